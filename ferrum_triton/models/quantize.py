"""Models rounded to few bits: a Hugging Face directory or a GGUF file from either.

A tensor is read, rounded and written at a time, or a layer where a text calibrates it. What is made
appears under its name when all of it has been written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.backends import get_backend
from ferrum_triton.errors import FileError, InputError
from ferrum_triton.files import write_gguf
from ferrum_triton.files.gguf import GgufFile
from ferrum_triton.files.gguf_vocabulary import same_tokens, vocabulary_metadata
from ferrum_triton.files.new_path import new_path, refuse_taken
from ferrum_triton.files.tokenizer import load_tokenizer
from ferrum_triton.files.write_gguf import GgufWriter, Record, pair
from ferrum_triton.files.write_safetensors import DirectoryWriter, quantization_config
from ferrum_triton.models import to_gguf
from ferrum_triton.models.calibration import calibration_ids, run_and_round
from ferrum_triton.models.originals import Directory, File, Original, open_original
from ferrum_triton.models.weights import Progress
from ferrum_triton.quant.codings import BlockCoding, Coding, IntCoding, block_coding, rounded
from ferrum_triton.quant.gptq import Curvature, curvature
from ferrum_triton.quant.rounding import Grid

GROUP_SIZES = (32, 64, 128)
# What ``general.file_type`` is of files that are mostly of a kind, by llama.cpp's numbers.
GGUF_KINDS = {"Q4_0": 2, "Q4_K": 14, "Q8_0": 7}
# What takes the place of a kind whose blocks are longer than rows are whole multiples of.
_SHORTER = {"Q4_K": "Q5_0"}


@dataclass(frozen=True)
class Settings:
    """How a model is rounded.

    Attributes:
        bits: bits of an integer in a directory, 4 or 8.
        group_size: columns that share a scale there, one of GROUP_SIZES.
        kind: the format of a GGUF file's matrices, one of GGUF_KINDS.
        eight_bits: patterns of modules' names, as of files, that get 8 bits.
        texts: files that calibrate GPTQ; none rounds to the nearest.
        num_tokens: the most tokens of the texts.
        length: tokens that are run as one sequence.
        backend: the backend that runs them.
    """

    bits: int = 4
    group_size: int = 128
    kind: str = "Q4_K"
    eight_bits: tuple[str, ...] = ()
    texts: tuple[Path, ...] = ()
    num_tokens: int = 32768
    length: int = 512
    backend: str = "cpu"


def quantize_model(
    source: Path,
    target: Path,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write a copy of a model whose linear layers have few bits.

    Args:
        source: a Hugging Face directory or a GGUF file.
        target: a directory to make, as compressed-tensors, or a file whose name ends in ``.gguf``.
        settings: how it is rounded.
        progress: a function called with the numbers of matrices rounded and to round.

    Returns:
        How many matrices were rounded to each coding, by its name.

    Raises:
        FileError: the source is of another kind or malformed, the target is there or cannot be
            written, or the text is too short.
        InputError: a setting is out of range, or for another kind of target.
    """
    settings = Settings() if settings is None else settings
    _check(settings)
    origin = open_original(source)
    is_file = target.suffix == ".gguf"
    if not is_file and isinstance(origin, File):
        reason = "a GGUF file becomes another one: give the target a name that ends in .gguf"
        raise FileError(source, reason)
    codings = _codings(origin, settings, is_file)
    refuse_taken(target)
    ids = []
    if settings.texts:
        length = min(settings.length, origin.config.max_positions)
        ids = calibration_ids(settings.texts, source, settings.num_tokens, length)
    with new_path(target) as made:
        output = _output(origin, codings, made, settings.kind if is_file else None)
        for name in origin.names:
            if name not in codings:
                output.keep(name)
        todo = _Todo(origin, codings, output, progress)
        if ids:
            backend = get_backend(settings.backend)
            model = origin.family.model
            run_and_round(model, origin.config, origin.source, backend, ids, todo.calibrated)
            todo.check()
        else:
            for name in codings:
                todo.round(name, origin.weight(name))
        output.finish()
    names = [coding.name for coding in codings.values()]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def _check(settings: Settings) -> None:
    allowed = {"bits": (4, 8), "group_size": GROUP_SIZES, "kind": tuple(GGUF_KINDS)}
    for name, values in allowed.items():
        if (got := getattr(settings, name)) not in values:
            known = ", ".join(map(str, values))
            raise InputError("quantize", name, str(got), known, "Choose one of these.")
    for name in ("num_tokens", "length"):
        if (got := getattr(settings, name)) < 1:
            raise InputError("quantize", name, str(got), "1 or more", "Choose a value in range.")


