"""Keys and values of running sequences: contiguous, or in pages of one pool.

What the host knows of a cache (lengths, which blocks a sequence has) is mirrored here, so that no
question about it waits for the device; the kernels read the device's copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.ops.kv_pool import LAYOUTS, cache_shapes
from ferrum_triton.runtime.blocks import BlockAllocator
from ferrum_triton.runtime.context import refuse_in_capture
from ferrum_triton.types import KvDtypeKind

SCALE_DTYPE = torch.float16
"""Of the scales of quantised caches: one per position and KV head, for keys and values each."""


class KvCache:
    """Keys and values of one sequence, contiguous and head-major.

    Attributes:
        k, v: a tensor per layer, [num_kv_heads, capacity, head_dim]; rows from ``length`` on hold
            anything.
        k_scales, v_scales: a tensor per layer of a quantised kind, [num_kv_heads, capacity]; empty
            for other kinds.
        length: the number of positions filled; whoever writes sets it with :meth:`set_len`.
        capacity: the number of positions there is room for.
        kind: the kind of elements stored.
    """

    def __init__(
        self,
        *,
        num_layers: int = 1,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        kind: KvDtypeKind = KvDtypeKind.BF16,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_sizes(
            "KvCache",
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            capacity=capacity,
        )
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.kind, self.length = KvDtypeKind(kind), 0
        self._device = torch.device(device)
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        rows = (self.num_kv_heads, capacity)
        scaled_layers = self.num_layers if self.kind.quantised else 0
        self.capacity = capacity
        self.k, self.v = (
            self._tensors(self.num_layers, (*rows, self.head_dim), self.kind.dtype) for _ in "kv"
        )
        self.k_scales, self.v_scales = (
            self._tensors(scaled_layers, rows, SCALE_DTYPE) for _ in "kv"
        )

    def _tensors(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device) for _ in range(count)]

    @property
    def tensors(self) -> list[Tensor]:
        """What a captured graph that uses this cache depends on."""
        return [*self.k, *self.v, *self.k_scales, *self.v_scales]

    def set_len(self, length: int) -> None:
        """Declare ``length`` positions filled.

        Raises:
            InputError: it exceeds the capacity.
        """
        if not 0 <= length <= self.capacity:
            allowed = f"0 to the capacity of {self.capacity}"
            _reject("set_len", "length", str(length), allowed, "Call ensure_contig_capacity.")
        self.length = length

    def ensure_contig_capacity(self, required: int) -> None:
        """Have room for ``required`` positions, moving each head's filled rows if need be.

        Growing at least doubles the capacity, so that a sequence grown token by token is copied a
        constant number of times. The tensors are new ones then, and graphs captured with the old
        ones as owners are dropped.
        """
        if required <= self.capacity:
            return
        refuse_in_capture("ensure_contig_capacity", self._device, "Reserve before the capture.")
        old = self.tensors
        self._allocate(max(required, 2 * self.capacity))
        for new, filled in zip(self.tensors, old, strict=True):
            new[:, : self.length].copy_(filled[:, : self.length])

    def free(self) -> None:
        """Give the memory back; the cache is empty and has no capacity."""
        self.length = 0
        self._allocate(0)


class PagedKvCache:
    """Keys and values of many sequences, in blocks of one pool per layer.

    A sequence has the same blocks in every layer. Position p of sequence s lies in block
    ``block_tables[s, p // block_size]`` at row ``p % block_size``.

    The layouts are those of :mod:`ferrum_triton.ops.kv_pool`: ``"hnd"``, ``"nhd"``, ``"vllm_x"``.

    Attributes:
        k, v: a tensor per layer, in that layout.
        k_scales, v_scales: a float16 tensor per layer of a quantised kind; empty for other kinds.
        block_tables: [num_seqs, max_blocks_per_seq] int32 on the device; -1 where there is none.
        kv_lens: [num_seqs] int32 on the device, as :meth:`set_lens` left them.
        tickets: [num_seqs · num_kv_heads] int32 zeros on the device, by which programs that attend
            to parts of one sequence find out who is last.
        blocks: a list of blocks per sequence: the host's mirror of ``block_tables``.
        lengths: the number of positions filled per sequence.
        allocator: the allocator of the blocks.
        capacity: the most positions of a sequence: what its blocks hold, or fewer if so asked.
        can_share: whether blocks are all that a sequence's next tokens need.

    Raises:
        InputError: a size is not positive, the layout is unknown, or ``"vllm_x"`` does not
            divide head_dim into pieces of 16 bytes.
    """

    can_share = True

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_seqs: int,
        max_blocks_per_seq: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int | None = None,
        kind: KvDtypeKind = KvDtypeKind.BF16,
        layout: str = "hnd",
        device: torch.device | str = "cpu",
    ) -> None:
        room = max_blocks_per_seq * block_size
        self.capacity = room if capacity is None else capacity
        _check_sizes(
            "PagedKvCache",
            capacity=self.capacity,
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_seqs=num_seqs,
            max_blocks_per_seq=max_blocks_per_seq,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        if self.capacity > room:
            advice = "Allow more blocks."
            _reject("PagedKvCache", "capacity", str(capacity), f"up to {room}", advice)
        self.kind, self.layout, self.block_size = KvDtypeKind(kind), layout, block_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        dtype, layers = self.kind.dtype, range(num_layers)
        if layout not in LAYOUTS:
            allowed = ", ".join(map(repr, LAYOUTS))
            _reject("PagedKvCache", "layout", repr(layout), allowed, "Choose one of these.")
        if layout == "vllm_x" and head_dim % (16 // dtype.itemsize):
            allowed = f"a multiple of {16 // dtype.itemsize}"
            _reject("PagedKvCache", "head_dim", str(head_dim), allowed, "Choose another layout.")
        k_shape, v_shape, scales_shape = cache_shapes(
            layout, num_blocks, block_size, num_kv_heads, head_dim, dtype
        )
        self.k = [torch.empty(k_shape, dtype=dtype, device=device) for _ in layers]
        self.v = [torch.empty(v_shape, dtype=dtype, device=device) for _ in layers]
        self.k_scales, self.v_scales = (
            [
                torch.empty(scales_shape, dtype=SCALE_DTYPE, device=device)
                for _ in layers
                if self.kind.quantised
            ]
            for _ in "kv"
        )
        self.allocator = BlockAllocator(num_blocks)
        self.blocks: list[list[int]] = [[] for _ in range(num_seqs)]
        self.lengths = [0] * num_seqs
        table = (num_seqs, max_blocks_per_seq)
        self.block_tables = torch.full(table, -1, dtype=torch.int32, device=device)
        self.kv_lens = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        self.tickets = torch.zeros(num_seqs * num_kv_heads, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """What a captured graph that uses this cache depends on."""
        pools = (*self.k, *self.v, *self.k_scales, *self.v_scales)
        return [*pools, self.block_tables, self.kv_lens, self.tickets]

    def reserve(self, lengths: Mapping[int, int]) -> None:
        """Have blocks for ``lengths[seq]`` positions of each sequence named; one upload.

        Raises:
            InputError: there is no such sequence, a length exceeds the capacity, or the blocks do
                not suffice for all of them; nothing has changed then.
        """
        missing = {}
        for seq, length in lengths.items():
            self._check_seq("reserve", seq)
            if not 0 <= length <= self.capacity:
                allowed = f"0 to the capacity of {self.capacity}"
                _reject("reserve", "lengths", f"{length} for {seq}", allowed, "Shorten it.")
            missing[seq] = max(-(-length // self.block_size) - len(self.blocks[seq]), 0)
        if not any(missing.values()):
            return
        refuse_in_capture("reserve", self.kv_lens.device, "Reserve before the replay.")
        fresh = iter(self.allocator.take(sum(missing.values())))
        entries = []
        for seq, count in missing.items():
            for _ in range(count):
                block = next(fresh)
                entries.append((seq, len(self.blocks[seq]), block))
                self.blocks[seq].append(block)
        self._write_table(entries)

    def set_lens(self, lengths: Mapping[int, int]) -> None:
        """Declare ``lengths[seq]`` positions of each sequence named filled; one upload.

        Raises:
            InputError: there is no such sequence, or it lacks the blocks; nothing has changed then.
        """
        for seq, length in lengths.items():
            self._check_seq("set_lens", seq)
            room = len(self.blocks[seq]) * self.block_size
            if not 0 <= length <= room:
                allowed = f"0 to the {room} positions of its blocks"
                _reject("set_lens", "lengths", f"{length} for {seq}", allowed, "Reserve first.")
        refuse_in_capture("set_lens", self.kv_lens.device, "Set them before the replay.")
        for seq, length in lengths.items():
            self.lengths[seq] = length
        self.kv_lens.copy_(torch.tensor(self.lengths, dtype=torch.int32), non_blocking=True)

    def share(self, seq: int, blocks: Sequence[int]) -> None:
        """Begin an empty sequence with blocks that others may hold too, to be read only.

        Raises:
            InputError: there is no such sequence, it is not empty, or they exceed its capacity.
        """
        self._check_seq("share", seq)
        if self.blocks[seq] or len(blocks) > self.block_tables.shape[1]:
            got = f"{len(blocks)} for {seq}, which has {len(self.blocks[seq])}"
            allowed = f"up to {self.block_tables.shape[1]}, of an empty sequence"
            _reject("share", "blocks", got, allowed, "Free the sequence first.")
        refuse_in_capture("share", self.kv_lens.device, "Share before the replay.")
        self.allocator.hold(blocks)
        self.blocks[seq] = list(blocks)
        if blocks:
            self._write_table([(seq, i, block) for i, block in enumerate(blocks)])

    def make_writable(self, seq: int, position: int) -> None:
        """Have the block of a position to oneself: a shared one is copied, in every layer.

        Raises:
            InputError: there is no such sequence or position, or no block is free for the copy.
        """
        (slot,) = self.slots(seq, position, position + 1)
        column, old = position // self.block_size, slot // self.block_size
        if self.allocator.holders(old) == 1:
            return
        refuse_in_capture("make_writable", self.kv_lens.device, "Copy before the replay.")
        (new,) = self.allocator.take(1)
        for pool in (*self.k, *self.v, *self.k_scales, *self.v_scales):
            pool[new].copy_(pool[old])
        self.allocator.give_back([old])
        self.blocks[seq][column] = new
        self._write_table([(seq, column, new)])

    def free(self, seq: int) -> None:
        """Give the blocks of a sequence back to the pool; it is empty then.

        Raises:
            InputError: there is no such sequence.
        """
        self._check_seq("free", seq)
        refuse_in_capture("free", self.kv_lens.device, "Free before the replay.")
        blocks, self.blocks[seq] = self.blocks[seq], []
        self.allocator.give_back(blocks)
        self.block_tables[seq].fill_(-1)
        self.set_lens({seq: 0})

    def slots(self, seq: int, start: int, end: int) -> list[int]:
        """Rows of the pool, block · block_size + row, of positions [start, end) of a sequence.

        Raises:
            InputError: there is no such sequence, or it lacks the blocks.
        """
        self._check_seq("slots", seq)
        room = len(self.blocks[seq]) * self.block_size
        if not 0 <= start <= end <= room:
            allowed = f"a range in the {room} positions of its blocks"
            _reject("slots", "start, end", f"[{start}, {end})", allowed, "Reserve first.")
        size, blocks = self.block_size, self.blocks[seq]
        return [blocks[p // size] * size + p % size for p in range(start, end)]

    def _write_table(self, entries: Sequence[tuple[int, int, int]]) -> None:
        width = self.block_tables.shape[1]
        cells = torch.tensor([(seq * width + column, block) for seq, column, block in entries])
        cells = cells.to(self.block_tables.device, non_blocking=True)
        self.block_tables.view(-1).index_copy_(0, cells[:, 0], cells[:, 1].to(torch.int32))

    def _check_seq(self, what: str, seq: int) -> None:
        if not 0 <= seq < len(self.blocks):
            allowed = f"0 to {len(self.blocks) - 1}"
            _reject(what, "seq", str(seq), allowed, "Make a cache for more sequences.")


def _check_sizes(what: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            _reject(what, name, str(size), "1 or more", "Pass a positive size.")


def _reject(what: str, argument: str, got: str, allowed: str, advice: str) -> NoReturn:
    raise InputError(what, argument, got, allowed, advice)
