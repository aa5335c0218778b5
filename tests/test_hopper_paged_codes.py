"""Prefill over pools of 8 bits on Hopper in Gluon: emulated, compiled, and when it is chosen."""

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.kernels.attention.flash_config import hopper_tile
from ferrum_triton.kernels.attention.prefill_config import prefill_config
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.hopper.attention_codes import codes_layout
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close
from tests import attention_twins, harness
from tests.compiling import compiled, in_turns, launches_of
from tests.hopper_kernels import softmax_runs_beside, warnings_of
from tests.test_hopper_paged import (
    KERNEL,
    MERGE,
    SMALL,
    SPLIT_AXES,
    WIDE,
    attend,
    check,
    on_kernels,
    sample,
    split_keys,
    unused_slots,
)

OP = OPS["paged_varlen_attention"]
FP8, INT8 = torch.float8_e4m3fn, torch.int8
FORMATS = {"e4m3": FP8, "int8": INT8}

on_formats = pytest.mark.parametrize("cache_dtype", FORMATS.values(), ids=FORMATS)
DTYPES = torch.float16, torch.bfloat16
on_dtypes = pytest.mark.parametrize("dtype", DTYPES)

attention_twins.register()

FEATURES = {
    "one sequence": {"q_lens": (150,)},
    "no context": {"q_lens": (100, 0, 70), "max_offset": 0},
    "a window": {"sliding_window": 33},
    "a cap and sinks": {"softcap": 5.0, "with_sinks": True},
    "a negative scale": {"softmax_scale": -0.2},
    "a scale of heads": {"scales": "head", "head_dim": 128},
    "a scale of all": {"scales": "tensor", "block_size": 64},
    "five heads a group": {"group_size": 5},
    "tokens before heads": {"layout": "nhd", "group_size": 3},
    "pages of 32": {"block_size": 32},
    "pages of a tile": {"block_size": 64},
    "pages of two tiles": {"block_size": 128},
    "heads of 96": {"head_dim": 96},
    "heads of 192": {"head_dim": 192, "num_kv_heads": 1},
    "heads of 256": {"head_dim": 256, "num_kv_heads": 1},
    "a prompt and decodes": {"q_lens": (1, 140, 1, 8, 9)},
}


@on_kernels
@on_formats
@pytest.mark.parametrize("axes", FEATURES.values(), ids=FEATURES)
def test_equals_the_reference(backend_name, axes, cache_dtype):
    backend = get_backend(backend_name)
    call = sample(backend, cache_dtype=cache_dtype, **axes)
    check(backend, call, WIDE if axes.get("head_dim") == 128 else SMALL)


@on_kernels
@on_formats
@pytest.mark.parametrize("head_dim", [64, 96])
def test_parts_of_keys_make_the_whole(backend_name, head_dim, cache_dtype, monkeypatch):
    backend = get_backend(backend_name)
    split_keys(monkeypatch, 3, 100)
    call = sample(backend, cache_dtype=cache_dtype, head_dim=head_dim, **SPLIT_AXES)
    check(backend, call)
    assert [launch.kernel.name for launch in attend(backend, call)[1]] == [
        KERNEL,
        MERGE,
    ]


@on_kernels
@on_formats
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_queries_in_bfloat16(backend_name, head_dim, cache_dtype):
    backend = get_backend(backend_name)
    check(backend, sample(backend, torch.bfloat16, cache_dtype=cache_dtype, head_dim=head_dim))


@on_kernels
@on_dtypes
@pytest.mark.parametrize("cache_dtype", FORMATS.values(), ids=FORMATS)
def test_every_code(backend_name, dtype, cache_dtype):
    """A key each, alone with its query: the result is the code, times its scale."""
    backend = get_backend(backend_name)
    call = sample(backend, dtype, cache_dtype=cache_dtype, q_lens=(9, 9), max_offset=0)
    call["sliding_window"] = 1
    codes = torch.arange(256, dtype=torch.uint8).view(cache_dtype)
    wide = codes.float()
    known = wide.isfinite() & (wide.abs() <= (448 if cache_dtype == FP8 else 127))
    codes = codes.view(torch.uint8)[known]
    v = call["v_cache"].view(torch.uint8)
    every = codes[torch.arange(v.numel()) % len(codes)].view(v.shape)
    v.copy_(every.to(v.device))
    check(backend, call)


@on_kernels
@on_formats
@pytest.mark.parametrize("axes", [{"block_size": 16}, {"block_size": 128}, {"head_dim": 256}])
def test_nothing_past_a_sequence_is_read(backend_name, axes, cache_dtype):
    """Slots behind a sequence's last key have NaN for a scale, and of fp8 for codes."""
    backend = get_backend(backend_name)
    call = sample(backend, q_lens=(70, 40, 9, 20), max_offset=300, cache_dtype=cache_dtype, **axes)
    unused = unused_slots(call)
    for name in "kv":
        call[f"{name}_scales"].movedim(1, 2)[unused] = float("nan")
        call[f"{name}_cache"].view(torch.uint8).movedim(1, 2)[unused] = 0x7F
    check(backend, call)


