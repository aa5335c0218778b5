"""flash-attn's functions against torch's own attention."""

import inspect

import pytest
import torch

from ferrum_triton import InputError
from ferrum_triton.integrations import flash_attn
from ferrum_triton.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8
# Of queries and keys: all of one length, fewer queries than keys, more, none.
LENGTHS = [([2, 2], [5, 5]), ([1, 3, 4], [9, 3, 17]), ([6, 2, 0], [4, 0, 3])]
SETTINGS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (2, 2)},
    {"window_size": (3, 0), "softcap": 2.0},
    {"causal": True, "softmax_scale": 0.4, "s_aux": True},
]


def reference(
    q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None, s_aux=None
):
    """(out, lse) of one sequence, [q_len, num_heads, head_dim], aligned at the bottom right."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(k), dim=0) for t in (k, v))
    left, right = window_size
    right = 0 if causal else right
    place = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    scores = q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        sink = s_aux.double()[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1).float(), lse.float()


def tensors(*lengths):
    """q, k and v of so many queries and keys."""
    q_len, kv_len = lengths
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(n, h, DIM) for n, h in zip((q_len, kv_len, kv_len), heads, strict=True)]


def with_sinks(settings):
    return settings | ({"s_aux": torch.randn(HEADS)} if settings.get("s_aux") else {})


def starts(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def pages(*sides, spare=3):
    """A pool of each of ``sides``, keys or values of several sequences, and the table of all."""
    counts = [-(-len(part) // BLOCK) + 1 for part in sides[0]]
    order = torch.randperm(sum(counts) + spare)
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for i, own in enumerate(order[: sum(counts)].split(counts)):
        table[i, : len(own)] = own
    pools = [torch.full((len(order), BLOCK, KV_HEADS, DIM), torch.nan) for _ in sides]
    for pool, side in zip(pools, sides, strict=True):
        for blocks, part in zip(table.long(), side, strict=True):
            for token, value in enumerate(part):
                pool[blocks[token // BLOCK], token % BLOCK] = value
    return *pools, table


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_sequences_of_several_lengths(lengths, settings):
    q_lens, kv_lens = lengths
    settings = with_sinks(settings)
    parts = [tensors(*pair) for pair in zip(q_lens, kv_lens, strict=True)]
    q, k, v = (torch.cat(side) for side in zip(*parts, strict=True))
    out, lse, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        starts(q_lens),
        starts(kv_lens),
        max(q_lens),
        max(kv_lens),
        return_attn_probs=True,
        **settings,
    )
    begin = 0
    for part in parts:
        own = slice(begin, begin := begin + len(part[0]))
        if len(part[1]):
            want, sums = reference(*part, **settings)
            torch.testing.assert_close(out[own], want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[:, own], sums, rtol=1e-4, atol=1e-5)
        else:
            assert not out[own].any()


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_batch_of_one_length(settings):
    settings = with_sinks(settings)
    parts = [tensors(3, 7) for _ in range(2)]
    q, k, v = (torch.stack(side) for side in zip(*parts, strict=True))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **settings)
    torch.testing.assert_close(flash_attn_func(q, k, v, **settings), out)
    for i, part in enumerate(parts):
        want, sums = reference(*part, **settings)
        torch.testing.assert_close(out[i], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[i], sums, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS[1:])
@pytest.mark.parametrize("lengths", LENGTHS[:2])
def test_sequences_over_pages(lengths, settings):
    q_lens, kv_lens = lengths
    settings = with_sinks(settings)
    parts = [tensors(*pair) for pair in zip(q_lens, kv_lens, strict=True)]
    k, v, table = pages([p[1] for p in parts], [p[2] for p in parts])
    out, lse, _ = flash_attn_varlen_func(
        torch.cat([p[0] for p in parts]),
        k,
        v,
        starts(q_lens),
        starts(kv_lens),
        max(q_lens),
        max(kv_lens),
        block_table=table,
        return_attn_probs=True,
        **settings,
    )
    wanted = [reference(*part, **settings) for part in parts]
    torch.testing.assert_close(out, torch.cat([w for w, _ in wanted]), rtol=1e-4, atol=1e-5)
    sums = torch.cat([sums for _, sums in wanted], dim=1)
    torch.testing.assert_close(lse, sums, rtol=1e-4, atol=1e-5)


# Several queries over pages are causal.
CACHES = [
    (settings, q_len, paged)
    for settings in SETTINGS
    for q_len in (1, 3)
    for paged in (False, True)
    if settings or q_len == 1 or not paged
]


@pytest.mark.parametrize(("settings", "q_len", "paged"), CACHES)
@pytest.mark.parametrize("appends", [False, True])
def test_a_cache(settings, q_len, paged, appends):
    settings, kv_lens = with_sinks(settings), [4, 11]
    parts = [tensors(q_len, n) for n in kv_lens]
    q = torch.stack([p[0] for p in parts])
    before = torch.tensor(kv_lens, dtype=torch.int32) - (q_len if appends else 0)
    new = {}
    if appends:
        new = {
            name: torch.stack([p[i][-q_len:] for p in parts]) for i, name in ((1, "k"), (2, "v"))
        }
    kept = [[p[i][:n] for p, n in zip(parts, before, strict=True)] for i in (1, 2)]
    if paged:
        k_cache, v_cache, new["block_table"] = pages(*kept)
    else:
        k_cache, v_cache = (torch.full((2, 13, KV_HEADS, DIM), torch.nan) for _ in range(2))
        for cache, sides in ((k_cache, kept[0]), (v_cache, kept[1])):
            for i, side in enumerate(sides):
                cache[i, : len(side)] = side
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=before, return_softmax_lse=True, **new, **settings
    )
    for i, part in enumerate(parts):
        want, sums = reference(*part, **settings)
        torch.testing.assert_close(out[i], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[i], sums, rtol=1e-4, atol=1e-5)


def test_a_full_cache_needs_no_lengths():
    q, k, v = (t[None] for t in tensors(2, 6))
    want = flash_attn_func(q, k, v, causal=True)
    for lens in (None, 6):
        got = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True)
        torch.testing.assert_close(got, want)


def test_a_padding_row_writes_nothing():
    """As continuous batching has them: one key less than none before the new one."""
    q, k, v = (t[:, None] for t in tensors(2, 2))
    pool, table = pages([torch.zeros(0, KV_HEADS, DIM)] * 2)
    pool, lens = pool.nan_to_num(0.5), torch.tensor([-1, 0], dtype=torch.int32)
    before = pool.clone()
    out = flash_attn_with_kvcache(
        q, pool, pool.clone(), k, v, cache_seqlens=lens, block_table=table, causal=True
    )
    assert not out[0].any()
    torch.testing.assert_close(out[1, 0], v[1, 0].repeat_interleave(2, dim=0))
    changed = (pool != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [int(table[1, 0])]


X = torch.zeros(1, 2, HEADS, DIM)
ONE = torch.ones(1)
CU = torch.tensor([0, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"alibi_slopes": ONE}, "alibi_slopes"),
        ({"window_size": (4, 4)}, "window_size"),
        ({"window_size": (4, -1)}, "window_size"),
        ({"rotary_cos": ONE}, "rotary_cos"),
        ({"cache_batch_idx": ONE}, "cache_batch_idx"),
        ({"cache_leftpad": ONE}, "cache_leftpad"),
        ({"num_splits": 4}, "num_splits"),
        ({"k": X}, "v"),
        ({"k": X, "v": X}, "cache_seqlens"),
        ({"cache_seqlens": torch.ones(3)}, "cache_seqlens"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "causal"),
    ],
)
def test_what_a_cache_cannot_do_is_named(arguments, name):
    with pytest.raises(InputError, match=f"flash_attn_with_kvcache: {name} is"):
        flash_attn_with_kvcache(X, X, X, **arguments)


def test_what_sequences_cannot_do_is_named():
    def call(q_starts=CU, k_starts=CU, **arguments):
        return flash_attn_varlen_func(X[0], X[0], X[0], q_starts, k_starts, 2, 2, **arguments)

    for arguments, name in (
        ({"dropout_p": 0.1}, "dropout_p is 0.1"),
        ({"alibi_slopes": ONE}, "alibi_slopes is given"),
        ({"k_starts": CU[:1]}, "cu_seqlens_k is of 1 elements"),
        ({"k_starts": CU * 2}, r"cu_seqlens_k is \[0, 4\]"),
        ({"q_starts": CU.flip(0)}, "cu_seqlens_q"),
        ({"block_table": CU[None]}, "causal is False for 2 queries"),
    ):
        with pytest.raises(InputError, match=name):
            call(**arguments)
    with pytest.raises(InputError, match="k_cache is of 1 sequences"):
        flash_attn_with_kvcache(X.expand(2, -1, -1, -1), X, X)
    with pytest.raises(InputError, match="requires grad"):
        flash_attn_func(X.clone().requires_grad_(), X, X)


def test_signatures_are_those_that_callers_look_for():
    """transformers finds out by their names what may be passed."""
    for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
        assert flash_attn.__name__ == function.__module__
        names = [*inspect.signature(function).parameters]
        assert {"window_size", "softcap", "block_table", "s_aux"} <= {*names}
        assert len(names) <= 20


@pytest.mark.parametrize("case", ["padded", "packed", "plain", "pages"])
def test_transformers_calls_these(monkeypatch, case):
    """Its flash attention, with these functions where it loads some."""
    reason = "transformers is the caller"
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils", reason=reason)
    functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    found = (*functions, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: found)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    sinks = torch.randn(HEADS)
    # It asks for no window over pages: the cache holds no more than that.
    window = None if case == "pages" else 4
    asked = {"is_causal": True, "sliding_window": window, "softcap": 3.0, "s_aux": sinks}
    settings = {"causal": True, "softcap": 3.0, "s_aux": sinks}
    settings |= {"window_size": (window - 1, 0)} if window else {}
    lengths = [6, 6] if case == "plain" else [6, 2]
    parts = [tensors(n, n) for n in lengths]
    wanted = [reference(*part, **settings)[0] for part in parts]
    shown = None
    if case == "pages":  # the last token of each, from a cache that it is written to
        k, v, table = pages(*([part[i][:-1] for part in parts] for i in (1, 2)))
        sides = [torch.stack([part[i][-1] for part in parts])[None] for i in range(3)]
        wanted = [torch.stack([want[-1] for want in wanted])]
        asked |= {"cu_seq_lens_k": starts(lengths), "k_cache": k, "v_cache": v}
        asked |= {"block_table": table, "max_length_q": 1, "max_length_k": 6}
    elif case == "packed":
        sides = [torch.cat(side)[None] for side in zip(*parts, strict=True)]
        asked["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
        wanted = [torch.cat(wanted)]
    else:
        pad = torch.nn.utils.rnn.pad_sequence
        sides = [pad(side, batch_first=True) for side in zip(*parts, strict=True)]
        shown = torch.arange(6) < torch.tensor(lengths)[:, None] if case == "padded" else None
    got = utils._flash_attention_forward(
        *sides, shown, sides[0].shape[1], attn_implementation="ours", **asked
    )
    for row, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(row[: len(want)], want, rtol=1e-4, atol=1e-5)
