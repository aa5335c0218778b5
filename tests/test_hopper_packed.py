"""Packed products on Hopper: executed by the emulator, and what is compiled of them."""

import contextlib
import itertools
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import triton

from ferrum_triton.gluon_emulator import EmulationError, hopper, run
from ferrum_triton.gluon_emulator.mutants import mutants
from ferrum_triton.gluon_emulator.schedule import Operation, current
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.hopper.packed import packed_kernel
from ferrum_triton.kernels.hopper.packed_products import packed_products
from ferrum_triton.kernels.jit import note_launches, record_launches
from ferrum_triton.kernels.quant.activations import arrange
from ferrum_triton.kernels.quant.gemv_fused import gemv_quant_gate_up_silu, gemv_quant_qkv
from ferrum_triton.kernels.quant.packed_config import (
    PackedConfig,
    is_served,
    order_of,
    packed_candidates,
    packed_fits,
    registers_of,
    shared_bytes,
)
from ferrum_triton.kernels.quant.packed_costs import programs_of
from ferrum_triton.kernels.quant.products import candidates, heuristic, packed, product, products
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.ops.elementwise import gelu_tanh
from ferrum_triton.quant import FORMATS, dequantize_blocks, to_planes
from ferrum_triton.quant.planes import PLANE_FORMATS
from tests.compiling import compiled
from tests.packed_twins import twins
from tests.test_quant_mma import packed as matrix
from tests.test_quant_mma import planes_of, seeded

HOPPER = gpu_of_arch("sm_90")
KINDS = [
    kind for kind, fmt in FORMATS.items() if f"{kind}:planes" in PLANE_FORMATS if is_served(fmt)
]
SMALL = PackedConfig(16, span=2, stages=2, x_stages=2)
CONFIGS = [
    SMALL,
    SMALL._replace(streamed=False),
    SMALL._replace(span=1, ctas_per_sm=2),
    SMALL._replace(tokens=8, span=4),
    SMALL._replace(span=1, overlapped=True),
    SMALL._replace(overlapped=True, streamed=False),
    SMALL._replace(tokens=32, span=4, overlapped=True, stages=3, x_stages=3),
    SMALL._replace(x_stages=0),
    SMALL._replace(span=4, x_stages=0, streamed=False),
    SMALL._replace(span=1, overlapped=True, x_stages=0, stages=3),
    SMALL._replace(span=4, x_stages=0, pingpong=True),
    SMALL._replace(tokens=32, span=4, x_stages=0, streamed=False, stages=3, pingpong=True),
    SMALL._replace(pingpong=True),
]


def tokens(m, k, dtype=torch.float16, seed=1):
    return torch.randn(m, k, generator=seeded(seed)).to(dtype)


def emulate(
    a,
    blocks,
    kind,
    config,
    y=None,
    seed=0,
    mutant=None,
    arranging=arrange,
    concurrent=1,
    **added,
):
    """The product with matrices side by side, and the tickets that it left."""
    arranged, matrices = arranging(a, order_of(config)), [planes_of(each, kind) for each in blocks]
    if y is None:
        y = a.new_full((len(a), sum(map(len, matrices))), torch.nan)
    with note_launches(runs=False) as launches:
        packed_products(y, arranged, matrices, f"{kind}:planes", config, a.shape[1], **added)
    ((kernel, grid, args, meta),) = [(x.kernel, x.grid, x.args, x.meta) for x in launches]
    constexprs = {name: meta[name] for name in kernel.constexprs}
    options = {"assembly": twins(FORMATS[kind]), "seed": seed, "mutant": mutant, "timeout": 60}
    run(kernel.jit, grid, args, constexprs, concurrent=concurrent, **options)
    return y, arranged.tickets


def wanted(a, blocks, kind):
    return a.double() @ dequantize_blocks(torch.cat(blocks), FORMATS[kind]).double().T


def error(got, want):
    """Squared error over the squares of what is wanted."""
    return ((got.double() - want).square().sum() / want.square().sum()).item()


# The result's own rounding, and that of weights and minimums to float16.
LIMITS = {torch.float16: 1e-6, torch.bfloat16: 6e-6, torch.float32: 1e-6}


