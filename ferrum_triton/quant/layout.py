"""How small integers and scales lie in the bytes of a block: the words formats are described in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Unsigned integers of ``bits`` bits in a run of bytes.

    ``lanes`` bytes that follow each other are a chunk. Its first ``lanes`` values are the lowest
    bits of each of its bytes, the next ``lanes`` the bits above them, and so on for ``planes``
    times. So value i of a nibble run with 16 lanes shares its byte with value i + 16, and with one
    lane neighbours share theirs.

    Attributes:
        at: first byte of the run in the block.
        bits: of a value.
        lanes: bytes of a chunk.
        planes: values in a byte.
        chunks: number of chunks.
        shift: bits of every byte below the first plane, which are another run's.
    """

    at: int
    bits: int
    lanes: int
    planes: int = 1
    chunks: int = 1
    shift: int = 0

    def __len__(self) -> int:
        return self.lanes * self.planes * self.chunks

    def read(self, blocks: Tensor) -> Tensor:
        """uint8 [..., block_bytes] -> uint8 [..., len(self)]."""
        run = blocks[..., self.at : self.at + self.chunks * self.lanes]
        chunks = run.unflatten(-1, (self.chunks, 1, self.lanes))
        planes = chunks >> self._shifts(blocks.device) & (1 << self.bits) - 1
        return planes.flatten(-3)

    def write(self, blocks: Tensor, values: Tensor) -> None:
        """Set the run's bits, which are 0, from the low bits of uint8 [..., len(self)]."""
        low = values & (1 << self.bits) - 1
        planes = low.unflatten(-1, (self.chunks, self.planes, self.lanes))
        # The planes' bits are apart: their sum is their union.
        run = (planes << self._shifts(blocks.device)).sum(-2, dtype=torch.uint8).flatten(-2)
        blocks[..., self.at : self.at + self.chunks * self.lanes] |= run

    def _shifts(self, device: torch.device) -> Tensor:
        """The planes' shifts, [planes, 1]."""
        stop = self.shift + self.planes * self.bits
        return torch.arange(self.shift, stop, self.bits, dtype=torch.uint8, device=device)[:, None]


@dataclass(frozen=True)
class Integers:
    """Integers that may lie in several runs: one after the other, and with their top bits apart.

    Attributes:
        low: the runs of their low bits, end to end.
        high: the run of the bits above those, None where ``low`` has them all.
        offset: taken from every value.
        signed: of eight bits, they are two's complement.
    """

    low: tuple[Run, ...]
    high: Run | None = None
    offset: int = 0
    signed: bool = False

    def __len__(self) -> int:
        return sum(map(len, self.low))

    @property
    def bits(self) -> int:
        """Bits of an integer as it is stored."""
        return self.low[0].bits + (self.high.bits if self.high else 0)

    @property
    def largest(self) -> int:
        """The largest there is."""
        return (1 << self.bits - self.signed) - 1 - self.offset

    @property
    def smallest(self) -> int:
        return -self.largest - 1 if self.signed else -self.offset

    def codes(self, blocks: Tensor) -> Tensor:
        """The integers as they are stored: uint8 [..., block_bytes] -> uint8 [..., len(self)]."""
        parts = [run.read(blocks) for run in self.low]
        codes = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.high is not None:
            codes = codes | self.high.read(blocks) << self.low[0].bits
        return codes

    def read(self, blocks: Tensor) -> Tensor:
        """uint8 [..., block_bytes] -> int8 [..., len(self)], uint8 if none can be negative."""
        codes = self.codes(blocks)
        if self.signed:
            return codes.view(torch.int8)
        return codes.view(torch.int8) - self.offset if self.offset else codes

    def write_codes(self, blocks: Tensor, codes: Tensor) -> None:
        """Set the runs' bits, which are 0, from uint8 [..., len(self)]."""
        parts = codes.split([len(run) for run in self.low], -1)
        for run, part in zip(self.low, parts, strict=True):
            run.write(blocks, part)
        if self.high is not None:
            self.high.write(blocks, codes >> self.low[0].bits)

    def write(self, blocks: Tensor, values: Tensor) -> None:
        """Store whole numbers from ``smallest`` to ``largest``, of any dtype."""
        self.write_codes(blocks, (values + self.offset).to(torch.int16).to(torch.uint8))


