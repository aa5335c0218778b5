"""Latent attention: what it equals, and what may not matter to it."""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.attention import mla as kernels
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.harness import BACKENDS, clone, sample

INF, NAN = float("inf"), float("nan")
LORA, ROPE = 32, 16
WIDTH = LORA + ROPE
SCALE = 0.21
OP = OPS["mla_attention"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return get_backend(request.param)


@pytest.fixture
def small_splits(monkeypatch):
    """Splits of 16 keys, so that short sequences have several."""
    monkeypatch.setattr(kernels, "MIN_KEYS", 16)


def use_splits(monkeypatch, count):
    monkeypatch.setattr(kernels, "pick_splits", lambda *_: count)


def use_tiles(monkeypatch, block_m, block_n, use_tma=False):
    """Tiles of that shape, through tensor maps where those can be made."""

    def pick(device, rows, block_size, dtype, has_tma):
        path = "tma" if use_tma and has_tma else "pointers"
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 8, "num_stages": 2}
        return {"path": path, **tile}

    monkeypatch.setattr(kernels.mla_config, "pick", pick)


def normal(backend, *shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(backend.device, dtype)


def integers(backend, values):
    return torch.tensor(values, device=backend.device, dtype=torch.int32)


def paged(backend, rows, block_size, seed=0):
    """Rows [batch, capacity, width] in pages of random order, the others of the pool NaN."""
    batch, width = rows.shape[0], rows.shape[2]
    pages = rows.view(-1, block_size, width)
    pool = torch.full((len(pages) + 5, block_size, width), NAN, dtype=rows.dtype).to(rows.device)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))[: len(pages)]
    pool[order] = pages
    return pool, integers(backend, order.tolist()).view(batch, -1)


def attend(backend, q, cache, lens, tables=None, **options):
    """out and lse."""
    lse = torch.full(q.shape[:3], NAN, device=q.device)
    lens = lens if isinstance(lens, torch.Tensor) else integers(backend, lens)
    out = backend.mla_attention(q, cache, tables, lens, LORA, SCALE, lse=lse, **options)
    return out, lse


@pytest.mark.parametrize("num_heads", [1, 4, 20])
@pytest.mark.parametrize("q_len", [1, 3])
def test_equals_flash_attention_with_one_kv_head(backend, num_heads, q_len):
    """Keys are the rows, values the rows without their last ROPE columns."""
    q, rows = normal(backend, 4, q_len, num_heads, WIDTH), normal(backend, 4, 40, WIDTH, seed=1)
    lens = integers(backend, [40, 17, 1, 0])
    values = torch.where(torch.arange(WIDTH) < LORA, rows.cpu(), 0.0)
    want = get_backend("cpu").flash_attention(
        q.transpose(1, 2).cpu(),
        rows[:, None].cpu(),
        values[:, None],
        kv_lens=lens.cpu(),
        softmax_scale=SCALE,
    )
    want = want.transpose(1, 2)[..., :LORA].double()
    assert_close(attend(backend, q, rows, lens)[0], want)
    pool, tables = paged(backend, rows, 8)
    assert_close(attend(backend, q, pool, lens, tables)[0], want)


def test_absorbed_form_is_multi_head_attention(backend):
    """Up-projections moved from the keys to the query and from the values to the output."""
    heads, nope, v_dim, num_keys = 4, 24, 20, 37
    latent, k_rope = (
        normal(backend, num_keys, LORA, seed=1),
        normal(backend, num_keys, ROPE, seed=2),
    )
    w_uk = normal(backend, heads, nope, LORA, seed=3) * LORA**-0.5
    w_uv = normal(backend, heads, v_dim, LORA, seed=4) * LORA**-0.5
    q_nope, q_rope = normal(backend, heads, nope, seed=5), normal(backend, heads, ROPE, seed=6)

    k = torch.einsum("hnl,kl->hkn", w_uk.double(), latent.double())
    v = torch.einsum("hvl,kl->hkv", w_uv.double(), latent.double())
    scores = torch.einsum("hn,hkn->hk", q_nope.double(), k)
    scores = (scores + q_rope.double() @ k_rope.double().T) * SCALE
    want = torch.einsum("hk,hkv->hv", scores.softmax(dim=-1), v)

    q_latent = torch.einsum("hn,hnl->hl", q_nope.double(), w_uk.double()).float()
    out, lse = attend(
        backend,
        torch.cat((q_latent, q_rope), dim=-1)[None, None],
        torch.cat((latent, k_rope), dim=-1)[None],
        [num_keys],
    )
    got = torch.einsum("hl,hvl->hv", out[0, 0].double(), w_uv.double())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_close(lse[0, 0], scores.logsumexp(dim=-1), scale=2.0)  # q_latent was rounded


