"""What decoders have in common: a paged cache, rotary tables, attention over them, a head.

A family's own file composes them into layers. Prefill and decode are the same code: a step takes
any numbers of new tokens of any sequences after those in the cache.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import InputError
from ferrum_triton.files.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.experts import Experts
from ferrum_triton.models.rope import rope_tables
from ferrum_triton.models.step import Step, varlen_step
from ferrum_triton.models.weights import LayerWeights, LlamaWeights
from ferrum_triton.ops.rope import NORM_ROPE, ROPE, ROPE_INTERLEAVED
from ferrum_triton.quant import QuantizedTensor
from ferrum_triton.runtime.expert_parallel import ExpertParallel
from ferrum_triton.runtime.kv_cache import PagedKvCache
from ferrum_triton.types import KvDtypeKind

if TYPE_CHECKING:
    from ferrum_triton.models.engine import Engine
    from ferrum_triton.models.generation import Generation, Piece, Prompt

# Keys and values are kept in the activations' dtype unless another kind is asked for.
_CACHE_KINDS = {kind.dtype: kind for kind in KvDtypeKind if not kind.quantised}

# The op that attends from the QKV product on, where a backend has it as one launch.
ONE_LAUNCH = "qkv_paged_decode_attention"

BLOCK_SIZE = 16
"""Positions of a block of the cache."""


class Decoder(ABC):
    """A model ready to run.

    Args:
        config: the model's hyperparameters.
        weights: the model's weights, on the backend's device.
        backend: the backend it runs on.
        dtype: the dtype of the activations and the cache.

    Attributes:
        path: the file or directory it was loaded from, if any; its tokenizer is read from there.
        engine: the engine of the last :meth:`generate`, with its cache and graphs; None frees it.
    """

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, backend: Backend, dtype: torch.dtype
    ) -> None:
        self.config, self.weights, self.backend, self.dtype = config, weights, backend, dtype
        self.path: Path | None = None
        self.engine: Engine | None = None
        self._num_positions = 0
        self._grow_tables(0)
        if config.qk_norm:
            self.qk_mode = NORM_ROPE
        else:
            self.qk_mode = ROPE_INTERLEAVED if config.rope.interleaved else ROPE

    def generate(
        self, prompts: Prompt | Iterable[Prompt], **settings: Any
    ) -> Generation | list[Generation]:
        """Answers to prompts; see ``ferrum_triton.models.generation``."""
        from ferrum_triton.models.generation import generate

        return generate(self, prompts, **settings)

    def stream(self, prompts: Prompt | Iterable[Prompt], **settings: Any) -> Iterator[Piece]:
        """Answers to prompts, a token at a time; see ``ferrum_triton.models.generation``."""
        from ferrum_triton.models.generation import stream

        return stream(self, prompts, **settings)

    @functools.cached_property
    def has_tokenizer(self) -> bool:
        """Whether the model came from a file, and a tokenizer with it."""
        return self.path is not None and has_tokenizer(self.path)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the model.

        Raises:
            InputError: the model was not loaded from a file.
            FileError: the file has none, or one of an unknown kind.
        """
        if self.path is None:
            advice = "Pass token ids, or load the model from a file."
            raise InputError("generate", "prompt", "text", "token ids", advice)
        return load_tokenizer(self.path)

    @property
    def parallel(self) -> ExpertParallel | None:
        """The ranks that share the model's experts, if several do."""
        mlp = self.weights.layers[0].mlp
        return mlp.parallel if isinstance(mlp, Experts) else None

    def new_cache(
        self,
        capacity: int,
        num_seqs: int = 1,
        num_blocks: int | None = None,
        kind: KvDtypeKind | None = None,
        one_pool: bool = False,
    ) -> PagedKvCache:
        """An empty cache.

        Args:
            capacity: the most positions of a sequence, up to the model's context length.
            num_seqs: sequences at a time.
            num_blocks: blocks of BLOCK_SIZE positions; None has enough for all sequences.
            kind: the kind of its elements; None is the activations' dtype.
            one_pool: whether layers write to one pool, of use for one step alone: what a layer
                wrote is lost with the next.

        Raises:
            InputError: the capacity is out of range, or a number is not positive.
        """
        if not 1 <= capacity <= self.config.max_positions:
            raise InputError(
                "new_cache",
                "capacity",
                str(capacity),
                f"1 to the context length of {self.config.max_positions}",
                "Shorten the prompt or the answer.",
            )
        if capacity > self._num_positions:
            self._grow_tables(capacity)
        blocks = -(-capacity // BLOCK_SIZE)
        num_layers = self.config.num_layers
        cache = self._cache_of(
            num_layers=1 if one_pool else num_layers,
            num_blocks=blocks * num_seqs if num_blocks is None else num_blocks,
            block_size=BLOCK_SIZE,
            num_seqs=num_seqs,
            max_blocks_per_seq=blocks,
            capacity=capacity,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            kind=_CACHE_KINDS[self.dtype] if kind is None else kind,
            # On a CPU neighbouring pages of this layout are read without a copy.
            layout="nhd" if self.backend.device.type == "cpu" else "hnd",
            device=self.backend.device,
        )
        if one_pool:
            cache.k, cache.v = cache.k * num_layers, cache.v * num_layers
        return cache

    def _cache_of(self, **sizes: Any) -> PagedKvCache:
        """A cache of these sizes. A family that keeps more than keys and values adds it."""
        return PagedKvCache(**sizes)

    def _grow_tables(self, num_positions: int) -> None:
        """Only as long as the caches need: a context of a million positions takes a gigabyte."""
        # (cos, sin) of each rotary embedding that the model has.
        self.tables = [
            tuple(
                table.to(self.backend.device)
                for table in rope_tables(rope, num_positions, self.weights.freq_factors)
            )
            for rope in self.config.ropes
        ]
        self._num_positions = num_positions

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor | Sequence[int],
        cache: PagedKvCache,
        seq: int = 0,
        *,
        all_logits: bool = False,
    ) -> Tensor:
        """Append tokens to a sequence in ``cache`` and predict what follows.

        Args:
            ids: [num_tokens] int32 or int64.
            cache: a cache of this model; the sequence's length grows by num_tokens.
            seq: the sequence.
            all_logits: whether to predict after every new token, not just the last.

        Returns:
            Logits [1, vocab_size], or [num_tokens, vocab_size] for all.

        Raises:
            InputError: there are no tokens, more than the cache has room for, or no such sequence;
                the cache is unchanged.
        """
        cache.reserve({seq: 0})  # which refuses a sequence that is none
        tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        length, num_tokens = cache.lengths[seq], len(tokens)
        if num_tokens == 0 or length + num_tokens > cache.capacity:
            room = cache.capacity - length
            advice = "Make a larger cache or pass fewer tokens."
            raise InputError("forward", "ids", f"{num_tokens} tokens", f"1 to {room}", advice)
        cache.reserve({seq: length + num_tokens})
        predicted = () if all_logits else (num_tokens - 1,)
        logits = self.run(varlen_step(cache, [(seq, tokens)], predicted), cache)
        cache.set_lens({seq: length + num_tokens})
        return logits

    @torch.inference_mode()
    def run(self, step: Step, cache: PagedKvCache) -> Tensor:
        """Logits [num_predicted, vocab_size] after a step, whose keys go to the cache.

        Nothing is read back from the device, so a step of static tensors may be captured in a
        graph. The cache's lengths are the caller's to set.
        """
        return self._head(self.hidden(step, cache))

    @torch.inference_mode()
    def hidden(self, step: Step, cache: PagedKvCache) -> Tensor:
        """What :meth:`run` makes logits of: [num_predicted, hidden_size]."""
        return self._layers(self._embed(step.ids), step, cache)

    @abstractmethod
    def _layers(self, x: Tensor, step: Step, cache: PagedKvCache) -> Tensor:
        """Embedded tokens through every layer and the last norm.

        Args:
            x: [num_tokens, hidden_size], which may be overwritten.
            step: where they belong.
            cache: the cache, whose keys and values are written.

        Returns:
            [num_predicted, hidden_size].
        """

    def _embed(self, ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size]"""
        table = self.weights.embedding
        if isinstance(table, QuantizedTensor):
            return self.backend.embedding_lookup_quant(table.blocks, ids, table.kind, self.dtype)
        return self.backend.embedding_lookup_dev(table, ids)

    def _attention(
        self,
        qkv: Tensor,
        index: int,
        step: Step,
        cache: PagedKvCache,
        *,
        tables: tuple[Tensor, Tensor],
        sliding_window: int,
        softmax_scale: float | None = None,
        pool_index: int | None = None,
    ) -> Tensor:
        """Attention, before the layer's last product; reads and extends a layer's cache.

        Args:
            qkv: [num_tokens, q_dim + 2 · kv_dim], the products with the layer's Q, K and V.
            pool_index: which of the cache's pools is the layer's; None is that of its number.

        Returns:
            [num_tokens, q_dim]. After the last layer only the tokens after which to predict are of
            use: [num_predicted, q_dim].
        """
        backend, config = self.backend, self.config
        layer: LayerWeights = self.weights.layers[index]
        at = index if pool_index is None else pool_index
        pool = (cache.k[at], cache.v[at])
        scales = {}
        if cache.kind.quantised:
            scales = {"k_scales": cache.k_scales[at], "v_scales": cache.v_scales[at]}
        settings: dict[str, Any] = {
            "sinks": layer.sinks,
            "softmax_scale": softmax_scale,
            "sliding_window": sliding_window,
            "layout": cache.layout,
        }
        if step.one_token_each and not scales and backend.has_kernel(ONE_LAUNCH):
            attended = backend.qkv_paged_decode_attention(
                qkv,
                layer.q_norm,
                layer.k_norm,
                *tables,
                *pool,
                step.block_tables,
                step.kv_lens,
                eps=config.rms_norm_eps,
                qk_mode=self.qk_mode,
                tickets=cache.tickets,
                **settings,
            )
        else:
            q = backend.split_qkv_norm_rope_into_paged_cache(
                qkv,
                layer.q_norm,
                layer.k_norm,
                *tables,
                *pool,
                num_heads=config.num_heads,
                block_tables=step.block_tables,
                pos_offsets=step.positions,
                cu_seqlens_q=step.cu_seqlens,
                eps=config.rms_norm_eps,
                qk_mode=self.qk_mode,
                layout=cache.layout,
                **scales,
            )  # [num_tokens, num_heads, head_dim]
            attended = self._attend(q, pool, step, **settings, **scales)
        attended = attended.view(qkv.shape[0], config.q_dim)
        if index == config.num_layers - 1:
            return predicted_rows(attended, step)
        return attended

    def _attend(
        self, q: Tensor, pool: tuple[Tensor, Tensor], step: Step, **settings: Any
    ) -> Tensor:
        """Attention of q [num_tokens, num_heads, head_dim], whose keys are in the pool."""
        if step.cu_seqlens is None:
            return self.backend.paged_decode_attention(
                q[:, None],
                *pool,
                step.block_tables,
                step.kv_lens,
                batch_invariant=step.batch_invariant,
                **settings,
            )
        return self.backend.paged_varlen_attention(
            q,
            *pool,
            step.cu_seqlens,
            step.positions,
            step.block_tables,
            max_q_len=step.longest,
            **settings,
        )

    def _head(self, h: Tensor) -> Tensor:
        """Logits, in float32: rounding them to 16 bits would reorder close ones."""
        head = self.weights.head
        if isinstance(head, Tensor):
            return self.backend.gemm(h, head, wide=True)
        return self.backend.gemm_quant(h, head.blocks, head.kind, wide=True)


def predicted_rows(x: Tensor, step: Step) -> Tensor:
    """Rows of x [num_tokens, ...] after which a step predicts."""
    return x if step.predicted is None else x.index_select(0, step.predicted)
