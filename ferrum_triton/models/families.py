"""The families of models there are, told by what a file says of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrum_triton.errors import FileError
from ferrum_triton.models import config as llama_config
from ferrum_triton.models import gemma3, weights
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.decoder import Decoder
from ferrum_triton.models.llama import Llama


@dataclass(frozen=True)
class Family:
    """How files of one family are read and run.

    Attributes:
        config: the class of its hyperparameters.
        model: the class that runs it.
        gguf: its architectures by GGUF's names.
        hf: its architectures by Hugging Face's names.
        hf_names: Hugging Face's names of its tensors by GGUF's.
        hf_norm_offset: what is added to norms' weights of Hugging Face files.
    """

    config: type[LlamaConfig]
    model: type[Decoder]
    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    hf_names: Mapping[str, str]
    hf_norm_offset: float = 0.0


FAMILIES = (
    Family(
        LlamaConfig,
        Llama,
        llama_config.GGUF_ARCHITECTURES,
        llama_config.HF_ARCHITECTURES,
        weights.HF_NAMES,
    ),
    Family(
        gemma3.Gemma3Config,
        gemma3.Gemma3,
        gemma3.GGUF_ARCHITECTURES,
        gemma3.HF_ARCHITECTURES,
        gemma3.HF_NAMES,
        gemma3.HF_NORM_OFFSET,
    ),
)


def family_of_gguf(metadata: Mapping[str, Any], path: Path) -> Family:
    """The family of a GGUF file.

    Raises:
        FileError: there is none for its architecture.
    """
    return _find(
        {name: f for f in FAMILIES for name in f.gguf}, metadata.get("general.architecture"), path
    )


def family_of_hf(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a Hugging Face ``config.json``.

    Raises:
        FileError: there is none for its architecture.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return _find({known: family for family in FAMILIES for known in family.hf}, name, path)


def _find(families: Mapping[str, Family], name: Any, path: Path) -> Family:
    if not isinstance(name, str) or name not in families:
        known = ", ".join(families)
        raise FileError(path, f"architecture {name!r:.80} is not supported; known: {known}")
    return families[name]
