"""The rotary tables of a model, after its hyperparameters."""

from __future__ import annotations

from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.models.config import RopeConfig
from ferrum_triton.ops import rope_tables as schemes


def rope_tables(
    rope: RopeConfig, num_positions: int, freq_factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency.

    Args:
        rope: wavelengths and their scaling; ``kind`` is ``"default"``, ``"linear"``, ``"llama3"``,
            ``"yarn"`` (with its published bounds and attention factor, its ramp widened to whole
            pairs if ``truncate``) or ``"dynamic"``, whose tables hold for sequences of up to
            num_positions.
        num_positions: rows.
        freq_factors: [dim / 2] divisors of the frequencies, which GGUF files store for models with
            llama3's scaling; they take the place of ``rope``'s own scaling.

    Returns:
        cos and sin, float32 [num_positions, dim / 2].

    Raises:
        InputError: the kind is unknown.
    """
    plain = schemes.frequencies(rope.dim, rope.theta)
    factor, original = rope.factor, rope.original_positions
    attention_factor = 1.0
    if freq_factors is not None:
        frequency = plain / freq_factors.double()
    elif rope.kind == "default":
        frequency = plain
    elif rope.kind == "linear":
        frequency = schemes.linear(plain, factor)
    elif rope.kind == "llama3":
        ramp = rope.low_freq_factor, rope.high_freq_factor
        frequency = schemes.llama3(plain, factor, *ramp, original)
    elif rope.kind == "yarn":
        frequency = schemes.yarn(rope.dim, rope.theta, factor, original, truncate=rope.truncate)
        attention_factor = schemes.yarn_attention_factor(factor)
    elif rope.kind == "dynamic":
        frequency = schemes.dynamic_ntk(rope.dim, rope.theta, factor, original, num_positions)
    else:
        allowed = "default, linear, llama3, yarn, dynamic"
        raise InputError("rope_tables", "kind", repr(rope.kind), allowed, "See RopeConfig.")
    return schemes.tables(frequency, num_positions, attention_factor)
