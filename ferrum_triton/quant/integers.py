"""Weights that are integers with a scale and a zero for every group: GPTQ's, AWQ's and others'.

w[i, j] = scale[i, g] · (q[i, j] - zero[i, g]), g being the group of column j. That is laid out anew
as one of these formats, exactly. So the kernels of packed weights multiply it, and what is decoded
is what the integers say.

| q - zero | format | bits a weight |
|---|---|---|
| -8 to 7, as of four bits with the zero in the middle | Q4_0 | 4.5 |
| four bits with any zero | Q4_Z | 5 |
| -128 to 127, as of eight bits with the zero in the middle | Q8_0 | 8.5 |

Columns whose groups are not in their order (GPTQ's ``desc_act``) are brought there, and the weights
are :class:`~ferrum_triton.quant.Reordered`. What fits none of the formats is decoded: scales that
float16 does not hold exactly, and groups that are no multiples of 32 weights.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.reordered import Reordered
from ferrum_triton.quant.tensor import QuantizedTensor

# Formats of q - zero, and the n of what they have room for, -n to n - 1.
ROOM = {"Q4_0": 8, "Q8_0": 128}
GROUP = 32
# Where column i of eight lies in an int32 of AWQ, as a number of four bits.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


LaidOut: TypeAlias = QuantizedTensor | Reordered | Tensor


class Integers(NamedTuple):
    """A matrix [n, k] of integers in groups."""

    q: Tensor  # int8 or int16 [n, k]
    zeros: Tensor  # of the same dtype, [n, groups]
    scales: Tensor  # [n, groups]
    group_of: Tensor | None = None  # int64 [k]; None: groups of one size, in their order


def load_gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    symmetric: bool = True,
    zeros_less_one: bool = True,
) -> LaidOut:
    """A matrix [n, k] as AutoGPTQ and GPTQModel store it.

    Args:
        qweight: int32 [k · bits / 32, n], integers of a column in each word, lowest bits first.
        scales: [groups, n].
        qzeros: int32 [groups, n · bits / 32], rounded up.
        g_idx: [k], the group of each column; None where they are in order.
        bits: bits of an integer, 4 or 8.
        symmetric: whether every zero is the middle of the range, so that less room is enough. A
            zero of the middle tells by itself whether it is stored as one less.
        zeros_less_one: whether zeros are stored as one less, as in the first form of such files.
    """
    _check_bits(bits)
    q = unpacked(qweight.T, bits)
    zeros = unpacked(qzeros, bits)[:, : scales.shape[1]]
    middle = 1 << (bits - 1)
    if symmetric and (zeros == middle).all():
        zeros_less_one = False
    elif symmetric and (zeros == middle - 1).all():
        zeros_less_one = True
    found = Integers(q, zeros.T + zeros_less_one, scales.T, None if g_idx is None else g_idx.long())
    return laid_out(found, bits, symmetric)


def load_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> LaidOut:
    """A matrix [n, k] as AutoAWQ's ``gemm`` stores it, of four bits.

    Args:
        qweight: int32 [k, n / 8], eight columns in each word, in an order of their own.
        scales: [groups, n].
        qzeros: int32 [groups, n / 8], alike.
    """
    q, zeros = (
        unpacked(part, 4).unflatten(-1, (-1, 8))[..., list(AWQ_PLACES)].flatten(-2)
        for part in (qweight, qzeros)
    )
    return laid_out(Integers(q.T, zeros.T, scales.T), 4, symmetric=False)


def load_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    num_columns: int,
    bits: int = 4,
    symmetric: bool = True,
) -> LaidOut:
    """A matrix [n, k] as compressed-tensors' ``pack-quantized`` stores it.

    Args:
        weight_packed: int32 [n, k · bits / 32], rounded up, of integers less the range's least.
        weight_scale: [n, groups].
        weight_zero_point: int32 [n · bits / 32, groups], rounded up; None is the middle.
        weight_g_idx: [k], the group of each column; None where they are in order.
        num_columns: k.
        bits: bits of an integer, 4 or 8.
        symmetric: whether every zero is the middle, so that less room is enough.
    """
    _check_bits(bits)
    q = unpacked(weight_packed, bits)[:, :num_columns]
    zeros = torch.full(weight_scale.shape, 1 << (bits - 1), dtype=q.dtype, device=q.device)
    if weight_zero_point is not None:
        zeros = unpacked(weight_zero_point.T, bits).T[: len(q)]
    group_of = None if weight_g_idx is None else weight_g_idx.long()
    return laid_out(Integers(q, zeros, weight_scale, group_of), bits, symmetric)


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise InputError("load_gptq", "bits", str(bits), "4 or 8", "Decode others beforehand.")


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> integers [rows, words · 32 / bits], the lowest bits of a word first.

    Of four bits they are int8, of eight int16: differences of two of them fit.
    """
    rows, columns = words.shape
    # End to end first: a tensor of one column counts as contiguous, and cannot be viewed.
    data = words.reshape(-1).view(torch.uint8).view(rows, 4 * columns)
    if bits == 8:
        return data.to(torch.int16)
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).view(torch.int8)


