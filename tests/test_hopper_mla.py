"""Latent attention on Hopper in Gluon: emulated, compiled, and chosen where it may be."""

import itertools
import random

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.kernels import hopper_config
from ferrum_triton.kernels.attention import mla as kernels
from ferrum_triton.kernels.attention.mla import HOPPER, mla_config
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests import harness
from tests.compiling import compiled, launches_of
from tests.hopper_kernels import emulate, unnoticed, warnings_of

OP = OPS["mla_attention"]
KERNEL = "_hopper_mla_kernel"
IDS = ["values first", "scores first"]
on_configs = pytest.mark.parametrize("config", HOPPER, ids=IDS)

on_kernels = pytest.mark.parametrize(
    "backend_name", ["interpret", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def sample(backend, dtype=torch.float16, seed=None, lengths=None, **axes):
    """A call; of 128 latents, which the emulator has sooner than 512."""
    axes = {"batch": 2, "num_heads": 64, "kv_lora_rank": 128, "rope_dim": 64} | axes
    axes = {"block_size": 64, "max_blocks": 5, "lens": "random", "with_lse": True} | axes
    seed = torch.seed() % 2**31 if seed is None else seed
    call = harness.sample(OP, dtype, backend.device, seed, **axes)
    if lengths is not None:
        call["kv_lens"] = torch.tensor(lengths, dtype=torch.int32, device=backend.device)
    return call


def attend(backend, call, config=HOPPER[0]):
    """What Hopper's kernel makes of a call."""
    with mla_config.forced(config), record_launches() as launches:
        got = backend.mla_attention(**call)
    assert launches[0].kernel.name == KERNEL
    return got


def check(backend, call, config=HOPPER[0]):
    """Hold Hopper's kernel to the reference, in float64."""
    got = attend(backend, call, config)
    wide = harness.in_float64(call)
    assert_close(got, OP.reference(**wide))
    if call["lse"] is not None:
        # A maximum and a logarithm, which may cancel.
        assert_close(call["lse"], wide["lse"], name="lse", scale=4)


def use_splits(monkeypatch, count):
    monkeypatch.setattr(kernels, "pick_splits", lambda *_: count)


FEATURES = {
    "pages of a tile": {},
    "pages of two tiles": {"block_size": 128},
    "pages of three tiles": {"block_size": 192, "max_blocks": 2},
    "a contiguous cache": {"paged": False},
    "a contiguous cache off every tile": {"paged": False, "block_size": 67},
    "two queries": {"q_len": 2},
    "two blocks of heads": {"num_heads": 128},
    "both": {"q_len": 3, "num_heads": 128, "batch": 1},
    "blocks that do not exist": {"hostile": True, "batch": 4},
    "256 latents": {"kv_lora_rank": 256},
    "512 latents": {"kv_lora_rank": 512},
    "a rope of 32": {"rope_dim": 32},
    "no logarithms": {"with_lse": False},
    "no keys": {"lens": "empty"},
    "one sequence": {"batch": 1, "lens": "full", "max_blocks": 1},
}


@on_kernels
@on_configs
@pytest.mark.parametrize("axes", FEATURES.values(), ids=FEATURES)
def test_equals_the_reference(backend_name, axes, config):
    backend = get_backend(backend_name)
    check(backend, sample(backend, **axes), config)


@on_kernels
@on_configs
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_lengths_off_every_tile(backend_name, monkeypatch, splits, config):
    """Splits of an odd and an even number of tiles, of one, of less, and of none."""
    use_splits(monkeypatch, splits)
    backend = get_backend(backend_name)
    lens = [0, 1, 63, 64, 65, 128, 129, 255, 320, 2**31 - 1]
    check(backend, sample(backend, batch=len(lens), lengths=lens), config)
    check(backend, sample(backend, batch=len(lens), lengths=lens, paged=False, q_len=2), config)


@on_kernels
@pytest.mark.parametrize("scale", [-0.3, 0.0, 3.0])
def test_scales_of_every_sign(backend_name, scale):
    backend = get_backend(backend_name)
    check(backend, sample(backend) | {"softmax_scale": scale})


@on_kernels
@pytest.mark.parametrize("axes", [{}, {"block_size": 128}, {"paged": False}])
def test_what_is_no_key_is_not_read(backend_name, axes):
    """Rows past a length are NaN, which a product would spread, and entries past it nonsense."""
    backend = get_backend(backend_name)
    lens = [320, 257, 64, 1, 0]
    call = sample(backend, batch=5, lengths=lens, **axes)
    clean = harness.clone(call)
    size, tables = call["cache"].shape[1], call["block_tables"]
    used = torch.zeros(call["cache"].shape[:2], dtype=torch.bool)
    for i, length in enumerate(lens):
        pages = -(-length // size)
        for page in range(pages):
            block = i if tables is None else int(tables[i, page])
            used[block, : length - page * size] = True
        if tables is not None:
            tables[i, pages:] = [2_147_480_000, -1, len(used), 0, 7][i]
    call["cache"][~used.to(backend.device)] = float("nan")
    got, want = attend(backend, call), attend(backend, clean)
    assert torch.equal(got, want) and torch.equal(call["lse"], clean["lse"])
    assert torch.isfinite(got).all()


@on_kernels
def test_strides_of_queries_cache_and_result_are_free(backend_name):
    backend = get_backend(backend_name)
    call = sample(backend, q_len=2, block_size=64)
    wide = harness.in_float64(call)
    q = call["q"].new_zeros(2, 64, 3, 200)[:, :, :2, :192].transpose(1, 2)
    cache = call["cache"].new_full((*call["cache"].shape[:2], 208), float("nan"))[..., :192]
    call["q"], call["cache"] = q.copy_(call["q"]), cache.copy_(call["cache"])
    out = q.new_empty(2, 64, 2, 131)[..., :128].transpose(1, 2)
    with mla_config.forced(HOPPER[0]), record_launches() as launches:
        OP.impls["triton"](**call, out=out)
    assert launches[0].kernel.name == KERNEL
    assert_close(out, OP.reference(**wide))


@on_kernels
@pytest.mark.parametrize("part", range(6))
def test_drawn_calls(backend_name, part, monkeypatch):
    """Every feature beside every other: six emulated, 150 on a GPU."""
    backend = get_backend(backend_name)
    for seed in range(part, 6 if backend_name == "interpret" else 150, 6):
        pick = random.Random(seed)
        use_splits(monkeypatch, pick.randint(1, 4))
        axes = {
            "batch": pick.randint(1, 3),
            "num_heads": pick.choice((64, 128, 192)),
            "q_len": pick.randint(1, 3),
            "kv_lora_rank": pick.choice((128, 512)),
            "rope_dim": pick.choice((16, 64)),
            "block_size": pick.choice((64, 128)),
            "max_blocks": pick.randint(1, 6),
            "paged": pick.random() < 0.7,
            "hostile": pick.random() < 0.5,
        }
        check(backend, sample(backend, seed=seed, **axes), pick.choice(HOPPER))


def recorded(config, **axes):
    """A launch of programs that go around their rings, and what it left."""
    backend = get_backend("interpret")
    call = sample(backend, lengths=[300, 256], with_lse=False, **axes)
    with mla_config.forced(config), record_launches() as launches:
        out = backend.mla_attention(**call)
    (launch,) = launches
    return launch, out


@on_configs
def test_results_do_not_depend_on_the_order_of_events(config, monkeypatch):
    """Partitions and copies go on in another order for every seed."""
    use_splits(monkeypatch, 1)
    launch, out = recorded(config)
    want = out.clone()
    for seed in range(1, 9):
        out.fill_(float("nan"))
        emulate(launch, seed)
        assert torch.equal(out, want)


def test_every_wait_fence_and_arrival_is_needed(monkeypatch):
    """Without one, of those in rings at each of their uses, the emulator finds a race or worse."""
    use_splits(monkeypatch, 1)
    (held,) = unnoticed([recorded(config) for config in HOPPER])
    assert "in fold_odd: without wait_full(room.weighed, n - 1)" in held


@on_configs
@pytest.mark.parametrize("case", OP.bench[1:], ids=lambda case: case.id)
def test_machine_code(case, config):
    """Roles with registers of their own, no spill, and as many products as were meant."""
    with mla_config.forced(config):
        launch = launches_of(OP, case, TARGETS["sm_90"])[0]
    assert launch.kernel.name == KERNEL
    used = compiled(launch)
    assert warnings_of(used.asm["ptx"]) == []
    code = instructions(used.asm["cubin"])
    names = [line.name for line in code]
    # Of both consumers a loop, and of each a last tile: scores of 576 columns, values of 64 keys.
    scores, values = 576 // 16, 64 // 16
    assert sum("HGMMA.64x64x16" in name for name in names) == 3 * scores
    assert sum("HGMMA.64x256x16" in name for name in names) == 6 * values
    assert sum(name.startswith("USETMAXREG") for name in names) >= 3
    assert not any(name.startswith("PRMT") for name in names)
    assert exponentials_beside(code) == (1 if config["SCORES_FIRST"] else 0)


@pytest.mark.parametrize(
    "axes",
    [
        {"paged": False, "q_len": 2},
        {"kv_lora_rank": 128, "rope_dim": 32, "block_size": 128},
        {"kv_lora_rank": 256, "batch": 200},
    ],
    ids=["contiguous", "128 latents", "256 latents"],
)
@on_configs
def test_every_kind_of_call_compiles_within_limits(axes, config):
    """Lengths and tables of 64 bits, a negative scale, logarithms, one split and several."""
    axes = {"batch": 3, "num_heads": 128, "kv_lora_rank": 512, "rope_dim": 64} | axes
    axes = {"block_size": 64, "max_blocks": 128, "lens": "full", "with_lse": True} | axes
    call = OP.make_sample(harness.TensorFactory(torch.float16, "meta"), **axes)
    call |= {"softmax_scale": -0.1, "kv_lens": call["kv_lens"].long()}
    if call["block_tables"] is not None:
        call["block_tables"] = call["block_tables"].long()
    with mla_config.forced(config), record_launches((9, 0)) as launches:
        OP.impls["triton"](**call)
    assert launches[0].kernel.name == KERNEL
    used = compiled(launches[0])
    assert warnings_of(used.asm["ptx"]) == []


def exponentials_beside(code):
    """How many products have a softmax between their beginning and the wait for them."""
    found = count = 0
    for before, line in itertools.pairwise(code):
        if line.name.startswith("HGMMA") and not before.name.startswith("HGMMA"):
            count = 0
        count += line.name == "MUFU.EX2"
        if line.name.startswith("WARPGROUP.DEPBAR"):
            found, count = found + (count >= 32), 0
    return found


def kernels_of(capability=(9, 0), config=HOPPER[0], dtype=torch.bfloat16, **axes):
    axes = {"batch": 2, "num_heads": 64, "kv_lora_rank": 512, "rope_dim": 64} | axes
    axes = {"block_size": 64, "max_blocks": 8, "lens": "full"} | axes
    call = OP.make_sample(harness.TensorFactory(dtype, "meta"), **axes)
    with mla_config.forced(config), record_launches(capability) as launches:
        OP.impls["triton"](**call)
    return [launch.kernel.name for launch in launches]


def test_the_plain_kernel_serves_what_this_one_cannot():
    assert kernels_of()[0] == KERNEL
    calls = {
        "float32": {"dtype": torch.float32},
        "an 8-bit cache": {"cache_dtype": torch.float8_e4m3fn},
        "heads of two queries in a block": {"num_heads": 32, "q_len": 2},
        "latents without halves of its width": {"kv_lora_rank": 384},
        "a rope wider than a tile": {"rope_dim": 128},
        "a tile in several blocks": {"block_size": 32},
        "rows off the grid": {"rope_dim": 4},
    }
    for name, axes in calls.items():
        plain = kernels_of(**axes)
        assert plain and KERNEL not in plain, name


def test_it_is_chosen_by_a_measured_row_alone(monkeypatch):
    """Of a GPU that it serves, with a Triton that it was tested on."""
    hopper, other = gpu_of_arch("sm_90"), gpu_of_arch("sm_100")
    shape = (128, 64, "16 bits", True)
    for config in HOPPER:
        assert config in mla_config.candidates(hopper, *shape)
        assert config not in mla_config.candidates(other, *shape)
        assert not mla_config.refusal(hopper, config, *shape)
        assert "not for sm_100" in mla_config.refusal(other, config, *shape)
        for change, reason in (
            ((32, 64, "16 bits", True), "64 heads"),
            ((64, 64, "8 bits", True), "16 bits"),
            ((64, 64, "16 bits", False), "no tensor map"),
            ((64, 32, "16 bits", True), "several blocks"),
        ):
            assert reason in mla_config.refusal(hopper, config, *change)
    for rows in (64, 128, 256, 1000):
        assert mla_config.heuristic(hopper, rows, 64, "16 bits", True)["path"] == "tma"
    monkeypatch.setattr(hopper_config, "TESTED", False)
    assert not any(c["path"] == "hopper" for c in mla_config.candidates(hopper, *shape))
    assert "version of Triton" in mla_config.refusal(hopper, HOPPER[0], *shape)


@pytest.mark.gpu
@on_configs
@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("q_len, max_blocks", [(1, 128), (2, 64), (1, 7)])
def test_long_calls_repeat_bit_for_bit(q_len, max_blocks, paged, num_heads, config):
    """Lengths of a real cache, off every tile, and a sequence without keys."""
    backend = get_backend("cuda")
    capacity = 64 * max_blocks
    lens = [capacity, capacity - 1, capacity // 2 + 13, 777 % capacity, 65, 64, 1, 0]
    axes = {"num_heads": num_heads, "q_len": q_len, "paged": paged, "kv_lora_rank": 512}
    for batch in (1, 8, 150):
        call = sample(
            backend,
            torch.bfloat16,
            batch=batch,
            lengths=(lens * 19)[:batch],
            max_blocks=max_blocks,
            **axes,
        )
        first = attend(backend, call, config)
        for _ in range(3):
            assert torch.equal(attend(backend, call, config), first)
        few = slice(0, 8)
        part = {name: call[name][few] for name in ("q", "kv_lens", "lse")}
        part["block_tables"] = call["block_tables"][few] if paged else None
        part["cache"] = call["cache"] if paged else call["cache"][few]
        wide = harness.in_float64(call | part)
        assert_close(first[few], OP.reference(**wide))
        assert_close(call["lse"][few], wide["lse"], name="lse", scale=4)
