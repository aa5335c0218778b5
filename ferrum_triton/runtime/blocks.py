"""Blocks of a paged pool: who holds each, and which tokens' keys it has.

A block may have several holders, who then only read it. A free block keeps its contents until it is
taken, so that a prompt that begins as an earlier one did finds the keys of its beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

from ferrum_triton.errors import InputError

# What a block holds: the name of what the block before it holds, and the tokens.
_Contents: TypeAlias = tuple[int, tuple[int, ...]]


class BlockAllocator:
    """Hands out the blocks [0, num_blocks) of a pool; those freed first are taken first.

    Args:
        num_blocks: the blocks there are.
        on_take: a function called with each block that is taken, whose contents are lost then.
    """

    def __init__(self, num_blocks: int, on_take: Callable[[int], None] | None = None) -> None:
        self._free = dict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self.on_take = on_take

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """``count`` blocks, with one holder each.

        Raises:
            InputError: fewer are free; none is taken then.
        """
        if not 0 <= count <= self.num_free:
            allowed = f"0 to the {self.num_free} that are free"
            _reject("take", "count", f"{count} blocks", allowed, "Free a sequence.")
        # In ascending order: pages beside each other can be read in one piece.
        blocks = sorted(itertools.islice(self._free, count))
        for block in blocks:
            del self._free[block]
            self._holders[block] = 1
            if self.on_take is not None:
                self.on_take(block)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Have one more holder for each block; a free one is free no longer.

        Raises:
            InputError: one of them is no block of the pool, or named twice; nothing has changed.
        """
        unknown = next((b for b in blocks if not 0 <= b < len(self._holders)), None)
        if unknown is not None or len(set(blocks)) < len(blocks):
            got = f"holding {unknown}" if unknown is not None else "holding one twice"
            allowed = f"different ones of the pool's {len(self._holders)}"
            _reject("hold", "blocks", got, allowed, "Pass what PrefixIndex.find returned.")
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Have one holder less for each of ``blocks``; what nobody holds is free.

        Raises:
            InputError: one of them is not held, or named twice; nothing has changed then.
        """
        seen: set[int] = set()
        for block in blocks:
            held = 0 <= block < len(self._holders) and self._holders[block] > 0
            if not held or block in seen:
                advice = "A block is given back once, by each holder."
                _reject("give_back", "blocks", f"holding {block}", "blocks in use", advice)
            seen.add(block)
        # The last block of a sequence goes first: others are likelier to begin as it did.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None


class PrefixIndex:
    """Full blocks by the tokens whose keys they hold and all the tokens before those.

    Args:
        allocator: the allocator of the blocks, which tells of those that lose their contents.
        block_size: tokens of a block.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._size = block_size
        self._blocks: dict[_Contents, int] = {}
        self._contents: dict[int, tuple[_Contents, int]] = {}
        self._names = itertools.count(1)
        allocator.on_take = self._forget

    def find(self, ids: Sequence[int]) -> list[int]:
        """Blocks that hold the keys of the longest known beginning of ``ids``."""
        found: list[int] = []
        name = 0
        for contents in self._spans(ids):
            block = self._blocks.get((name, contents))
            if block is None:
                break
            found.append(block)
            name = self._contents[block][1]
        return found

    def add(self, ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Remember that ``blocks`` hold the keys of ``ids``, but for a last one partly filled."""
        name = 0
        for contents, block in zip(self._spans(ids), blocks, strict=False):
            known = self._blocks.get((name, contents))
            if known is None:
                self._forget(block)
                self._blocks[name, contents] = known = block
                self._contents[block] = (name, contents), next(self._names)
            name = self._contents[known][1]

    def _spans(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self._size
        return [tuple(ids[i : i + size]) for i in range(0, len(ids) - size + 1, size)]

    def _forget(self, block: int) -> None:
        known = self._contents.pop(block, None)
        if known is not None:
            del self._blocks[known[0]]


def _reject(what: str, argument: str, got: str, allowed: str, advice: str) -> NoReturn:
    raise InputError(what, argument, got, allowed, advice)
