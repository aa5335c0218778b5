"""Dense products of few tokens: every kernel that a launch choice may name, and what it leaves."""

import dataclasses
import functools
import itertools

import pytest
import torch

import bench.behind
from bench import tune
from ferrum_triton import get_backend
from ferrum_triton.backends.door import make_door
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.linear import is_in_units, product
from ferrum_triton.kernels.linear_config import (
    BLAS,
    MOST_IN_TILES,
    candidates,
    fits,
    gemm_config,
    heuristic,
    matvec,
    mma,
    shared_bytes,
    tiles,
)
from ferrum_triton.kernels.rehearsal import NotReplayable, rehearse
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.kernels.tables import table_file, user_directory
from ferrum_triton.ops.elementwise import GATES
from ferrum_triton.ops.linear import MOST_TOKENS
from ferrum_triton.registry import OPS, Case
from ferrum_triton.testing import UNROUNDED, assert_close
from tests.compiling import compiled

# Rows of a program, warps and loads in flight that end inside the matrices below, and past them.
PATHS = [
    matvec(2, 128, 1, 16),
    matvec(8, 256, 2, 0),
    mma(8, 1, 1, 4),
    mma(16, 2, 2, 16),
    mma(32, 1, 4, 0),
    tiles(16, 64, 1, 1, 2),
    tiles(32, 16, 3, 4, 1),
]
EACH_PATH = pytest.mark.parametrize(
    "config", PATHS, ids=lambda c: f"{c['path']}-{c['BLOCK_N']}-{c['num_warps']}"
)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """On the CPU kernels are interpreted."""
    return request.param


def strided(rows, columns, dtype, device, apart=0, first=0):
    """Random rows with NaN around them: ``first`` elements before each, ``apart`` after it."""
    room = torch.full((rows, columns + apart + first), torch.nan)
    room[:, first : first + columns] = torch.randn(rows, columns)
    return room.to(dtype).to(device)[:, first : first + columns]


def multiplied(a, b, config, wide=False):
    """The product by the kernel of ``config``, into rows that have others' memory between them."""
    dtype = torch.float32 if wide else a.dtype
    room = torch.full((len(a), len(b) + 3), torch.nan, dtype=dtype, device=a.device)
    y = room[:, : len(b)]
    product(a, b, config, y)
    assert room[:, len(b) :].isnan().all()
    return y


def reference(a, b):
    return a.double() @ b.double().T


@EACH_PATH
@EACH_DTYPE
def test_every_path_sums_every_row_and_column_once(config, dtype, device):
    """Rows past a program's last, columns past a step's, strides, and sums unrounded or rounded."""
    sizes = itertools.product((1, 17, 37), (8, 200, 328))
    for num_tokens, (num_rows, num_cols) in zip(
        (*range(1, MOST_TOKENS + 1), MOST_TOKENS), sizes, strict=True
    ):
        a = strided(num_tokens, num_cols, dtype, device, apart=16)
        b = strided(num_rows, num_cols, dtype, device, apart=8, first=8)
        for wide, scale in ((False, 4), (True, UNROUNDED)):
            assert_close(multiplied(a, b, config, wide), reference(a, b), scale=scale)


@EACH_DTYPE
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("config", [mma(16, 2, 2, 16), mma(32, 1, 4, 0)], ids=["eight", "sixteen"])
def test_gates_are_those_of_their_rows(config, activation, dtype, device):
    """Rows of y that end inside a program's, and its rows of gate and up."""
    op = OPS["gemm_gate_up_silu"]
    for num_tokens, num_rows, num_cols in ((1, 16, 136), (5, 37, 64), (8, 3, 200), (3, 24, 520)):
        a = strided(num_tokens, num_cols, dtype, device, apart=8)
        b = strided(2 * num_rows, num_cols, dtype, device, apart=16, first=8)
        room = torch.full((num_tokens, num_rows + 3), torch.nan, dtype=dtype, device=device)
        product(a, b, config, room[:, :num_rows], activation)
        assert room[:, num_rows:].isnan().all()
        want = op.reference(a.double(), b.double(), activation)
        assert_close(room[:, :num_rows], want, scale=4)


