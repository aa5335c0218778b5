"""Tiles of flash attention: what the plain kernel and Hopper's are launched with, and why."""

from ferrum_triton.kernels.attention.tensor_maps import LARGE
from ferrum_triton.kernels.gpu import INTERPRETER, SHARED_LIMITS, Gpu
from ferrum_triton.kernels.hopper_config import serves
from ferrum_triton.kernels.parameters import one_of, shared_refusal
from ferrum_triton.kernels.rows import cdiv, next_power_of_2
from ferrum_triton.kernels.tuning import Config, Dim, Tunable

# Queries of a block where there are many: from as many on it holds those of one head, not of a KV
# head's whole group.
MANY_QUERIES = 128

# Queries up to which half of a block of Hopper's kernel would be empty.
FEW_QUERIES = 64

# Registers of a thread of Hopper's kernel by its consumers, and bytes of its barriers and of what
# roles are told by.
HOPPER_REGISTERS = {2: 240, 3: 160}
HOPPER_BARRIERS = 1024

# Registers of a consumer's thread where the producer widens 8-bit pages, which takes 72.
WIDE_REGISTERS = 216

# A block's queries come in while the block before is at work, if blocks have up to so many keys on
# average. 300 queries of sixteen sequences of 32 heads over 8 of 128 take 58.8 us for 64.8, 700 of
# eight 87.6 for 93.4, and 1,024 of eight with 32 heads over 32 155.8 for 158.4. But 2,048 of eight
# with 32 heads over 8 take 498 us for 494, and 1,024 of eight that see all their keys 236 for 233.
# With heads of 64 longer blocks gain too: four sequences of 8,192 take 1,220 us for 1,244
# (``bench.timing.Replay`` of ``flash_attention`` with each, H200, copies of cccdbea).
SHORT_BLOCK = 896

# What the queries of a call see, which decides how much blocks have to do: each the keys up to its
# own, or all of as many; or else, as with windows and with keys from before.
TRIANGLE, SQUARE, OTHERS = "triangle", "square", "others"


def flash_heuristic(
    gpu: Gpu,
    rows: int,
    head_dim: int,
    value_dim: int,
    is_float32: bool,
    one_loop: bool,
    has_window: bool,
    pairs: int,
    seen: str,
) -> Config:
    """Hopper's kernel for many queries, where it serves; else the plain one."""
    if gpu.capability == (9, 0) and not is_float32:
        config = _tile_on_hopper(gpu.num_sms, rows, pairs, head_dim, value_dim, seen)
        if config and not flash_refusal(gpu, config, rows, head_dim, value_dim, is_float32):
            return config
    return plain_heuristic(gpu, rows, head_dim, is_float32, one_loop, has_window)


def _tile_on_hopper(
    num_sms: int, rows: int, pairs: int, head_dim: int, value_dim: int, seen: str
) -> Config | None:
    """The tile that takes least, of either kernel; None where the plain one chooses its own."""
    shape = num_sms, rows, pairs, head_dim, value_dim, seen
    if rows < MANY_QUERIES or seen == OTHERS:
        return _hopper_choice(*shape)
    if max(head_dim, value_dim) <= 64:
        choose = _narrow_triangle if seen == TRIANGLE else _narrow_square
        return choose(num_sms, rows, pairs)
    return _small_tile(*shape) or _hopper_choice(*shape)


def _small_tile(
    num_sms: int, rows: int, pairs: int, head_dim: int, value_dim: int, seen: str
) -> Config | None:
    """The plain kernel's tile of 64 rows, where blocks of 128 are few and it takes less; else None.

    An SM then has one block of 128 rows or none, and two or three of 64, which most likely do not
    all wait at the same time.

    With heads of 128, 1,500 queries of eight take 17.2 us for 22.7 by blocks of 128, and with 192
    by 128, 1,000 of eight take 16.7 us for 19.1. With 256, 700 of eight take 17.7 us for 19.0.

    ``bench.timing.device_us`` of ``flash_attention`` under ``flash_config.forced`` of each timed
    them in bfloat16 on an H200, on copies of 17fb2ae. Bounds lie where the two cross over 250 such
    calls, of 2 to 128 heads by 200 to 12,000 queries.
    """
    blocks = pairs * cdiv(rows, 128) / num_sms
    widest = max(head_dim, value_dim)
    if widest <= 128:
        if blocks > (1 if seen == TRIANGLE else 0.5):
            return None
        return tile(64, 128, 4, 3) if seen == TRIANGLE and rows > 512 else tile(64, 64, 4, 3)
    if blocks > (0.75 if seen == TRIANGLE else 0.5):
        return None
    if value_dim <= 128:
        return tile(64, 64, 4, 3)
    return tile(64, 32, 4, 3) if rows <= 1024 else None


