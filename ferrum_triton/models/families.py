"""The families of models there are, told by what a file says of its architecture."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ferrum_triton.errors import FileError
from ferrum_triton.models import (
    bert,
    gemma3,
    gpt_oss,
    mixtures,
    qwen35,
    qwen35_config,
    weights,
)
from ferrum_triton.models import config as llama_config
from ferrum_triton.models.bert import BertConfig
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.decoder import Decoder
from ferrum_triton.models.llama import Llama
from ferrum_triton.models.weights import HfSource, LlamaLoader

T = TypeVar("T")

_NO_DECODER = "is a text encoder; load it with load_encoder"
_NO_ENCODER = "is a decoder; load it with load_model"


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
        hf_source: the class that reads its Hugging Face directories.
        loader: the class that makes its weights of tensors.
        packs_integers: whether its Hugging Face directories may hold weights in integers.
    """

    config: type[LlamaConfig]
    model: type[Decoder]
    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    hf_names: Mapping[str, str]
    hf_norm_offset: float = 0.0
    hf_source: type[HfSource] = HfSource
    loader: type[LlamaLoader] = LlamaLoader
    packs_integers: bool = True


FAMILIES = (
    Family(
        LlamaConfig,
        Llama,
        llama_config.GGUF_ARCHITECTURES,
        llama_config.HF_ARCHITECTURES,
        weights.HF_NAMES,
    ),
    Family(
        LlamaConfig,
        Llama,
        (),
        (llama_config.QWEN3_MOE,),
        mixtures.QWEN3_MOE_NAMES,
        hf_source=mixtures.MixtureSource,
    ),
    Family(
        LlamaConfig,
        Llama,
        (),
        (llama_config.MIXTRAL,),
        mixtures.MIXTRAL_NAMES,
        hf_source=mixtures.MixtureSource,
    ),
    Family(
        gemma3.Gemma3Config,
        gemma3.Gemma3,
        gemma3.GGUF_ARCHITECTURES,
        gemma3.HF_ARCHITECTURES,
        gemma3.HF_NAMES,
        gemma3.HF_NORM_OFFSET,
    ),
    Family(
        gpt_oss.GptOssConfig,
        gpt_oss.GptOss,
        gpt_oss.GGUF_ARCHITECTURES,
        gpt_oss.HF_ARCHITECTURES,
        gpt_oss.HF_NAMES,
        hf_source=gpt_oss.GptOssSource,
        loader=gpt_oss.GptOssLoader,
        packs_integers=False,
    ),
    Family(
        qwen35_config.Qwen35Config,
        qwen35.Qwen35,
        qwen35_config.GGUF_ARCHITECTURES,
        qwen35_config.HF_ARCHITECTURES,
        qwen35.HF_NAMES,
        qwen35.HF_NORM_OFFSET,
        hf_source=qwen35.Qwen35Source,
        loader=qwen35.Qwen35Loader,
    ),
)


def family_of_gguf(metadata: Mapping[str, Any], path: Path) -> Family:
    """The family of a GGUF file of a decoder.

    Raises:
        FileError: there is none for its architecture.
    """
    name = metadata.get("general.architecture")
    return _find(_by_gguf_name(), name, path, bert.GGUF_ARCHITECTURES, _NO_DECODER)


def family_of_hf(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a decoder's Hugging Face ``config.json``.

    Raises:
        FileError: there is none for its architecture.
    """
    return _find(_by_hf_name(), _hf_name(config), path, bert.HF_ARCHITECTURES, _NO_DECODER)


def encoder_of_gguf(metadata: Mapping[str, Any], path: Path) -> type[BertConfig]:
    """The class of hyperparameters of a GGUF file of a text encoder.

    Raises:
        FileError: there is none for its architecture.
    """
    known = dict.fromkeys(bert.GGUF_ARCHITECTURES, BertConfig)
    return _find(known, metadata.get("general.architecture"), path, _by_gguf_name(), _NO_ENCODER)


def encoder_of_hf(config: Mapping[str, Any], path: Path) -> type[BertConfig]:
    """The class of hyperparameters of a text encoder's Hugging Face ``config.json``.

    Raises:
        FileError: there is none for its architecture.
    """
    known = dict.fromkeys(bert.HF_ARCHITECTURES, BertConfig)
    return _find(known, _hf_name(config), path, _by_hf_name(), _NO_ENCODER)


def _by_gguf_name() -> dict[str, Family]:
    return {name: family for family in FAMILIES for name in family.gguf}


def _by_hf_name() -> dict[str, Family]:
    return {name: family for family in FAMILIES for name in family.hf}


def _hf_name(config: Mapping[str, Any]) -> Any:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else None


def _find(
    kinds: Mapping[str, T], name: Any, path: Path, others: Collection[str], of_others: str
) -> T:
    """What ``name`` stands for; of the other kind of model's names it is said what they are."""
    if isinstance(name, str) and name in others:
        raise FileError(path, f"architecture {name!r} {of_others}")
    if not isinstance(name, str) or name not in kinds:
        known = ", ".join(kinds)
        raise FileError(path, f"architecture {name!r:.80} is not supported; known: {known}")
    return kinds[name]
