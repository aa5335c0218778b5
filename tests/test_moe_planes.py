"""The experts of a layer in planes: the whole of it, and what its kernels take of a GPU."""

import dataclasses
import re
from itertools import cycle, zip_longest

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from bench import moe_layer
from bench.launches import record
from ferrum_triton import get_backend
from ferrum_triton.kernels.gpu import gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.moe import prepare
from ferrum_triton.kernels.moe.plane_config import GATE_UP_TILES, MIXES, TILES, Mix, Quads
from ferrum_triton.kernels.moe.plane_gemm import gemm_plane_pairs
from ferrum_triton.kernels.moe.plane_gemv import gemv_plane_pairs
from ferrum_triton.kernels.quant.mma_config import OTHER_TILES, MmaConfig
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.quant.kinds import format_of, quantize_rows
from ferrum_triton.quant.planes import PLANE_FORMATS
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests.compiling import compiled, in_turns

KINDS = list(PLANE_FORMATS)
# Tokens of fewer pairs, and whether of gate and up, that take other tiles than many.
TILES_OF_FEWER = [(8, True), (256, False), (512, True)]
# One of each size of word, of which the matrix of bench cases compiles others.
ALONE = ("Q3_K:planes", "Q5_0:planes", "Q8_0:planes")


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def empty_stack(kind, num_experts, n, k):
    return empty(num_experts, n, format_of(kind).row_bytes(k), dtype=torch.uint8)


@pytest.mark.parametrize("form", moe_layer.FORMATS)
@pytest.mark.parametrize(("backend", "num_tokens"), [("cpu", 2), ("cpu", 17), ("interpret", 17)])
def test_a_layer_is_its_definition(form, backend, num_tokens):
    """Few tokens and more, whose experts are not all chosen."""
    experts = moe_layer.experts_of(form, "cpu", num_experts=4, hidden=256, intermediate=256)
    experts = dataclasses.replace(experts, top_k=2)
    call = moe_layer.tokens("cpu", num_tokens, num_experts=4, top_k=2, hidden=256)[0]
    want = moe_layer.defined(experts, **call)
    assert_close(moe_layer.layer(get_backend(backend), experts, **call), want, scale=2)
    if form == "bf16":
        assert_close(moe_layer.by_grouped_mm(experts, **call), want, scale=4)


# Every mix with two kinds, in turns: each kind meets short words and long, by TMA and not.
@pytest.mark.parametrize(
    ("mix", "kind"),
    [
        (mix, kind)
        for mix, kinds in zip(
            [*MIXES.values(), *map(Mix, OTHER_TILES.values())],
            cycle([("Q4_K", "Q3_K"), ("Q6_K", "Q5_0")]),
            strict=False,
        )
        for kind in kinds
    ],
    ids=str,
)
def test_every_mix_of_tiles_gives_the_products(mix, kind):
    """Whatever the number of pairs: an expert has all of them, one has none."""
    weights = torch.randn(3, 9, 512, generator=torch.Generator().manual_seed(0)) / 512**0.5
    stack = quantize_rows(weights, f"{kind}:planes")
    a = torch.randn(35, 512, generator=torch.Generator().manual_seed(1)).half()
    ids = torch.tensor([2, 0]).repeat_interleave(torch.tensor([67, 3])).view(35, 2)
    buckets, tpe, _ = OPS["compute_ids_tpe"].reference(ids, 3, 1, 1)
    got = gemm_plane_pairs(a, stack, buckets, tpe, f"{kind}:planes", 2, mix=mix)
    want = OPS["gemv_quant_moe_id"].reference(a.double(), stack, ids, f"{kind}:planes")
    assert_close(got, want)
    up = quantize_rows(weights.flip(1), f"{kind}:planes")
    got = gemm_plane_pairs(a, stack, buckets, tpe, f"{kind}:planes", 2, up, mix=mix)
    gated = OPS["gemv_quant_moe_id_gate_up_silu"].reference
    assert_close(got, gated(a.double(), stack, up, ids, *[f"{kind}:planes"] * 2), scale=2)


