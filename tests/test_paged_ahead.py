"""Decode that reads blocks a tile ahead of their keys: where it may, and that it is decode."""

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.kernels.attention import paged_decode
from ferrum_triton.kernels.attention.decode_config import (
    decode_config,
    decode_heuristic,
    step_config,
    step_heuristic,
)
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.registry import OPS
from ferrum_triton.testing import assert_close
from tests import harness
from tests.test_hopper_paged import unused_slots

CONFIG = {
    "BLOCK_N": 16,
    "PROGRAMS": 8,
    "LEAST_KEYS": 32,
    "PREFETCH": 0,
    "AHEAD": 1,
    "num_warps": 4,
    "num_stages": 3,
}
SIZES = {"num_kv_heads": 2, "group_size": 3, "head_dim": 32, "block_size": 8}
DECODE, VARLEN, STEP = (
    OPS[name]
    for name in (
        "paged_decode_attention",
        "paged_varlen_attention",
        "qkv_paged_decode_attention",
    )
)
LENGTHS = {
    DECODE: {"batch": 4, "q_len": 2, "max_len": 150, "with_lse": True},
    VARLEN: {"q_lens": (1, 5, 0, 20, 8), "max_offset": 150, "with_lse": True},
    STEP: {"batch": 4, "max_len": 150},
}
of_all = pytest.mark.parametrize("op", LENGTHS, ids=lambda op: op.name)


def sample(op, dtype=torch.float16, **axes):
    axes = SIZES | LENGTHS[op] | axes
    return harness.sample(op, dtype, torch.device("cpu"), torch.seed() % 2**31, **axes)


def call(op, arguments, ahead=1):
    """The result, and whether blocks were read ahead."""
    config, tunable = CONFIG | {"AHEAD": ahead}, decode_config
    if op is STEP:
        config, tunable = config | {"MERGES": 1}, step_config
    with tunable.forced(config), record_launches() as launches:
        got = getattr(get_backend("interpret"), op.name)(**arguments)
    kernels = "_paged_decode_kernel", "_paged_step_kernel"
    (launch,) = [each for each in launches if each.kernel.name in kernels]
    return got, launch.meta["ATTENTION"].ahead


@of_all
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"head_dim": 24},
        {"block_size": 16},
        {"block_size": 64},
        {"layout": "nhd"},
        {"sliding_window": 21},
        {"softcap": 3.0, "with_sinks": True},
        {"group_size": 9},
    ],
    ids=lambda axes: " ".join(axes) or "plain",
)
def test_equals_the_reference(op, axes):
    arguments = sample(op, **axes)
    wide = harness.in_float64(arguments)
    got, ahead = call(op, arguments)
    assert ahead
    assert_close(got, op.reference(**wide))
    for name in op.mutates:
        if arguments.get(name) is not None:
            assert_close(arguments[name], wide[name], name=name, scale=4)


@pytest.mark.parametrize("block_size", [8, 64])
def test_nothing_past_a_sequence_is_read(block_size):
    """Slots behind a sequence's last key and blocks of nobody hold NaN, unused entries nonsense."""
    arguments = sample(VARLEN, q_lens=(1, 3, 8, 2), block_size=block_size)
    unused = unused_slots(arguments)
    for name in ("k_cache", "v_cache"):
        arguments[name].movedim(1, 2)[unused] = float("nan")
    want = VARLEN.reference(**harness.in_float64(arguments))
    got, ahead = call(VARLEN, arguments)
    assert ahead
    assert_close(got, want)


@pytest.mark.parametrize(
    ("axes", "change"),
    [
        ({"dtype": torch.float32}, {}),
        ({"cache_dtype": torch.int8}, {}),
        ({"layout": "vllm_x"}, {}),
        ({"head_dim": 96}, {}),  # in two strips
        ({}, {"softmax_scale": -0.2}),
        ({}, {"softmax_scale": 0.0}),
    ],
    ids=["float32", "codes", "pieces", "strips", "a negative scale", "no scale"],
)
def test_others_are_left_to_the_compiler(axes, change):
    arguments = sample(DECODE, **{"q_len": 1} | axes) | change
    got, ahead = call(DECODE, arguments)
    assert not ahead
    assert_close(got, DECODE.reference(**harness.in_float64(arguments)))


def test_offsets_of_a_wide_pool_are_left_to_the_compiler(monkeypatch):
    arguments = sample(DECODE)
    monkeypatch.setattr(paged_decode, "is_narrow", lambda _: False)
    assert not call(DECODE, arguments)[1]


def test_it_is_chosen_where_it_was_seen_to_gain():
    hopper = gpu_of_arch("sm_90")

    def of_decode(*shape):
        return decode_heuristic(hopper, *shape)["AHEAD"]

    def of_step(*shape):
        return step_heuristic(hopper, *shape)["AHEAD"]

    for keys in (512, 4096):
        assert of_decode(64, 8, keys, 512, 4, True, False, True)
    assert not of_decode(64, 8, 4096, 512, 4, True, True, True)  # beside a prompt
    assert not of_decode(64, 8, 4096, 512, 20, True, False, True)
    assert not of_decode(64, 8, 4096, 256, 4, True, False, True)
    assert not of_decode(64, 8, 4096, 512, 4, False, False, True)
    for keys in (1024, 8192):
        assert of_step(1, 8, keys, 512, 4, True)
        assert not of_step(8, 8, keys, 512, 4, True)
        assert not of_step(1, 8, keys, 256, 4, True)
        assert not of_step(1, 8, keys, 512, 4, False)
