"""What decoders have in common: a cache, rotary tables, attention over them, a head.

A family's own file composes them into layers. Prefill and decode are the same code: a step takes
any number of new tokens after those in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import InputError
from ferrum_triton.models.config import LlamaConfig
from ferrum_triton.models.linear import apply, matmul
from ferrum_triton.models.rope import rope_tables
from ferrum_triton.models.weights import LayerWeights, LlamaWeights
from ferrum_triton.ops.rope import NORM_ROPE, ROPE, ROPE_INTERLEAVED
from ferrum_triton.quant import QuantizedTensor
from ferrum_triton.runtime.kv_cache import KvCache
from ferrum_triton.types import KvDtypeKind

# Attention over a contiguous cache reads keys and values of the activations' dtype.
_CACHE_KINDS = {kind.dtype: kind for kind in KvDtypeKind if not kind.quantised}


class Decoder(ABC):
    """A model ready to run.

    Args:
        config: the model's hyperparameters.
        weights: the model's weights, on the backend's device.
        backend: the backend it runs on.
        dtype: the dtype of the activations and the cache.
    """

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, backend: Backend, dtype: torch.dtype
    ) -> None:
        self.config, self.weights, self.backend, self.dtype = config, weights, backend, dtype
        self._num_positions = 0
        self._grow_tables(0)
        if config.qk_norm:
            self.qk_mode = NORM_ROPE
        else:
            self.qk_mode = ROPE_INTERLEAVED if config.rope.interleaved else ROPE

    def new_cache(self, capacity: int) -> KvCache:
        """An empty cache for ``capacity`` positions, at most the model's context length."""
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
        return KvCache(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            capacity=capacity,
            kind=_CACHE_KINDS[self.dtype],
            device=self.backend.device,
        )

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
    def forward(self, ids: Tensor, cache: KvCache, *, all_logits: bool = False) -> Tensor:
        """Append tokens to the sequence in ``cache`` and predict what follows.

        Args:
            ids: [num_tokens] int32 or int64 on the backend's device.
            cache: a cache of this model; its length grows by num_tokens.
            all_logits: whether to predict after every new token, not just the last.

        Returns:
            Logits [1, vocab_size], or [num_tokens, vocab_size] for all.

        Raises:
            InputError: there are no tokens, or more than the cache has room for; it is unchanged.
        """
        num_tokens = ids.shape[0]
        if num_tokens == 0 or cache.length + num_tokens > cache.capacity:
            room = cache.capacity - cache.length
            advice = "Make a larger cache or pass fewer tokens."
            raise InputError("forward", "ids", f"{num_tokens} tokens", f"1 to {room}", advice)
        h = self._layers(self._embed(ids), cache, all_logits)
        cache.set_len(cache.length + num_tokens)
        return self._head(h)

    @abstractmethod
    def _layers(self, x: Tensor, cache: KvCache, all_logits: bool) -> Tensor:
        """Embedded tokens through every layer and the last norm.

        Args:
            x: [num_tokens, hidden_size], which may be overwritten.
            cache: as in :meth:`forward`; keys and values are written, its length is not.
            all_logits: whether every token's output is of use, not just the last one's.

        Returns:
            [1, hidden_size], or [num_tokens, hidden_size] for all.
        """

    def _embed(self, ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size]"""
        table = self.weights.embedding
        if isinstance(table, QuantizedTensor):
            return self.backend.embedding_lookup_quant(table.blocks, ids, table.kind, self.dtype)
        return self.backend.embedding_lookup_dev(table, ids)

    def _attention(
        self,
        h: Tensor,
        layer: LayerWeights,
        k_cache: Tensor,
        v_cache: Tensor,
        past: int,
        newest: bool,
        *,
        tables: tuple[Tensor, Tensor],
        sliding_window: int,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size] to the same, reading and extending the layer's cache.

        If newest, to [1, hidden_size]: what the last of the tokens sees, all of them being cached.
        """
        backend, config = self.backend, self.config
        qkv = apply(backend, h, layer.qkv)
        q = backend.split_qkv_norm_rope_into_cache(
            qkv,
            layer.q_norm,
            layer.k_norm,
            *tables,
            k_cache,
            v_cache,
            num_heads=config.num_heads,
            cache_len=past,
            pos_offset=past,
            eps=config.rms_norm_eps,
            qk_mode=self.qk_mode,
        )  # [num_heads, num_tokens, head_dim]
        q = q[:, -1:] if newest else q
        num_queries = q.shape[1]
        attended = backend.flash_attention(
            q[None],
            k_cache[None],
            v_cache[None],
            kv_len=past + h.shape[0],
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
        )[0]
        if num_queries > 1:
            attended = backend.transpose_head_to_token(attended)
        return apply(backend, attended.view(num_queries, config.q_dim), layer.attn_out)

    def _head(self, h: Tensor) -> Tensor:
        """Logits, in float32: rounding them to 16 bits would reorder close ones."""
        head = self.weights.head
        if isinstance(head, Tensor):
            return self.backend.gemm(h, head, wide=True)
        if h.dtype != torch.float32:
            wide = torch.empty(h.shape, dtype=torch.float32, device=h.device)
            self.backend.copy_slice(h, wide)
            h = wide
        return matmul(self.backend, h, head)
