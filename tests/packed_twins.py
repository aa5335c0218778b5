"""What the assembly of packed products on Hopper computes, element by element, in torch."""

import torch
from torch import Tensor

from ferrum_triton.kernels.hopper import packed_weights
from ferrum_triton.kernels.quant.fragments import LESS, PLUS, TIMES, unpacking_of
from ferrum_triton.quant.formats import BlockFormat


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


def minimum(byte):
    def twin(s, both):
        m = halves(both)[1]
        found = -((s >> (8 * byte) & 0xFF) * m)
        return pair(found, found)

    return twin


def nothing(*operands):
    return torch.zeros((), dtype=torch.int32)


def twins(fmt: BlockFormat) -> dict:
    """By the assembly's text or by the function that holds it."""
    return {
        unpacking_of(fmt): unpacking(fmt),
        TIMES.value: each_pair(lambda x, d: x * d),
        PLUS.value: each_pair(lambda x, d, low: x * d + low),
        LESS.value: each_pair(lambda x, d, low: (x - low).half().float() * d),
        packed_weights._minimum_asm(1): minimum(1),
        packed_weights._minimum_asm(3): minimum(3),
        "mov.b32 $0, {$1, $1};": lambda d: pair(d, d),
        "prmt.b32 $0, $1, $1, 0x1010;": lambda x: pair(halves(x)[0], halves(x)[0]),
        "prmt.b32 $0, $1, $1, 0x3232;": lambda x: pair(halves(x)[1], halves(x)[1]),
        "griddepcontrol.wait; mov.b32 $0, 0;": nothing,
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;": nothing,
    }
