"""BERT's text encoders: every token sees every other, and a text becomes one vector.

Word, position and token type are added up and normed; each layer norms behind attention and MLP
what they give, added to what they took. A batch is packed: its texts' tokens lie one behind the
other, without padding, and each attends to those of its own text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import FileError, InputError
from ferrum_triton.files.json_file import read_json, read_json_array
from ferrum_triton.files.safetensors import SafetensorsFiles
from ferrum_triton.models.config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    refuse_quantised,
)
from ferrum_triton.models.config_keys import Keys
from ferrum_triton.models.linear import Linear, Matrix, apply
from ferrum_triton.models.weights import HfSource, Loader
from ferrum_triton.quant import QuantizedTensor

GGUF_ARCHITECTURES = ("bert",)
HF_ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
HF_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
# What a text's vector may be: the mean of its tokens, or the first of them.
POOLINGS = ("mean", "cls")

# By GGUF's numbers. A file that names none leaves the choice to its reader.
_GGUF_POOLINGS = ("none", "mean", "cls", "last", "rank")
# In a directory: of heads that embeddings do without, and numbers that are counted anew.
_UNUSED = ("pooler.", "cls.", "embeddings.position_ids", "embeddings.token_type_ids")
# Tokens that are run together at most, which bounds the memory of activations; a longer text is
# run alone.
_TOKENS_AT_A_TIME = 8192


@dataclass(frozen=True)
class BertConfig:
    """Hyperparameters of one model.

    Attributes:
        num_token_types: the kinds of tokens that are told apart; most often first and second text.
        pooling: what a text's vector is where the caller does not say: one of ``POOLINGS``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    num_token_types: int
    layer_norm_eps: float
    pooling: str = "mean"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: Path) -> BertConfig:
        """Read the ``bert.*`` keys of the GGUF specification.

        Raises:
            FileError: a key is missing or unusable.
        """
        keys = Keys(metadata, path, "bert.")
        if keys.flag("attention.causal"):
            raise FileError(path, "causal attention is not supported in text encoders")
        pooling = keys.size("pooling_type", 0, least=0)
        name = _GGUF_POOLINGS[pooling] if pooling < len(_GGUF_POOLINGS) else str(pooling)
        tokens = metadata.get("tokenizer.ggml.tokens")
        config = cls(
            vocab_size=keys.size("vocab_size", len(tokens) if isinstance(tokens, list) else None),
            hidden_size=keys.size("embedding_length"),
            intermediate_size=keys.size("feed_forward_length"),
            num_layers=keys.size("block_count"),
            num_heads=keys.size("attention.head_count"),
            max_positions=keys.size("context_length"),
            num_token_types=Keys(metadata, path, "tokenizer.ggml.").size("token_type_count", 2),
            layer_norm_eps=keys.number("attention.layer_norm_epsilon"),
            pooling="mean" if name == "none" else name,
        )
        return config.checked(path)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], path: Path) -> BertConfig:
        """Read a Hugging Face ``config.json``, and sentence-transformers' files beside it.

        Raises:
            FileError: a value is missing or unusable.
        """
        keys = Keys(config, path)
        refuse_quantised(config, path)
        for name, known in (
            ("model_type", "bert"),
            ("hidden_act", "gelu"),
            ("position_embedding_type", "absolute"),
        ):
            if (value := keys.text(name, known)) != known:
                raise FileError(path, f"{name} {value!r:.80} is not supported; known: {known}")
        for name in ("is_decoder", "add_cross_attention"):
            if keys.flag(name):
                raise FileError(path, f"{name} is not supported in text encoders")
        result = cls(
            vocab_size=keys.size("vocab_size"),
            hidden_size=keys.size("hidden_size"),
            intermediate_size=keys.size("intermediate_size"),
            num_layers=keys.size("num_hidden_layers"),
            num_heads=keys.size("num_attention_heads"),
            max_positions=keys.size("max_position_embeddings", 512),
            num_token_types=keys.size("type_vocab_size", 2),
            layer_norm_eps=keys.number("layer_norm_eps", 1e-12),
            pooling=_pooling(path.parent),
        )
        return result.checked(path)

    def checked(self, path: Path) -> BertConfig:
        """This, if a model can be built of it.

        Raises:
            FileError: a hyperparameter is out of range.
        """
        hidden, heads = self.hidden_size, self.num_heads
        problems = {
            f"hidden size {hidden} is no multiple of {heads} heads": hidden % heads,
            f"head size {self.head_dim} is over {MAX_HEAD_DIM}": self.head_dim > MAX_HEAD_DIM,
            f"{self.num_layers} layers are over {MAX_LAYERS}": self.num_layers > MAX_LAYERS,
            f"{self.max_positions} positions are over {MAX_POSITIONS}": self.max_positions
            > MAX_POSITIONS,
            f"norm epsilon {self.layer_norm_eps}": not 0 < self.layer_norm_eps < 1,
        }
        for problem, present in problems.items():
            if present:
                raise FileError(path, f"unusable hyperparameters: {problem}")
        if self.pooling not in POOLINGS:
            known = ", ".join(POOLINGS)
            raise FileError(path, f"pooling {self.pooling!r:.80} is not supported; known: {known}")
        return self


