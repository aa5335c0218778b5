"""Attention on Hopper in Gluon: executed by the emulator, compiled, and chosen where it may be."""

import random
import subprocess
import sys

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.kernels import hopper_config
from ferrum_triton.kernels.attention.flash_config import TRIANGLE, flash_config, hopper_tile
from ferrum_triton.kernels.gpu import gpu_of, gpu_of_arch
from ferrum_triton.kernels.hopper_config import is_gluon
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.kernels.tables import SHIPPED, table_file
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close
from tests import attention_twins
from tests.compiling import compiled, launches_of
from tests.hopper_kernels import emulate, softmax_runs_beside, unnoticed, warnings_of

OP = OPS["flash_attention"]
KERNEL = "_hopper_attention_kernel"
SMALL, WIDE, THREE = hopper_tile(128, 64, 2), hopper_tile(128, 128, 2), hopper_tile(192, 64, 3)
LARGE = hopper_tile(192, 128, 3)

attention_twins.register()

on_kernels = pytest.mark.parametrize(
    "backend_name", ["interpret", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def sample(backend, dtype=torch.float16, seed=None, **axes):
    axes = {"batch": 1, "num_kv_heads": 2, "group_size": 2, "head_dim": 64} | axes
    if backend.device.type == "cuda":
        # The plan asks for blocks enough for half of a GPU's SMs.
        blocks = axes["num_kv_heads"] * axes["group_size"] * cdiv(axes["q_len"], 192)
        axes["batch"] = max(axes["batch"], cdiv(gpu_of(backend.device).num_sms, 2 * blocks))
    seed = torch.seed() % 2**31 if seed is None else seed
    return OP.make_sample(TensorFactory(dtype, backend.device, seed), **axes)


def attend(backend, arguments, config=SMALL):
    """What Hopper's kernel makes of a call."""
    with flash_config.forced(config), record_launches() as launches:
        got = backend.flash_attention(**arguments)
    assert [launch.kernel.name for launch in launches] == [KERNEL]
    return got


def check(backend, arguments, config=SMALL):
    """Hold Hopper's kernel to the reference, in float64."""
    got = attend(backend, arguments, config)
    wide = {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    assert_close(got, OP.reference(**wide))
    if arguments["lse"] is not None:
        # A maximum and a logarithm, which may cancel.
        assert_close(arguments["lse"], wide["lse"], name="lse", scale=4)


FEATURES = {
    "causal": {},
    "all keys": {"causal": False},
    "a window within a tile": {"sliding_window": 9},
    "a window of tiles": {"sliding_window": 170},
    "a cap": {"softcap": 5.0},
    "a cap over a negative scale": {"softcap": 5.0, "softmax_scale": -0.3},
    "sinks": {"with_sinks": True, "sliding_window": 40},
    "a scale of zero": {"softmax_scale": 0.0},
    "lengths on the device": {"device_lens": True, "batch": 3},
    "lengths, all keys": {"device_lens": True, "batch": 3, "causal": False, "spare": 40},
    "heads of their own": {"group_size": 1},
    "five heads a group": {"group_size": 5, "num_kv_heads": 1},
}


@on_kernels
@pytest.mark.parametrize("axes", FEATURES.values(), ids=FEATURES)
def test_equals_the_reference(backend_name, axes):
    backend = get_backend(backend_name)
    check(backend, sample(backend, q_len=150, kv_len=333, with_lse=True, **axes))


@on_kernels
@pytest.mark.parametrize(
    "head_dim, value_dim, config",
    [
        (128, 128, WIDE),
        (128, 128, hopper_tile(128, 128, 3)),
        (256, 256, SMALL),
        (192, 128, THREE),
        (192, 128, WIDE),
        (96, 96, SMALL),
        (80, 24, THREE),
        (64, 64, THREE),
        (64, 64, LARGE),
        (40, 136, SMALL),
    ],
)
def test_heads_of_every_width(backend_name, head_dim, value_dim, config):
    """Also where results leave through the buffers of queries, for want of room."""
    backend = get_backend(backend_name)
    axes = {"head_dim": head_dim, "value_dim": value_dim, "with_lse": True}
    check(backend, sample(backend, q_len=200, kv_len=200, num_kv_heads=1, **axes), config)


@on_kernels
@pytest.mark.parametrize("q_len, kv_len", [(128, 128), (129, 1), (191, 64), (192, 511), (257, 700)])
def test_lengths_off_every_tile(backend_name, q_len, kv_len):
    """Queries before the first key as well, which see nothing: zeros, and -inf."""
    backend = get_backend(backend_name)
    check(backend, sample(backend, q_len=q_len, kv_len=kv_len, with_lse=True), WIDE)


@on_kernels
@pytest.mark.parametrize("offset", [-300, -40, 0, 30, 1000])
def test_queries_anywhere(backend_name, offset):
    backend = get_backend(backend_name)
    arguments = sample(backend, q_len=150, kv_len=200, sliding_window=60, with_lse=True)
    check(backend, arguments | {"pos_offset": offset})


@on_kernels
def test_nothing_past_a_length_is_read(backend_name):
    """Stale rows hold NaN, which a product would spread; a length of 0 leaves zeros."""
    backend = get_backend(backend_name)
    arguments = sample(backend, q_len=140, kv_len=300, batch=4, with_lse=True, causal=False)
    lens = [0, 1, 130, 299] * cdiv(len(arguments["q"]), 4)
    lens = lens[: len(arguments["q"])]
    for name in ("k", "v"):
        for b, n in enumerate(lens):
            arguments[name][b, :, n:] = float("nan")
    arguments["kv_lens"] = torch.tensor(lens, device=backend.device)
    check(backend, arguments)
    check(backend, arguments | {"causal": True})
    of_host = arguments | {"kv_lens": None, "kv_len": 130, "lse": None}
    check(backend, of_host | {name: arguments[name][3::4].repeat(4, 1, 1, 1) for name in "qkv"})


@on_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_strides_that_a_tensor_map_holds(backend_name, dtype, monkeypatch):
    """Tokens before heads, as a projection leaves them, and heads out of a wider row."""
    if backend_name == "interpret":  # whose plain kernels have no bfloat16 in tensor maps
        name = "ferrum_triton.kernels.attention.flash_plan.can_describe"
        monkeypatch.setattr(name, lambda x: True)
    backend = get_backend(backend_name)
    arguments = sample(backend, dtype, q_len=130, kv_len=130, with_lse=True)
    rows = torch.randn(len(arguments["q"]), 130, 9, 64, device=backend.device).to(dtype)
    arguments |= {
        "q": rows[:, :, 1:5].transpose(1, 2),
        "k": rows[:, :, 5:7].transpose(1, 2),
        "v": rows[:, :, 7:].transpose(1, 2),
    }
    check(backend, arguments, LARGE)


@on_kernels
@pytest.mark.parametrize("part", range(8))
def test_drawn_calls(backend_name, part):
    """Every feature beside every other, at sizes off every tile: eight emulated, 200 on a GPU."""
    for i in range(1 if backend_name == "interpret" else 25):
        check_drawn(get_backend(backend_name), seed=part + 8 * i)


def check_drawn(backend, seed):
    pick = random.Random(seed)
    head_dim, config = pick.choice(
        (
            (64, SMALL),
            (64, THREE),
            (64, LARGE),
            (96, SMALL),
            (128, WIDE),
            (128, THREE),
            (192, THREE),
            (256, SMALL),
        )
    )
    axes = {
        "batch": pick.randint(1, 3),
        "num_kv_heads": pick.randint(1, 3),
        "group_size": pick.randint(2, 5),
        "head_dim": head_dim,
        # Threads have registers for as many values as columns of a key, but for 192.
        "value_dim": pick.choice({192: (64, 128), 256: (None,)}.get(head_dim, (None, 64, 128))),
        "q_len": pick.randint(128, 300),
        "kv_len": pick.randint(1, 500),
        "spare": pick.choice((0, 40)),
        "causal": pick.random() < 0.7,
        "sliding_window": pick.choice((0, 0, 1, 65, 200)),
        "softmax_scale": pick.choice((None, 0.3, -0.1)),
        "device_lens": pick.random() < 0.4,
        "softcap": pick.choice((0.0, 0.0, 5.0)),
        "with_sinks": pick.random() < 0.3,
        "with_lse": pick.random() < 0.5,
    }
    arguments = sample(backend, seed=seed, **axes)
    arguments["pos_offset"] = pick.choice((None, None, 0, 100))
    check(backend, arguments, config)


def test_results_do_not_depend_on_the_order_of_events():
    """Partitions and copies go on in another order for every seed."""
    launch, out = recorded(q_len=300, kv_len=330)
    want = out.clone()
    for seed in range(1, 6):
        out.fill_(float("nan"))
        emulate(launch, seed)
        assert torch.equal(out, want)


def recorded(**axes):
    """A launch of programs that take several blocks, and what it left."""
    backend = get_backend("interpret")
    with flash_config.forced(axes.pop("config", SMALL)), record_launches() as (launches):
        out = backend.flash_attention(**sample(backend, **axes))
    (launch,) = launches
    return launch, out


def test_every_wait_fence_and_arrival_is_needed():
    """Without one, of those in rings at each of their uses, the emulator finds a race or worse."""
    launches = [
        recorded(q_len=300, kv_len=330),
        # Results leave through the buffers of queries.
        recorded(q_len=150, kv_len=200, head_dim=256, num_kv_heads=3, group_size=1),
    ]
    scaled, held = sorted(unnoticed(launches), key=lambda text: "in fold_tile" in text)
    # Of keys with scales, which are attention's over pages alone, whose test needs it.
    assert "in rounded: without wait_full(streams.v.ring, step)" in scaled
    assert "in fold_tile: without wait_full(streams.v.ring, step - 1)" in held


# Tiles of the listed prefills, by columns of a head.
CHOSEN = {64: LARGE, 128: WIDE, 192: hopper_tile(128, 64, 3), 256: SMALL}
PREFILLS = [case for case in OP.bench if "decode" not in case.id]


@pytest.mark.parametrize("case", PREFILLS, ids=lambda case: case.id)
def test_machine_code(case):
    """Roles with registers of their own, no spill, and products beside the softmax."""
    head_dim = case.axes["head_dim"]
    with flash_config.forced(CHOSEN[head_dim]):
        (launch,) = launches_of(OP, case, TARGETS["sm_90"])
    assert launch.kernel.name == KERNEL
    used = compiled(launch)
    assert warnings_of(used.asm["ptx"]) == []
    code = instructions(used.asm["cubin"])
    names = [line.name for line in code]
    variant = launch.meta["VARIANT"]
    # For each consumer: scores and values, of the first or last tile and of the loop.
    steps = (variant.block_d + variant.block_e + variant.block_n) // 16
    assert sum("HGMMA" in name for name in names) == 2 * variant.consumers * steps
    assert sum(name.startswith("USETMAXREG") for name in names) >= 3
    assert not any(name.startswith("PRMT") for name in names)
    assert softmax_runs_beside(code, variant.consumers)


def tensors(q_len, head_dim=64, dtype=torch.float16, heads=264, device="meta", keys=None):
    """q, k and v whose blocks fill a GPU."""
    kv = 1, heads // 2, keys or q_len, head_dim
    shapes = (1, heads, q_len, head_dim), kv, kv
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def kernels_of(q, k, v, config=WIDE, capability=(9, 0), **arguments):
    with flash_config.forced(config), record_launches(capability) as launches:
        OP.impls["triton"](q, k, v, **arguments)
    return [launch.kernel.name for launch in launches]


def test_the_plain_kernel_serves_what_this_one_cannot():
    q, k, v = tensors(256)
    assert kernels_of(q, k, v) == [KERNEL]
    off = torch.empty(k.numel() + 1, dtype=k.dtype, device="meta")[1:].view(k.shape)
    narrow = torch.empty(*v.shape[:3], 68, dtype=v.dtype, device="meta")[..., :64]
    calls = {
        "an address off the grid": ((q, off, v), {}),
        "rows off the grid": ((q, k, narrow), {}),
        "a result off the grid": ((q, k, v), {"out": torch.empty_like(narrow[:, :1]).expand_as(q)}),
        "one key for all": ((q, k[:, :, :1].expand_as(k), v), {}),
        "float32": (tensors(256, dtype=torch.float32), {}),
        "half a block of queries": (tensors(64), {}),
        "blocks for less than half the GPU, of many keys": (tensors(256, heads=32, keys=2048), {}),
        "no key": ((q, k, v), {"kv_len": 0}),
    }
    for name, (call, more) in calls.items():
        plain = kernels_of(*call, **more)
        assert plain and KERNEL not in plain, name


def test_few_blocks_of_few_keys_are_this_kernels_too():
    assert kernels_of(*tensors(256, heads=32)) == [KERNEL]


def test_it_is_chosen_for_its_gpu_alone():
    """Of a GPU that it serves, with a Triton that it was tested on."""
    shape = (4096, 128, 128, False, True, False, 32, TRIANGLE)
    hopper, other = gpu_of_arch("sm_90"), gpu_of_arch("sm_100")
    assert "path" not in flash_config.heuristic(other, *shape)
    assert WIDE in flash_config.candidates(hopper, *shape)
    assert WIDE not in flash_config.candidates(other, *shape)
    assert not flash_config.refusal(hopper, WIDE, *shape)
    assert "not for sm_100" in flash_config.refusal(other, WIDE, *shape)
    for change, reason in (
        ((64, 128, 128, False), "more than 64 queries"),
        ((4096, 128, 128, True), "16 bits"),
        ((4096, 256, 256, False), "registers"),
        ((4096, 256, 128, False), "shared memory"),
    ):
        assert reason in flash_config.refusal(hopper, WIDE, *change, True, False)


def test_other_versions_of_triton_never_see_it(monkeypatch, caplog):
    shape = (4096, 128, 128, False, True, False, 32, TRIANGLE)
    hopper = gpu_of_arch("sm_90")
    shipped = table_file(SHIPPED, "flash_attention", "sm_90")
    assert any(is_gluon(row.config) for row in flash_config.read(shipped, hopper))
    monkeypatch.setattr(hopper_config, "TESTED", False)
    rows = flash_config.read(shipped, hopper)
    assert not any(is_gluon(row.config) for row in rows)
    assert not caplog.records
    assert not any("path" in config for config in flash_config.candidates(hopper, *shape))
    assert "path" not in flash_config.heuristic(hopper, *shape)
    assert "version of Triton" in flash_config.refusal(hopper, WIDE, *shape)
    script = "import sys, ferrum_triton.kernels.attention; print(*sys.modules, sep='\\n')"
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "ferrum_triton.kernels.attention" in told.stdout.splitlines()
    assert "ferrum_triton.kernels.hopper" not in told.stdout.splitlines()


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [128, 130, 1000, 2048, 8192])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_long_calls_repeat_bit_for_bit(q_len, head_dim, value_dim, causal):
    """With every configuration that is timed; some of their rows are held to the reference."""
    backend = get_backend("cuda")
    axes = {"head_dim": head_dim, "value_dim": value_dim, "num_kv_heads": 4, "group_size": 4}
    batch = 8 if q_len <= 1000 else 1
    arguments = sample(backend, torch.bfloat16, q_len=q_len, kv_len=q_len, batch=batch, **axes)
    arguments["causal"] = causal
    shape = (q_len, head_dim, value_dim, False, True, False)
    rows = torch.cat((torch.randint(0, q_len, (64,)), torch.tensor([0, 1, 63, 64, 127, -1])))
    want = {
        row: OP.reference(**one_row(arguments, row)) for row in (rows % q_len).unique().tolist()
    }
    for config in flash_config.candidates(gpu_of_arch("sm_90"), *shape):
        if "path" in config:
            first = attend(backend, arguments, config)
            assert all(torch.equal(attend(backend, arguments, config), first) for _ in range(3))
            for row, exact in want.items():
                assert_close(first[:, :, row : row + 1], exact, name=f"{config}, row {row}")


def one_row(arguments, row):
    wide = {name: arguments[name].double() for name in "qkv"}
    wide["q"] = wide["q"][:, :, row : row + 1]
    return arguments | wide | {"pos_offset": row}
