"""Which tiles flash attention takes on a Hopper, and how it cuts calls into programs."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ferrum_triton.gluon_emulator import run
from ferrum_triton.kernels.attention.flash_config import (
    OTHERS,
    SHORT_BLOCK,
    SQUARE,
    TRIANGLE,
    comes_early,
    flash_config,
    hopper_tile,
)
from ferrum_triton.kernels.attention.flash_plan import choose_plan, heads_together
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.hopper.attention_tiles import Call, Variant, block_of_rank, next_rank
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import record_picks
from ferrum_triton.registry import OPS, Case
from tests.compiling import compiled, launches_of

# Programs of an H200.
PROGRAMS = 132


@pytest.mark.parametrize(
    ("rows", "head_dim", "value_dim", "chosen"),
    [
        (128, 64, 64, (128, 64)),
        (512, 128, 128, (128, 64)),
        (513, 80, 80, (128, 128)),
        (32768, 128, 128, (128, 128)),
        (200, 256, 256, (128, 64)),
        (512, 192, 128, (128, 64)),
        (2048, 192, 128, (128, 128)),
        (2048, 256, 128, (128, 64)),
        (300, 256, 128, (128, 64)),
        (513, 64, 64, None),
        (65, 128, 128, (128, 64)),
        (64, 128, 128, None),
        (127, 64, 64, None),
    ],
)
def test_it_is_chosen_where_it_was_seen_to_gain(rows, head_dim, value_dim, chosen):
    """Of keys from before, whether lengths are on the device or a window hides keys."""
    for one_loop, has_window in ((True, False), (False, False), (True, True)):
        shape = rows, head_dim, value_dim, False, one_loop, has_window, 32, OTHERS
        config = flash_config.heuristic(gpu_of_arch("sm_90"), *shape)
        blocks = (config["BLOCK_M"], config["BLOCK_N"]) if "path" in config else None
        assert blocks == chosen
        assert not flash_config.refusal(gpu_of_arch("sm_90"), config, *shape)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "pairs", "q_len"),
    [
        (64, 64, 9, 2047),
        (64, 64, 9, 500),
        (128, 128, 8, 1500),
        (192, 128, 8, 1000),
        (256, 256, 8, 700),
    ],
)
def test_small_tiles_spill_nowhere(head_dim, value_dim, pairs, q_len):
    axes = {"batch": 1, "num_kv_heads": pairs, "group_size": 1, "kv_len": q_len, "q_len": q_len}
    axes |= {"head_dim": head_dim, "value_dim": value_dim}
    case = Case("few blocks", torch.bfloat16, axes)
    (launch,) = launches_of(OPS["flash_attention"], case, TARGETS["sm_90"])
    assert launch.kernel.name == "_flash_attention_kernel"
    assert compiled(launch).spilled == 0


def of_dims(head_dim, value_dim=None, *, rows, pairs, seen=TRIANGLE):
    return rows, head_dim, value_dim or head_dim, False, True, False, pairs, seen


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        (of_dims(64, rows=2047, pairs=9), (64, 128)),
        (of_dims(64, rows=500, pairs=9), (64, 64)),
        (of_dims(64, rows=3000, pairs=32), (64, 64)),
        (of_dims(64, rows=1024, pairs=128), (128, 128)),
        (of_dims(64, rows=900, pairs=128), (64, 64)),
        (of_dims(64, rows=4096, pairs=48), (128, 128)),
        (of_dims(64, rows=8192, pairs=64), (192, 128)),
        (of_dims(64, 256, rows=500, pairs=64), (128, 64)),
        (of_dims(64, rows=700, pairs=16, seen=SQUARE), (64, 128)),
        (of_dims(64, rows=700, pairs=32, seen=SQUARE), (192, 64)),  # one turn of such blocks
        (of_dims(64, rows=800, pairs=30, seen=SQUARE), (64, 64)),  # 390 blocks, three to an SM
        (of_dims(64, rows=1024, pairs=64, seen=SQUARE), (128, 128)),
        (of_dims(64, rows=3000, pairs=16, seen=SQUARE), (192, 128)),
        (of_dims(64, rows=512, pairs=64, seen=SQUARE), (128, 128)),  # 256 blocks, by 132 SMs
        (of_dims(64, rows=480, pairs=48, seen=SQUARE), (64, 64)),  # 192
        (of_dims(64, rows=290, pairs=44, seen=SQUARE), (64, 64)),  # 132, a quarter of them empty
        (of_dims(64, rows=333, pairs=160, seen=SQUARE), (128, 128)),  # 480, a seventh
        (of_dims(64, rows=200, pairs=320, seen=SQUARE), (64, 32)),  # 640, a fifth
        (of_dims(64, rows=250, pairs=256, seen=SQUARE), (128, 64)),
        (of_dims(128, rows=1500, pairs=8), (64, 128)),
        (of_dims(96, rows=300, pairs=16), (64, 64)),
        (of_dims(128, rows=1500, pairs=16), (128, 128)),
        (of_dims(128, rows=300, pairs=128), (128, 64)),
        (of_dims(128, rows=700, pairs=8, seen=SQUARE), (64, 64)),
        (of_dims(128, rows=512, pairs=256, seen=SQUARE), (128, 128)),
        (of_dims(128, rows=300, pairs=256, seen=SQUARE), (128, 64)),
        (of_dims(128, rows=300, pairs=60, seen=SQUARE), (192, 64)),
        (of_dims(192, 128, rows=512, pairs=64, seen=SQUARE), (128, 64)),
        (of_dims(128, rows=1500, pairs=8, seen=SQUARE), (128, 128)),
        (of_dims(128, rows=3000, pairs=8, seen=SQUARE), (192, 64)),
        (of_dims(192, 128, rows=1500, pairs=8), (64, 64)),
        (of_dims(192, 128, rows=1000, pairs=16), (128, 128)),
        (of_dims(192, 128, rows=500, pairs=128), (128, 64)),
        (of_dims(192, 128, rows=3000, pairs=8, seen=SQUARE), (192, 64)),
        (of_dims(192, 128, rows=3000, pairs=16, seen=SQUARE), (128, 128)),
        (of_dims(256, rows=700, pairs=8), (64, 32)),
        (of_dims(256, rows=1500, pairs=8), (128, 64)),
        (of_dims(256, rows=1000, pairs=16), (128, 64)),
    ],
)
def test_few_blocks_are_cut_smaller(shape, chosen):
    """As ``flash_config`` says, on this GPU alone; 16 bits alone have such tiles."""
    config = flash_config.heuristic(gpu_of_arch("sm_90"), *shape)
    assert (config["BLOCK_M"], config["BLOCK_N"]) == chosen
    assert ("path" in config) == (chosen[0] > 64)
    assert not flash_config.refusal(gpu_of_arch("sm_90"), config, *shape)
    others = [flash_config.heuristic(gpu_of_arch("sm_100"), *shape)]
    others.append(flash_config.heuristic(gpu_of_arch("sm_90"), *shape[:3], True, *shape[4:]))
    assert not any("path" in other for other in others)
    assert others[1]["BLOCK_M"] == 16


@pytest.mark.parametrize(
    ("q_len", "keys", "window", "causal", "seen"),
    [
        (300, 300, 0, True, TRIANGLE),
        (300, 599, 0, True, TRIANGLE),
        (300, 600, 0, True, OTHERS),
        (300, 300, 0, False, SQUARE),
        (300, 300, 50, True, OTHERS),
        (40, 40, 0, True, OTHERS),  # packed, with their group's other heads
    ],
)
def test_what_is_seen_decides_tiles(q_len, keys, window, causal, seen):
    q = torch.empty(1, 8, q_len, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 4, keys, 128, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)), record_picks() as picks:
        choose_plan(q, k, k, q, keys, None, window, causal)
    assert picks[0].shape[-1] == seen
    assert picks[0].shape[-2] == (4 if q_len == 40 else 8)


@pytest.mark.parametrize(
    ("batch", "rows", "at_once"),
    [
        (1, 3072, [8, 1]),  # as many as 32 MB have room for
        (8, 512, [64, 1]),  # 1.3 turns of 132 programs are 172 blocks, of four a head
        (8, 2048, [16, 1]),
    ],
)
def test_heads_that_see_all_keys_need_no_others_beside_them(batch, rows, at_once):
    """Their blocks are alike; of short ones that see a triangle, few heads make up for another."""
    q = torch.empty(batch, 16, rows, 192, dtype=torch.bfloat16, device="meta")
    v = torch.empty(batch, 16, rows, 128, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)), flash_config.forced(hopper_tile(128, 64, 2)):
        plans = [choose_plan(q, q, v, v, rows, None, 0, causal) for causal in (True, False)]
    assert [plan.heads_at_once for plan in plans] == at_once


@pytest.mark.parametrize(
    ("head_dim", "turns", "keys", "early"),
    [
        (128, 1.01, SHORT_BLOCK, True),
        (128, 1.0, SHORT_BLOCK, False),  # no SM has a next block
        (128, 1.01, SHORT_BLOCK + 1, False),
        (64, 1.01, SHORT_BLOCK + 1, True),
        (192, 1.01, SHORT_BLOCK, False),  # no room
    ],
)
def test_queries_come_early_where_blocks_are_short_and_there_is_room(head_dim, turns, keys, early):
    tile = hopper_tile(128, 128, 2)
    assert comes_early(tile, head_dim, min(head_dim, 128), turns, keys) == early


def test_keys_of_few_queries_and_keys_are_not_split():
    """Merging would take longer: sixteen heads of 500 queries fill 128 programs, four fill 32."""
    for pairs, keys, splits in ((4, 500, 1), (4, 700, 3), (16, 500, 1)):
        q = torch.empty(1, pairs, keys, 64, dtype=torch.bfloat16, device="meta")
        with record_launches((9, 0)):
            assert choose_plan(q, q, q, q, keys, None, 0, True).splits == splits


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "head_dim", "q_len", "keys", "chosen"),
    [
        (16, 32, 8, 128, 96, 96, "packed"),
        (16, 32, 8, 128, 97, 97, "hopper"),
        (16, 32, 8, 64, 112, 112, "packed"),
        (1, 8, 4, 256, 65, 65, "hopper"),
        (1, 8, 4, 256, 65, 512, "packed, split"),
        (1, 8, 8, 128, 100, 256, "hopper"),
        (1, 8, 8, 128, 100, 512, "apart, split"),
        (1, 32, 8, 128, 128, 512, "hopper"),
        (1, 32, 8, 128, 128, 1024, "apart, split"),
        (1, 32, 8, 128, 129, 1024, "hopper"),
        (1, 32, 8, 128, 129, 8192, "packed, split"),
        (1, 32, 8, 128, 225, 8192, "apart, split"),
        (1, 8, 4, 256, 129, 2048, "apart, split"),
    ],
)
def test_heads_are_packed_and_keys_split_as_timed(
    batch, heads, kv_heads, head_dim, q_len, keys, chosen
):
    """As ``packing_saves``, SPLIT_KEYS and FEW_SPLITS of ``flash_plan`` say."""
    q = torch.empty(batch, heads, q_len, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, kv_heads, keys, head_dim, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)):
        plan = choose_plan(q, k, k, q, keys, None, 0, True)
    packing = "packed" if plan.packed else "apart"
    split = ", split" if plan.splits > 1 else ""
    assert ("hopper" if "path" in plan.tile else packing + split) == chosen


@gluon.jit
def shares_of_flash(tiles_ptr, seen_ptr, call, VARIANT: gl.constexpr):
    """Tiles of keys that each program has, and how often each block of queries is one's."""
    rank, turn, tiles = gl.program_id(0), 0, 0
    blocks_per_head = call.last_row // VARIANT.block_m + 1
    while rank < call.blocks:
        block = block_of_rank(rank, call, VARIANT)
        at = block.head * blocks_per_head + block.first_row // VARIANT.block_m
        gl.store(seen_ptr + at, gl.load(seen_ptr + at) + 1)
        tiles += block.tiles
        turn += 1
        rank = next_rank(rank, turn, gl.num_programs(0))
    gl.store(tiles_ptr + gl.program_id(0), tiles)


