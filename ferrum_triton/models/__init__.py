"""Models, from files: :func:`load_model` gives decoders, :func:`load_encoder` text encoders."""

from __future__ import annotations

from pathlib import Path

import torch

from ferrum_triton.backends import Backend, get_backend
from ferrum_triton.files.gguf import open_gguf
from ferrum_triton.files.int_weights import packing_of, read_config
from ferrum_triton.files.json_file import is_directory, read_json
from ferrum_triton.files.packed import open_packed
from ferrum_triton.files.safetensors import open_safetensors
from ferrum_triton.files.tokenizer import load_tokenizer
from ferrum_triton.models.bert import Bert, BertConfig, BertLoader, BertSource
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.decoder import Decoder
from ferrum_triton.models.families import (
    Family,
    encoder_of_gguf,
    encoder_of_hf,
    family_of_gguf,
    family_of_hf,
)
from ferrum_triton.models.llama import Llama
from ferrum_triton.models.memory import tell_what_decoding_takes
from ferrum_triton.models.weights import (
    GgufSource,
    Progress,
    Source,
    load_weights,
)
from ferrum_triton.runtime.collective import Collective
from ferrum_triton.runtime.expert_parallel import ExpertParallel

__all__ = [
    "Bert",
    "BertConfig",
    "Decoder",
    "Llama",
    "LlamaConfig",
    "load_encoder",
    "load_model",
    "load_tokenizer",
]


def load_model(
    path: str | Path,
    backend: Backend | str,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    *,
    allow_non_finite: bool = False,
    experts_over: Collective | None = None,
) -> Decoder:
    """Load a GGUF file, or a Hugging Face directory with ``config.json`` and safetensors.

    On the CPU backend packed weights are decoded as they are loaded: a file of 4.5 bits a weight
    takes seven times its size as float32 and half of that as bfloat16. The logger of
    ``ferrum_triton.models`` says how much before the first is read.

    Args:
        path: the file or directory.
        backend: the backend the model will run on, or its name.
        dtype: the dtype of activations and cache, and of weights that are not kept packed.
        progress: a function called with the numbers of tensors loaded and to load.
        allow_non_finite: whether weights may be NaN, infinite, or too large for their dtype.
        experts_over: the ranks that share each layer's experts, contiguous ranges of them; each of
            them loads the model, and runs the same number of steps, of tokens of its own. None
            keeps all experts.

    Raises:
        FileError: the file is malformed, or of a model this package cannot run.
        InputError: the model has no experts to share, or ranks load different models.
    """
    chosen = get_backend(backend) if isinstance(backend, str) else backend

    def assemble(family: Family, source: Source, config: LlamaConfig) -> Decoder:
        parallel = None
        if experts_over is not None:
            parallel = ExpertParallel(
                chosen,
                experts_over,
                config.num_experts,
                top_k=config.experts_per_token,
                hidden_size=config.hidden_size,
                dtype=dtype,
            )
        weights = load_weights(
            source,
            config,
            chosen,
            dtype,
            progress,
            allow_non_finite=allow_non_finite,
            loader=family.loader,
            parallel=parallel,
        )
        model = family.model(config, weights, chosen, dtype)
        model.path = Path(path)
        return model

    path = Path(path)
    if is_directory(path):
        values = read_config(path)
        family = family_of_hf(values, path / "config.json")
        config = family.config.from_hf(values, path / "config.json")
        stored = open_safetensors(path)
        packing = packing_of(values, path / "config.json") if family.packs_integers else None
        files = open_packed(stored, packing) if packing else stored
        source = family.hf_source(files, family.hf_names, family.hf_norm_offset)
        return assemble(family, source, config)
    with open_gguf(path) as file:
        family = family_of_gguf(file.metadata, path)
        config = family.config.from_gguf(file.metadata, file.tensors, path)
        return assemble(family, GgufSource(file), config)


def load_encoder(
    path: str | Path,
    backend: Backend | str,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    *,
    allow_non_finite: bool = False,
) -> Bert:
    """Load a text encoder: a GGUF file, or a Hugging Face directory, as :func:`load_model` does.

    Args:
        path: the file or directory.
        backend: the backend the model will run on, or its name.
        dtype: the dtype of activations, and of weights that are not kept packed.
        progress: a function called with the numbers of tensors loaded and to load.
        allow_non_finite: whether weights may be NaN, infinite, or too large for their dtype.

    Raises:
        FileError: the file is malformed, or of a model that is no encoder this package can run.
    """
    chosen = get_backend(backend) if isinstance(backend, str) else backend

    def assemble(source: Source, config: BertConfig) -> Bert:
        tell_what_decoding_takes(source, chosen, dtype)
        loader = BertLoader(source, chosen, dtype, progress, allow_non_finite=allow_non_finite)
        return Bert(config, loader.load(config), chosen, dtype)

    path = Path(path)
    if is_directory(path):
        values = read_json(path / "config.json")
        config = encoder_of_hf(values, path / "config.json").from_hf(values, path / "config.json")
        return assemble(BertSource(open_safetensors(path)), config)
    with open_gguf(path) as file:
        config = encoder_of_gguf(file.metadata, path).from_gguf(file.metadata, path)
        return assemble(GgufSource(file), config)
