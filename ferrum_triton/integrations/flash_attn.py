"""The functions of flash-attn 2 that inference calls, on this package's attention.

    from ferrum_triton.integrations.flash_attn import flash_attn_varlen_func

Names, arguments and layouts are flash-attn's: heads come after tokens, a causal query is aligned to
the last key, and a window counts the keys to either side. On CUDA tensors the kernels compute, on
CPU tensors torch. ``s_aux``, sinks as in gpt-oss, is taken beside what flash-attn takes. There is
no backward; what cannot be done is refused by name: dropout, ALiBi, rotary embedding, windows that
reach past a query's own position, paddings and choices of rows inside of a cache.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ferrum_triton.backends import Backend, get_backend
from ferrum_triton.errors import InputError

Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of a batch whose sequences are of one length.

    Args:
        q: [batch, q_len, num_heads, head_dim].
        k, v: [batch, kv_len, num_kv_heads, head_dim].
        causal: whether a query sees only keys up to its own position, the last query the last key.
        window_size: keys seen to the left and right of that position; -1 means all.
        softcap: bound on the scores; 0 means none.
        deterministic: ignored: it concerns the backward pass, which does not exist here.
        return_attn_probs: return (out, lse, empty), lse [batch, num_heads, q_len].
        s_aux: [num_heads] sinks, or None.

    Returns:
        [batch, q_len, num_heads, head_dim] in q's dtype.
    """
    call = "flash_attn_func"
    _refuse_given(call, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    settings = _Settings.of(call, softmax_scale, causal, window_size, softcap, s_aux)
    lse = q.new_empty(len(q), q.shape[2], q.shape[1], dtype=torch.float32)
    out = _attend(q, k, v, lse if return_attn_probs else None, settings)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of sequences of several lengths, one after the other in q, k and v.

    Without a block table the lengths are read back from the device, and a call is made for each
    sequence unless all are of one length. With one, nothing is read back.

    Args:
        q: [num_tokens, num_heads, head_dim].
        k, v: [num_keys, num_kv_heads, head_dim]; with ``block_table`` pools [num_blocks,
            block_size, num_kv_heads, head_dim], block_size a power of two.
        cu_seqlens_q, cu_seqlens_k: [num_seqs + 1] int32, where sequences start. Tokens past the
            last give zeros, or with ``block_table`` anything.
        max_seqlen_q, max_seqlen_k: bounds on the lengths.
        block_table: [num_seqs, max_blocks] int32, pages of a causal call, or None.
        return_attn_probs: return (out, lse, empty), lse [num_heads, num_tokens].

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype. The others are :func:`flash_attn_func`'s.
    """
    call = "flash_attn_varlen_func"
    _refuse_given(call, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    settings = _Settings.of(call, softmax_scale, causal, window_size, softcap, s_aux)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        got = f"of {len(cu_seqlens_k)} elements"
        _reject(call, "cu_seqlens_k", got, f"{len(cu_seqlens_q)}, as many as cu_seqlens_q")
    num_tokens, num_heads = q.shape[:2]
    wants = return_attn_probs
    if block_table is not None:
        settings.check_paged(call, int(max_seqlen_q))
        lse = q.new_empty(num_tokens, num_heads, dtype=torch.float32) if wants else None
        out = _backend(q).paged_varlen_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k.diff() - cu_seqlens_q.diff(),
            block_table,
            lse=lse,
            max_q_len=int(max_seqlen_q),
            layout="nhd",
            **settings.keywords,
        )
        return out if lse is None else (out, lse.T, q.new_empty(0))
    ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    lse = q.new_full((num_heads, num_tokens), -torch.inf, dtype=torch.float32) if wants else None
    out = _of_sequences(call, q, k, v, ends, lse, settings)
    return out if lse is None else (out, lse, q.new_empty(0))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of the newest tokens over a cache, which may take their keys and values first.

    Args:
        q: [batch, q_len, num_heads, head_dim].
        k_cache, v_cache: [batch, capacity, num_kv_heads, head_dim], or with ``block_table`` pools
            [num_blocks, block_size, num_kv_heads, head_dim], block_size a power of two. Written in
            place if k and v are given.
        k, v: [batch, new_len, num_kv_heads, head_dim], written behind ``cache_seqlens``, or None.
        cache_seqlens: keys in the cache before that: [batch] int32, one number, or None for a full
            cache. A sequence of -1 is padding: nothing of it is written.
        block_table: [batch, max_blocks] int32, or None.
        causal: as in :func:`flash_attn_func`; without it, q_len over pages has to be 1.
        rotary_interleaved: ignored, since rotary embedding itself is refused.
        num_splits: 0; over pages also 1, by which results do not depend on the batch.
        return_softmax_lse: return (out, lse), lse [batch, num_heads, q_len].

    Returns:
        [batch, q_len, num_heads, head_dim] in q's dtype. The others are :func:`flash_attn_func`'s.
    """
    call = "flash_attn_with_kvcache"
    _refuse_given(
        call,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
    )
    settings = _Settings.of(call, softmax_scale, causal, window_size, softcap, s_aux)
    if num_splits not in ((0,) if block_table is None else (0, 1)):
        _reject(call, "num_splits", str(num_splits), "0, or 1 over pages")
    if (k is None) != (v is None):
        _reject(call, "v", "None" if v is None else "given", "given where k is")
    batch, q_len = q.shape[:2]
    if block_table is not None:
        settings.check_paged(call, q_len)
    elif len(k_cache) != batch:
        _reject(call, "k_cache", f"of {len(k_cache)} sequences", f"{batch}, as q has")
    lens = _lengths(call, q, k_cache, cache_seqlens, block_table is not None or k is not None)
    if k is not None and v is not None:
        _append(k_cache, v_cache, k, v, lens, block_table)
        lens = lens + k.shape[1]
    shape = (batch, q_len, q.shape[2])
    backend = _backend(q)
    if block_table is not None:
        lse = q.new_empty(shape, dtype=torch.float32) if return_softmax_lse else None
        out = backend.paged_decode_attention(
            q,
            k_cache,
            v_cache,
            block_table,
            lens.to(torch.int32),
            lse=lse,
            layout="nhd",
            batch_invariant=num_splits == 1,
            **settings.keywords,
        )
        return out if lse is None else (out, lse.transpose(1, 2))
    lse = q.new_empty(batch, shape[2], q_len, dtype=torch.float32) if return_softmax_lse else None
    out = _attend(q, k_cache, v_cache, lse, settings, lens.to(torch.int32))
    return out if lse is None else (out, lse)


class _Settings(NamedTuple):
    """What a call says beside its tensors, in this package's terms."""

    causal: bool
    sliding_window: int
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None

    @classmethod
    def of(
        cls,
        call: str,
        softmax_scale: float | None,
        causal: bool,
        window_size: Window,
        softcap: float,
        sinks: Tensor | None,
    ) -> _Settings:
        left, right = window_size
        # A causal query sees nothing to the right, and one that sees nothing there is causal.
        causal = causal or right == 0
        if not causal and (left >= 0 or right >= 0):
            allowed = "(-1, -1), or (n, 0)"
            _reject(call, "window_size", str(tuple(window_size)), allowed, "Pass causal=True.")
        window = left + 1 if left >= 0 else 0
        return cls(causal, window, softmax_scale, softcap, sinks)

    @property
    def keywords(self) -> dict[str, Any]:
        """For ops that are causal."""
        return {name: value for name, value in self._asdict().items() if name != "causal"}

    def check_paged(self, call: str, q_len: int) -> None:
        if not self.causal and q_len > 1:
            got = f"False for {q_len} queries over pages"
            _reject(call, "causal", got, "True, or one query a sequence")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor | None,
    settings: _Settings,
    kv_lens: Tensor | None = None,
) -> Tensor:
    """[batch, q_len, num_heads, head_dim]; lse [batch, num_heads, q_len]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = _backend(q).flash_attention(
        q, k, v, kv_lens=kv_lens, causal=settings.causal, lse=lse, **settings.keywords
    )
    return out.transpose(1, 2).contiguous()


def _of_sequences(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: tuple[list[int], list[int]],
    lse: Tensor | None,
    settings: _Settings,
) -> Tensor:
    """[num_tokens, num_heads, head_dim], sequence by sequence; lse [num_heads, num_tokens]."""
    for name, places, tokens in zip(("q", "k"), ends, (q, k), strict=True):
        if places[0] < 0 or places != sorted(places) or places[-1] > len(tokens):
            allowed = f"ascending from 0 to the {len(tokens)} tokens of {name}"
            _reject(call, f"cu_seqlens_{name}", str(places), allowed)
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    spans = [*zip(*(pairwise(places) for places in ends), strict=True)]
    lengths = {(b - a, d - c) for (a, b), (c, d) in spans}
    if len(lengths) == 1:  # one call for all
        spans = [((ends[0][0], ends[0][-1]), (ends[1][0], ends[1][-1]))]
    for (a, b), (c, d) in spans:
        q_len, kv_len = next(iter(lengths)) if len(lengths) == 1 else (b - a, d - c)
        if q_len and kv_len:
            queries = q[a:b].unflatten(0, (-1, q_len))
            keys, values = (t[c:d].unflatten(0, (-1, kv_len)) for t in (k, v))
            sums = None if lse is None else lse[:, a:b].unflatten(1, (-1, q_len)).transpose(0, 1)
            out[a:b] = _attend(queries, keys, values, sums, settings).flatten(0, 1)
    return out


def _lengths(
    call: str, q: Tensor, k_cache: Tensor, cache_seqlens: int | Tensor | None, is_needed: bool
) -> Tensor:
    """[batch] keys before any are appended."""
    if cache_seqlens is None:
        if is_needed:
            _reject(call, "cache_seqlens", "None", "given with block_table, k or v")
        cache_seqlens = k_cache.shape[1]
    if isinstance(cache_seqlens, int):
        return torch.full((len(q),), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_seqlens.shape != (len(q),):
        got = f"of shape {list(cache_seqlens.shape)}"
        _reject(call, "cache_seqlens", got, f"[{len(q)}], a number for each sequence")
    return cache_seqlens


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lens: Tensor,
    block_table: Tensor | None,
) -> None:
    """Write k and v behind each sequence's keys."""
    batch, new_len = k.shape[:2]
    backend = _backend(k)
    starts = torch.arange(0, (batch + 1) * new_len, new_len, dtype=torch.int32, device=k.device)
    if block_table is not None:
        rows = k.flatten(0, 1), v.flatten(0, 1)
        backend.kv_cache_append_paged(
            k_cache,
            v_cache,
            *rows,
            block_tables=block_table,
            pos_offsets=lens,
            cu_seqlens_q=starts,
            layout="nhd",
        )
        return
    table = torch.zeros(1, 1, dtype=torch.int32, device=k.device)
    for b in range(batch):  # each sequence's part of the cache is a pool of one page
        own = slice(b, b + 1)
        backend.kv_cache_append_paged(
            k_cache[own],
            v_cache[own],
            k[b],
            v[b],
            block_tables=table,
            pos_offsets=lens[own],
            layout="nhd",
        )


def _backend(x: Tensor) -> Backend:
    return get_backend({"cuda": "cuda", "mps": "metal"}.get(x.device.type, "cpu"))


def _refuse_given(call: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and (isinstance(value, Tensor) or value):
            got = f"{value}" if isinstance(value, float) else "given"
            _reject(call, name, got, "0" if isinstance(value, float) else "None")


def _reject(
    call: str, argument: str, got: str, allowed: str, advice: str = "There is no such kernel."
) -> NoReturn:
    raise InputError(call, argument, got, allowed, advice)
