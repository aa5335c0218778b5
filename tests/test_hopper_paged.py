"""Prefill over paged pools on Hopper in Gluon: emulated, compiled, and chosen where it may be."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton import get_backend
from ferrum_triton.gluon_emulator import run
from ferrum_triton.kernels.attention import paged_prefill, prefill_merge
from ferrum_triton.kernels.attention.flash_config import hopper_tile
from ferrum_triton.kernels.attention.prefill_config import prefill_config
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.hopper import attention_paged
from ferrum_triton.kernels.hopper.attention_walk import (
    FLAT,
    SEQUENCES,
    Batch,
    begin,
    part_of,
    share_sms,
    walk_to,
)
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close
from tests import harness
from tests.compiling import compiled, launches_of
from tests.hopper_kernels import softmax_runs_beside, unnoticed, warnings_of

OP = OPS["paged_varlen_attention"]
KERNEL, MERGE = "_hopper_paged_kernel", "_prefill_merge_kernel"
SMALL, WIDE = hopper_tile(128, 64, 2), hopper_tile(128, 128, 2)

on_kernels = pytest.mark.parametrize(
    "backend_name", ["interpret", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def sample(backend, dtype=torch.float16, **axes):
    axes = {"num_kv_heads": 2, "group_size": 2, "head_dim": 64, "block_size": 16} | axes
    axes = {"q_lens": (70, 3, 20), "max_offset": 200, "with_lse": True} | axes
    scale = axes.pop("softmax_scale", None)
    made = harness.sample(OP, dtype, backend.device, torch.seed() % 2**31, **axes)
    return made | {"softmax_scale": scale}


def attend(backend, arguments, config=SMALL):
    """What a call makes of its sequences of many queries by Hopper's kernel; its launches."""
    with prefill_config.forced(config), record_launches() as launches:
        got = backend.paged_varlen_attention(**arguments)
    assert launches[0].kernel.name == KERNEL
    return got, launches


def check(backend, arguments, config=SMALL):
    """Hold a call to the reference, in float64."""
    got, _ = attend(backend, arguments, config)
    wide = harness.in_float64(arguments)
    assert_close(got, OP.reference(**wide))
    # A maximum and a logarithm, which may cancel.
    assert_close(arguments["lse"], wide["lse"], name="lse", scale=4)