def _codings(origin: Original, settings: Settings, is_file: bool) -> dict[str, Coding]:
    """What each matrix is rounded to, by name."""
    group = settings.group_size
    usual: Coding = IntCoding(settings.bits, group)
    eight: Coding = IntCoding(8, group)
    if is_file:
        usual, eight = block_coding(settings.kind), block_coding("Q8_0")
    codings, used = {}, set()
    for name in origin.matrices:
        module = name.removesuffix(".weight")
        found = [pattern for pattern in settings.eight_bits if fnmatchcase(module, pattern)]
        used.update(found)
        coding, columns = eight if found else usual, origin.shape(name)[1]
        if columns % coding.columns and coding.name in _SHORTER:
            coding = block_coding(_SHORTER[coding.name])
        if columns % coding.columns:
            fitting = [str(size) for size in GROUP_SIZES if columns % size == 0]
            known = f"group sizes: {', '.join(fitting) or 'none'}"
            known = "a GGUF file has blocks of 32" if is_file else known
            reason = f"has {columns} columns, no whole groups of {coding.columns}; {known}"
            raise FileError(origin.path, f"tensor {name!r} {reason}")
        codings[name] = coding
    if unused := [pattern for pattern in settings.eight_bits if pattern not in used]:
        first = origin.matrices[0].removesuffix(".weight")
        advice = f"Modules are named as {first}."
        raise InputError("quantize", "eight_bits", repr(unused[0]), "patterns of modules", advice)
    return codings


class _Todo:
    """Matrices that are rounded, one or some at a time."""

    def __init__(
        self,
        origin: Original,
        codings: Mapping[str, Coding],
        output: _Output,
        progress: Progress | None,
    ) -> None:
        self._origin, self._codings, self._output = origin, codings, output
        self._progress, self._left = progress, set(codings)

    def round(self, name: str, weight: Tensor, seen: Curvature | None = None) -> Tensor:
        """Write what a matrix is rounded to, and give its weights."""
        if not weight.isfinite().all():
            raise FileError(self._origin.path, f"tensor {name!r} holds what is not finite")
        q, grid = rounded(weight, self._codings[name], seen)
        self._output.put(name, q, grid)
        self._left.remove(name)
        if self._progress is not None:
            self._progress(len(self._codings) - len(self._left), len(self._codings))
        return grid.decode(q)

    def calibrated(self, weights: dict[str, Tensor], products: Tensor) -> None:
        """Round matrices by X Xᵀ of their inputs, in place."""
        try:
            seen = curvature(products)
        except InputError as error:
            reason = f"the inputs of tensor {next(iter(weights))!r} cannot calibrate it: {error}"
            raise FileError(self._origin.path, reason) from error
        for name, weight in weights.items():
            weight.copy_(self.round(name, weight, seen))

    def check(self) -> None:
        """Refuse a model of which some matrices were not run."""
        if self._left:
            reason = f"tensor {min(self._left)!r} has no place in this model"
            raise FileError(self._origin.path, reason)


class _Output(ABC):
    """Where tensors go."""

    @abstractmethod
    def keep(self, name: str) -> None:
        """Write a tensor as it is."""

    @abstractmethod
    def put(self, name: str, q: Tensor, grid: Grid) -> None:
        """Write a matrix of integers."""

    @abstractmethod
    def finish(self) -> None:
        """Write what is left, and let go of it."""


def _output(origin: Original, codings: Mapping[str, Coding], at: Path, kind: str | None) -> _Output:
    """A directory, or a file that is mostly of a kind."""
    if kind is not None:
        return _ToFile(origin, codings, at, kind)
    assert isinstance(origin, Directory)
    return _ToDirectory(origin, codings, at)