@EACH_DTYPE
@pytest.mark.parametrize("num_tokens", [9, 16, 33, MOST_IN_TILES])
def test_tiles_take_more_tokens(num_tokens, dtype, device):
    """Splits of K that end inside a step, and the last of them with fewer steps than others."""
    for num_rows, num_cols, splits in ((64, 136, 1), (17, 520, 2), (130, 320, 3), (5, 64, 4)):
        config = tiles(64, 16, splits, 4, 3)
        a = strided(num_tokens, num_cols, dtype, device, apart=8)
        b = strided(num_rows, num_cols, dtype, device, apart=16, first=8)
        for wide, scale in ((False, 4), (True, UNROUNDED)):
            assert_close(multiplied(a, b, config, wide), reference(a, b), scale=scale)


@EACH_DTYPE
@pytest.mark.parametrize("config", PATHS[:2], ids=["two-rows", "eight-rows"])
def test_threads_along_k_take_any_alignment(config, dtype, device):
    for num_cols, first in ((1, 0), (33, 1), (131, 3), (128, 1)):
        a = strided(2, num_cols, dtype, device, apart=1)
        b = strided(11, num_cols, dtype, device, first=first)
        assert not is_in_units(a, b)
        assert_close(multiplied(a, b, config, wide=True), reference(a, b), scale=4)


@EACH_PATH
def test_what_is_not_finite_stays_in_its_row_and_column(config, device):
    """A NaN or an infinity reaches the sums that it is part of, and no other."""
    a = strided(5, 136, torch.bfloat16, device)
    b = strided(19, 136, torch.bfloat16, device)
    a[1, 3], a[4, 135], b[2, 77], b[18, 0] = torch.inf, torch.nan, -torch.inf, torch.nan
    a[2, 77] = 0.0
    want = reference(a, b)
    assert want.isfinite().any() and want[2, 2].isnan()
    assert_close(multiplied(a, b, config), want, scale=4)


@EACH_PATH
def test_one_row_may_be_all(config, device):
    """Rows of stride 0."""
    a = strided(1, 64, torch.float16, device).expand(4, 64)
    b = strided(1, 64, torch.float16, device).expand(20, 64)
    assert_close(multiplied(a, b, config, wide=True), reference(a, b), scale=4)


@EACH_DTYPE
def test_sums_are_in_float32(dtype, device):
    """Terms that cancel in float32, and would not in 16 bits."""
    a = torch.ones(3, 1024, dtype=dtype, device=device)
    b = torch.ones(16, 1024, dtype=dtype, device=device)
    b[:, ::2] = -1
    b[:, 7] = 1 + 2**-7
    for config in PATHS:
        assert (multiplied(a, b, config, wide=True) == 2**-7).all()


def test_the_backend_takes_the_kernels_in_the_interpreter():
    """The property tests of the op then run them."""
    backend = get_backend("interpret")
    names = ((1, "_matvec"), (5, "_mma"), (20, "_tiles _add_partials"), (65, ""))
    for num_tokens, wanted in names:
        with record_launches() as launches:
            backend.gemm(torch.randn(num_tokens, 128).half(), torch.randn(9, 128).half())
        kernels = [launch.kernel.name for launch in launches]
        assert kernels == [f"{name}_kernel" for name in wanted.split()]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_what_torch_computes_is_never_replayed(wide, num_tokens):
    """A replay repeats a call's launches of kernels; torch's own product is none of them."""
    op = OPS["gemm"]
    launcher = op.impls["triton"]
    door = make_door(op, launcher, "cpu", replays=True)
    with gemm_config.forced(BLAS):
        for _ in range(4):
            a, b = torch.randn(num_tokens, 32).half(), torch.randn(7, 32).half()
            assert_close(door(a, b, wide), reference(a, b), scale=4)
        with pytest.raises(NotReplayable):
            rehearse(launcher, {"a": a, "b": b, "wide": wide, "out": None}, frozenset({"wide"}))