def _narrow_triangle(num_sms: int, rows: int, pairs: int) -> Config:
    """Tiles of heads of up to 64 columns whose queries see the keys up to their own.

    Few blocks are cut smaller, as other heads are: 2,047 queries of nine take 20.8 us for 33.7 by
    blocks of 128, and 1,000 of eight 10.1 for 15.8 (as for ``_small_tile``). Up to 3,500 queries
    the plain kernel takes less where blocks of 128 have many rows past the queries, or are few: 800
    of 100 heads take 33.7 us for 38.5, but 1,024 of 128 take 57.7 for 55.8, and 2,048 of 128 180.7
    for 174.5. Longer ones gain by blocks of 192: 8,192 of twelve take 209.4 us for 223.0, and
    16,384 of eight 532 for 575, but 8,192 of eight 155.8 for 150.3, and 4,096 of 48 241 for 234.
    Of 64 heads, 8,192 take 1,074 us by three stages of these, and 1,088 by two. (In blocks of 128
    they took 1,224 us, and 1,364 by the plain kernel, by ``device_us`` of each, copies of 17fb2ae.)

    ``bench.timing.Replay`` of ``flash_attention`` under ``flash_config.forced`` of each timed the
    others in bfloat16 on an H200, on a copy of a71f97f with what came behind it, and at 10cdbe9.
    """
    blocks = pairs * cdiv(rows, 128) / num_sms
    if rows > 512 and blocks <= 2:
        return tile(64, 128, 4, 3)
    whole = rows / (cdiv(rows, 128) * 128) > 0.97
    if rows < 3500 and not (whole and blocks > 6):
        return tile(64, 64, 4, 3)
    return hopper_tile(192, 128, 3) if rows > 7000 and blocks > 5 else hopper_tile(128, 128, 2)


def _narrow_square(num_sms: int, rows: int, pairs: int) -> Config:
    """Tiles of heads of up to 64 columns whose queries see all keys, of which there are as many.

    Blocks are alike, so that turns of the SMs decide, which the last one may leave half empty. A
    block of 192 rows takes 1.3 times as long as one of 128, and more where keys are few: 2,048
    queries of 96 heads take 200.6 us in eight turns of such blocks and 228.1 in twelve, but 1,024
    of 64 take 45.3 in three and 43.5 in four. (That was by two stages; of 32 heads, 4,096 take
    292.6 us by two and 292.5 by three.) The plain kernel has three blocks of 64 rows on an SM
    at once, which take 1.7 times as long as one of Hopper's of 128: 800 of 30 take 16.2 us for
    21.7, and 1,024 of 24 take 19.1 for 23.3. Fewer blocks than SMs take tiles of 128 keys: 1,024 of
    eight take 9.8 us for 13.0.

    Up to 512 queries take blocks of 128 where they are 0.78 or more of the rows of all turns: 512
    of two sequences of sixteen heads took 9.3 us for 10.3 by the plain kernel, of four 15.2 for
    17.9, and of eight 27.6 for 30.7 (``device_us``, what became 3554614). Their tiles are of 64
    keys up to 256 queries: 250 of sixteen sequences of sixteen heads take 17.7 us for 18.5 by 128
    keys, but 512 of eight 28.3 for 26.2.

    Where they are less, the plain kernel's tiles of 32 keys hide fewer of them, and take less where
    blocks are many: 200 of twenty take 20.4 us for 24.5 by 64 keys, and 288 of twelve 19.9 for
    21.7. Where blocks are few, fewer tiles do: 250 of seven sequences of twelve heads take 8.2 us
    for 10.0 (``Replay`` as for ``_narrow_triangle``; of up to 512 queries on a copy of cccdbea).
    """
    turns = {block_m: cdiv(pairs * cdiv(rows, block_m), num_sms) for block_m in (128, 192)}
    blocks = pairs * cdiv(rows, 128) / num_sms
    if rows <= 512:
        if pairs * rows / (turns[128] * num_sms * 128) > 0.78:
            return hopper_tile(128, 64, 4) if rows <= 256 else hopper_tile(128, 128, 2)
        return tile(64, 32 if blocks > 1.5 else 64, 4, 3)
    if blocks <= 1:
        return tile(64, 128, 4, 3)
    small = pairs * cdiv(rows, 64) / (3 * num_sms)
    # A wave that is not full takes about a third of one longer than its share.
    small = 1 if small <= 1 else small + 0.35
    plain = 1.7 * small * cdiv(rows, 64) / (2 * cdiv(rows, 128))
    large = (1.4 if rows <= 1024 else 1.32) * turns[192]
    if plain < min(large, turns[128]):
        return tile(64, 64, 4, 3)
    if large >= turns[128]:
        return hopper_tile(128, 128, 2)
    # Of few tiles of 128 keys, one that is half hidden counts: 576 of 176 take 38.9 us for 41.8.
    return hopper_tile(192, 64, 3) if cdiv(rows, 64) in (9, 11, 13) else hopper_tile(192, 128, 3)