@pytest.mark.parametrize(
    ("kind", "config"), [*zip(KINDS, itertools.cycle(CONFIGS)), *(("Q4_K", c) for c in CONFIGS)]
)
def test_values(kind, config):
    assert_values(kind, config)


def assert_values(kind, config, m=20, n=330, k=512, dtype=torch.float16, scale=1):
    """The product is right, and its tickets are left at zero."""
    a, blocks = tokens(m, k, dtype) * scale, [matrix(kind, n, k)]
    y, tickets = emulate(a, blocks, kind, config)
    assert error(y, wanted(a, blocks, kind)) < LIMITS[dtype]
    assert not tickets.any()


def test_what_lies_behind_the_last_token_is_not_in_a_result():
    """Tiles are read whole: rows of no token are in memory, and any numbers."""
    a, blocks, results = tokens(9, 512), [matrix("Q4_K", 130, 512)], []

    def filled(fill, *given):
        arranged = arrange(*given)
        assert len(arranged.x) == SMALL.tokens
        for part in filter(torch.is_tensor, arranged[:3]):  # some take no sums
            part[9:] = fill
        return arranged

    for fill in (0.0, torch.nan):
        results.append(emulate(a, blocks, "Q4_K", SMALL, arranging=partial(filled, fill))[0])
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "dtype"),
    [
        ("Q4_K", 1, 1, 256, torch.bfloat16),
        ("Q4_0", 9, 129, 352, torch.float16),
        ("Q5_0", 17, 8, 32, torch.float32),
        ("Q4_Z", 33, 200, 800, torch.bfloat16),
    ],
)
def test_odd_sizes(kind, m, n, k, dtype):
    assert_values(kind, SMALL._replace(overlapped=m > 9), m, n, k, dtype, scale=100)


def test_what_is_added():
    a, blocks = tokens(20, 512, torch.bfloat16), [matrix("Q4_K", 200, 512)]
    bias, residual = torch.randn(200), tokens(20, 2 * 200)[:, :200]
    y = torch.full((20, 300), torch.nan)
    emulate(a, blocks, "Q4_K", SMALL, y[:, 50:250], bias=bias, residual=residual)
    want = wanted(a, blocks, "Q4_K") + bias.double() + residual.double()
    assert error(y[:, 50:250], want) < LIMITS[y.dtype]
    assert y[:, :50].isnan().all() and y[:, 250:].isnan().all()


@pytest.mark.parametrize(
    ("config", "counts"),
    [*zip(CONFIGS[:3], [(200, 70, 136), (0, 150, 20), (30, 140)], strict=True)],
)
def test_matrices_side_by_side(config, counts):
    a, blocks = tokens(20, 512), [matrix("Q6_K", n, 512, seed=i) for i, n in enumerate(counts)]
    y, _ = emulate(a, blocks, "Q6_K", config)
    assert error(y, wanted(a, blocks, "Q6_K")) < LIMITS[a.dtype]


@pytest.mark.parametrize(
    ("config", "kind", "activation"),
    [(CONFIGS[0], "Q4_K", "silu"), (CONFIGS[5], "Q4_1", "gelu_tanh"), (CONFIGS[6], "Q8_0", "silu")],
)
def test_gate_and_up(config, kind, activation):
    a, blocks = tokens(20, 512), [matrix(kind, 100, 512, seed=i) for i in range(2)]
    y, _ = emulate(a, blocks, kind, config, a.new_empty(20, 100), activation=activation)
    assert error(y, gated(a, blocks, kind, activation)) < 2 * LIMITS[a.dtype]


def gated(a, blocks, kind, activation):
    gate, up = wanted(a, blocks, kind).chunk(2, 1)
    return (gelu_tanh(gate) if activation == "gelu_tanh" else gate * gate.sigmoid()) * up


@pytest.mark.parametrize(
    ("tiles", "blocks", "programs"),
    [
        (32, 56, 128),
        (56, 12, 112),
        (40, 20, 120),  # of 7, 7 and 6 blocks
        (20, 38, 120),
        (130, 16, 130),
        (224, 16, 132),
        (40, 100, 120),
        (56, 100, 132),
        (1, 3, 3),
    ],
)
def test_tiles_are_shared_evenly_where_no_program_has_more_to_do(tiles, blocks, programs):
    found = programs_of(PackedConfig(128), tiles, blocks, 132)
    assert found.count == programs
    units = tiles * blocks
    least = cdiv(units, min(132, units))
    assert least <= found.blocks <= 1.07 * least + 1
    assert found.cut or programs % tiles == 0


