"""Sample tensors, tolerances and comparison, shared by the tests and the benches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Relative and absolute error an implementation may show against the float64 reference, by the
# dtype of its output. The unit roundoff is 2^-24, 2^-11 and 2^-8; a result is rounded once from a
# float32 computation whose own error grows with the length of its sums, hence the head-room: 40
# roundoffs in float32 (sums of some thousand terms), 4 in fp16 and bf16 (rounded inputs of a
# tensor-core product, such as the softmax weights, add to the final rounding).
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2.5e-6, 2.5e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}

# The scale of those bounds for float32 sums of tensor cores that are returned unrounded. An
# addition may be off by 2^-24 of the sum. Over 4096 products, eight at a time, these are 512
# additions: 3e-5, which is 12 times the bound of float32.
UNROUNDED = 12.0

# The scale of those bounds for gate and up whose weights were decoded for cuBLAS. Decoding rounds
# them to 16 bits, and the error of each product counts times the other product. In bfloat16 the
# worst of eight million results, 4096 products each, was off by 1.05 times the bound (torch alone:
# silu(a Gᵀ) · (a Uᵀ) of random a [1024, 4096] and G and U [8192, 4096], with and without rounding).
TWO_PRODUCTS = 2.0

# Elements from which on a draw on the CPU would be what a test on a GPU waits for.
DRAWN_THERE = 1 << 16


@dataclass
class TensorFactory:
    """Makes the tensors of one sample: fresh random values from one seed.

    Attributes:
        dtype: the activation dtype of the sample (``T`` in a contract).
        device: where the tensors lie; ``"meta"`` makes shapes without memory.
        seed: of the generator.
    """

    dtype: torch.dtype
    device: torch.device | str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    @property
    def _is_meta(self) -> bool:
        return torch.device(self.device).type == "meta"

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _draw(self, draw: Callable[..., Tensor], shape: tuple[int, ...], dtype: Any) -> Tensor:
        """``draw(shape)`` placed; large tensors of a GPU are drawn there."""
        if self._is_meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        device, generator = torch.device(self.device), self._generator
        if device.type == "cuda" and math.prod(shape) >= DRAWN_THERE:
            seed = int(torch.randint(2**62, (), generator=generator))
            generator = torch.Generator(device).manual_seed(seed)
        return self._place(draw(shape, generator=generator, device=generator.device, dtype=dtype))

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values in the sample's dtype."""
        if self._is_meta:
            return self._draw(torch.randn, shape, self.dtype)
        return (self._draw(torch.randn, shape, torch.float32) * scale).to(self.dtype)

    def weight(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Norm weights and biases: around one, in ``dtype`` whatever the sample's."""
        if self._is_meta:
            return self._draw(torch.randn, shape, dtype)
        return (1.0 + 0.2 * self._draw(torch.randn, shape, torch.float32)).to(dtype)

    def scalar(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self._generator))

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Uniform integers in [low, high)."""
        return self._draw(functools.partial(torch.randint, low, high), shape, dtype)

    def distinct_ints(self, low: int, high: int, count: int) -> Tensor:
        """``count`` different int32 from [low, high), in random order."""
        order = torch.randperm(high - low, generator=self._generator)[:count] + low
        return self._place(order.to(torch.int32))

    def int_list(self, low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=self._generator).tolist()

    def bytes(self, *shape: int) -> Tensor:
        """Uniform bytes."""
        return self.ints(0, 256, *shape, dtype=torch.uint8)

    def rope(self, max_positions: int, rotary_dim: int) -> dict[str, Tensor]:
        """cos and sin of random angles, [max_positions, rotary_dim / 2] in float32."""
        angle = 6.3 * torch.rand(max_positions, rotary_dim // 2, generator=self._generator)
        return {"cos": self._place(angle.cos()), "sin": self._place(angle.sin())}


# Values are rounded to codes at boundaries that float32 errors cross: this share of codes, and one
# more, may be a step away.
CODES = (torch.int8, torch.float8_e4m3fn)
CODES_OFF = 1e-5


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """(rtol, atol) for outputs of ``dtype``; integers are compared exactly."""
    return TOLERANCES.get(dtype, (0.0, 0.0))


def assert_close(got: Tensor, want: Tensor, *, name: str = "output", scale: float = 1.0) -> None:
    """Compare with a reference of higher precision, under the table's tolerance.

    Args:
        got: what an implementation returned.
        want: the reference, same shape, in any dtype; infinities and NaN must match in place.
        name: of the tensor, for the message.
        scale: factor on the tolerance; a call that needs one says why.
    """
    if got.dtype in CODES:
        _assert_codes_close(got, want, name)
        return
    rtol, atol = (scale * t for t in tolerance(got.dtype))
    if got.dtype.is_floating_point:
        want = want.to(got.dtype).double()  # overflow to inf where got's dtype overflows
        got = got.double()
    torch.testing.assert_close(
        got.cpu(),
        want.cpu(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        check_dtype=False,
        msg=lambda detail: f"{name}: {detail}",
    )


def _assert_codes_close(got: Tensor, want: Tensor, name: str) -> None:
    """Quantised values: equal, but for a few that lay on the boundary of two codes."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: another shape or dtype"
    steps = (_code_order(got) - _code_order(want)).abs()
    off = int((steps > 0).sum())
    assert off == 0 or int(steps.max()) == 1, f"{name}: codes up to {int(steps.max())} steps apart"
    allowed = 1 + int(CODES_OFF * got.numel())
    assert off <= allowed, f"{name}: {off} of {got.numel()} codes differ, {allowed} may"


def _code_order(codes: Tensor) -> Tensor:
    """Integers that order as the codes' values do, one step apart; NaN is far from all."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.view(torch.int8).int()
    magnitude = bits & 0x7F
    order = torch.where(bits < 0, -magnitude, magnitude)
    return torch.where(magnitude == 0x7F, 1000, order)
