"""Models that are rounded: their tensors by their own names and by GGUF's, and how they are run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.errors import FileError
from ferrum_triton.files.gguf import open_gguf
from ferrum_triton.files.json_file import is_directory, read_json
from ferrum_triton.files.safetensors import open_safetensors
from ferrum_triton.models import to_gguf
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.families import Family, family_of_gguf, family_of_hf
from ferrum_triton.models.weights import GgufSource, Source
from ferrum_triton.quant import QuantizedTensor

HF_ARCHITECTURES = (*to_gguf.ARCHITECTURES, "Gemma3ForCausalLM")
GGUF_ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")
# Stems of tensors that are in no layer.
_ENDS = ("token_embd", "output_norm", "output")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_original(path: Path) -> Original:
    """A Hugging Face directory, or a GGUF file.

    Raises:
        FileError: it is malformed, or of a model that is not rounded.
    """
    return Directory(path) if is_directory(path) else File(path)


class Original(ABC):
    """A model that is rounded.

    Attributes:
        path: its file or directory.
        family, config, source: what it is run as.
        names: its tensors, by its own names, without those that a model has no use for.
        gguf_names: GGUF's names of them.
        matrices: those that are rounded.
    """

    path: Path
    family: Family
    config: LlamaConfig
    source: Source
    names: list[str]
    gguf_names: dict[str, str]

    @property
    def matrices(self) -> list[str]:
        """The matrices of layers: not the embedding and the head, which every token meets."""
        return [
            name
            for name in self.names
            if self.gguf_names[name].startswith("blk.")
            and name.endswith(".weight")
            and len(self.shape(name)) > 1
        ]

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """A tensor in plain numbers."""

    def _check_matrices(self) -> None:
        if self.config.num_experts:
            raise FileError(self.path, "mixtures of experts are not quantised")
        if not self.matrices:
            raise FileError(self.path, "holds no matrices of layers")
        for name in self.matrices:
            if len(shape := self.shape(name)) != 2:
                raise FileError(self.path, f"tensor {name!r} has shape {list(shape)}, no matrix")


class Directory(Original):
    """A Hugging Face directory, not quantised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = read_json(path / "config.json")
        _known(self.values.get("architectures"), HF_ARCHITECTURES, path)
        if self.values.get("quantization_config"):
            raise FileError(path, "is quantised already")
        self.family = family_of_hf(self.values, path / "config.json")
        self.config = self.family.config.from_hf(self.values, path / "config.json")
        self.files = open_safetensors(path)
        family = self.family
        self.source = source = family.hf_source(self.files, family.hf_names, family.hf_norm_offset)
        stems = [*_ENDS]
        for layer in range(self.config.num_layers):
            stems += [f"blk.{layer}.{stem}" for stem in family.hf_names if stem not in _ENDS]
        wanted = [f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")]
        self.gguf_names = {source.spelled(name): name for name in wanted if name in source}
        if self.config.tie_embeddings:
            self.gguf_names.pop("lm_head.weight", None)
        self.names = [name for name in self.files if name in self.gguf_names]
        for name in self.files:
            is_extra = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
            if name not in self.gguf_names and not is_extra:
                raise FileError(path, f"tensor {name!r} has no place in this model")
        self._check_matrices()
        for name in self.names:
            if (kind := self.files.stored_as(name)[0]) not in _DTYPES:
                raise FileError(path, f"tensor {name!r} is {kind}; known: {', '.join(_DTYPES)}")

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.shape(name)

    def weight(self, name: str) -> Tensor:
        return self.files[name]

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor as it is stored."""
        return _DTYPES[self.files.stored_as(name)[0]]


class File(Original):
    """A GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, open_gguf(path)
        _known([self.file.metadata.get("general.architecture")], GGUF_ARCHITECTURES, path)
        self.family = family_of_gguf(self.file.metadata, path)
        self.config = self.family.config.from_gguf(self.file.metadata, self.file.tensors, path)
        self.source = GgufSource(self.file)
        self.names = [*self.file.tensors]
        self.gguf_names = {name: name for name in self.names}
        self._check_matrices()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[name].shape

    def weight(self, name: str) -> Tensor:
        stored = self.source.fetch(name)
        if isinstance(stored, QuantizedTensor):
            return stored.dequantize()
        assert isinstance(stored, Tensor)
        return stored


def _known(names: Any, known: tuple[str, ...], path: Path) -> None:
    name = names[0] if isinstance(names, list) and names else None
    if name not in known:
        reason = f"architecture {name!r:.80} is not quantised; known: {', '.join(known)}"
        raise FileError(path, reason)
