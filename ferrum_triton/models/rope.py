"""Rotary tables: cosines and sines of every position, computed in float64 and kept in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferrum_triton.models.config import RopeConfig


def rope_tables(
    rope: RopeConfig, num_positions: int, freq_factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency.

    Args:
        rope: wavelengths and their scaling.
        num_positions: rows.
        freq_factors: [dim / 2] divisors of the frequencies, which GGUF files store for models with
            llama3's scaling; they take the place of ``rope``'s own scaling.

    Returns:
        cos and sin, float32 [num_positions, dim / 2].
    """
    frequency = rope.theta ** (-torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    if freq_factors is not None:
        frequency = frequency / freq_factors.double()
    elif rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3(frequency, rope)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def _llama3(frequency: Tensor, rope: RopeConfig) -> Tensor:
    """Wavelengths beyond the old context are stretched by factor, short ones kept, a ramp between.

    Source: Llama 3.1's reference code, ``apply_scaling``.
    """
    turns = rope.original_positions * frequency / (2 * math.pi)  # in the original context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return frequency * kept + frequency / rope.factor * (1 - kept)
