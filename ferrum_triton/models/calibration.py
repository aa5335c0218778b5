"""A model run over a text once, layer by layer, each matrix rounded as its inputs come to it.

All tokens go through a layer before the next is read, so that one layer is in memory at a time. The
product that a matrix is for hands over its inputs, the matrix is rounded, and the product is made
with what it was rounded to: every later matrix sees what the earlier ones have become.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import FileError
from ferrum_triton.files.json_file import read_text
from ferrum_triton.files.tokenizer import load_tokenizer
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.decoder import Decoder
from ferrum_triton.models.linear import Linear
from ferrum_triton.models.step import varlen_step
from ferrum_triton.models.weights import LayerWeights, LlamaLoader, Source

MAX_TEXT_BYTES = 256 << 20
# Tokens whose products are added up at a time.
_CHUNK = 4096

Round: TypeAlias = Callable[[dict[str, Tensor], Tensor], None]
"""Called with matrices by name, whose weights it replaces in place, and X Xᵀ of their inputs."""


def calibration_ids(
    texts: Sequence[Path], model: Path, num_tokens: int, length: int
) -> list[list[int]]:
    """Sequences of texts' tokens, of one length, of each text as much as of the others.

    Args:
        texts: files of text.
        model: the file or directory whose tokenizer reads them.
        num_tokens: the most tokens of all sequences together.
        length: tokens of a sequence.

    Raises:
        FileError: there is no tokenizer, or a text is unreadable or shorter than one sequence.
    """
    tokenizer = load_tokenizer(model)
    sequences = []
    for path in texts:
        ids = tokenizer.encode(read_text(path, MAX_TEXT_BYTES), add_special=False)
        if len(ids) < length:
            reason = f"the calibration text has {len(ids)} tokens; {length} or more are needed"
            raise FileError(path, reason)
        count = max(1, min(len(ids), num_tokens // len(texts)) // length)
        sequences += [ids[i * length : (i + 1) * length] for i in range(count)]
    return sequences


def run_and_round(
    kind: type[Decoder],
    config: LlamaConfig,
    source: Source,
    backend: Backend,
    sequences: Sequence[Sequence[int]],
    round_them: Round,
) -> None:
    """Run a model in float32 over sequences, and call ``round_them`` with matrices as they come.

    Q, K and V come together, as gate and up do. Memory holds two layers, the embedding, what one
    layer keeps of all tokens, and X Xᵀ of its widest matrix with what is computed of that.

    Raises:
        FileError: a tensor is missing or misshapen.
    """
    watched = _Watched(backend, round_them)
    # No head is run: the embedding in its place is not read twice.
    weights = _Loader(source, watched).load(replace(config, tie_embeddings=True))
    model = kind(config, weights, watched, torch.float32)
    cache = model.new_cache(max(map(len, sequences)), len(sequences), one_pool=True)
    cache.reserve({seq: len(ids) for seq, ids in enumerate(sequences)})
    model.hidden(varlen_step(cache, [*enumerate(sequences)]), cache)


class _Watched(Backend):
    """A backend whose products with registered weights are preceded by a call."""

    def __init__(self, backend: Backend, round_them: Round) -> None:
        super().__init__(backend.name, str(backend.device), backend.providers)
        self._backend, self._round = backend, round_them
        self._parts: dict[int, dict[str, slice]] = {}

    def register(self, weight: Tensor, parts: dict[str, slice]) -> None:
        """Know a weight, and the names of its rows, until it has been multiplied by."""
        self._parts[id(weight)] = parts

    def gemm(self, a: Tensor, b: Tensor, wide: bool = False, *, out: Any = None) -> Tensor:
        parts = self._parts.pop(id(b), None)
        if parts is not None:
            products = a.new_zeros(a.shape[1], a.shape[1])
            for x in a.split(_CHUNK):
                products.addmm_(x.T, x)
            self._round({name: b[rows] for name, rows in parts.items()}, products)
        return self._backend.gemm(a, b, wide, out=out)

    def has_kernel(self, name: str, kind: str = "") -> bool:
        """None: weights are decoded, and one launch for several ops would hide their inputs."""
        return False


class _Loader(LlamaLoader):
    """A loader that reads a layer when it is asked for something of it, and keeps two."""

    def __init__(self, source: Source, backend: _Watched) -> None:
        super().__init__(source, backend, torch.float32, None, planes=False, allow_non_finite=True)
        self.watched = backend
        self._kept: dict[int, LayerWeights] = {}

    def layer(self, index: int) -> Any:
        return _Layer(lambda: self._read(index))

    def _read(self, index: int) -> LayerWeights:
        if index not in self._kept:
            self._kept = {i: layer for i, layer in self._kept.items() if i == index - 1}
            self._kept[index] = super().layer(index)
        return self._kept[index]

    def refuse_unread(self) -> None:
        """Nothing: what there is has been compared with what is to be rounded."""

    def linear(self, prefix: str, sizes: dict[str, int], *rest: Any, **more: Any) -> Linear:
        made = super().linear(prefix, sizes, *rest, **more)
        parts, start = {}, 0
        for name, size in sizes.items():
            parts[self.source.spelled(f"{prefix}{name}.weight")] = slice(start, start + size)
            start += size
        assert isinstance(made.weight, Tensor)
        self.watched.register(made.weight, parts)
        return made


class _Layer:
    """A layer's weights, each by a call that reads the layer if need be."""

    def __init__(self, read: Callable[[], LayerWeights]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)