@pytest.mark.parametrize("config", [MmaConfig(64, 16), MmaConfig(64, 16, use_tma=True)], ids=str)
def test_a_pair_in_two_buckets_has_either_row_or_zeros(config):
    """And none but it: buckets that hold more than all pairs are passed over."""
    generator = torch.Generator().manual_seed(0)
    stack = quantize_rows(torch.randn(3, 9, 256, generator=generator) / 16, "Q4_K:planes")
    a = torch.randn(8, 256, generator=generator).half()
    buckets = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 5, 0, 0], [6, 7, 7, 6, 4]], dtype=torch.int32)
    tpe = torch.tensor([5, 4, 5], dtype=torch.int32)
    got = gemm_plane_pairs(a, stack, buckets, tpe, "Q4_K:planes", 1, mix=Mix(config))[:, 0]
    rows = OPS["gemv_quant_moe_id"].reference(
        a.double(), stack, torch.arange(3).expand(8, 3), "Q4_K:planes"
    )
    homes = {0: (0, 1), 1: (0,), 2: (0,), 3: (0, 1), 4: (0, 1, 2), 5: (1,), 6: (2,), 7: (2,)}
    for pair, experts in homes.items():
        allowed = [torch.zeros(9), *(rows[pair, expert] for expert in experts)]
        assert min((got[pair] - want).abs().max() for want in allowed) < 5e-3, pair
    assert (got[1:3] != 0).any(-1).all()


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("stale", [0, 1, (2 << 32) | 1, -1, (3 << 32) | 5])
def test_the_place_of_a_pair_in_no_bucket_may_be_anothers(stale, use_tma, monkeypatch):
    """Nobody writes it, so that it holds what lay in that memory."""
    room_for_pairs = prepare.room_for_pairs

    def stale_room(*sizes):
        table = room_for_pairs(*sizes)
        table.places.fill_(stale)
        return table

    monkeypatch.setattr(prepare, "room_for_pairs", stale_room)
    generator = torch.Generator().manual_seed(0)
    stack = quantize_rows(torch.randn(3, 9, 256, generator=generator) / 16, "Q4_K:planes")
    a = torch.randn(4, 256, generator=generator).half()
    ids = torch.tensor([[0, 2], [-1, 0], [2, 3], [-1, -1]])
    buckets, tpe, _ = OPS["compute_ids_tpe"].reference(ids, 3, 1, 1)
    out = torch.full((4, 2, 9), torch.nan, dtype=a.dtype)
    mix = Mix(MmaConfig(64, 16, use_tma=use_tma))
    gemm_plane_pairs(a, stack, buckets, tpe, "Q4_K:planes", 2, out=out, mix=mix)
    want = OPS["gemv_quant_moe_id"].reference(a.double(), stack, ids, "Q4_K:planes")
    assert_close(out, want)
    assert not out[(ids < 0) | (ids > 2)].any()


def test_smaller_tiles_take_just_what_the_others_spare():
    """Of experts with so many pairs that large tiles end with, before and after the most spared."""
    counts = torch.tensor([8, 9, 16, 23, 24, 25, 0])
    stack = quantize_rows(
        torch.randn(7, 9, 256, generator=torch.Generator().manual_seed(0)) / 16, "Q4_K:planes"
    )
    ids = torch.arange(7).repeat_interleave(counts).view(-1, 1)
    a = torch.randn(len(ids), 256, generator=torch.Generator().manual_seed(1)).half()
    buckets, tpe, _ = OPS["compute_ids_tpe"].reference(ids, 7, 1, 1)
    out = torch.full((len(ids), 1, 9), torch.nan, dtype=a.dtype)
    mix = Mix(MmaConfig(64, 16), 8, MmaConfig(64, 8))
    gemm_plane_pairs(a, stack, buckets, tpe, "Q4_K:planes", 1, out=out, mix=mix)
    assert_close(out, OPS["gemv_quant_moe_id"].reference(a.double(), stack, ids, "Q4_K:planes"))


