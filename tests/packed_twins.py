"""What the assembly of packed products on Hopper computes, element by element, in torch."""

from dataclasses import replace
from operator import mul

import torch
from torch import Tensor

from ferrum_triton.gluon_emulator import twin_of
from ferrum_triton.kernels.hopper import packed_offsets, packed_weights
from ferrum_triton.kernels.quant.fragments import (
    LESS,
    PLUS,
    TIMES,
    codes_of,
    scaling_of,
    unpacking_of,
)
from ferrum_triton.quant.formats import BlockFormat
from ferrum_triton.quant.planes import PLANE_FORMATS


def halves(word: Tensor) -> tuple[Tensor, Tensor]:
    """The two float16 of each word, as float32."""
    pair = word.to(torch.int32).contiguous().view(torch.float16).view(*word.shape, 2)
    return pair[..., 0].float(), pair[..., 1].float()


def pair(low: Tensor, high: Tensor) -> Tensor:
    """Two numbers as float16, rounded once, in a word."""
    return torch.stack((low.half(), high.half()), -1).view(torch.int32).squeeze(-1)


def unpacking(fmt: BlockFormat):
    """What :func:`~ferrum_triton.kernels.quant.fragments.unpacking_of` a format does."""
    num_words = 4 if fmt.bits == 8 else 2

    def code(words, more, h, n, byte):
        if fmt.bits == 8:
            return (words[h + 2 * n] << (24 - 8 * byte)) >> 24
        found = words[h] >> (8 * byte + 4 * n) & 15
        if fmt.high_bits:
            place = (2 * h + n) * fmt.high_bits
            mask = (1 << fmt.high_bits) - 1
            found = found | (more >> (8 * byte + place) & mask) << 4
        if fmt.values:
            return torch.tensor(fmt.values, dtype=torch.int32)[found.long()]
        return found - fmt.offset

    def twin(*operands):
        words, more = operands[:num_words], operands[num_words] if fmt.high_bits else None
        scale = 1
        if fmt.scale_code:
            scale = operands[-1] & 0xFF
            if fmt.scale_code == "byte":
                scale = (scale ^ 128) - 128
        each = []
        for p in range(8):
            h, n, o = p // 4, p // 2 % 2, p % 2
            low, high = (scale * code(words, more, h, n, 2 * e + o) for e in range(2))
            each.append(pair(low, high))
        return tuple(each)

    return twin


def each_pair(function):
    """A twin of assembly that does the same to eight pairs, with one pair or two."""

    def twin(*operands):
        given = [halves(x) for x in operands[8:]]
        results = []
        for x in map(halves, operands[:8]):
            results.append(pair(*(function(x[i], *(g[i] for g in given)) for i in range(2))))
        return tuple(results)

    return twin


def times(number):
    return lambda x: pair(*(number * each for each in halves(x)))


def minimum(byte):
    def twin(s, both):
        m = halves(both)[1]
        found = -((s >> (8 * byte) & 0xFF) * m)
        return pair(found, found)

    return twin


def masked(fmt: BlockFormat):
    """What :func:`~ferrum_triton.kernels.quant.fragments.codes_of` a format does."""
    code = unpacking(replace(fmt, q=replace(fmt.q, offset=0), scales=None))

    def twin(*operands):
        sizes = [2.0 ** (10 - place) for place in places_in_order(fmt)]
        found = map(halves, code(*operands))
        return tuple(
            pair(*(x + size for x in each)) for each, size in zip(found, sizes, strict=True)
        )

    return twin


def places_in_order(fmt: BlockFormat) -> list[int]:
    """Where the codes of each pair lie: integers of four bits where their nibble is."""
    is_apart = fmt.bits == 4 and not fmt.values
    return [4 * (p // 2 % 2) if is_apart else 0 for p in range(8)]


def scaling(fmt: BlockFormat):
    """What :func:`~ferrum_triton.kernels.quant.fragments.scaling_of` a format does."""

    def twin(*operands):
        scale, sizes = halves(operands[8]), [halves(x) for x in operands[9:]]
        results = []
        for x, place in zip(map(halves, operands[:8]), places_in_order(fmt), strict=True):
            size = sizes[place // 4]
            results.append(pair(*(x[i] * scale[i] + size[i] for i in range(2))))
        return tuple(results)

    return twin


def scale_of_byte(byte):
    def twin(s, both):
        found = (s >> (8 * byte) & 0xFF) * halves(both)[0]
        return pair(found, found)

    return twin


def minimums(s, both):
    m = -4 * halves(both)[1]
    return pair(*((s >> byte & 0xFF) * m for byte in (8, 24)))


def nothing(*operands):
    return torch.zeros((), dtype=torch.int32)


def twins(fmt: BlockFormat) -> dict:
    """By the assembly's text or by the function that holds it."""
    return {
        unpacking_of(fmt): unpacking(fmt),
        TIMES.value: each_pair(lambda x, d: x * d),
        PLUS.value: each_pair(lambda x, d, low: x * d + low),
        LESS.value: each_pair(lambda x, d, low: (x - low).half().float() * d),
        scaling_of(fmt): scaling(fmt),
        codes_of(fmt): masked(fmt),
        packed_offsets._scale_asm(0): scale_of_byte(0),
        packed_offsets._scale_asm(2): scale_of_byte(2),
        packed_offsets._minimums_asm(): minimums,
        **{packed_offsets._times_asm(n): times(n) for n in (-1024, -64, -32, -4, 4)},
        "mov.b32 $0, {$1, $2};": pair,
        "prmt.b32 $0, $1, $2, 0x5410;": lambda x, y: pair(halves(x)[0], halves(y)[0]),
        "prmt.b32 $0, $1, $2, 0x7632;": lambda x, y: pair(halves(x)[1], halves(y)[1]),
        "mul.rn.f16x2 $0, $1, $2;": lambda x, y: pair(*map(mul, halves(x), halves(y))),
        packed_weights._minimum_asm(1): minimum(1),
        packed_weights._minimum_asm(3): minimum(3),
        "mov.b32 $0, {$1, $1};": lambda d: pair(d, d),
        "prmt.b32 $0, $1, $1, 0x1010;": lambda x: pair(halves(x)[0], halves(x)[0]),
        "prmt.b32 $0, $1, $1, 0x3232;": lambda x: pair(halves(x)[1], halves(x)[1]),
        "griddepcontrol.wait; mov.b32 $0, 0;": nothing,
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;": nothing,
    }


def register() -> None:
    """Have every launch of the emulator know them, of all formats."""
    for form in PLANE_FORMATS.values():
        for assembly, twin in twins(form.file).items():
            twin_of(assembly)(twin)