@pytest.mark.parametrize("config", [SMALL, SMALL._replace(overlapped=True)])
def test_sums_are_the_same_in_whatever_order_programs_run(config):
    a, blocks = tokens(20, 512), [matrix("Q4_K", 330, 512)]
    results = [emulate(a, blocks, "Q4_K", config, seed=seed) for seed in range(3)]
    assert all(torch.equal(y, results[0][0]) and not tickets.any() for y, tickets in results)


# What makes no result wrong, but the order in which warpgroups begin (test_hopper_packed_pingpong),
# and the order of copies (test_hopper_packed_ahead).
TAKES_OVER = "mbarrier.wait(w.go.index(WARPGROUP), row & 1 ^ 1 - WARPGROUP)"
TOKENS_FIRST = "mbarrier.wait(asked.index(0), 0)"
# And what one launch of the emulator cannot miss: the launches before and after it, and the order
# of a partition's own stores and its ticket.
NOT_SEEN = {"gl.thread_barrier()", TAKES_OVER, TOKENS_FIRST}


def test_every_synchronisation_is_needed():
    variants = SMALL, SMALL._replace(overlapped=True, span=2), SMALL._replace(pingpong=True)
    seen = assert_every_mutant_fails(variants)
    assert len(seen) == 9, seen


def without(text):
    """The mutant of the kernel that lacks a statement."""
    (found,) = [mutant for mutant in mutants(packed_kernel.jit) if mutant.text == text]
    return found


@contextlib.contextmanager
def whose(what):
    """Whose operations of a kind begin, one after the other, of each program: {program: names}."""
    begun = {}

    def noted(program, kind):
        if kind == what:
            begun.setdefault(program.index[0], []).append(current().name)
        return Operation(program, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "Operation", noted)
        yield begun


def assert_every_mutant_fails(variants):
    """Whatever is left out, one of the configurations notices; what was left out."""
    a, blocks = tokens(20, 512), [matrix("Q4_K", 330, 512)]
    want, seen = wanted(a, blocks, "Q4_K"), []
    for mutant in mutants(packed_kernel.jit):
        if mutant.text in NOT_SEEN:
            continue
        seen.append(str(mutant))
        for config, seed in itertools.product(variants, range(4)):
            try:
                y, tickets = emulate(a, blocks, "Q4_K", config, seed=seed, mutant=mutant)
            except EmulationError:
                break
            if not error(y, want) < LIMITS[a.dtype] or tickets.any():
                break
        else:
            pytest.fail(str(mutant))
    return seen


def test_it_is_tried_on_hopper_alone_and_not_chosen_where_the_plain_kernel_takes_less():
    for kind, m in itertools.product(KINDS, (5, 16, 32, 64, 256)):
        bucket = "few" if m < 9 else "many"
        shape = (kind, bucket, m, 4096, 128)
        assert (heuristic(HOPPER, *shape)["path"] == "packed") == (m > 32)
        assert any(config["path"] == "packed" for config in candidates(HOPPER, *shape))
        for arch in ("sm_80", "sm_100", "gfx942"):
            assert heuristic(gpu_of_arch(arch), *shape)["path"] != "packed"
            tried = candidates(gpu_of_arch(arch), *shape)
            assert not any(config["path"] == "packed" for config in tried)
            assert "Hopper" in packed_fits(gpu_of_arch(arch), SMALL, kind, m, 4096, 4096)
    assert not packed_candidates(HOPPER, "Q2_K", 16, 4096, 4096)
    assert "unpacked" in packed_fits(HOPPER, SMALL, "Q2_K", 16, 4096, 4096)
    assert "tickets" in packed_fits(HOPPER, SMALL, "Q4_K", 16, 1 << 20, 4096)
    assert "spill" in packed_fits(HOPPER, SMALL._replace(ctas_per_sm=2), "Q5_K", 16, 4096, 4096)
    many = SMALL._replace(stages=8, ctas_per_sm=2)
    assert "shared memory" in packed_fits(HOPPER, many, "Q4_K", 16, 4096, 4096)
    for ring in ({"stages": 1}, {"x_stages": 1}):
        assert "stages" in packed_fits(HOPPER, SMALL._replace(**ring), "Q4_K", 16, 4096, 4096)
    assert "tiles of 16" in packed_fits(HOPPER, SMALL._replace(tokens=16), "Q4_K", 17, 4096, 4096)
    large = PackedConfig(128, stages=2)
    for m in (300, 1024):
        assert not packed_fits(HOPPER, large, "Q4_0", m, 4096, 4096)
    assert "1024 tokens" in packed_fits(HOPPER, large, "Q4_0", 1025, 4096, 4096)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def packed_rows(kind, n, k):
    return empty(n, PLANE_FORMATS[f"{kind}:planes"].row_bytes(k), dtype=torch.uint8)


