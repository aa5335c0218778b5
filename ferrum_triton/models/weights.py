"""A model's weights, from a GGUF file or a Hugging Face directory.

Q, K and V are one linear layer, gate and up another: matrices of one format are concatenated at
load, so that each layer is one product, and those of different formats (a GGUF file may hold V in
more bits than Q and K) stay apart in a :class:`~ferrum_triton.quant.FusedTensor`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import FileError
from ferrum_triton.files.gguf import GgufFile
from ferrum_triton.files.packed import PackedFiles
from ferrum_triton.files.safetensors import SafetensorsFiles
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.experts import DenseExperts, Experts, Fp8Experts, PackedExperts
from ferrum_triton.models.linear import Linear, Matrix, Stored, Table, keeps_packed, stacked
from ferrum_triton.models.memory import tell_what_decoding_takes
from ferrum_triton.quant import Fp8Blocks, QuantizedTensor, Reordered
from ferrum_triton.quant.finite import count_out_of_range
from ferrum_triton.quant.formats import GGUF_FORMATS
from ferrum_triton.runtime.expert_parallel import ExpertParallel

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of tensors loaded and the number there are."""

# What plain weights may be stored as. Integers and complex numbers would be cast without a word.
PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Mlp:
    """A gated MLP: the rows of gate before those of up, and the way back."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norm weights are float32."""

    attn_norm: Tensor  # [hidden_size]
    qkv: Linear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    attn_out: Linear
    mlp_norm: Tensor  # [hidden_size]
    mlp: Mlp | Experts
    attn_post_norm: Tensor | None = None  # [hidden_size], as mlp_post_norm: of sandwich norms
    mlp_post_norm: Tensor | None = None
    sinks: Tensor | None = None  # [num_heads], logits of each head that attend to nothing


@dataclass(frozen=True)
class LlamaWeights:
    """All weights of a model; ``head`` may share its memory with ``embedding``."""

    embedding: Table  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Table  # [vocab_size, hidden_size]
    freq_factors: Tensor | None = None  # [rope.dim / 2]


class Packed(NamedTuple):
    """The size of a packed tensor."""

    kind: str
    nbytes: int
    numel: int
    is_stack: bool = False


class Source(ABC):
    """Where tensors come from, by GGUF's names."""

    path: Path
    norm_offset = 0.0
    """What is added to norms' weights as they are stored."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def fetch(self, name: str) -> Stored:
        """The tensor ``name`` on the CPU, as it is stored."""

    def spelled(self, name: str) -> str:
        """The source's own name of the tensor ``name``."""
        return name

    def packed(self) -> list[Packed]:
        """The sizes of all packed tensors, none of which is fetched."""
        return []

    def unread(self) -> list[str]:
        """Tensors never fetched, by the source's own names."""
        return []