def _pooling(directory: Path) -> str:
    """How sentence-transformers pools, "mean" where its files are absent.

    Raises:
        FileError: a step follows that would change the vectors and is not run here.
    """
    modules, path = directory / "modules.json", directory / "1_Pooling" / "config.json"
    for module in read_json_array(modules) if modules.exists() else ():
        kind = module.get("type") if isinstance(module, Mapping) else None
        name = kind.rpartition(".")[2] if isinstance(kind, str) else None
        if name not in ("Transformer", "Pooling", "Normalize"):
            known = "Transformer, Pooling, Normalize"
            raise FileError(modules, f"module {kind!r:.80} is not supported; known: {known}")
    if not path.exists():
        return "mean"
    values = read_json(path)
    keys = Keys(values, path)
    chosen = [name for name in values if name.startswith("pooling_mode_") and keys.flag(name)]
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    named = [keys.text("pooling_mode", "mean")] if "pooling_mode" in values else []
    named += [names.get(name, name) for name in chosen]
    return " and ".join(dict.fromkeys(named)) or "mean"


@dataclass(frozen=True)
class Norm:
    """A layer norm; both float32 [hidden_size]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One encoder layer."""

    qkv: Linear
    attn_out: Linear
    attn_norm: Norm
    up: Linear
    down: Linear
    out_norm: Norm


@dataclass(frozen=True)
class BertWeights:
    """All weights of a model."""

    words: Matrix  # [vocab_size, hidden_size]
    positions: Matrix  # [max_positions, hidden_size]
    types: Matrix  # [num_token_types, hidden_size]
    norm: Norm
    layers: tuple[LayerWeights, ...]


class BertSource(HfSource):
    """A Hugging Face directory; heads are left out, and older names of norms are known."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self._prefix = "bert." if any(name.startswith("bert.") for name in files) else ""
        names = {
            ours: self._prefix + theirs if theirs.startswith("embeddings.") else theirs
            for ours, theirs in HF_NAMES.items()
        }
        super().__init__(files, names, layers=f"{self._prefix}encoder.layer.")

    def spelled(self, name: str) -> str:
        spelled = super().spelled(name)
        older = spelled.replace("LayerNorm.weight", "LayerNorm.gamma")
        older = older.replace("LayerNorm.bias", "LayerNorm.beta")
        return older if older in self._files else spelled

    def unread(self) -> list[str]:
        return [n for n in super().unread() if not n.removeprefix(self._prefix).startswith(_UNUSED)]


class BertLoader(Loader):
    """Every weight a model has."""

    def load(self, config: BertConfig) -> BertWeights:
        """Read them from the source.

        Raises:
            FileError: as :func:`~ferrum_triton.models.weights.load_weights`.
        """
        hidden = config.hidden_size
        weights = BertWeights(
            words=self.table("token_embd.weight", (config.vocab_size, hidden)),
            positions=self.table("position_embd.weight", (config.max_positions, hidden)),
            types=self.table("token_types.weight", (config.num_token_types, hidden)),
            norm=self.norm("token_embd_norm", hidden),
            layers=tuple(self.layer(f"blk.{i}.", config) for i in range(config.num_layers)),
        )
        self.refuse_unread()
        return weights

    def layer(self, prefix: str, config: BertConfig) -> LayerWeights:
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = {"attn_q": hidden, "attn_k": hidden, "attn_v": hidden}
        return LayerWeights(
            qkv=self.linear(prefix, heads, hidden, biased=True),
            attn_out=self.linear(prefix, {"attn_output": hidden}, hidden, biased=True),
            attn_norm=self.norm(f"{prefix}attn_output_norm", hidden),
            up=self.linear(prefix, {"ffn_up": inner}, hidden, biased=True),
            down=self.linear(prefix, {"ffn_down": hidden}, inner, biased=True),
            out_norm=self.norm(f"{prefix}layer_output_norm", hidden),
        )

    def norm(self, name: str, size: int) -> Norm:
        return Norm(self.vector(f"{name}.weight", size), self.vector(f"{name}.bias", size))


class _Text(NamedTuple):
    """A text's tokens, checked, and their types."""

    ids: Sequence[int]
    types: Sequence[int]


