"""What the assembly of attention on Hopper computes, element by element, in torch."""

import torch
from torch import Tensor

from ferrum_triton.gluon_emulator import twin_of
from ferrum_triton.kernels.hopper.attention_codes import E4M3_IN_BF16, INT8_IN_F16
from ferrum_triton.kernels.hopper.attention_roles import TWO_BF16, TWO_F16


def widened_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.bfloat16)


def two_bf16(low: Tensor, high: Tensor) -> Tensor:
    return in_word(low.bfloat16(), high.bfloat16())


def two_f16(low: Tensor, high: Tensor) -> Tensor:
    return in_word(low.half(), high.half())


def in_word(low: Tensor, high: Tensor) -> Tensor:
    low, high = (x.view(torch.int16).int() for x in (low, high))
    return low & 0xFFFF | high << 16


def register() -> None:
    """Have every launch of the emulator know them."""
    twin_of(E4M3_IN_BF16.value)(widened_e4m3)
    twin_of(INT8_IN_F16.value)(Tensor.half)
    twin_of(TWO_BF16.value)(two_bf16)
    twin_of(TWO_F16.value)(two_f16)