def targets(bits: int, symmetric: bool) -> tuple[str, ...]:
    """Formats that come into question, the first for all matrices but odd ones."""
    if bits == 8:
        return ("Q8_0",)
    return ("Q4_0", "Q4_Z") if symmetric else ("Q4_Z",)


def has_room(kind: str, least: int, most: int) -> bool:
    """Whether a target has room for q - zero from ``least`` to ``most``."""
    return kind not in ROOM or -ROOM[kind] <= least <= most < ROOM[kind]


def laid_out(found: Integers, bits: int, symmetric: bool) -> LaidOut:
    """The same weights in one of their targets, or decoded to float32 where none holds them.

    Out of the order of their groups, of one size, they are reordered.

    Raises:
        InputError: columns are in no groups of one size, and nothing says in which.
    """
    (n, k), groups = found.q.shape, found.scales.shape[1]
    size = k // groups if groups and k % groups == 0 else 0
    if found.group_of is None and not size:
        advice = "Pass the group of each column, or scales of as many groups as divide them."
        raise InputError("laid_out", "scales", f"{groups} groups", f"a divisor of {k}", advice)
    if found.group_of is not None and k:
        first, last = (int(v) for v in found.group_of.aminmax())
        if not 0 <= first <= last < groups:
            got, allowed = f"{first} to {last}", f"0 to {groups - 1}"
            raise InputError("laid_out", "g_idx", got, allowed, "It is the group of each column.")
    in_order = torch.arange(k, device=found.q.device) // max(size, 1)
    group_of = in_order if found.group_of is None else found.group_of
    differences = found.q - found.zeros[:, group_of]
    is_exact = torch.equal(found.scales.half().to(found.scales.dtype), found.scales)
    least, most = (int(v) for v in differences.aminmax()) if differences.numel() else (0, 0)
    kind = next((k for k in targets(bits, symmetric) if has_room(k, least, most)), None)
    order = group_of.argsort(stable=True)
    is_whole = size > 0 and size % GROUP == 0 and torch.equal(group_of[order], in_order)
    if kind is None or not (is_exact and is_whole):
        return differences * found.scales.float()[:, group_of]
    is_reordered = not torch.equal(group_of, in_order)
    fmt = FORMATS[kind]
    shape = n, k // GROUP, fmt.block_bytes
    blocks = torch.zeros(shape, dtype=torch.uint8, device=found.q.device)
    integers = found.q if fmt.has_zero else differences
    if is_reordered:
        integers = integers[:, order]
    fmt.q.write(blocks, integers.unflatten(1, (-1, GROUP)))
    fmt.d.write(blocks, found.scales.repeat_interleave(size // GROUP, 1)[..., None])
    if fmt.m is not None:
        fmt.m.write(blocks, found.zeros.repeat_interleave(size // GROUP, 1)[..., None])
    weight = QuantizedTensor(blocks.flatten(1), kind)
    return Reordered(weight, order) if is_reordered else weight
