"""Elementwise, activation and layout ops."""

import math

import torch
from torch import Tensor

from ferrum_triton.ops.pointwise import sigmoid, silu
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, Op, op

SPLIT_AXES = {"num_tokens": (0, 1, 3, 5), "intermediate_size": (1, 2, 33, 128, 200)}
ROW_AXES = {"num_tokens": (0, 1, 3, 5), "hidden_size": (1, 2, 33, 128, 300)}
ROW_CASES = [
    Case(f"bf16/h4096/m{m}", torch.bfloat16, {"num_tokens": m, "hidden_size": 4096})
    for m in (1, 4096)
]
SPLIT_CASES = [
    Case(f"bf16/i14336/m{m}", torch.bfloat16, {"num_tokens": m, "intermediate_size": 14336})
    for m in (1, 64, 4096)
]


def _same_shape(of_op, name, tensor, other_name, other):
    if tensor.shape != other.shape:
        allowed = f"{list(other.shape)}, the shape of {other_name}"
        of_op.reject(name, f"of shape {list(tensor.shape)}", allowed)


def _split(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = widen(gate_up).chunk(2, dim=-1)
    return gate, up


def _gelu(x: Tensor) -> Tensor:
    # erfc(-z) is 1 + erf(z), and keeps the bits of a small one.
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def gelu_tanh(x: Tensor) -> Tensor:
    z = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return x * sigmoid(2.0 * z)


GATES = ("silu", "gelu_tanh")
"""Activations of the ops that make gate and up themselves."""


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) · up, the activation one of :data:`GATES`."""
    activated = silu(gate) if activation == "silu" else gelu_tanh(gate)
    return activated * up


def check_gate(of_op: Op, activation: str) -> None:
    """Reject an activation that is none of :data:`GATES`."""
    if activation not in GATES:
        of_op.reject("activation", repr(activation), ", ".join(GATES))


@op(tensors={"gate_up": "T[..., gate_up_size]"}, axes=SPLIT_AXES, bench=SPLIT_CASES)
def fused_silu_mul_split(gate_up: Tensor) -> Tensor:
    """y = silu(gate) · up, with silu(g) = g / (1 + e⁻ᵍ) and each row packed as [gate | up].

    Args:
        gate_up: [..., 2 · intermediate_size].

    Returns:
        [..., intermediate_size] in the input's dtype; computed in float32, rounded once.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
    """
    gate, up = _split(gate_up)
    return gated(gate, up, "silu").to(gate_up.dtype)


@op(tensors={"gate_up": "T[..., gate_up_size]"}, axes=SPLIT_AXES, bench=SPLIT_CASES)
def fused_gelu_mul_split(gate_up: Tensor) -> Tensor:
    """y = gelu(gate) · up, with the exact gelu(g) = g/2 · (1 + erf(g/√2)).

    Args:
        gate_up: [..., 2 · intermediate_size], each row packed as [gate | up].

    Returns:
        [..., intermediate_size] in the input's dtype; computed in float32, rounded once.

    Source: Shazeer 2020 (GeGLU).
    """
    gate, up = _split(gate_up)
    return (_gelu(gate) * up).to(gate_up.dtype)


@op(tensors={"gate_up": "T[..., gate_up_size]"}, axes=SPLIT_AXES, bench=SPLIT_CASES)
def fused_gelu_tanh_mul_split(gate_up: Tensor) -> Tensor:
    """y = gelu(gate) · up with gelu(g) = g/2 · (1 + tanh z), z = √(2/π) · (g + 0.044715 g³).

    1 + tanh z is computed as 2 · sigmoid(2z), which does not cancel where z is negative.

    Args:
        gate_up: [..., 2 · intermediate_size], each row packed as [gate | up].

    Returns:
        [..., intermediate_size] in the input's dtype; computed in float32, rounded once.

    Source: Shazeer 2020 (GeGLU), with the tanh form of Hendrycks & Gimpel, "GELUs", 2016.
    """
    gate, up = _split(gate_up)
    return gated(gate, up, "gelu_tanh").to(gate_up.dtype)


for _split_op in (fused_silu_mul_split, fused_gelu_mul_split, fused_gelu_tanh_mul_split):

    @_split_op.rule
    def _(gate_up, split_op=_split_op):
        if gate_up.shape[-1] % 2:
            got = f"of odd last dimension {gate_up.shape[-1]}"
            split_op.reject("gate_up", got, "an even one", "Pack each row as [gate | up].")

    @_split_op.sample
    def _(make, num_tokens, intermediate_size):
        return {"gate_up": make.randn(num_tokens, 2 * intermediate_size, scale=3.0)}


@op(
    tensors={"gate": "T[..., intermediate_size]", "up": "T[..., intermediate_size]"},
    axes=SPLIT_AXES,
    bench=SPLIT_CASES,
    over=("gate", "up"),
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """y = silu(gate) · up, with silu(g) = g / (1 + e⁻ᵍ), for gate and up in tensors of their own.

    Args:
        gate: [..., intermediate_size]; rows may be strided.
        up: of gate's shape.

    Returns:
        A tensor of gate's shape and dtype; computed in float32, rounded once.

    Source: Shazeer 2020 (SwiGLU).
    """
    return gated(widen(gate), widen(up), "silu").to(gate.dtype)


@silu_mul.rule
def _(gate, up):
    _same_shape(silu_mul, "up", up, "gate", gate)


@silu_mul.sample
def _(make, num_tokens, intermediate_size):
    return {
        "gate": make.randn(num_tokens, intermediate_size, scale=3.0),
        "up": make.randn(num_tokens, intermediate_size),
    }


@op(
    tensors={"x": "T[..., hidden_size]"},
    axes=ROW_AXES,
    bench=ROW_CASES,
    over=("x",),
)
def gelu(x: Tensor) -> Tensor:
    """y = x/2 · (1 + erf(x/√2)), the exact form.

    Args:
        x: [..., hidden_size]; rows may be strided.

    Returns:
        A tensor of x's shape and dtype; computed in float32, rounded once.

    Source: Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016.
    """
    return _gelu(widen(x)).to(x.dtype)


@gelu.sample
def _(make, num_tokens, hidden_size):
    return {"x": make.randn(num_tokens, hidden_size, scale=3.0)}


@op(
    tensors={"x": "T[..., hidden_size]"},
    axes=ROW_AXES,
    bench=ROW_CASES,
    mutates=("x",),
)
def scale_inplace(x: Tensor, scale: float) -> None:
    """x ← scale · x, in place, computed in float32.

    Args:
        x: [..., hidden_size], updated in place.
        scale: the factor, as it is: Gemma's √hidden_size is rounded to bfloat16 by its caller.
    """
    x.copy_(scale * widen(x))


@scale_inplace.sample
def _(make, num_tokens, hidden_size):
    return {"x": make.randn(num_tokens, hidden_size), "scale": make.scalar(-2.0, 2.0)}


@op(
    tensors={"x": "T[..., hidden_size]", "bias": "float[hidden_size]"},
    axes=ROW_AXES,
    bench=ROW_CASES,
    mutates=("x",),
)
def add_bias(x: Tensor, bias: Tensor) -> None:
    """x ← x + bias, the bias added to every row, in place.

    Args:
        x: [..., hidden_size], updated in place.
        bias: [hidden_size], any float dtype.
    """
    x.copy_(widen(x) + widen(bias))


@add_bias.sample
def _(make, num_tokens, hidden_size):
    return {"x": make.randn(num_tokens, hidden_size), "bias": make.weight(hidden_size)}


@op(
    tensors={"residual": "float[..., hidden_size]", "x": "T[..., hidden_size]"},
    axes={**ROW_AXES, "wide_residual": (False, True)},
    bench=ROW_CASES,
    mutates=("residual",),
    over=("x",),
)
def add_inplace(residual: Tensor, x: Tensor) -> None:
    """residual ← residual + x, in place, computed in float32.

    Args:
        residual: [..., hidden_size], updated in place; of x's dtype, or float32.
        x: of residual's shape.
    """
    residual.copy_(widen(residual) + widen(x))


@add_inplace.rule
def _(residual, x):
    _same_shape(add_inplace, "x", x, "residual", residual)
    if residual.dtype not in (x.dtype, torch.float32):
        allowed = f"x's dtype {x.dtype}, or float32"
        add_inplace.reject("residual", str(residual.dtype), allowed)


@add_inplace.sample
def _(make, num_tokens, hidden_size, wide_residual=False):
    residual = make.randn(num_tokens, hidden_size)
    return {
        "residual": residual.float() if wide_residual else residual,
        "x": make.randn(num_tokens, hidden_size),
    }


@op(
    tensors={"dst": "T[..., hidden_size]", "src": "T[..., hidden_size]"},
    axes=ROW_AXES,
    bench=ROW_CASES,
    mutates=("dst",),
    over=("src",),
)
def scaled_add_inplace(dst: Tensor, src: Tensor, scale: float) -> None:
    """dst ← dst + scale · src, in place; same shape and dtype, computed in float32."""
    dst.copy_(widen(dst) + scale * widen(src))


@scaled_add_inplace.rule
def _(dst, src, scale):
    _same_shape(scaled_add_inplace, "src", src, "dst", dst)


@scaled_add_inplace.sample
def _(make, num_tokens, hidden_size):
    return {
        "dst": make.randn(num_tokens, hidden_size),
        "src": make.randn(num_tokens, hidden_size),
        "scale": make.scalar(-2.0, 2.0),
    }


@op(
    tensors={"src": "any[...]", "dst": "any[...]"},
    axes={"length": (0, 1, 7, 1000, 1500), "src_offset": (0, 3), "dst_offset": (0, 5)},
    bench=[Case(f"bf16/n{n}", torch.bfloat16, {"length": n}) for n in (4096, 1 << 24)],
    mutates=("dst",),
)
def copy_slice(
    src: Tensor,
    dst: Tensor,
    src_offset: int = 0,
    dst_offset: int = 0,
    length: int | None = None,
) -> None:
    """dst[dst_offset : dst_offset + length] ← src[src_offset : src_offset + length], converted.

    Both tensors are contiguous and addressed as one row of elements, whatever their shape.

    Args:
        src: contiguous tensor of any dtype.
        dst: contiguous tensor of any dtype, written in place; it must not share memory with src.
        src_offset: first element read.
        dst_offset: first element written.
        length: elements copied; None means as many as both tensors have left.

    Raises:
        InputError: the range leaves either tensor, or a tensor is not contiguous.
    """
    length = _slice_length(src, dst, src_offset, dst_offset, length)
    source = src.reshape(-1)[src_offset : src_offset + length]
    dst.view(-1)[dst_offset : dst_offset + length] = source.to(dst.dtype)


def _slice_length(src, dst, src_offset, dst_offset, length):
    return min(src.numel() - src_offset, dst.numel() - dst_offset) if length is None else length


@copy_slice.rule
def _(src, dst, src_offset, dst_offset, length):
    for name, tensor in (("src", src), ("dst", dst)):
        if not tensor.is_contiguous():
            copy_slice.reject(name, f"strided {list(tensor.stride())}", "a contiguous tensor")


@copy_slice.call_rule
def _(src, dst, src_offset, dst_offset, length):
    count = _slice_length(src, dst, src_offset, dst_offset, length)
    if count < 0:
        copy_slice.reject("length", str(count), "0 or more", "The offsets lie past the end.")
    for name, tensor, start in (("src_offset", src, src_offset), ("dst_offset", dst, dst_offset)):
        if start < 0 or start + count > tensor.numel():
            got = f"{start}, with length {count}"
            copy_slice.reject(name, got, f"a range inside {tensor.numel()} elements")


@copy_slice.sample
def _(make, length, src_offset=0, dst_offset=0):
    return {
        "src": make.randn(src_offset + length + 3),
        "dst": make.randn(dst_offset + length + 2),
        "src_offset": src_offset,
        "dst_offset": dst_offset,
        "length": length,
    }


@copy_slice.traffic
def _(src, dst, src_offset, dst_offset, length):
    length = _slice_length(src, dst, src_offset, dst_offset, length)
    return length * (src.element_size() + dst.element_size())


LAYOUT_AXES = {"num_tokens": (0, 1, 5, 17), "num_heads": (1, 3), "head_dim": (1, 16, 40, 64)}
LAYOUT_CASES = [
    Case(
        "bf16/h32d128/t4096", torch.bfloat16, {"num_tokens": 4096, "num_heads": 32, "head_dim": 128}
    )
]


@op(tensors={"x": "any[num_heads, num_tokens, head_dim]"}, axes=LAYOUT_AXES, bench=LAYOUT_CASES)
def transpose_head_to_token(x: Tensor) -> Tensor:
    """[num_heads, num_tokens, head_dim] → [num_tokens, num_heads, head_dim], contiguous."""
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)


@transpose_head_to_token.sample
def _(make, num_tokens, num_heads, head_dim):
    return {"x": make.randn(num_heads, num_tokens, head_dim)}


@op(tensors={"x": "any[num_tokens, num_heads, head_dim]"}, axes=LAYOUT_AXES, bench=LAYOUT_CASES)
def transpose_token_to_head(x: Tensor) -> Tensor:
    """[num_tokens, num_heads, head_dim] → [num_heads, num_tokens, head_dim], contiguous."""
    return transpose_head_to_token.reference(x)


@transpose_token_to_head.sample
def _(make, num_tokens, num_heads, head_dim):
    return {"x": make.randn(num_tokens, num_heads, head_dim)}
