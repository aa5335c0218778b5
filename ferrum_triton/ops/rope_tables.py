"""Rotary tables: cosines and sines of position · frequency, for every way a model scales them.

A frequency is the angle in radians by which one position turns one pair. Each scheme gives the
frequencies [dim / 2] in float64, and :func:`tables` the tables that the rotary ops read::

    cos, sin = tables(linear(frequencies(dim, theta), factor), num_positions)

Partial rotary embedding is a ``dim`` below head_dim. A model with two wavelength bases, such as
Gemma 3 with one for local and one for global layers, has two tables.
"""

import math

import torch
from torch import Tensor


def frequencies(dim: int, theta: float) -> Tensor:
    """theta^(-2i/dim).

    Source: Su et al., "RoFormer", 2021.
    """
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def linear(frequency: Tensor, factor: float) -> Tensor:
    """Positions divided by ``factor``.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023.
    """
    return frequency / factor


def llama3(
    frequency: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_positions: int,
) -> Tensor:
    """Wavelengths beyond the old context are stretched by factor, short ones kept, a ramp between.

    Source: Llama 3.1's reference code, ``apply_scaling``.
    """
    turns = original_positions * frequency / (2 * math.pi)  # in the original context
    ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return frequency * kept + frequency / factor * (1 - kept)


def yarn(
    dim: int,
    theta: float,
    factor: float,
    original_positions: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Pairs of over beta_fast turns in the original context kept, of under beta_slow stretched.

    Between them the ramp is linear in the pair's index. The tables want
    :func:`yarn_attention_factor` as well.

    Args:
        dim: dimensions rotated.
        theta: base of the wavelengths.
        factor: how much longer the context became.
        original_positions: the context of the pretraining.
        beta_fast, beta_slow: turns at the ramp's ends.
        truncate: widen the ramp to whole indices.

    Source: Peng et al., "YaRN", 2023, section 3.2, and its reference code.
    """

    def pair_of(turns: float) -> float:
        return dim * math.log(original_positions / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pair = torch.arange(dim // 2, dtype=torch.float64)
    # An empty ramp is a step; the reference code gives it this width.
    stretched = ((pair - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    frequency = frequencies(dim, theta)
    return frequency * (1 - stretched) + frequency / factor * stretched


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN multiplies cosines and sines by, which sharpens the softmax: 0.1 ln(factor) + 1.

    Args:
        factor: how much longer the context became.
        mscale, mscale_all_dim: DeepSeek's weights of the logarithm, whose ratio is taken if both
            are given.
    """

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return sharpening(mscale) / sharpening(mscale_all_dim)
    return sharpening(1.0)


def dynamic_ntk(
    dim: int, theta: float, factor: float, original_positions: int, num_positions: int
) -> Tensor:
    """A base that grows with the sequence, so that the longest wavelength stretches with it.

    Args:
        dim: dimensions rotated, more than 2.
        theta: base of the wavelengths up to the original context.
        factor: how fast the base grows.
        original_positions: the context of the pretraining.
        num_positions: of the longest sequence.

    Source: Hugging Face transformers, ``_compute_dynamic_ntk_parameters``.
    """
    stretch = factor * max(num_positions, original_positions) / original_positions - (factor - 1)
    return frequencies(dim, theta * stretch ** (dim / (dim - 2)))


def tables(
    frequency: Tensor, num_positions: int, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, times attention_factor.

    Args:
        frequency: [dim / 2], float64: at position 100 000 a float32 angle is off by 0.004.
        num_positions: rows.
        attention_factor: of YaRN.

    Returns:
        cos and sin, float32 [num_positions, dim / 2].
    """
    position = torch.arange(num_positions, dtype=torch.float64, device=frequency.device)
    angle = position[:, None] * frequency
    return (angle.cos() * attention_factor).float(), (angle.sin() * attention_factor).float()