class Bert:
    """An encoder ready to run.

    Args:
        config: the model's hyperparameters.
        weights: the model's weights, on the backend's device.
        backend: the backend it runs on.
        dtype: the dtype of the activations.
    """

    def __init__(
        self, config: BertConfig, weights: BertWeights, backend: Backend, dtype: torch.dtype
    ) -> None:
        self.config, self.weights, self.backend, self.dtype = config, weights, backend, dtype

    @torch.inference_mode()
    def hidden_states(self, ids: Sequence[int], token_types: Sequence[int] | None = None) -> Tensor:
        """What the last layer makes of each token of a text.

        Args:
            ids: token ids, ``[CLS]`` and ``[SEP]`` around them as the tokenizer adds them.
            token_types: the type of each token; None means 0 of all.

        Returns:
            [num_tokens, hidden_size] in the model's dtype.

        Raises:
            InputError: there are no tokens, more than the model has positions, or unknown ones.
        """
        return self._run([self._checked("hidden_states", ids, token_types)])

    @torch.inference_mode()
    def encode(
        self,
        texts: Sequence[Sequence[int]],
        token_types: Sequence[Sequence[int]] | None = None,
        *,
        pooling: str | None = None,
        normalize: bool = False,
    ) -> Tensor:
        """One vector a text.

        Args:
            texts: token ids of each text; texts may differ in length.
            token_types: the types of each text's tokens; None means 0 of all.
            pooling: "mean" of the tokens, or "cls", the first of them; None means the model's own.
            normalize: whether each vector is scaled to length 1, so that products are cosines.

        Returns:
            [number of texts, hidden_size] in float32.

        Raises:
            InputError: there are no texts, one is none that the model takes, or the pooling is
                unknown.
        """
        pooling = self.config.pooling if pooling is None else pooling
        if pooling not in POOLINGS:
            known = " or ".join(map(repr, POOLINGS))
            raise InputError("encode", "pooling", repr(pooling), known, "None is the model's own.")
        if not len(texts):
            raise InputError("encode", "texts", "empty", "at least one text", "Leave the call out.")
        if token_types is not None and len(token_types) != len(texts):
            got = f"of {len(token_types)} texts"
            raise InputError("encode", "token_types", got, str(len(texts)), "None means 0 of all.")
        types = [None] * len(texts) if token_types is None else token_types
        checked = [self._checked("encode", *pair) for pair in zip(texts, types, strict=True)]
        pooled = [
            text[0].float() if pooling == "cls" else text.mean(0, dtype=torch.float32)
            for batch in _batches(checked)
            for text in self._run(batch).split([len(text.ids) for text in batch])
        ]
        vectors = torch.stack(pooled)
        return torch.nn.functional.normalize(vectors) if normalize else vectors

    def _checked(self, caller: str, ids: Sequence[int], types: Sequence[int] | None) -> _Text:
        for name, values in (("ids", ids), ("token_types", types)):
            if values is not None and not isinstance(values, Sequence):
                got = f"of type {type(values).__name__}"
                advice = "Of a tensor, pass .tolist()."
                raise InputError(caller, name, got, "a list of integers for each text", advice)
        config, types = self.config, [0] * len(ids) if types is None else types
        if not 1 <= len(ids) <= config.max_positions:
            allowed = f"1 to the model's {config.max_positions} positions"
            advice = "Cut a longer text into several; an empty one still has [CLS] and [SEP]."
            raise InputError(caller, "ids", f"of {len(ids)} tokens", allowed, advice)
        if len(types) != len(ids):
            got, allowed = f"of {len(types)} tokens", f"the {len(ids)} of ids"
            raise InputError(caller, "token_types", got, allowed, "None means 0 of all.")
        for name, values, bound, advice in (
            ("ids", ids, config.vocab_size, "Is the tokenizer the model's own?"),
            ("token_types", types, config.num_token_types, "A single text's are 0."),
        ):
            for value in values:
                if type(value) is not int or not 0 <= value < bound:
                    allowed = f"a list of integers in [0, {bound})"
                    raise InputError(caller, name, f"holding {value!r:.80}", allowed, advice)
        return _Text(ids, types)

    def _run(self, texts: Sequence[_Text]) -> Tensor:
        """[num_tokens, hidden_size], the texts one behind the other."""
        backend = self.backend
        lengths = [len(text.ids) for text in texts]
        x = self._embed(texts)
        for layer in self.weights.layers:
            h = apply(backend, self._attention(x, layer.qkv, lengths), layer.attn_out)
            x = self._add_norm(h, x, layer.attn_norm)
            h = backend.gelu(apply(backend, x, layer.up))
            x = self._add_norm(apply(backend, h, layer.down), x, layer.out_norm)
        return x

    def _embed(self, texts: Sequence[_Text]) -> Tensor:
        indices = (
            [i for text in texts for i in text.ids],
            [i for text in texts for i in range(len(text.ids))],
            [i for text in texts for i in text.types],
        )
        on_device = torch.tensor(indices, dtype=torch.int32, device=self.backend.device)
        tables = (self.weights.words, self.weights.positions, self.weights.types)
        x, positions, types = (
            self._rows(table, rows) for table, rows in zip(tables, on_device, strict=True)
        )
        self.backend.add_inplace(x, types)
        return self._add_norm(x, positions, self.weights.norm)

    def _rows(self, table: Matrix, rows: Tensor) -> Tensor:
        if isinstance(table, QuantizedTensor):
            return self.backend.embedding_lookup_quant(table.blocks, rows, table.kind, self.dtype)
        return self.backend.embedding_lookup_dev(table, rows)

    def _add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """norm(x + residual); x is overwritten."""
        self.backend.add_inplace(x, residual)
        return self.backend.layer_norm(x, norm.weight, norm.bias, self.config.layer_norm_eps)

    def _attention(self, x: Tensor, qkv: Linear, lengths: Sequence[int]) -> Tensor:
        """[num_tokens, hidden_size] to the same, each text's tokens seeing one another."""
        backend, config = self.backend, self.config
        heads = apply(backend, x, qkv).view(-1, 3, config.num_heads, config.head_dim)
        attended = x.new_empty(x.shape[0], config.num_heads, config.head_dim)
        for text, out in zip(heads.split(lengths), attended.split(lengths), strict=True):
            q, k, v = text.permute(1, 2, 0, 3)[:, None]  # each [1, num_heads, length, head_dim]
            y = backend.flash_attention(q, k, v, causal=False)
            backend.transpose_head_to_token(y[0], out=out)
        return attended.view(x.shape)


def _batches(texts: Sequence[_Text]) -> Iterator[list[_Text]]:
    """Batches of texts: up to _TOKENS_AT_A_TIME tokens together, or one longer text."""
    batch: list[_Text] = []
    num_tokens = 0
    for text in texts:
        num_tokens += len(text.ids)
        if batch and num_tokens > _TOKENS_AT_A_TIME:
            yield batch
            batch, num_tokens = [], len(text.ids)
        batch.append(text)
    yield batch
