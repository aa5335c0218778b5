"""Multi-head latent attention over a cache of latents, contiguous or paged."""

import torch
from torch import Tensor

from ferrum_triton.contract import ACTIVATIONS, DTYPES
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op

DTYPES["latent"] = (*ACTIVATIONS, torch.float8_e4m3fn)

# What a kernel holds of one query at once; no model has more.
MAX_LORA_RANK, MAX_ROPE_DIM = 512, 128


def _bench_case(num_heads: int, batch: int, kv_len: int, metric: str) -> Case:
    axes = {
        "batch": batch,
        "num_heads": num_heads,
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "block_size": 64,
        "max_blocks": kv_len // 64,
        "lens": "full",
    }
    name = f"bf16/h{num_heads}/lora512/rope64/b{batch}/ctx{kv_len}"
    return Case(name, torch.bfloat16, axes, metric)


@op(
    tensors={
        "q": "T[batch, q_len, num_heads, width]",
        "cache": "latent[num_blocks, block_size, width]",
        "block_tables": "int[batch, max_blocks]",
        "kv_lens": "int[batch]",
        "scale": "float32[1]",
        "lse": "float32[batch, q_len, num_heads]",
    },
    axes={
        "batch": (1, 3),
        "num_heads": (4, 1, 20),
        "q_len": (1, 3, 0),
        "kv_lora_rank": (32, 64),
        "rope_dim": (16,),
        "block_size": (8, 16),
        "max_blocks": (5, 1),
        "lens": ("empty", "full", "random"),
        "paged": (False, True),
        "hostile": (True, False),
        "cache_dtype": (torch.float8_e4m3fn, None),
        "with_lse": (False, True),
    },
    bench=[
        _bench_case(16, 64, 8192, "tbs"),
        _bench_case(64, 64, 8192, "tbs"),
        _bench_case(128, 128, 4096, "tflops"),
    ],
    mutates=("lse",),
    static=("kv_lora_rank",),
    finite=("cache",),
)
def mla_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor | None,
    kv_lens: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """y = softmax(softmax_scale · q rowᵀ + mask) row[:kv_lora_rank] over a cache of latent rows.

    Absorbed form: one row of the cache, [latent | rope], is the key of every head, and its latent
    is the value of every head. The projections between heads and latents are the caller's, applied
    to q before and to y after: q = [latent | rope] with the latent part W_UKᵀ q_nope, and the
    output of a head W_UV y. The scale of the scores is therefore that of the heads as they were,
    usually (nope_dim + rope_dim) ** -0.5, and must be given.

    Sequence b holds the keys [0, kv_lens[b]), its queries' own the last of them: query i sees the
    keys [0, kv_lens[b] - q_len + 1 + i). Key n is row n of cache[b], or with block_tables row
    n % block_size of the block block_tables[b, n // block_size]. Lengths are clamped to what the
    cache or the table has room for; a key whose table entry is not a block of the cache is not
    seen. Rows and entries that belong to no key may hold anything. A query that sees no key, or
    only scores of -inf, gives zeros and an lse of -inf. An infinite or NaN value in a row may turn
    queries that do not see it into NaN (a weight of 0 times it).

    Args:
        q: [batch, q_len, num_heads, kv_lora_rank + rope_dim].
        cache: [num_blocks, block_size, kv_lora_rank + rope_dim], or without block_tables
            [batch, capacity, kv_lora_rank + rope_dim]; in q's dtype or in float8_e4m3fn, which is
            widened to q's dtype. Strides of the first two dimensions are free.
        block_tables: [batch, max_blocks] integers, or None for a contiguous cache.
        kv_lens: [batch] integers, on the device: a captured graph sees new lengths.
        kv_lora_rank: width of the latents, up to 512; rope_dim is up to 128.
        softmax_scale: factor of the scores.
        scale: [1] factor of a float8_e4m3fn cache; None means 1.
        lse: [batch, q_len, num_heads] float32, written in place if given: the natural logarithm
            of the sum of exp of the scaled scores.

    Returns:
        [batch, q_len, num_heads, kv_lora_rank] in q's dtype; computed in float32.

    Source: DeepSeek-V2, 2024, section 2.1 and appendix C.
    """
    batch, q_len, num_heads = q.shape[:3]
    rows = cache.to(widen(q).dtype)
    there = torch.ones(cache.shape[:2], dtype=torch.bool, device=q.device)
    if block_tables is not None:
        known = (block_tables >= 0) & (block_tables < cache.shape[0])
        pages = torch.where(known, block_tables, 0).long()
        rows, there = rows[pages].flatten(1, 2), (there[pages] & known[..., None]).flatten(1, 2)
    capacity = rows.shape[1]
    lens = kv_lens.clamp(0, capacity).long()
    key = torch.arange(capacity, device=q.device)
    there = there & (key < lens[:, None])  # [batch, capacity]
    # Rows that are no keys can hold anything, NaN included, so they are cleared, not just masked.
    rows = torch.where(there[..., None], rows, 0.0)
    if scale is not None:
        rows = rows * scale

    position = (lens - q_len)[:, None] + torch.arange(q_len, device=q.device)  # [batch, q_len]
    visible = there[:, None] & (key <= position[..., None])
    scores = (widen(q).flatten(1, 2) @ rows.transpose(1, 2)).view(batch, q_len, num_heads, capacity)
    scores = (scores * softmax_scale).masked_fill(~visible[:, :, None], -torch.inf)
    largest = scores.amax(dim=-1, keepdim=True)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(scores - shift)
    total = weights.sum(dim=-1, keepdim=True)
    if lse is not None:
        lse.copy_((shift + torch.log(total)).squeeze(-1))
    weights = weights / torch.where(total == 0.0, 1.0, total)
    out = weights.flatten(1, 2) @ rows[..., :kv_lora_rank]
    return out.view(batch, q_len, num_heads, kv_lora_rank).to(q.dtype)