def unused_slots(call):
    """Which slots of a pool no sequence has keys in; entries past a sequence become nonsense."""
    num_blocks, _, block_size, _ = call["k_cache"].shape
    unused = torch.ones(num_blocks, block_size, dtype=torch.bool)
    queries = call["cu_seqlens_q"].diff()
    for seq, keys in enumerate((call["pos_offsets"] + queries).tolist()):
        pages = -(-keys // block_size)
        for page, block in enumerate(call["block_tables"][seq, :pages].tolist()):
            unused[block, : keys - page * block_size] = False
        call["block_tables"][seq, pages:] = 2_147_480_000 if seq % 2 else -1
    return unused.to(call["k_cache"].device)


FEATURES = {
    "one sequence": {"q_lens": (150,)},
    "no context": {"q_lens": (100, 0, 70), "max_offset": 0},
    "a window": {"sliding_window": 33},
    "a cap and sinks": {"softcap": 5.0, "with_sinks": True},
    "a negative scale": {"softmax_scale": -0.2},
    "a head alone": {"group_size": 1},
    "five heads a group": {"group_size": 5},
    "tokens before heads": {"layout": "nhd", "group_size": 3},
    "pages of 32": {"block_size": 32},
    "pages of a tile": {"block_size": 64},
    "pages of two tiles": {"block_size": 128},
    "heads of 96": {"head_dim": 96},
    "heads of 128": {"head_dim": 128},
    "heads of 256": {"head_dim": 256, "num_kv_heads": 1},
}


@on_kernels
@pytest.mark.parametrize("axes", FEATURES.values(), ids=FEATURES)
def test_equals_the_reference(backend_name, axes):
    backend = get_backend(backend_name)
    check(backend, sample(backend, **axes), WIDE if axes.get("head_dim") == 128 else SMALL)


@on_kernels
def test_queries_before_the_first_key_see_none(backend_name):
    """Where a sequence begins only the device knows: a hundred of its queries before position 0."""
    backend = get_backend(backend_name)
    call = sample(backend, q_lens=(300, 70))
    call["pos_offsets"][0] = -100
    check(backend, call)
    assert (call["lse"][:100] == float("-inf")).all()


# The most parts of a block's keys, and a sequence's keys for each of them.
SPLIT = {
    "no context": (6, 16),
    "a window": (3, 16),
    "a cap and sinks": (3, 100),
    "heads of 96": (3, 100),
}
SPLIT_AXES = {"q_lens": (70, 20), "offsets": (80, 300)}
LONGEST = {"max_q_len": 100}


def parts_of(launch):
    """How many parts of the results a launch has room for."""
    out, *_ = launch.args
    return out.shape[0]


def split_keys(monkeypatch, most, least):
    """Cut each block's keys into up to ``most`` parts, one for every ``least`` of its sequence."""
    for module in (paged_prefill, attention_paged, prefill_merge):
        monkeypatch.setattr(module, "LEAST_KEYS", least)
    monkeypatch.setattr(paged_prefill, "MAX_SPLITS", most)
    monkeypatch.setattr(paged_prefill, "processors", lambda _: 1 << 20)


@on_kernels
@pytest.mark.parametrize("feature", SPLIT)
def test_parts_of_keys_make_the_whole(backend_name, feature, monkeypatch):
    """Fewer parts than tiles, of few keys one, or more than tiles, so that some have none."""
    backend = get_backend(backend_name)
    most, least = SPLIT[feature]
    split_keys(monkeypatch, most, least)
    axes = FEATURES[feature]
    axes = axes if "max_offset" in axes else axes | SPLIT_AXES
    call = sample(backend, **axes) | LONGEST
    check(backend, call)
    alone = harness.clone(call) | {"lse": None}
    got, (launch, merge) = attend(backend, alone)
    assert launch.meta["VARIANT"].is_split and parts_of(launch) == most
    assert merge.kernel.name == MERGE
    assert torch.equal(got, attend(backend, call)[0])


def test_parts_of_keys_end_where_a_table_does(monkeypatch):
    """Positions past it are no keys, neither to the parts nor to their merge."""
    split_keys(monkeypatch, 3, 150)
    backend = get_backend("interpret")
    call = sample(backend, **SPLIT_AXES) | LONGEST
    call["block_tables"] = call["block_tables"][:, :19].contiguous()  # 304 keys
    call["pos_offsets"] += 900
    check(backend, call)


@pytest.mark.parametrize(
    ("q_lens", "keys", "window", "splits"),
    [
        ((128,), 8192, 0, 4),  # 4 blocks of 8 heads
        ((9,), 8192, 0, 16),
        ((9,), 65_536, 0, 16),
        ((9,), 1024, 0, 8),  # 128 keys of a part
        ((9,), 255, 0, 1),
        ((9,), 8192, 500, 4),
        ((60, 60), 8192, 0, 3),
        ((300,), 8192, 0, 1),
        ((60, 1, 1), 8192, 0, 1),  # some may be decodes
        ((60,) * 9, 8192, 0, 1),
    ],
)
def test_keys_are_split_where_blocks_are_few(q_lens, keys, window, splits):
    axes = {"num_kv_heads": 8, "group_size": 4, "head_dim": 128, "q_lens": q_lens}
    call = OP.make_sample(TensorFactory(torch.bfloat16, "meta"), **axes, sliding_window=window)
    call["block_tables"] = torch.empty(len(q_lens), keys // 16, dtype=torch.int32, device="meta")
    with record_launches((9, 0)) as launches:
        OP.impls["triton"](**call | {"max_q_len": max(q_lens)})
    assert launches[0].kernel.name == KERNEL
    assert parts_of(launches[0]) == splits
    assert launches[1].kernel.name == (MERGE if splits > 1 else "_paged_decode_kernel")


@on_kernels
@pytest.mark.parametrize("block_size", [16, 128])
def test_nothing_past_a_sequence_is_read(backend_name, block_size):
    """Slots behind a sequence's last key and blocks of nobody hold NaN, unused entries nonsense."""
    backend = get_backend(backend_name)
    call = sample(backend, block_size=block_size, q_lens=(70, 40, 9, 20), max_offset=300)
    unused = unused_slots(call)
    for name in ("k_cache", "v_cache"):
        call[name].movedim(1, 2)[unused] = float("nan")
    check(backend, call)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("cost", [1e-6, 0.05, 1.0, 1e6])
def test_programs_leave_their_sms_to_decodes(cost, window, monkeypatch):
    """One program, some or all of them take the blocks; results are those of a launch of all."""
    backend = get_backend("interpret")
    monkeypatch.setattr(attention_paged, "gpu_of", lambda _: SimpleNamespace(num_sms=7))
    monkeypatch.setattr(attention_paged, "BLOCK_COST", cost)
    call = sample(backend, q_lens=(1, 260, 3, 90), group_size=4, sliding_window=window)
    alone = harness.clone(call)
    with monkeypatch.context() as unshared:
        unshared.setattr(paged_prefill, "may_differ", lambda *_: False)
        want, _ = attend(backend, alone)
    got, launches = attend(backend, call)
    assert launches[0].meta["VARIANT"].shared
    assert torch.equal(got, want) and torch.equal(call["lse"], alone["lse"])


@gluon.jit
def batch_of(offsets_ptr, cuts_ptr, num_seqs, capacity, window, programs):
    """Sequences without a pool."""
    return Batch(
        tables_ptr=None,
        pos_offsets_ptr=offsets_ptr,
        cu_seqlens_q_ptr=cuts_ptr,
        stride_table=None,
        num_seqs=num_seqs,
        capacity=capacity,
        num_tokens=1 << 30,
        num_blocks=None,
        sliding_window=window,
        scale_log2=None,
        softcap_log2=None,
        programs=programs,
    )


@gluon.jit
def tell_programs(
    to_ptr,
    offsets_ptr,
    cuts_ptr,
    num_seqs,
    capacity,
    window,
    sms,
    cost,
    keys,
    VARIANT: gl.constexpr,
):
    programs = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    batch = batch_of(offsets_ptr, cuts_ptr, num_seqs, capacity, window, programs)
    share_sms(batch, sms, cost, keys, VARIANT)
    gl.store(to_ptr + gl.program_id(0), gl.max(programs.load(SEQUENCES), 0))


@pytest.mark.parametrize(
    ("q_lens", "offsets", "window", "grid", "programs"),
    [
        # 2 blocks count 968 + 100 keys three times, 6,408 for the decodes' 4,000: 62 of 100 SMs.
        # Two heads' blocks are all taken by four programs.
        ((64, 1, 1), (936, 1999, 1999), 0, 9, 4),
        # 10 blocks of 260, 7,800 for 70,000: 10 SMs. Their 20 pairs take nine programs three turns,
        # which seven do not exceed; ten take two.
        ((320, 1), (0, 69_999), 0, 9, 7),
        ((320, 1), (0, 69_999), 0, 40, 10),
        ((320, 1, 1, 1), (0, 2**24, 2**24, 2**24), 0, 9, 1),
        # A decode sees 208 keys at most: 78 SMs.
        ((320, *(1,) * 10), (0, *(69_999,) * 10), 200, 9, 7),
        ((320, 0), (0, 69_999), 0, 9, 9),  # without decodes all
        ((1, 1), (5, 5), 0, 9, 0),
    ],
)
def test_the_share_of_programs(q_lens, offsets, window, grid, programs):
    launch, _ = recorded(sliding_window=window)
    variant = replace(launch.meta["VARIANT"], block_b=16)
    assert (variant.heads, variant.num_kv_heads, variant.few) == (4, 2, 8)
    told, lens = torch.zeros(grid, dtype=torch.int32), torch.tensor([0, *q_lens])
    cuts, offsets = lens.cumsum(0).int(), torch.tensor(offsets, dtype=torch.int32)
    arguments = (told, offsets, cuts, len(q_lens), 2**26, window, 100, 3.0, 100)
    run(tell_programs, grid, arguments, {"VARIANT": variant})
    assert told.tolist() == [programs] * grid


@gluon.jit
def tell_parts(to_ptr, offsets_ptr, cuts_ptr, num_seqs, capacity, VARIANT: gl.constexpr):
    batch = batch_of(offsets_ptr, cuts_ptr, num_seqs, capacity, None, None)
    rank, walk = begin(batch, VARIANT)
    walk = walk_to(walk, rank, batch, VARIANT)
    part = part_of(walk, rank, batch, VARIANT)
    gl.store(to_ptr + rank * 2, part.block.batch)
    gl.store(to_ptr + rank * 2 + 1, part.block.first_row)


def test_every_other_sequence_comes_backwards():
    """The last ones come first, and those without queries count for nothing."""
    launch, _ = recorded()
    variant = replace(launch.meta["VARIANT"], num_kv_heads=1, few=0)
    assert variant.consumers * variant.queries == 32
    cuts = torch.tensor([0, 96, 96, 160, 200, 200]).int()
    offsets, told = torch.zeros(5, dtype=torch.int32), torch.zeros(7, 2, dtype=torch.int32)
    run(tell_parts, 7, (told, offsets, cuts, 5, 2**16), {"VARIANT": variant})
    wanted = [(3, 32), (3, 0), (2, 0), (2, 32), (0, 64), (0, 32), (0, 0)]
    assert [tuple(part) for part in told.tolist()] == wanted


def test_every_wait_fence_and_arrival_is_needed():
    launches = [recorded(), recorded(head_dim=96)]
    launches += [recorded(cache_dtype=torch.float8_e4m3fn, head_dim=n) for n in (64, 96, 256)]
    (held,) = unnoticed(launches)
    assert "in fold_tile: without wait_full(streams.v.ring, step - 1)" in held


def recorded(**axes):
    """A launch of programs that take several blocks, and what it left."""
    backend = get_backend("interpret")
    call = sample(backend, q_lens=(150, 90), group_size=4, with_lse=False, **axes)
    got, launches = attend(backend, call)
    return launches[0], got


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("config", [WIDE, hopper_tile(128, 64, 4)], ids=["wide", "narrow"])
def test_machine_code(block_size, config):
    case = OP.bench[0]
    case = type(case)(case.id, case.dtype, case.axes | {"block_size": block_size}, case.metric)
    with prefill_config.forced(config):
        launch = launches_of(OP, case, TARGETS["sm_90"])[0]
    assert launch.kernel.name == KERNEL
    used = compiled(launch)
    assert warnings_of(used.asm["ptx"]) == []
    code = instructions(used.asm["cubin"])
    assert sum(line.name.startswith("USETMAXREG") for line in code) >= 3
    assert not [line for line in code if line.name.startswith(("LDL", "STL"))]
    assert softmax_runs_beside(code)


def kernels_of(config=WIDE, dtype=torch.float16, **axes):
    backend = get_backend("interpret")
    with prefill_config.forced(config), record_launches() as launches:
        backend.paged_varlen_attention(**sample(backend, dtype, **axes))
    return [launch.kernel.name for launch in launches]


@pytest.mark.parametrize(
    "axes",
    [
        {"cache_dtype": torch.int8, "head_dim": 72},
        {"layout": "vllm_x"},
        {"block_size": 8},
        {"head_dim": 36},
    ],
    ids=["codes off the grid", "vectors in pieces", "small pages", "vectors off the grid"],
)
def test_the_plain_kernel_serves_what_this_one_cannot(axes):
    assert kernels_of(**axes)[0] == "_paged_prefill_kernel"


def test_it_is_chosen_for_its_gpu_where_it_was_seen_to_gain():
    hopper, other = gpu_of_arch("sm_90"), gpu_of_arch("sm_80")
    shape = (128, False, True, "")
    assert prefill_config.heuristic(hopper, *shape) == WIDE
    assert prefill_config.heuristic(hopper, 128, False, False, "e4m3") == WIDE
    assert prefill_config.heuristic(hopper, 128, False, False, "") == SMALL  # windows
    assert prefill_config.heuristic(hopper, 256, False, True, "") == SMALL
    for gpu, *of_plain in ((other, *shape), (hopper, 128, True, True, "")):
        assert "path" not in prefill_config.heuristic(gpu, *of_plain)
    assert WIDE in prefill_config.candidates(hopper, *shape)
    assert WIDE not in prefill_config.candidates(other, *shape)
    assert "16 bits" in prefill_config.refusal(hopper, WIDE, 128, True, True, "")
    assert "128 rows" in prefill_config.refusal(
        hopper, hopper_tile(192, 64, 2), 64, False, True, ""
    )