def _hopper_choice(
    num_sms: int, rows: int, pairs: int, head_dim: int, value_dim: int, seen: str
) -> Config | None:
    """Hopper's tiles where they take less time than the plain kernel's; else None.

    Up to 512 queries take tiles of 64 keys, but of 128 where they see all and no more would be
    hidden: with heads of 128, 512 queries of eight sequences of 32 heads over 8 take 62.5 us for
    67.6, but 300 of 256 heads 39.4 for 35.9 (``Replay`` as for ``_narrow_triangle``, 10cdbe9).

    With 255 queries and keys and 32 heads over 8, sixteen sequences with heads of 128 take 41.8 us
    for the plain kernel's 64.0, and four with heads of 96 take 12.4 us for 17.1. One sequence with
    8 heads over 4 of 256 takes 10.6 us for 14.4.

    More queries take tiles of 128 keys, and of 64 where heads have more than 192 columns, or both
    heads and values more than 128. By eight sequences of 2,048, heads of 80 take 403 us for 528,
    and heads of 160 take 728 us for 1,057. Heads of 128 take 293 us for 427 in windows of 512, and
    245 us for 302 with lengths on the device.

    Of keys from before, heads of 64 leave the plain kernel's tensor cores little to wait for. One
    sequence of 255 takes 6.9 us for 11.0, but eight of 700 take 59.3 us for 54.3.

    ``bench.timing.Replay`` of ``flash_attention`` under ``flash_config.forced`` of each timed those
    on an H200, at cdd887f; ``device_us`` these, on copies of 17fb2ae. With 128 heads of 192 by 128,
    4,096 queries take 1,062 us, and 1,247 in blocks of 192. Where they see all, 3,000 queries of
    eight heads of 128 take 78 us in blocks of 128, which are 1.5 turns of an H200's programs, and
    61 in blocks of 192, which are one. So do 300 of 60: 15.0 us and 12.0 (as of 512 above).
    """
    if head_dim <= 64:
        return hopper_tile(128, 64, 3) if MANY_QUERIES <= rows <= 512 else None
    if head_dim > 192 or min(head_dim, value_dim) > 128:
        return hopper_tile(128, 64, 2)
    turns = {block_m: cdiv(pairs * cdiv(rows, block_m), num_sms) for block_m in (128, 192)}
    if seen == SQUARE:
        # A block of 192 rows takes 1.65 times as long as one of 128.
        if 1.65 * turns[192] < turns[128]:
            return hopper_tile(192, 64, 2)
        if cdiv(rows, 64) % 2 == 0 and max(head_dim, value_dim) <= 128:
            return hopper_tile(128, 128, 2)
    return hopper_tile(128, 64, 3) if rows <= 512 else hopper_tile(128, 128, 2)


