"""The attention ``"ferrum"`` of transformers' models: its masks, and what computes by them.

transformers describes a mask by a function of positions and leaves it to each implementation what
to make of it. Here that is :class:`Pattern`, told from the function itself: causal with or without
a window, or full. Padding on either side of a sequence is heeded exactly. Any other mask is refused
where it is made, so that none is taken for something that it is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ferrum_triton.errors import InputError
from ferrum_triton.integrations.transformers.layers import backend_of
from ferrum_triton.integrations.transformers.library import part

NAME = "ferrum"
INSTEAD = 'Convert with attention=False, or model.set_attn_implementation("sdpa").'
# What other implementations read of a call and this one cannot heed.
UNSERVED = ("position_bias", "cache", "cu_seq_lens_q", "cu_seq_lens_k", "head_mask", "block_table")


class Pattern(NamedTuple):
    """What the queries of a forward pass see.

    Attributes:
        causal: whether a query sees only keys up to its own position.
        sliding_window: keys it sees then, itself included; 0 means all.
        kv_length: keys that the cache returns, some of which may not be filled yet.
        end: the number of those keys that are filled; None if only the device knows it, and the
            mask holds it.
        spans: the keys [start, end) of each sequence that are no padding; None if all are none.
    """

    causal: bool
    sliding_window: int
    kv_length: int
    end: int | None
    spans: tuple[tuple[int, int], ...] | None


def register() -> None:
    """Make ``"ferrum"`` known to transformers; again, it does nothing more."""
    part("modeling_utils").AttentionInterface.register(NAME, attention)
    part("masking_utils").AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """The mask of a forward pass: [batch, 1, 1, 1] int32, each sequence's number of keys.

    It has four dimensions since transformers hands such a mask on as it is, and a
    :class:`Pattern` in its attribute ``pattern``.

    Raises:
        InputError: the mask is none that the kernels know.
    """
    causal, sliding_window = _read(mask_function)
    end = q_offset + q_length - kv_offset if causal else kv_length
    spans = None
    if attention_mask is not None:
        spans = _spans(attention_mask[:, kv_offset : kv_offset + kv_length], int(end))
    known = int(end) if spans is not None or not isinstance(end, Tensor) else None
    if known is not None and known > kv_length:
        _refuse("attention_mask", f"of queries past the {kv_length} keys", "queries on their keys")
    lens = torch.as_tensor(end, dtype=torch.int32, device=device)
    # Contiguous, so that generate has no reason to copy it, which would lose the pattern.
    result = lens.expand(batch_size).contiguous().view(batch_size, 1, 1, 1)
    pattern = Pattern(causal, sliding_window, kv_length, known, spans)
    result.pattern = pattern  # type: ignore[attr-defined]
    return result


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' modules call it.

    Args:
        query: [batch, num_heads, q_len, head_dim].
        key, value: [batch, num_kv_heads, kv_len, head_dim] and [..., value_dim].
        attention_mask: what :func:`mask` made. Without one ``is_causal`` decides, or the module's
            own ``is_causal`` where that is None too.
        scaling: factor on the scores; None means 1 / sqrt(head_dim).
        sliding_window: heeded where there is no mask, which says so itself.
        softcap: bound on the scores; None means none.
        s_aux: [num_heads] sinks, or None.

    Returns:
        [batch, q_len, num_heads, value_dim] and None.

    Raises:
        InputError: dropout, a mask that is not :func:`mask`'s, or an argument of other kinds of
            attention.
    """
    if dropout:
        _refuse("dropout", str(dropout), "0", "Call model.eval().")
    if output_attentions:
        _refuse("output_attentions", "True", "False")
    for name in UNSERVED:
        if others.get(name) is not None:
            _refuse(name, "given", "None")
    pattern = getattr(attention_mask, "pattern", None)
    if pattern is None:
        if attention_mask is not None:
            got = f"a tensor of shape {list(attention_mask.shape)}"
            _refuse("attention_mask", got, "padding of [batch, length], or None")
        pattern = _without_mask(module, query, key, is_causal, sliding_window)
    elif pattern.kv_length != key.shape[2] or len(attention_mask) != len(query):  # type: ignore[arg-type]
        got = f"of {pattern.kv_length} keys, where {key.shape[2]} are given"
        _refuse("attention_mask", got, "one made for these keys")
    settings = {
        "causal": pattern.causal,
        "softmax_scale": scaling,
        "sliding_window": pattern.sliding_window,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    backend = backend_of(query)
    if pattern.spans is not None:
        out = _padded(backend, query, key, value, pattern, settings)
    elif pattern.end is not None:
        out = backend.flash_attention(query, key, value, kv_len=pattern.end, **settings)
    else:
        lens = attention_mask.view(-1)  # type: ignore[union-attr]
        out = backend.flash_attention(query, key, value, kv_lens=lens, **settings)
    return out.transpose(1, 2).contiguous(), None


def _read(mask_function: Callable[..., Any] | None) -> tuple[bool, int]:
    """(causal, sliding_window) of one of transformers' functions of positions."""
    masks = part("masking_utils")
    if mask_function is None or mask_function is masks.causal_mask_function:
        return True, 0
    if mask_function is masks.bidirectional_mask_function:
        return False, 0
    if _is_made_by(mask_function, masks.and_masks):
        window, *others = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
        is_window = _is_made_by(window, masks.sliding_window_overlay)
        if is_window and others == [masks.causal_mask_function]:
            return True, int(inspect.getclosurevars(window).nonlocals["sliding_window"])
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    allowed = "causal, causal with a sliding window, or full, with padding"
    return _refuse("mask_function", name, allowed)


def _is_made_by(function: Callable[..., Any], maker: Callable[..., Any]) -> bool:
    names = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    return names[0] == maker.__module__ and names[1].startswith(f"{maker.__qualname__}.<locals>.")


def _spans(visible: Tensor, end: int) -> tuple[tuple[int, int], ...] | None:
    """Where each row [batch, keys] is true, up to ``end``; None if it is everywhere."""
    visible = visible[:, :end].bool()
    if visible.shape[1] == end and bool(visible.all()):
        return None
    spans = []
    for row in visible.cpu():
        places = row.nonzero().flatten().tolist()
        start, stop = (places[0], places[-1] + 1) if places else (0, 0)
        if stop - start != len(places):
            allowed = "padding before or after a sequence"
            _refuse("attention_mask", "padded inside of a sequence", allowed)
        spans.append((start, stop))
    return tuple(spans)


def _without_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Pattern:
    q_len, kv_len = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and q_len not in (1, kv_len):
        got = f"None for {q_len} causal queries on {kv_len} keys"
        _refuse("attention_mask", got, "a mask, which says where the queries are")
    if sliding_window and not causal:
        _refuse("sliding_window", str(sliding_window), "None where attention is not causal")
    return Pattern(bool(causal), sliding_window or 0, kv_len, kv_len, None)


def _padded(
    backend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    settings: dict[str, Any],
) -> Tensor:
    """Sequences of one span at a time; queries that see no key give zeros."""
    spans, end, q_len = pattern.spans or (), pattern.end or 0, query.shape[2]
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for span in set(spans):
        rows = [row for row, other in enumerate(spans) if other == span]
        start, stop = span
        if stop > start:
            # Only where some have another span is there something to copy.
            q, k, v = (t if len(rows) == len(t) else t[rows] for t in (query, key, value))
            out[rows] = backend.flash_attention(
                q,
                k[:, :, start:stop],
                v[:, :, start:stop],
                kv_len=stop - start,
                pos_offset=end - q_len - start if pattern.causal else 0,
                **settings,
            )
    return out


def _refuse(argument: str, got: str, allowed: str, advice: str = INSTEAD) -> NoReturn:
    raise InputError('attention "ferrum"', argument, got, allowed, advice)