@mla_attention.rule
def _(q, cache, block_tables, kv_lens, kv_lora_rank, softmax_scale, scale, lse):
    width = q.shape[3]
    if not 1 <= kv_lora_rank <= min(MAX_LORA_RANK, width - 1):
        allowed = f"1 to {MAX_LORA_RANK}, and less than the width of {width}"
        mla_attention.reject("kv_lora_rank", str(kv_lora_rank), allowed)
    if width - kv_lora_rank > MAX_ROPE_DIM:
        got = f"of rope_dim {width - kv_lora_rank}"
        mla_attention.reject("q", got, f"rope_dim up to {MAX_ROPE_DIM}")
    if cache.shape[1] == 0 or (cache.shape[0] == 0 and q.shape[0]):
        mla_attention.reject("cache", f"of shape {list(cache.shape)}", "at least one row")
    if block_tables is None and cache.shape[0] != q.shape[0]:
        got = f"of {cache.shape[0]} sequences, and no block_tables,"
        mla_attention.reject("cache", got, f"{q.shape[0]} sequences, as q has")
    if block_tables is not None and block_tables.shape[1] == 0:
        mla_attention.reject("block_tables", "of no columns", "at least one")
    quantised = cache.dtype == torch.float8_e4m3fn
    if not quantised and cache.dtype != q.dtype:
        mla_attention.reject("cache", str(cache.dtype), f"{q.dtype}, q's, or float8_e4m3fn")
    if not quantised and scale is not None:
        mla_attention.reject("scale", "given", f"None, since the cache is {cache.dtype}")


@mla_attention.sample
def _(
    make,
    batch,
    num_heads,
    kv_lora_rank,
    rope_dim,
    block_size,
    max_blocks,
    lens,
    q_len=1,
    paged=True,
    hostile=False,
    cache_dtype=None,
    with_lse=False,
):
    """Hostile samples hold lengths and blocks that do not exist."""
    width, capacity = kv_lora_rank + rope_dim, block_size * max_blocks
    spare = 0 if lens == "full" else 2
    num_blocks = batch * max_blocks + spare
    shape = (num_blocks, block_size) if paged else (batch, capacity)
    low, high = {"empty": (0, 1), "full": (capacity, capacity + 1)}.get(lens, (0, capacity + 1))
    if hostile and lens == "random":
        low, high = -2, capacity + 3
    first, last = (-1, num_blocks + 1) if hostile else (0, num_blocks)
    tables = make.distinct_ints(first, last, batch * max_blocks).view(batch, max_blocks)
    quantised = cache_dtype is not None
    return {
        "q": make.randn(batch, q_len, num_heads, width),
        "cache": make.randn(*shape, width).to(cache_dtype or make.dtype),
        "block_tables": tables if paged else None,
        "kv_lens": make.ints(low, high, batch),
        "kv_lora_rank": kv_lora_rank,
        "softmax_scale": make.scalar(0.5, 1.0) * width**-0.5,
        "scale": make.weight(1) if quantised else None,
        "lse": make.weight(batch, q_len, num_heads) if with_lse else None,
    }


def _capacity(cache, block_tables):
    return cache.shape[1] * (1 if block_tables is None else block_tables.shape[1])


@mla_attention.flops
def _(q, cache, block_tables, kv_lens, kv_lora_rank, softmax_scale, scale, lse):
    """Scores and values of every head, where every sequence is as long as its table allows."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    return 2 * rows * _capacity(cache, block_tables) * (q.shape[3] + kv_lora_rank)


@mla_attention.traffic
def _(q, cache, block_tables, kv_lens, kv_lora_rank, softmax_scale, scale, lse):
    """Every latent row read once, as long as the tables allow, q read and the output written."""
    latents = q.shape[0] * _capacity(cache, block_tables) * cache.shape[2] * cache.element_size()
    heads = q.numel() + q.numel() // q.shape[3] * kv_lora_rank
    return latents + heads * q.element_size()