def test_prefill_in_heads_is_the_absorbed_form(backend):
    """A prompt attends with keys and values of 40 and 20 columns, as decode does over latents."""
    heads, nope, v_dim, tokens = 4, 24, 20, 37
    latent, k_rope = normal(backend, tokens, LORA, seed=1), normal(backend, tokens, ROPE, seed=2)
    w_uk = normal(backend, heads, nope, LORA, seed=3) * LORA**-0.5
    w_uv = normal(backend, heads, v_dim, LORA, seed=4) * LORA**-0.5
    q_nope = normal(backend, heads, tokens, nope, seed=5)
    q_rope = normal(backend, heads, tokens, ROPE, seed=6)

    k = torch.einsum("hnl,kl->hkn", w_uk, latent)
    k = torch.cat((k, k_rope.expand(heads, -1, -1)), dim=-1)
    v = torch.einsum("hvl,kl->hkv", w_uv, latent).contiguous()
    q = torch.cat((q_nope, q_rope), dim=-1)
    prompt = backend.flash_attention(q[None], k[None], v[None], softmax_scale=SCALE)
    assert prompt.shape == (1, heads, tokens, v_dim)

    q_latent = torch.einsum("htn,hnl->thl", q_nope, w_uk)
    absorbed = torch.cat((q_latent, q_rope.transpose(0, 1)), dim=-1)[None]
    row = torch.cat((latent, k_rope), dim=-1)[None]
    out, _ = attend(backend, absorbed, row, [tokens])
    want = torch.einsum("thl,hvl->htv", out[0], w_uv)
    torch.testing.assert_close(prompt[0], want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("block_size", "use_tma"), [(8, False), (16, False), (40, False), (16, True), (80, True)]
)
def test_where_pages_lie_does_not_matter(backend, monkeypatch, block_size, use_tma):
    """Any order of pages, NaN in the unused ones, gives what the contiguous cache gives."""
    use_tiles(monkeypatch, 16, 16, use_tma=use_tma)
    q, rows = normal(backend, 3, 2, 4, WIDTH), normal(backend, 3, 80, WIDTH, seed=1)
    lens = [80, 33, 2]
    want = attend(backend, q, rows, lens)
    for seed in (1, 2):
        pool, tables = paged(backend, rows, block_size, seed)
        for got, expected in zip(attend(backend, q, pool, lens, tables), want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("tiles", "block_size", "use_tma"),
    [
        ((16, 16), 8, False),
        ((64, 64), 8, False),
        ((16, 32), 8, False),
        ((16, 16), 16, True),
        ((16, 16), 32, True),
        ((64, 32), 32, True),
    ],
)
def test_what_is_no_key_does_not_matter(backend, monkeypatch, tiles, block_size, use_tma):
    """Rows past a length may be NaN and entries past it anything; neither is read into a result."""
    use_tiles(monkeypatch, *tiles, use_tma=use_tma)
    q, rows = normal(backend, 4, 2, 4, WIDTH), normal(backend, 4, 64, WIDTH, seed=1)
    lens = [64, 33, 8, 0]
    want = attend(backend, q, rows, lens)
    poisoned = rows.clone()
    for i, length in enumerate(lens):
        poisoned[i, length:] = NAN
    pool, tables = paged(backend, poisoned, block_size)
    for i, length in enumerate(lens):
        tables[i, -(-length // block_size) :] = integers(
            backend, [2_147_480_000, -1, len(pool), 0]
        )[i]
    for got in (attend(backend, q, poisoned, lens), attend(backend, q, pool, lens, tables)):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.isfinite(want[0]).all() and (want[0][:3] != 0).all()


@pytest.mark.parametrize(("block_size", "use_tma"), [(8, False), (32, False), (32, True)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_block_that_does_not_exist_holds_no_keys(
    backend, monkeypatch, block_size, use_tma, dtype
):
    """Its keys drop out of the softmax, as if the sequence were made of the others."""
    use_tiles(monkeypatch, 16, 16, use_tma=use_tma)
    q, rows = normal(backend, 1, 1, 4, WIDTH), normal(backend, 1, 128, WIDTH, seed=1)
    pool, tables = paged(backend, rows, block_size)
    tables = tables.to(dtype)
    keep = torch.ones(128, dtype=torch.bool)
    for column, entry in ((0, -1), (2, len(pool)), (tables.shape[1] - 1, 2_000_000_000)):
        tables[0, column] = entry
        keep[column * block_size : (column + 1) * block_size] = False
    got = attend(backend, q, pool, [128], tables)
    want = attend(backend, q, rows[:, keep.to(rows.device)], [int(keep.sum())])
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)
    tables[:] = -1
    out, lse = attend(backend, q, pool, [128], tables)
    assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("stride", [WIDTH, WIDTH + 16, WIDTH + 1])
@pytest.mark.parametrize("rows_apart", [32, 33])
def test_strides_of_the_cache_are_free(backend, stride, rows_apart):
    """Also those that a tensor descriptor cannot hold."""
    q, rows = normal(backend, 2, 2, 4, WIDTH), normal(backend, 2, 96, WIDTH, seed=1)
    pool, tables = paged(backend, rows, 32)
    lens = [96, 50]
    want = attend(backend, q, pool, lens, tables)
    wide = torch.full((len(pool), rows_apart, stride), NAN, device=pool.device)
    wide[:, :32, :WIDTH] = pool
    got = attend(backend, q, wide[:, :32, :WIDTH], lens, tables)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.parametrize("lens", [(-5, 0), (0, -(2**31))])
def test_no_keys_give_zeros(backend, lens):
    q, rows = normal(backend, 2, 3, 4, WIDTH), normal(backend, 2, 40, WIDTH, seed=1)
    out, lse = attend(backend, q, rows, lens)
    assert (out == 0).all() and (lse == -INF).all()


def test_queries_before_the_first_key_see_nothing(backend):
    """Two keys and three queries: the first comes before both."""
    q, rows = normal(backend, 1, 3, 4, WIDTH), normal(backend, 1, 40, WIDTH, seed=1)
    out, lse = attend(backend, q, rows, [2])
    assert (out[:, 0] == 0).all() and (lse[:, 0] == -INF).all()
    # The second sees one key, whose value is then its result.
    assert_close(out[0, 1], rows[0, 0, :LORA].expand(4, LORA))
    assert torch.isfinite(lse[:, 1:]).all()


def test_lengths_are_clamped_to_the_room_there_is(backend, monkeypatch):
    use_tiles(monkeypatch, 16, 16)
    q, rows = normal(backend, 2, 1, 4, WIDTH), normal(backend, 2, 40, WIDTH, seed=1)
    pool, tables = paged(backend, rows, 8)
    want = attend(backend, q, rows, [40, 40])
    for got in (
        attend(backend, q, rows, [41, 2**31 - 1]),
        attend(backend, q, pool, [41, 2**31 - 1], tables),
    ):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    wide = torch.tensor([2**40, 41], device=backend.device)
    assert torch.equal(attend(backend, q, rows, wide)[0], want[0])


def test_each_query_is_a_step_of_its_own(backend):
    """Query i of three is the only query of a sequence that much shorter."""
    q, rows = normal(backend, 2, 3, 4, WIDTH), normal(backend, 2, 40, WIDTH, seed=1)
    out, lse = attend(backend, q, rows, [40, 20])
    for i in range(3):
        alone = attend(backend, q[:, i : i + 1].contiguous(), rows, [38 + i, 18 + i])
        assert_close(out[:, i : i + 1], alone[0])
        assert_close(lse[:, i : i + 1], alone[1])


# Every tile with splits of several keys, and with more splits than there are keys for.
@pytest.mark.parametrize(
    ("tiles", "use_tma", "count"),
    [
        ((16, 16), False, 2),
        ((16, 16), False, 7),
        ((64, 32), False, 3),
        ((64, 32), False, 16),
        ((16, 16), True, 3),
        ((16, 16), True, 16),
    ],
)
def test_splits_change_nothing(monkeypatch, small_splits, count, tiles, use_tma):
    """Partial results merged are the whole, also where splits are left without keys."""
    backend = get_backend("interpret")
    use_tiles(monkeypatch, *tiles, use_tma=use_tma)
    q, rows = normal(backend, 6, 3, 4, WIDTH), normal(backend, 6, 160, WIDTH, seed=1)
    lens = [160, 159, 97, 17, 3, 0]
    use_splits(monkeypatch, 1)
    want = attend(backend, q, rows, lens)
    use_splits(monkeypatch, count)
    pool, tables = paged(backend, rows, 16)
    for got in (attend(backend, q, rows, lens), attend(backend, q, pool, lens, tables)):
        assert_close(got[0], want[0])
        assert_close(got[1], want[1])


@pytest.mark.parametrize("splits_too", [False, True])
def test_prefix_and_suffix_merge(backend, monkeypatch, splits_too):
    """What its lse is for: attention over two ranges of keys makes attention over both."""
    if splits_too:
        monkeypatch.setattr(kernels, "MIN_KEYS", 16)
        use_splits(monkeypatch, 3)
    q, rows = normal(backend, 2, 1, 4, WIDTH), normal(backend, 2, 80, WIDTH, seed=1)
    want = attend(backend, q, rows, [80, 70])
    prefix = attend(backend, q, rows, [50, 50])
    suffix = attend(backend, q, rows[:, 50:], [30, 20])
    outs, lses = (torch.stack(pair).flatten(1, 2) for pair in zip(prefix, suffix, strict=True))
    out, lse = backend.merge_attention_states(outs, lses)
    assert_close(out, want[0].flatten(0, 1))
    assert_close(lse, want[1].flatten(0, 1))


def test_every_code_of_an_8_bit_cache(backend):
    """With one key the result is its value: all of float8_e4m3fn's, scaled."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    row = torch.cat((codes, codes[:16])).view(torch.float8_e4m3fn).to(backend.device)
    q = normal(backend, 1, 1, 4, 272)
    scale = torch.tensor([0.375], device=backend.device)
    lens = integers(backend, [1])
    out = backend.mla_attention(q, row.view(1, 1, 272), None, lens, 256, 1e-3, scale=scale)
    assert torch.equal(out, (0.375 * row[:256].float()).expand(1, 1, 4, 256))
    plain = backend.mla_attention(q, row.view(1, 1, 272), None, lens, 256, 1e-3)
    assert torch.equal(plain, row[:256].float().expand(1, 1, 4, 256))
    for code in (0x7F, 0xFF):
        codes[3] = code
        row = torch.cat((codes, codes[:16])).view(torch.float8_e4m3fn).to(backend.device)
        out = backend.mla_attention(q, row.view(1, 1, 272), None, lens, 256, 1e-3)
        assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_8_bit_cache_is_its_widened_values(backend, dtype):
    q = normal(backend, 2, 2, 4, WIDTH, dtype=dtype)
    codes = normal(backend, 2, 40, WIDTH, seed=1).to(torch.float8_e4m3fn)
    scale = torch.tensor([2.0], device=backend.device)  # exact in every dtype
    got = attend(backend, q, codes, [40, 17], scale=scale)
    want = attend(backend, q.float(), 2.0 * codes.float(), [40, 17])
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_heads", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["paged", "contiguous", "small blocks", "fp8"])
def test_tiles_of_the_gpu(dtype, num_heads, kind):
    """Latents of 512 columns, for which each GPU has tiles of its own."""
    axes = {
        "batch": 3,
        "num_heads": num_heads,
        "q_len": 2,
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "block_size": 16 if kind == "small blocks" else 64,
        "max_blocks": 20,
        "lens": "random",
        "paged": kind != "contiguous",
        "hostile": True,
        "cache_dtype": torch.float8_e4m3fn if kind == "fp8" else None,
        "with_lse": True,
    }
    arguments = sample(OP, dtype, "cuda", 1, **axes)
    twin = clone(arguments)
    assert_close(get_backend("cuda").mla_attention(**arguments), OP.reference(**twin))
    assert_close(arguments["lse"], twin["lse"])


def test_refusals(backend):
    q, rows = normal(backend, 2, 1, 4, WIDTH), normal(backend, 2, 40, WIDTH, seed=1)
    lens, tables = integers(backend, [40, 17]), integers(backend, [[0], [1]])
    good = {
        "q": q,
        "cache": rows,
        "block_tables": tables,
        "kv_lens": lens,
        "kv_lora_rank": LORA,
        "softmax_scale": SCALE,
    }
    scale = torch.ones(1, device=backend.device)
    refused = {
        "kv_lora_rank": [{"kv_lora_rank": 0}, {"kv_lora_rank": WIDTH}],
        "q": [{"q": normal(backend, 2, 1, 4, 300), "cache": normal(backend, 2, 40, 300)}],
        "cache": [
            {"cache": rows.half()},
            {"cache": rows[:0]},
            {"cache": rows[:, :0]},
            {"cache": rows[:1], "block_tables": None},
        ],
        "block_tables": [{"block_tables": tables[:, :0]}],
        "scale": [
            {"scale": scale},
            {"scale": scale.half(), "cache": rows.to(torch.float8_e4m3fn)},
        ],
        "lse": [{"lse": torch.zeros(2, 1, 4, dtype=torch.float16, device=backend.device)}],
    }
    for argument, changes in refused.items():
        for change in changes:
            with pytest.raises(InputError) as error:
                backend.mla_attention(**(good | change))
            assert error.value.argument == argument, change