def test_a_kernels_calls_are_replayed():
    op = OPS["gemm"]
    door = make_door(op, op.impls["triton"], "cpu", replays=True)
    for _ in range(4):
        a, b = torch.randn(3, 32).bfloat16(), torch.randn(7, 32).bfloat16()
        assert_close(door(a, b), reference(a, b), scale=4)
        recipe = rehearse(
            op.impls["triton"], {"a": a, "b": b, "wide": False, "out": None}, frozenset({"wide"})
        )
        assert len(recipe.steps) == 1


@pytest.fixture
def tunable():
    """The choices of dense products; what they read of a test's tables is forgotten behind it."""
    yield gemm_config
    gemm_config.forget()


def test_bench_tune_times_torch_beside_the_kernels(tunable, monkeypatch, tmp_path):
    op = OPS["gemm"]
    case = Case("bf16/n48k128/m4", torch.bfloat16, {"m": 4, "n": 48, "k": 128})
    machine = tune.Machine("interpret", gpu_of_arch("sm_90"), TARGETS["sm_90"])
    timed = []

    def added_us(calls, before):
        timed.append(tunable._forced[None])
        assert_close(calls[0](), reference(*(calls[0].keywords[name] for name in "ab")), scale=4)
        return 2.0 if tunable._forced[None] == BLAS else 1.0

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(op, "bench", [case])
    for other in OPS.values():  # whose choices are gemm's too
        if other is not op:
            monkeypatch.setattr(other, "bench", [])
    monkeypatch.setattr(tune, "this_machine", lambda: machine)
    monkeypatch.setattr(tune, "environment", lambda commit: dict.fromkeys(tune.VERSIONS, "1"))
    monkeypatch.setattr(tune, "copies_of", lambda arguments, nbytes: [arguments])
    monkeypatch.setattr(bench.behind, "device_us", lambda call, sets: 0.0)
    monkeypatch.setattr(bench.behind, "added_us", added_us)
    monkeypatch.setattr(
        tunable, "candidates", lambda *shape: [mma(16, 2, 2, 0), BLAS, matvec(8, 128, 4, 0)]
    )
    tune.main(["gemm"])
    (row,) = tunable.read(table_file(user_directory(), "gemm", "sm_90"), machine.gpu)
    assert row.config == mma(16, 2, 2, 0) and (row.us, row.default_us) == (1.0, 2.0)
    assert row.shape == (True, 4, 48, 128)
    assert {config["path"] for config in timed} == {"mma", "matvec", "blas"}


def test_what_the_kernels_leave_to_cublas():
    hopper, ampere, amd = map(gpu_of_arch, ("sm_90", "sm_80", "gfx942"))
    few = (True, 8, 4096, 4096)
    assert heuristic(hopper, *few)["path"] == "mma"
    assert heuristic(ampere, *few) == heuristic(amd, *few) == BLAS
    assert heuristic(ampere, True, 9, 4096, 4096) == BLAS
    assert heuristic(hopper, True, 65, 4096, 4096) == BLAS
    assert heuristic(hopper, False, 8, 4096, 4096) == BLAS
    assert heuristic(hopper, True, 8, 128, 4096) == BLAS
    assert candidates(hopper, True, 65, 4096, 4096) == [BLAS]
    assert candidates(hopper, False, 9, 4096, 4096) == [BLAS]
    assert not fits(hopper, BLAS, True, 65, 4096, 4096)
    assert fits(hopper, mma(16, 8, 4, 0), False, 8, 4096, 4096)
    assert fits(amd, mma(16, 8, 4, 0), *few)
    assert fits(hopper, matvec(4, 2048, 8, 0), *few)