@pytest.mark.parametrize("m", [5, 16])
def test_whoever_asks_for_products_gets_it(m):
    w, kind = packed_rows("Q4_K", 256, 512), "Q4_K:planes"
    calls = (
        lambda: product(empty(m, 512), w, kind),
        lambda: gemv_quant_gate_up_silu(empty(m, 512), w, w, kind, kind),
        lambda: gemv_quant_qkv(empty(m, 512), w, w, w, kind, kind, kind),
    )
    with products.forced(packed(SMALL)):
        for call in calls:
            with record_launches((9, 0)) as launches:
                call()
            assert [x.kernel.name for x in launches] == ["_arrange_kernel", "packed_kernel"]


@pytest.mark.parametrize("m", [33, 64, 128, 129, 256, 400])
def test_two_kinds_share_a_launch_of_the_plain_kernel_up_to_its_largest_tile(m):
    """Where Hopper's would multiply one of them alone, and a launch of its own the other."""
    q, v = packed_rows("Q4_K", 5120, 4096), packed_rows("Q6_K", 1024, 4096)
    config = packed(PackedConfig(128 if m > 64 else 64, 2))
    with products.forced(config), record_launches((9, 0)) as launches:
        gemv_quant_qkv(empty(m, 4096), q, None, v, "Q4_K:planes", "", "Q6_K:planes")
    names = [x.kernel.name for x in launches]
    assert names[1:] == (["_mma_quant_kernel"] if m <= 128 else ["packed_kernel"] * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 16, 33, 64, 128, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_on_a_gpu(kind, m):
    """Right, and the same bits at every launch, tickets of the launch before included."""
    a, blocks = tokens(m, 1024, torch.bfloat16), matrix(kind, 1000, 1024)
    x, planes, want = a.cuda(), to_planes(blocks, kind).cuda(), wanted(a, [blocks], kind)
    for config in packed_candidates(HOPPER, kind, m, 1000, 1024):
        with products.forced(packed(config)):
            y = product(x, planes, f"{kind}:planes")
            assert torch.equal(product(x, planes, f"{kind}:planes"), y), config
        assert error(y.cpu(), want) < LIMITS[a.dtype], config


def launch_of(kind, config, m, n=28672, k=4096, matrices=1, **added):
    with record_launches((9, 0)) as launches:
        arranged = arrange(empty(m, k), order_of(config))
        w = [packed_rows(kind, n, k)] * matrices
        packed_products(empty(m, n), arranged, w, f"{kind}:planes", config, k, **added)
    return launches[-1]


JOINED = PackedConfig(64, stages=2, x_stages=0)


@pytest.mark.parametrize(
    ("kind", "config", "registers"),
    [
        ("Q4_K", JOINED, 168),
        ("Q4_K", JOINED._replace(streamed=False), 168),
        ("Q4_K", JOINED._replace(tokens=32), 240),
        ("Q4_K", JOINED._replace(tokens=128), 240),
        ("Q4_K", JOINED._replace(tokens=128, overlapped=True), 224),
        ("Q4_K", JOINED._replace(tokens=256, overlapped=True), 240),
        ("Q4_K", JOINED._replace(tokens=32, ctas_per_sm=2), 104),
        ("Q4_K", JOINED._replace(ctas_per_sm=2), 104),
        ("Q4_0", JOINED, 168),
        ("Q4_0", JOINED._replace(streamed=False), 192),
        ("Q4_0", JOINED._replace(tokens=128, overlapped=True), 240),
        ("Q4_Z", JOINED, 168),
        ("IQ4_XS", JOINED, 240),
        ("Q5_K", JOINED, 240),
    ],
)
def test_registers_are_those_timed_and_are_there(kind, config, registers):
    tokens, programs = config.tokens, config.ctas_per_sm
    launch, told = launch_of(kind, config, tokens), registers_of(config, FORMATS[kind])
    assert (launch.meta["TILE"].registers, launch.meta["maxnreg"]) == told
    assert told.multiplying == registers
    # Warps that fetch leave what they have over 24 to those that multiply, which wait for it.
    assert 2 * told.multiplying + 24 <= 3 * told.average
    assert programs * 3 * 128 * told.average <= 1 << 16


def assembler_says(ptx):
    """What ptxas prints of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(ptx)
        command = [tool, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def unpacking_in_flight(code):
    """Of the instructions that mask codes, those between a product and the wait for it."""
    found, in_flight = [], False
    for each in code:
        if each.name.startswith("HGMMA"):
            in_flight = True
        elif each.name.startswith("WARPGROUP.DEPBAR"):
            in_flight = each.operands[-1] != "0x0"
        elif each.name.startswith("LOP3") and re.search(
            r"0xf000f|0xf000f0|0x1f001f|0xff00ff", " ".join(each.operands)
        ):
            found.append(in_flight)
    return found


GELU = {"activation": "gelu_tanh"}
TRIED = [
    ("Q4_K", 16, PackedConfig(16, 2, False, True, 2, 4, 6), {"matrices": 3}),
    ("Q4_0", 64, PackedConfig(64, 2, True, False, 1, 6, 4), {}),
    ("Q4_K", 64, PackedConfig(64, 2, False, False, 1, 3, 0), {}),
    ("Q4_K", 256, PackedConfig(256, 1, True, False, 1, 3, 4), {}),
    ("Q4_Z", 32, PackedConfig(32, 2, True, True, 1, 8, 4), {"matrices": 2, "activation": "silu"}),
    ("Q4_K", 16, PackedConfig(16, 2, False, True, 2, 3, 0, True), {"matrices": 3}),
    ("Q4_0", 32, PackedConfig(32, 2, False, False, 2, 2, 0, True), {}),
    ("Q4_K", 128, PackedConfig(128, 2, True, True, 1, 4, 3, True), {}),
    ("Q4_Z", 256, PackedConfig(256, 1, True, False, 1, 2, 4, True), {}),
    ("Q5_K", 64, PackedConfig(64, 2, False, False, 1, 3, 0, True), {"matrices": 2, **GELU}),
    ("Q4_K", 64, PackedConfig(64, 2, True, True, 1, 3, 0, True), {"matrices": 2, **GELU}),
]


@pytest.mark.parametrize(("kind", "m", "config", "added"), TRIED)
def test_what_is_compiled(kind, m, config, added):
    assert not packed_fits(HOPPER, config, kind, m, 28672, 4096)
    resources = compiled(launch_of(kind, config, m, **added))
    assert resources.registers == registers_of(config, FORMATS[kind]).average
    # Gate and up are turned round as one tile.
    spare = 256 + (64 * config.tokens * 4 if "activation" in added else 0)
    assert 0 <= shared_bytes(config, FORMATS[kind]) - resources.shared <= spare
    code = instructions(resources.asm["cubin"])
    # Two warpgroups, four products for each of a block's four steps, and one of its offsets.
    products_of_block = 4 * 4 + config.sums_offsets
    assert sum(each.name.startswith("HGMMA.64x") for each in code) == 2 * products_of_block
    found = unpacking_in_flight(code)
    assert len(found) == 2 * 16 * 4
    if config.overlapped:
        # A block's first row of steps is unpacked before any of its products.
        assert sum(found) >= 2 * 16 * 2
    assert "C75" not in assembler_says(resources.asm["ptx"])


@pytest.mark.parametrize("m", [8, 32, 64, 256])
@pytest.mark.every_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_compiles(kind, m):
    for config in packed_candidates(HOPPER, kind, m, 28672, 4096):
        compiled(launch_of(kind, config, m))
