"""What the assembly that widens 8-bit pages on Hopper computes, element by element, in torch."""

import torch
from torch import Tensor

from ferrum_triton.gluon_emulator import twin_of
from ferrum_triton.kernels.hopper.attention_codes import E4M3_IN_BF16, INT8_IN_F16


def widened_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.bfloat16)


def register() -> None:
    """Have every launch of the emulator know them."""
    twin_of(E4M3_IN_BF16.value)(widened_e4m3)
    twin_of(INT8_IN_F16.value)(Tensor.half)