def plain_heuristic(
    gpu: Gpu,
    rows: int,
    head_dim: int,
    is_float32: bool,
    one_loop: bool,
    has_window: bool,
) -> Config:
    """Tiles that spill nowhere: large ones where tensor maps and 227 KB of shared memory are."""
    if gpu.arch == INTERPRETER:
        # Tiles small enough that small samples have whole and crossed ones.
        return tile(16, 16, 1, 1)
    if is_float32:
        return tile(16, 32, 8, 1) if head_dim > 64 else tile(16, 32, 4, 2)
    if gpu.capability[0] in LARGE:
        return _large_tile(gpu.capability[0] == 9, rows, head_dim, one_loop, has_window)
    # What fits 99 KB of shared memory (sm_86, sm_89, sm_120) and the 64 KB of gfx942.
    if rows <= 16:
        return tile(16, 64, 4, 2 if head_dim > 128 else 3)
    if head_dim > 128:
        return tile(64, 32, 8, 1)
    return tile(64, 64, 4, 2) if rows <= 64 else tile(128, 64, 8, 2)


def _large_tile(
    is_hopper: bool, rows: int, head_dim: int, one_loop: bool, has_window: bool
) -> Config:
    if rows <= 64:
        return _few_rows(is_hopper, rows, head_dim, one_loop)
    if head_dim > 128:
        # With two products for the scores the larger tile spills on Blackwell.
        return tile(128, 64, 8, 2) if is_hopper or head_dim > 192 else tile(64, 64, 4, 2)
    if rows < 2048 or not one_loop or head_dim <= 64:
        return tile(128, 64, 8, 3)
    if has_window and not is_hopper:
        return tile(64, 64, 4, 3)  # what does not spill there
    if rows >= 4096 or has_window:
        return tile(128, 128, 8, 3)
    # Two blocks to an SM hide each other's latencies.
    return tile(128, 64, 4, 2)


def _few_rows(is_hopper: bool, rows: int, head_dim: int, one_loop: bool) -> Config:
    """A block that has all of a KV head's few rows.

    Blocks of 64 rows gain on Hopper, whose tensor cores multiply them asynchronously while TMA
    loads. One query of 32 heads over 8 of 128 takes 14.4 us on 8,192 keys, and 19.6 in blocks of 16
    rows without TMA. On 4,096 keys 32 sequences take 124 us for 132, and 126 us for 145 with eight
    queries each. Heads of 64 take less in blocks of 16 rows: one query on 32,768 keys takes 23.8 us
    for 26.5 (``bench.timing.Replay`` of ``flash_attention`` under ``flash_config.forced`` of each,
    H200, cdd887f).

    Blocks of 16 rows by 32 keys gain with lengths on the device. Eight sequences of up to 4,096
    keys take 25.2 us, and 28.3 in blocks of 64 by 64; 32 of them take 83.2 us for 88.0 (the same,
    e50bc87). By 64 sequences of up to 1,024 keys they take 40.8 us for 46.4 (cdd887f).
    """
    block_n = 32 if head_dim > 128 else 64
    if is_hopper and rows <= 16 and not one_loop and head_dim > 64:
        return tile(16, 32, 4, 3)
    if is_hopper and (rows > 16 or head_dim > 64):
        return tile(64, block_n, 4, 3)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return tile(block_m, block_n, 4, 4 if rows <= 32 and head_dim <= 128 else 3)