@dataclass(frozen=True)
class E4m3(Integers):
    """Bytes in E4M3, halved: numbers that scale sub-blocks as integers do in other formats.

    0x7F and 0xFF, NaN in ``torch.float8_e4m3fn``, are ±480 here, as their bits would say: whoever
    makes such blocks refuses them. Halved because the integers they multiply are E2M1 values
    doubled.
    """

    def read(self, blocks: Tensor) -> Tensor:
        """uint8 [..., block_bytes] -> float32 [..., len(self)]."""
        codes = self.codes(blocks).to(torch.int32)
        # Moved to where a float16 has its exponent, they are 2^-8 of what they stand for.
        bits = (codes & 0x80) << 8 | (codes & 0x7F) << 7
        return bits.to(torch.int16).view(torch.float16).float() * 2.0**7

    def write(self, blocks: Tensor, values: Tensor) -> None:
        """Store float32 [..., len(self)], each as the nearest there is of up to ±224."""
        codes = (2 * values).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.write_codes(blocks, codes.view(torch.uint8))


class Scale(Protocol):
    """A number a block has one of."""

    @property
    def at(self) -> int: ...

    def read(self, blocks: Tensor) -> Tensor:
        """uint8 [..., block_bytes] -> float32 [..., 1]."""
        ...

    def write(self, blocks: Tensor, value: Tensor) -> None:
        """Store float32 [..., 1], rounded."""
        ...


@dataclass(frozen=True)
class Half:
    """An fp16 at byte ``at``."""

    at: int

    def read(self, blocks: Tensor) -> Tensor:
        # Copied first: a block may start at an odd address, where fp16 cannot be viewed.
        pair = blocks[..., self.at : self.at + 2].clone(memory_format=torch.contiguous_format)
        return pair.view(torch.float16).float()

    def write(self, blocks: Tensor, value: Tensor) -> None:
        blocks[..., self.at : self.at + 2] = value.half().view(torch.uint8)


@dataclass(frozen=True)
class Zero(Half):
    """An fp16 at byte ``at`` that is a whole number up to 16, taken from every integer."""


@dataclass(frozen=True)
class HalvedExponent:
    """Half of an E8M0 at byte ``at``: byte e is 2^(e - 128), two denormals among them.

    E8M0 is that of the OCP microscaling formats, but for 255, which is NaN there and 2^127 here as
    in ggml. Halved because the integers it multiplies are E2M1 values doubled.
    """

    at: int

    def read(self, blocks: Tensor) -> Tensor:
        e = blocks[..., self.at : self.at + 1].to(torch.int32)
        # A float32 with exponent bits e - 1; 2^-128 and 2^-127 have none and a bit of the mantissa.
        bits = torch.where(e < 2, (1 << 21) << e.clamp(max=1), (e - 1) << 23)
        return bits.view(torch.float32)

    def write(self, blocks: Tensor, value: Tensor) -> None:
        """Store powers of two; what is too small to be told, 0 included, as the smallest."""
        e = value.double().log2().clamp(-128, 127).round() + 128
        blocks[..., self.at : self.at + 1] = e.to(torch.uint8)


@dataclass(frozen=True)
class Ratio:
    """Two float32 from byte ``at`` on, of which the second divides the first.

    Every block of a row has the same. Of a factor the second is 1, and of a divisor the first, so
    that what is scaled by either is rounded once.
    """

    at: int

    def parts(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [..., block_bytes] -> both, float32 [..., 1]."""
        raw = blocks[..., self.at : self.at + 8].clone(memory_format=torch.contiguous_format)
        first, second = raw.view(torch.float32).split(1, -1)
        return first, second

    def read(self, blocks: Tensor) -> Tensor:
        first, second = self.parts(blocks)
        return first / second

    def write(self, blocks: Tensor, value: Tensor) -> None:
        self.write_parts(blocks, value, torch.ones_like(value))

    def write_parts(self, blocks: Tensor, first: Tensor, second: Tensor) -> None:
        """Store float32 [..., 1] each."""
        blocks[..., self.at : self.at + 8] = torch.cat([first, second], -1).view(torch.uint8)