def shares(kv_heads, group, q_len, together, programs=PROGRAMS, consumers=2):
    """Tiles of 64 keys that each program has of a causal call; each block is one program's.

    Args:
        together: KV heads that run side by side, a section.
        consumers: groups of 64 queries that make a block.
    """
    variant = Variant(
        consumers=consumers,
        registers=240,
        block_n=64,
        stages=2,
        block_d=128,
        block_e=0,
        block_v=128,
        own_out=True,
        group=group,
        negate=False,
        is_causal=True,
        has_window=False,
        has_softcap=False,
        newest=False,
    )
    heads, blocks = kv_heads * group, cdiv(q_len, variant.block_m)
    tiles, seen = torch.zeros(programs).int(), torch.zeros(heads * blocks).int()
    call = Call(
        kv_lens_ptr=None,
        blocks=heads * blocks,
        blocks_at_once=blocks * together * group,
        heads_at_once=together * group,
        last_row=(blocks - 1) * variant.block_m,
        num_heads=heads,
        q_len=q_len,
        kv_len=q_len,
        pos_offset=0,
        sliding_window=0,
        scale_log2=1.0,
        softcap_log2=0.0,
    )
    run(shares_of_flash, programs, (tiles, seen, call), {"VARIANT": variant}, timeout=60)
    assert (seen == 1).all()
    return tiles