def tile(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    """The configuration of a block of block_m rows and tiles of block_n keys."""
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def hopper_tile(block_m: int, block_n: int, num_stages: int) -> Config:
    """The configuration of Hopper's kernel with a consumer for every 64 rows of a block."""
    return {"path": "hopper", "BLOCK_M": block_m, "BLOCK_N": block_n, "num_stages": num_stages}


def flash_candidates(
    gpu: Gpu, rows: int, head_dim: int, value_dim: int, is_float32: bool, *_: Dim
) -> list[Config]:
    """Blocks of up to 128 rows, on one warp for every 16 or 32 of them, and Hopper's."""
    blocks = (16,) if rows <= 16 else (32, 64) if rows <= 64 else (64, 128)
    plain = [
        tile(block_m, block_n, num_warps, num_stages)
        for block_m in blocks
        for block_n in (32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (2, 3, 4)
        if block_m < 128 or num_warps == 8 or block_n < 128
    ]
    hopper = [
        hopper_tile(block_m, block_n, num_stages)
        for block_m in (128, 192)
        for block_n in (64, 128)
        for num_stages in (2, 3, 4)
    ]
    shape = (rows, head_dim, value_dim, is_float32)
    return plain + [config for config in hopper if not flash_refusal(gpu, config, *shape)]


def flash_refusal(
    gpu: Gpu,
    config: Config,
    rows: int,
    head_dim: int,
    value_dim: int,
    is_float32: bool,
    *_: Dim,
) -> str:
    """Why a GPU cannot launch Hopper's kernel with a configuration, or ""."""
    if "path" not in config:
        return ""
    if not serves(gpu):
        return f"Hopper's kernel is not for {gpu.arch}, or not with this version of Triton"
    if is_float32 or rows <= FEW_QUERIES:
        return f"Hopper's kernel takes 16 bits and more than {FEW_QUERIES} queries"
    # What a thread holds of results, scores and weights, beside which it needs some thirty more.
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    registers = padded(value_dim) // 2 + block_n * 3 // 4
    most = HOPPER_REGISTERS[block_m // 64] - 32
    if registers > most:
        return f"{registers} registers of a thread for products are more than {most}"
    # Where there is room for no others, results leave through buffers of queries, of their width.
    own_out = split_columns(head_dim)[0] != padded(value_dim)
    return shared_refusal(gpu, hopper_shared(config, head_dim, value_dim, own_out=own_out))


def hopper_shared(
    config: Config, head_dim: int, value_dim: int, *, own_out: bool, ahead: bool = False
) -> int:
    """Bytes of shared memory of Hopper's kernel.

    Args:
        own_out: there are buffers for its results.
        ahead: there are buffers for the next block's queries.
    """
    block_m, block_n, stages = config["BLOCK_M"], config["BLOCK_N"], config["num_stages"]
    columns, values = sum(split_columns(head_dim)), padded(value_dim)
    queries = block_m * (columns * (1 + ahead) + values * own_out)
    return 2 * (queries + stages * block_n * (columns + values)) + HOPPER_BARRIERS


def comes_early(
    config: Config, head_dim: int, value_dim: int, turns: float, keys_of_block: int
) -> bool:
    """Whether a block's queries come in while the block before is at work.

    Args:
        turns: blocks for each SM.
        keys_of_block: the keys that a block has on average.
    """
    if turns <= 1 or (head_dim > 64 and keys_of_block > SHORT_BLOCK):
        return False
    shared = hopper_shared(config, head_dim, value_dim, own_out=True, ahead=True)
    return shared <= SHARED_LIMITS["sm_90"]


def codes_refusal(gpu: Gpu, config: Config, head_dim: int) -> str:
    """Why Hopper's kernel, which takes a configuration, cannot take 8-bit pages with it, or ""."""
    block_n, values = config["BLOCK_N"], padded(head_dim)
    registers, most = values // 2 + block_n * 3 // 4, WIDE_REGISTERS - 40
    if registers > most:
        return f"{registers} registers of a thread for products are more than {most}"
    codes = block_n * (sum(split_columns(head_dim)) + values)
    scales = 2 * config["num_stages"] * block_n * 4
    shared = hopper_shared(config, head_dim, head_dim, own_out=False) + codes + scales
    return shared_refusal(gpu, shared)


def padded(columns: int) -> int:
    """Columns of a product that has at least some."""
    return max(next_power_of_2(columns), 16)


def split_columns(head_dim: int) -> tuple[int, int]:
    """Columns of the two products that make scores: 192 are 128 and 64, where 256 would be padded.

    The second is 0 where it would save nothing.
    """
    whole = padded(head_dim)
    first = whole // 2
    second = padded(head_dim - first) if head_dim > first else 0
    return (first, second) if first >= 16 and first + second < whole else (whole, 0)


flash_config = Tunable(
    "flash_attention",
    (
        "rows",
        "head_dim",
        "value_dim",
        "is_float32",
        "one_loop",
        "has_window",
        "pairs",
        "seen",
    ),
    flash_heuristic,
    flash_candidates,
    flash_refusal,
    # Heads of another size take other registers. The number of rows matters less: at a quarter of a
    # measured row's the choice was still 47 % ahead (8 x 512 queries by ``do_bench``, as chosen and
    # under ``flash_config.forced(flash_heuristic(...))``, fcb9219).
    within={"rows": 8, "head_dim": 1, "value_dim": 1},
    parameters={"path": one_of("hopper")},
)