class GgufSource(Source):
    def __init__(self, file: GgufFile) -> None:
        self.path, self._file = file.path, file
        self._read: set[str] = set()

    def __len__(self) -> int:
        return len(self._file.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def fetch(self, name: str) -> Stored:
        self._read.add(name)
        tensor = self._file.tensors[name]
        if tensor.type.dtype is not None:
            return tensor.data()
        if tensor.type.id not in GGUF_FORMATS:
            known = ", ".join(fmt.name for fmt in GGUF_FORMATS.values())
            reason = f"tensor {name!r} is {tensor.type.name}, which has no decoder; known: {known}"
            raise FileError(self.path, reason, tensor.offset)
        if len(tensor.shape) not in (2, 3):
            reason = (
                f"tensor {name!r} of shape {list(tensor.shape)} is packed; only matrices may be"
            )
            raise FileError(self.path, reason, tensor.offset)
        return QuantizedTensor(tensor.data(), tensor.type.name)

    def packed(self) -> list[Packed]:
        return [
            Packed(tensor.type.name, tensor.nbytes, math.prod(tensor.shape), len(tensor.shape) == 3)
            for tensor in self._file.tensors.values()
            if tensor.type.dtype is None
        ]

    def unread(self) -> list[str]:
        return [name for name in self._file.tensors if name not in self._read]


POST_NORMS = {"attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}

# GGUF's names of tensors, without prefix and suffix, in Hugging Face's words.
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class HfSource(Source):
    """A Hugging Face directory, whose names are translated."""

    def __init__(
        self,
        files: SafetensorsFiles | PackedFiles,
        names: Mapping[str, str] = HF_NAMES,
        norm_offset: float = 0.0,
        layers: str = "model.layers.",
    ) -> None:
        self.path, self._names = files.path, names
        self._files: Mapping[str, Any] = files
        self._layers = layers  # what layers' names begin with, before their number
        self.norm_offset = norm_offset
        self._read: set[str] = set()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return self.spelled(name) in self._files

    def fetch(self, name: str) -> Stored:
        self._read.add(self.spelled(name))
        return self._files[self.spelled(name)]

    def packed(self) -> list[Packed]:
        found = self._files.sizes() if isinstance(self._files, PackedFiles) else []
        return [Packed(*sizes) for sizes in found]

    def unread(self) -> list[str]:
        """Leaves out what older files hold in excess: frequencies, and a tied head's copy."""
        return [
            name
            for name in self._files
            if name not in self._read
            and name != "lm_head.weight"
            and not name.endswith("rotary_emb.inv_freq")
        ]

    def spelled(self, name: str) -> str:
        block, _, rest = name.rpartition("blk.")[2].partition(".")
        layer = f"{self._layers}{block}." if name.startswith("blk.") else ""
        stem, _, kind = (rest if layer else name).rpartition(".")
        return f"{layer}{self._names.get(stem, stem)}.{kind}"


def load_weights(
    source: Source,
    config: LlamaConfig,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    planes: bool | None = None,
    allow_non_finite: bool = False,
    loader: type[LlamaLoader] | None = None,
    parallel: ExpertParallel | None = None,
) -> LlamaWeights:
    """Read every weight a model of ``config`` has.

    Packed weights stay packed where the backend multiplies by their kind in kernels; others are
    decoded to ``dtype`` once, as all are on the CPU backend, where torch multiplies. What they take
    then is logged before they are read: as a warning if the machine has less memory.

    Args:
        source: the files that hold the weights.
        config: the model's hyperparameters.
        backend: the backend the model will run on.
        dtype: the dtype of weights that are not kept packed.
        progress: a function called with the numbers of tensors loaded and to load.
        planes: whether packed weights are laid out in planes; None does so on CUDA devices only.
        allow_non_finite: whether weights may be NaN, infinite, or too large for their dtype.
        loader: the class that reads a family's layers; None reads Llama's.
        parallel: the ranks that share each layer's experts; None keeps all of them.

    Raises:
        FileError: a tensor is missing, has another shape than the hyperparameters say, is of a type
            that weights are not stored in, holds weights that are not finite, or has no place in a
            model of this family, so that leaving it out would change what is computed.
    """
    tell_what_decoding_takes(source, backend, dtype)
    kind = LlamaLoader if loader is None else loader
    reader = kind(source, backend, dtype, progress, planes, allow_non_finite)
    reader.parallel = parallel
    return reader.load(config)


class Loader:
    """Tensors of any model, fetched, checked, and laid out for the backend."""

    def __init__(
        self,
        source: Source,
        backend: Backend,
        dtype: torch.dtype,
        progress: Progress | None,
        planes: bool | None = None,
        allow_non_finite: bool = False,
    ) -> None:
        self.allow_non_finite = allow_non_finite
        self.source, self.dtype = source, dtype
        self.backend, self.device = backend, backend.device
        self.in_planes = backend.provider_of("gemm_quant") != "reference" and (
            self.device.type == "cuda" if planes is None else planes
        )
        self.progress, self.loaded = progress, 0

    def linear(
        self,
        prefix: str,
        sizes: dict[str, int],
        in_features: int,
        biased: bool = False,
        apart: bool = False,
        rows: Tensor | None = None,
    ) -> Linear:
        """Matrices stacked along their rows, those of each in the order ``rows`` if there is one.

        ``apart`` keeps those in planes from being joined.
        """
        names = [prefix + name for name in sizes]
        stored = [
            self.matrix(f"{name}.weight", (size, in_features))
            for name, size in zip(names, sizes.values(), strict=True)
        ]
        has_bias = [f"{name}.bias" in self.source for name in names]
        biases = []
        if biased or any(has_bias):
            if not all(has_bias):
                spelled = ", ".join(self.source.spelled(f"{name}.bias") for name in names)
                raise FileError(self.source.path, f"some of {spelled} are missing")
            pairs = zip(names, sizes.values(), strict=True)
            biases = [self.vector(f"{name}.bias", size) for name, size in pairs]
        return stacked(stored, biases, self.dtype, rows=rows, in_planes=self.in_planes, apart=apart)

    def table(self, name: str, shape: tuple[int, int]) -> Table:
        """A matrix that no other is stacked on."""
        matrix = self.matrix(name, shape)
        if isinstance(matrix, Fp8Blocks | Reordered):
            return matrix.dequantize(self.dtype)  # rows are looked up of other weights only
        lay_out = self.in_planes and isinstance(matrix, QuantizedTensor)
        return matrix.in_planes() if lay_out else matrix

    def matrix(self, name: str, shape: tuple[int, int]) -> Stored:
        """As it is stored, on the device, or decoded where packed weights are not kept."""
        stored = self.fetch(name, shape, self.dtype)
        if not isinstance(stored, Tensor):
            if keeps_packed(self.backend, stored.kind):
                return stored.to(self.device)
            return stored.dequantize(self.dtype).to(self.device)
        return stored.to(self.device, self.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        vector = self.plain(name, (size,))
        return vector + self.source.norm_offset if "_norm." in name else vector

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that may not be packed, on the device in float32."""
        stored = self.fetch(name, shape, torch.float32)
        if not isinstance(stored, Tensor):
            raise self.error(name, "is packed; expected plain numbers")
        return stored.to(self.device, torch.float32)

    def fetch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
        """The tensor ``name`` on the CPU as it is stored, checked to be weights of ``dtype``."""
        if name not in self.source:
            raise self.error(name, "is missing")
        stored = self.source.fetch(name)
        if tuple(stored.shape) != shape:
            raise self.error(name, f"has shape {list(stored.shape)}, expected {list(shape)}")
        if isinstance(stored, Tensor) and stored.dtype not in PLAIN_DTYPES:
            known = ", ".join(map(_name_of, PLAIN_DTYPES))
            raise self.error(name, f"is of {_name_of(stored.dtype)}; weights are of {known}")
        if not self.allow_non_finite and (count := count_out_of_range(stored, dtype)):
            advice = "allow_non_finite=True (--allow-non-finite) loads them"
            raise self.error(
                name, f"holds {count} weights not finite in {_name_of(dtype)}; {advice}"
            )
        self.loaded += 1
        if self.progress is not None:
            self.progress(self.loaded, len(self.source))
        return stored

    def error(self, name: str, reason: str) -> FileError:
        return FileError(self.source.path, f"tensor {self.source.spelled(name)!r} {reason}")

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor, by the source's own name, is of a part that is not run here."""
        return False

    def refuse_unread(self) -> None:
        """Refuse a source of which something was left out."""
        if unread := [name for name in self.source.unread() if not self.leaves_out(name)]:
            reason = f"{len(unread)} tensors have no place in this model, {unread[0]!r} the first"
            raise FileError(self.source.path, reason)


class LlamaLoader(Loader):
    """Weights of a decoder. A family with layers of another kind has a subclass of its own."""

    config: LlamaConfig
    parallel: ExpertParallel | None = None

    def load(self, config: LlamaConfig) -> LlamaWeights:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        embedding = self.table("token_embd.weight", shape)
        layers = tuple(self.layer(i) for i in range(config.num_layers))
        final_norm = self.vector("output_norm.weight", config.hidden_size)
        head = embedding if config.tie_embeddings else self.table("output.weight", shape)
        factors = None
        if "rope_freqs.weight" in self.source:
            factors = self.vector("rope_freqs.weight", config.rope.dim // 2).cpu()
            if not (factors.isfinite() & (factors > 0)).all():
                raise FileError(self.source.path, "rope_freqs.weight holds unusable divisors")
        self.refuse_unread()
        return LlamaWeights(embedding, layers, final_norm, head, factors)

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"blk.{index}."
        hidden = config.hidden_size
        sizes = {"attn_q": config.q_dim, "attn_k": config.kv_dim, "attn_v": config.kv_dim}
        norms = [
            self.vector(f"{prefix}attn_{part}_norm.weight", config.head_dim)
            if config.qk_norm
            else None
            for part in "qk"
        ]
        return LayerWeights(
            attn_norm=self.vector(f"{prefix}attn_norm.weight", hidden),
            qkv=self.linear(prefix, sizes, hidden, biased=config.qkv_bias),
            q_norm=norms[0],
            k_norm=norms[1],
            attn_out=self.linear(prefix, {"attn_output": hidden}, config.q_dim),
            mlp_norm=self.vector(f"{prefix}ffn_norm.weight", hidden),
            mlp=self.mlp(prefix),
            **{
                field: self.vector(f"{prefix}{name}.weight", hidden)
                for field, name in POST_NORMS.items()
                if config.sandwich_norms
            },
        )

    def mlp(self, prefix: str) -> Mlp | Experts:
        """An MLP, or in its place experts: those of this rank."""
        if self.config.num_experts:
            experts = self.experts(prefix)
            return experts if self.parallel is None else experts.spread(self.parallel)
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gates = {"ffn_gate": inner, "ffn_up": inner}
        down = self.linear(prefix, {"ffn_down": hidden}, inner)
        # In planes one launch takes both, and their activation, as matrices of their own; and their
        # rows are in the order in which down takes them.
        gate_up = self.linear(prefix, gates, hidden, apart=True, rows=down.order)
        return Mlp(gate_up, replace(down, order=None))

    def experts(self, prefix: str) -> Experts:
        """The experts of a layer, packed or in FP8 if all of them are, and their router."""
        config = self.config
        count, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        router = self.matrix(f"{prefix}ffn_gate_inp.weight", (count, hidden))
        stacks: list[Any] = [
            self.stack(f"{prefix}ffn_{part}_exps.weight", shape)
            for part, shape in (
                ("gate", (count, inner, hidden)),
                ("up", (count, inner, hidden)),
                ("down", (count, hidden, inner)),
            )
        ]
        gate, up, down = stacks
        common = {
            "router": self.decoded(router),
            "top_k": config.experts_per_token,
            "norm_topk_prob": config.norm_topk_prob,
        }
        if all(isinstance(part, QuantizedTensor) for part in stacks):
            return PackedExperts(**common, gate=gate, up=up, down=down)
        if all(isinstance(part, Fp8Blocks) for part in stacks):
            return Fp8Experts(**common, gate=gate, up=up, down=down)
        gate_up = torch.cat((self.decoded(gate), self.decoded(up)), dim=1)
        return DenseExperts(**common, gate_up=gate_up, down=self.decoded(down))

    def stack(self, name: str, shape: tuple[int, int, int]) -> Matrix:
        """The matrices of all experts on the device, packed as they are stored."""
        stored = self.fetch(name, shape, self.dtype)
        if isinstance(stored, Reordered) or (
            isinstance(stored, Fp8Blocks) and not keeps_packed(self.backend, stored.kind)
        ):
            stored = stored.dequantize(self.dtype)
        if isinstance(stored, Tensor):
            return stored.to(self.device, self.dtype)
        stored = stored.to(self.device)
        return stored.in_planes() if self.in_planes else stored

    def decoded(self, matrix: Stored) -> Tensor:
        """A matrix that is not packed."""
        return matrix if isinstance(matrix, Tensor) else matrix.dequantize(self.dtype)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