def test_keys_are_not_rounded():
    """Logarithms of sums show what keys, times their scales, would lose in 16 bits."""
    backend = get_backend("interpret")
    call = sample(backend, torch.bfloat16, cache_dtype=INT8, q_lens=(100,), softmax_scale=2.0)
    attend(backend, call)
    wide = harness.in_float64(call)
    OP.reference(**wide)
    assert_close(call["lse"], wide["lse"], name="lse", scale=4)


@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_threads_share_out_all_codes(columns):
    layout = codes_layout(columns)
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    at = {(0, 0)}
    for row, column in bases:
        at |= {(r ^ row, c ^ column) for r, c in at}
    assert at == {(r, c) for r in range(layout.shape[0]) for c in range(columns)}
    assert 64 % layout.shape[0] == 0


CODE = {
    "e4m3": {},
    "int8": {"cache_dtype": INT8},
    "a scale of all": {"scales": "tensor"},
    "a page a tile": {"block_size": 128},
    "a window": {"sliding_window": 1024},
    "a cap, sinks and sums": {"softcap": 30.0, "with_sinks": True, "with_lse": True},
    "heads of 64": {"head_dim": 64},
    "heads of 192": {"head_dim": 192},
    "heads of 256": {"head_dim": 256},
}


def launch_of(axes, dtype=torch.bfloat16):
    (case,) = (each for each in OP.bench if "fp8" in each.id)
    case = type(case)(case.id, dtype, case.axes | axes, case.metric)
    return launches_of(OP, case, TARGETS["sm_90"])[0]


# Those that may spill nothing are compiled for both dtypes, the others for one each.
UNSPILLED = (*FORMATS, "a page a tile")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in UNSPILLED for dtype in DTYPES]
    + in_turns([name for name in CODE if name not in UNSPILLED], [(dtype,) for dtype in DTYPES]),
)
def test_machine_code(name, dtype):
    axes = CODE[name]
    config = SMALL if axes.get("head_dim", 0) > 128 else WIDE
    with prefill_config.forced(config):
        launch = launch_of(axes, dtype)
    assert launch.kernel.name == KERNEL
    used = compiled(launch)
    assert warnings_of(used.asm["ptx"]) == []
    code = instructions(used.asm["cubin"])
    assert sum(line.name.startswith("USETMAXREG") for line in code) >= 3
    if name in UNSPILLED:
        assert not [line for line in code if line.name.startswith(("LDL", "STL"))]
    assert softmax_runs_beside(code)
    # Of the exponentials' unit, which both would wait for.
    assert not [line for line in code if line.name.startswith(("I2F.F16", "F2F.BF16"))]
    # 16 bytes at a time, as codes_layout says.
    assert sum(line.name == "STS.128" for line in code) == 2 * sum(
        line.name == "LDS.128" for line in code
    )


@pytest.mark.parametrize(("head_dim", "by"), [(128, MERGE), (192, "_paged_decode_kernel")])
def test_keys_of_wide_heads_are_not_cut_into_parts(head_dim, by):
    axes = {"num_kv_heads": 8, "group_size": 4, "head_dim": head_dim, "cache_dtype": INT8}
    call = OP.make_sample(TensorFactory(torch.bfloat16, "meta"), q_lens=(100,), **axes)
    call["block_tables"] = torch.empty(1, 512, dtype=torch.int32, device="meta")
    with record_launches((9, 0)) as launches:
        OP.impls["triton"](**call)
    assert [launch.kernel.name for launch in launches][:2] == [KERNEL, by]


def test_rows_of_one_kind_of_pool_say_nothing_of_others():
    hopper = gpu_of_arch("sm_90")
    for codes in FORMATS:
        shape = (128, False, False, codes)
        assert prefill_config.heuristic(hopper, *shape) == WIDE
        assert WIDE in prefill_config.candidates(hopper, *shape)
    served = {row.shape[-1] for row in prefill_config.rows(hopper)}
    assert served >= {"", *FORMATS}
    for row in prefill_config.rows(hopper):
        for codes in served - {row.shape[-1]}:
            assert prefill_config.distance(row.shape, (*row.shape[:3], codes)) == float("inf")
    assert launch_of({}).kernel.name == KERNEL


def test_what_has_no_room_is_refused():
    hopper = gpu_of_arch("sm_90")
    wide, deep = hopper_tile(128, 128, 2), hopper_tile(128, 64, 3)
    assert "registers" in prefill_config.refusal(hopper, wide, 256, False, False, "e4m3")
    assert "shared" in prefill_config.refusal(hopper, deep, 256, False, False, "e4m3")
    most = hopper_tile(128, 128, 3)
    assert not prefill_config.refusal(hopper, most, 128, False, True, "")
    assert "shared" in prefill_config.refusal(hopper, most, 128, False, False, "e4m3")