@pytest.mark.parametrize(
    ("num_rows", "num_cols", "splits"),
    [
        (4096, 4096, 2),  # 64 tiles, 132 SMs
        (6144, 4096, 1),
        (8448, 4096, 1),  # a tile for each
        (8449, 4096, 0),  # more tiles than SMs
        (5120, 5120, 0),  # 80: two splits are too many, and one leaves 52 SMs idle
        (5888, 4096, 0),  # 92, one too few
        (5952, 4096, 1),
        (2048, 2048, 2),  # more splits would be shorter than 1024 columns
        (2048, 8192, 4),
        (64, 512, 1),
    ],
)
def test_splits_of_tiles_by_heuristic(num_rows, num_cols, splits):
    hopper = gpu_of_arch("sm_90")
    wanted = tiles(64, 128, splits, 4, 5) if splits else BLAS
    for num_tokens in (9, 32):
        assert heuristic(hopper, True, num_tokens, num_rows, num_cols) == wanted
    for num_tokens in (33, MOST_IN_TILES):
        split = heuristic(hopper, True, num_tokens, num_rows, num_cols)
        assert split == (wanted if splits > 1 else BLAS)


def test_rows_serve_matrices_of_nearly_as_many_rows():
    """More would leave SMs idle that the measured matrix filled, or wait for them."""
    hopper = gpu_of_arch("sm_90")
    picked = functools.partial(gemm_config._choose, hopper, with_users=False)
    assert picked((True, 32, 4096, 12288)).row is not None
    assert picked((True, 32, 3328, 12288)).row is None
    found = picked((True, 32, 5120, 5120))
    assert found.row is None and found.config == BLAS
    assert picked((True, 1, 28672, 4096)).row.shape == (True, 1, 24576, 4096)


def test_what_tiles_do_not_fit():
    hopper, ampere, amd = map(gpu_of_arch, ("sm_90", "sm_86", "gfx942"))
    shape = (True, 32, 4096, 4096)
    assert not fits(hopper, tiles(64, 128, 2, 4, 5), *shape)
    assert fits(hopper, tiles(64, 128, 2, 4, 5), False, *shape[1:])
    for gpu in (ampere, amd):
        assert "shared memory" in fits(gpu, tiles(64, 128, 2, 4, 5), *shape)
    # Three rooms of 96 rows by 128 columns of two bytes, and 1 KB.
    least = 3 * 96 * 128 * 2 + 1024
    for room, reason in ((least, ""), (least - 1, f"{least} bytes of shared memory are more")):
        gpu = dataclasses.replace(hopper, shared_limit=room)
        refusal = fits(gpu, tiles(64, 128, 2, 4, 3), *shape)
        assert reason in refusal and bool(reason) == bool(refusal)
    assert fits(hopper, tiles(64, 128, 2, 4, 5), True, MOST_IN_TILES + 1, 4096, 4096)
    assert fits(hopper, tiles(64, 128, 3, 4, 5), True, 32, 4096, 256)
    assert not fits(hopper, tiles(64, 128, 3, 4, 5), True, 32, 4096, 257)


@pytest.mark.parametrize("arch", TARGETS)
def test_candidates_compile_without_spills(arch):
    target, seen = TARGETS[arch], []
    for num_tokens in (1, 2, 8, MOST_IN_TILES):
        shape = (True, num_tokens, 4096, 4096)
        a = torch.empty(num_tokens, 4096, dtype=torch.bfloat16, device="meta")
        b = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
        for config in candidates(gpu_of_arch(arch), *shape):
            if config == BLAS or (config["path"] != "matvec" and config in seen):
                continue
            seen.append(config)
            with record_launches(target.capability) as launches:
                product(a, b, config, a.new_empty(num_tokens, 4096))
            found = compiled(launches[0], arch)
            asm = found.asm
            if config["path"] == "tiles":
                assert found.shared <= shared_bytes(config, num_tokens) + 1024
                assert ("wgmma" in asm["ptx"]) == (arch == "sm_90"), config
            elif arch == "sm_90":
                loads = [line for line in instructions(asm["cubin"]) if "LDG" in str(line)]
                assert loads and all(".128" in str(line) for line in loads), config