class _ToDirectory(_Output):
    def __init__(self, origin: Directory, codings: Mapping[str, Coding], at: Path) -> None:
        self._origin, self._codings, self._writer = origin, codings, DirectoryWriter(at)

    def keep(self, name: str) -> None:
        self._writer.put(name, self._origin.weight(name))

    def put(self, name: str, q: Tensor, grid: Grid) -> None:
        stem = name.removesuffix("weight")
        dtype = self._origin.dtype(name)
        for suffix, tensor in self._codings[name].stored(q, grid).items():
            is_scale = suffix == "weight_scale"
            self._writer.put(stem + suffix, tensor.to(dtype) if is_scale else tensor)

    def finish(self) -> None:
        codings = {
            name.removesuffix(".weight"): coding
            for name, coding in self._codings.items()
            if isinstance(coding, IntCoding)
        }
        usual = min(codings.values(), key=lambda coding: coding.bits)
        others = {name: coding for name, coding in codings.items() if coding != usual}
        config = self._origin.values | {"quantization_config": quantization_config(usual, others)}
        self._writer.finish(config, self._origin.path)


class _ToFile(_Output):
    def __init__(
        self, origin: Original, codings: Mapping[str, Coding], at: Path, kind: str
    ) -> None:
        self._origin, self._codings = origin, codings
        self._factors: Tensor | None = None
        if isinstance(origin, File):
            self._architecture = ""
            pairs = [*_copied(origin.file)]
        else:
            assert isinstance(origin, Directory)
            self._architecture, said = _described(origin)
            pairs = [pair(key, value) for key, value in said.items()]
            self._factors = to_gguf.frequency_factors(origin.config)
        pairs.append(pair("general.file_type", GGUF_KINDS[kind]))
        pairs.append(pair("general.quantization_version", 2))
        if isinstance(origin, Directory):
            GgufWriter(at, pairs, [])  # which is written over once the tokenizer is known to do
            same_tokens(origin.path, load_tokenizer(at))
        self._writer = GgufWriter(at, pairs, [*self._records()])

    def _records(self) -> Iterator[Record]:
        origin = self._origin
        if self._factors is not None:
            kind = write_gguf.TYPES["F32"]
            yield Record("rope_freqs.weight", tuple(self._factors.shape), kind)
        for name in origin.names:
            coding, shape = self._codings.get(name), origin.shape(name)
            if isinstance(coding, BlockCoding):
                kind = write_gguf.TYPES[coding.name]
            elif isinstance(origin, File):
                kind = origin.file.tensors[name].type
            else:
                kind = write_gguf.OF_DTYPES[self._plain_dtype(name)]
            yield Record(origin.gguf_names[name], shape, kind)

    def _plain_dtype(self, name: str) -> torch.dtype:
        """That of a tensor which is kept: vectors are in float32 in every file."""
        assert isinstance(self._origin, Directory)
        is_vector = len(self._origin.shape(name)) == 1
        return torch.float32 if is_vector else self._origin.dtype(name)

    def _put(self, name: str, tensor: Tensor) -> None:
        renamed = self._origin.gguf_names[name]
        order = to_gguf.row_order(renamed, self._origin.config, self._architecture)
        self._writer.put(renamed, tensor if order is None else tensor[order.to(tensor.device)])

    def keep(self, name: str) -> None:
        if isinstance(self._origin, File):
            self._put(name, self._origin.file.tensors[name].data())
        else:
            self._put(name, self._origin.weight(name).to(self._plain_dtype(name)))

    def put(self, name: str, q: Tensor, grid: Grid) -> None:
        self._put(name, self._codings[name].stored(q, grid)["weight"])

    def finish(self) -> None:
        if self._factors is not None:
            self._writer.put("rope_freqs.weight", self._factors)
        self._writer.finish()


def _copied(file: GgufFile) -> Iterator[bytes]:
    """A file's metadata, but for what is said anew."""
    said = ("general.file_type", "general.quantization_version", "general.alignment")
    return (file.pair(key) for key in file.metadata if key not in said)


def _described(origin: Directory) -> tuple[str, dict[str, Any]]:
    """A directory's architecture in GGUF's words, and its metadata."""
    name = origin.values["architectures"][0]
    if name not in to_gguf.ARCHITECTURES:
        known = ", ".join(to_gguf.ARCHITECTURES)
        raise FileError(origin.path, f"{name} is not written as GGUF; known: {known}")
    architecture = to_gguf.ARCHITECTURES[name]
    said = to_gguf.metadata(origin.config, architecture, origin.path)
    return architecture, said | vocabulary_metadata(origin.path, origin.config.vocab_size)