def test_experts_that_are_one_matrix():
    """A stack without a stride is one expert to a descriptor, whether gate or up is such."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 9, 256, generator=generator) / 16
    apart = quantize_rows(weights, "Q4_K:planes")
    one = apart[:1].expand(3, -1, -1)
    a = torch.randn(9, 256, generator=generator).half()
    ids = torch.tensor([[2, 0], [0, 2], [1, 1]]).repeat(3, 1)
    buckets, tpe, _ = OPS["compute_ids_tpe"].reference(ids, 3, 1, 1)
    mix = Mix(MmaConfig(64, 16, use_tma=True))
    for gate, up in ((one, apart), (apart, one)):
        got = gemm_plane_pairs(a, gate, buckets, tpe, "Q4_K:planes", 2, up, mix=mix)
        gated = OPS["gemv_quant_moe_id_gate_up_silu"].reference
        assert_close(got, gated(a.double(), gate, up, ids, *["Q4_K:planes"] * 2), scale=2)


# Every pair of a kind, a number of rows and how tiles come.
@pytest.mark.parametrize(
    ("kind", "num_rows", "use_tma"),
    [("Q4_K", 128, False), ("Q4_K", 192, True), ("Q3_K", 128, True), ("Q3_K", 192, False)],
)
def test_a_program_takes_tiles_one_after_the_other(kind, num_rows, use_tma):
    """Of gate and up and alone; pairs of no expert get zeros whatever lay there."""
    generator = torch.Generator().manual_seed(0)
    gate, up = (
        quantize_rows(
            torch.randn(3, num_rows, 512, generator=generator) / 512**0.5, f"{kind}:planes"
        )
        for _ in range(2)
    )
    a = torch.randn(9, 512, generator=generator).half()
    ids = torch.tensor([[2, 0], [-1, 2], [3, 1]]).repeat(3, 1)
    buckets, tpe, _ = OPS["compute_ids_tpe"].reference(ids, 3, 1, 1)
    buckets[0, 1] = 99  # no pair: the one that was there gets zeros as well
    mix = Mix(MmaConfig(64, 16, words=16, parts=2, scale_after=False, use_tma=use_tma))
    for second in (None, up):
        out = torch.full((9, 2, num_rows), torch.nan, dtype=a.dtype)
        gemm_plane_pairs(a, gate, buckets, tpe, f"{kind}:planes", 2, second, out=out, mix=mix)
        args = (a.double(), gate, *(() if second is None else (up,)), buckets, tpe)
        name = "gemm_quant_moe_id" + ("" if second is None else "_gate_up_silu")
        want = OPS[name].reference(*args, *[f"{kind}:planes"] * (len(args) - 3), 2)
        assert (want == 0).all(-1).sum() == 7  # three of expert -1, three of 3, and that one
        assert_close(out, want, scale=2)


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "is_sorted"),
    [
        (1, torch.bfloat16, False),
        (16, torch.bfloat16, False),
        (17, torch.bfloat16, True),
        (512, torch.bfloat16, True),
        (512, torch.float32, False),
    ],
)
def test_pairs_are_sorted_by_expert_where_experts_have_several(num_tokens, dtype, is_sorted):
    stack = empty_stack("Q4_K:planes", 128, 64, 512)
    ids = empty(num_tokens, 8, dtype=torch.int32)
    a = empty(num_tokens, 512, dtype=dtype)
    kinds = ["Q4_K:planes"] * 2
    for name, stacks in (("", [stack]), ("_gate_up_silu", [stack, stack])):
        with record_launches((9, 0)) as launches:
            OPS[f"gemv_quant_moe_id{name}"].impls["triton"](a, *stacks, ids, *kinds[: len(stacks)])
        names = {launch.kernel.name for launch in launches}
        sorts = {"_plane_tiles_kernel", "_quad_tiles_kernel", "packed_experts_kernel"}
        assert bool(names & sorts) == is_sorted
        assert ("_plane_pairs_kernel" in names) != is_sorted


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_mixes_fit_their_gpu(capability):
    gpu = gpu_of_capability(capability)
    for tunable in (TILES, GATE_UP_TILES):
        for kind in PLANE_FORMATS:
            for num_pairs in (8, 512, 2048, 32768):
                shape = num_pairs, 128, kind
                assert tunable.fits(gpu, tunable.heuristic(gpu, *shape), *shape) == ""
                for config in tunable.candidates(gpu, *shape):
                    made_by = {"quads": Quads, None: Mix}.get(config.get("path"))
                    assert made_by is None or made_by.of(config).flat() == config


def test_a_token_meets_other_experts_in_every_call():
    calls = moe_layer.tokens("cpu", 1)
    assert torch.cat([call["ids"].flatten() for call in calls]).unique().numel() == 128
    for call in moe_layer.tokens("cpu", 8):
        assert all(len(set(row)) == len(row) for row in call["ids"].tolist())


# The products are what the matrix of bench cases compiles for such numbers of tokens.
@pytest.mark.parametrize("form", moe_layer.FORMATS)
@pytest.mark.parametrize(
    "num_tokens",
    [
        pytest.param(n, marks=() if n in (1, 64) else pytest.mark.every_gpu)
        for n in moe_layer.TOKENS
    ],
)
def test_a_layer_compiled_for_hopper(form, num_tokens):
    found = record(moe_layer.meta_call(moe_layer.row_of(form, num_tokens)), "sm_90")
    assert found.launches and not found.operations
    for launch in found.launches:
        compiled(launch)


def products(kind, num_tokens, target, gated=False):
    """What gate, or gate and up, launch for so many tokens of eight experts each."""
    ids = empty(num_tokens, 8, dtype=torch.int32)
    stack = empty_stack(kind, 128, 1536, 2048)
    buckets, tpe = empty(128, ids.numel(), dtype=torch.int32), empty(128, dtype=torch.int32)
    with record_launches(TARGETS[target].capability) as launches:
        up = stack if gated else None
        gemm_plane_pairs(empty(num_tokens, 2048), stack, buckets, tpe, kind, 8, up)
    return launches


# Every kind in the tiles of many pairs, which take the most registers, and some in others.
@pytest.mark.parametrize(
    ("kind", "num_tokens", "gated"),
    [(kind, 4096, False) for kind in KINDS]
    + in_turns(("Q4_K:planes", "Q5_1:planes", "Q3_K:planes"), TILES_OF_FEWER),
)
def test_tiles_compiled_for_hopper(kind, num_tokens, gated):
    """No spills, and weights stay in their registers, pairs of neighbours of K."""
    launches = products(kind, num_tokens, "sm_90", gated)
    for launch in (each for each in launches if each.kernel.name == "_plane_tiles_kernel"):
        asm = compiled(launch).asm
        code = instructions(asm["cubin"])
        # Products stay whole, and are waited for once each: of weights, and of minimums.
        waits = [each for each in code if each.name.startswith("WARPGROUP.DEPBAR")]
        assert len(waits) <= 3
        ttgir = asm["ttgir"]
        assert not re.search(r"ttg.local_alloc %", ttgir)
        layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
        unpacking = re.findall(
            r"elementwise_inline_asm .*packed_element = 2.*? : tensor<\w+, "
            r"([^<>]*(?:<\{[^}]*\}>)?)>",
            ttgir,
        )
        assert unpacking
        for layout in unpacking:
            text = layouts.get(layout, layout)
            assert re.search(r"register = \[\[0, 1\]|kWidth = [24]", text), text


@pytest.mark.parametrize(
    ("target", "kind", "num_tokens"),
    in_turns(
        ["sm_80", "sm_100", "gfx942"],
        [("Q4_K:planes", 8), ("Q3_K:planes", 4096), ("Q8_0:planes", 8)],
    ),
)
def test_tiles_compiled_elsewhere(target, kind, num_tokens):
    for launch in products(kind, num_tokens, target, gated=True):
        compiled(launch, target)


def pair_launch(kind, up_kind="", target="sm_90", **options):
    with record_launches(TARGETS[target].capability) as launches:
        gemv_plane_pairs(
            empty(1, 2048),
            empty_stack(kind, 128, 768, 2048),
            empty(1, 8, dtype=torch.int32),
            kind,
            empty_stack(up_kind, 128, 768, 2048) if up_kind else None,
            up_kind,
            **options,
        )
    return launches[-1]


# Every kind as gate or up of another; the last one as both, and a few alone.
@pytest.mark.parametrize(
    ("gate", "up"),
    [*zip_longest(KINDS[::2], KINDS[1::2], fillvalue=KINDS[-1])]
    + [
        pytest.param(kind, "", marks=() if kind in ALONE else pytest.mark.every_gpu)
        for kind in KINDS
    ],
)
def test_pairs_compiled_for_hopper(gate, up):
    assert ".ftz" not in compiled(pair_launch(gate, up)).asm["ptx"]


def test_gate_and_up_share_their_activations():
    """Their loads, 64 bytes a thread, and the integers made of them, whatever the kinds."""
    alike, apart = (
        compiled(pair_launch("Q4_K:planes", up)).asm["ptx"] for up in ("Q4_K:planes", "Q5_K:planes")
    )
    loads = r"ld\.global\.v4\.b32"
    assert len(re.findall(loads, alike)) == len(re.findall(loads, apart)) == 4


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_pairs_compiled_elsewhere(target):
    launch = pair_launch("Q6_K:planes", "Q4_K:planes", target)
    compiled(launch, target)


def test_a_chained_launch_waits_before_its_weights_or_guesses_their_expert():
    """Guessed weights are loaded before the wait, and others after it."""
    weights = r"ld\.global\.L1::evict_first"
    for guess in (False, True):
        launch = pair_launch("Q4_K:planes", chained=True, guess=guess)
        ptx = compiled(launch).asm["ptx"]
        waits = ptx.split("griddepcontrol.wait;")
        found = [len(re.findall(weights, part)) for part in waits]
        # Of a guess, the first wait is that of programs whose pair seems to have no expert.
        assert found == ([8, 0, 8] if guess else [0, 8])


def packed_experts():
    """Gate, up and down of 16 experts of 512 by 512."""
    made = moe_layer.experts_of("q4_K", "cuda", num_experts=16, hidden=512, intermediate=512)
    return made.gate.blocks, made.up.blocks, made.down.blocks


@pytest.mark.gpu
def test_a_chain_of_launches():
    """Each takes what the launch before it wrote."""
    (gate, up, down), kind = packed_experts(), moe_layer.PACKED["q4_K"]
    call = moe_layer.tokens("cuda", 1, num_experts=16, hidden=512)[0]
    for _ in range(3):
        results = []
        for chained in (False, True):
            inner = gemv_plane_pairs(
                call["x"], gate, call["ids"], kind, up, kind, chained=chained
            )  # fmt: skip
            results.append(
                gemv_plane_pairs(inner, down, call["ids"], kind, chained=chained, guess=chained)
            )
        assert torch.equal(*results)


@triton.jit
def _late_ids_kernel(ids_ptr, new_ptr, TURNS: tl.constexpr):
    """Writes ids long after the launch behind it may begin."""
    gdc_launch_dependents()
    i = tl.arange(0, 8)
    ids = tl.load(new_ptr + i)
    for _ in range(TURNS):
        ids = (ids * 5 + 3) * 0 + tl.load(new_ptr + i, volatile=True)
    tl.store(ids_ptr + i, ids)


@pytest.mark.gpu
@pytest.mark.parametrize("stale", [0, -1, 3])
def test_a_wrong_guess_is_made_good(stale):
    """Ids that change while the launch before still runs, to and from what is no expert."""
    (*_, down), kind = packed_experts(), moe_layer.PACKED["q4_K"]
    a = torch.randn(1, 8, 512, device="cuda").bfloat16()
    new = torch.tensor([[5, 3, -1, 16, 0, 9, 9, 2]], dtype=torch.int32, device="cuda")
    want = gemv_plane_pairs(a, down, new, kind)
    for _ in range(5):
        ids = torch.full_like(new, stale)
        torch.cuda.synchronize()
        _late_ids_kernel[(1,)](ids, new, 20000, num_warps=1)
        got = gemv_plane_pairs(a, down, ids, kind, chained=True, guess=True)
        assert torch.equal(ids, new) and torch.equal(got, want)