def largest_share(tiles):
    """What a program has at most, an even share being 1."""
    return (tiles.max() / tiles.double().mean()).item()


@pytest.mark.parametrize(
    ("kv_heads", "group", "q_len", "room"),
    [
        (8, 2, 1000, 4),
        (8, 2, 1000, 8),
        (12, 1, 640, 3),
        (8, 2, 500, 2),
        (6, 1, 1500, 1),
        (10, 1, 900, 5),
    ],
)
def test_programs_have_alike_much_to_do(kv_heads, group, q_len, room):
    """Of heads that come in several sections."""
    blocks = cdiv(q_len, 128)
    together = heads_together(kv_heads, room, 16, group * blocks)
    tiles = shares(kv_heads, group, q_len, together, programs=16)
    ends = [min(128 * i, q_len) for i in range(1, blocks + 1)]
    assert tiles.sum() == kv_heads * group * sum(cdiv(end, 64) for end in ends)
    assert largest_share(tiles) < 1.15


@pytest.mark.parametrize(
    ("kv_heads", "room", "num_sms", "blocks", "together"),
    [
        (8, 100, PROGRAMS, 64, 8),
        (8, 7, PROGRAMS, 64, 4),
        (128, 8, PROGRAMS, 16, 16),  # 128 blocks are fewer than 172
        (128, 8, 0, 16, 8),
        (7, 5, PROGRAMS, 32, 7),
        (5, 0, PROGRAMS, 300, 1),
        (3, 1, PROGRAMS, 1, 3),
    ],
)
def test_heads_side_by_side(kv_heads, room, num_sms, blocks, together):
    assert heads_together(kv_heads, room, num_sms, blocks) == together
