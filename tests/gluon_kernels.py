"""Small Gluon kernels for Hopper, which test_gluon_emulator.py runs."""

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import mangle_type

ROWS = gl.constexpr(64)
# A row to eight threads, for blocks of 64 rows.
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


HOPPER = GPUTarget("cuda", 90, 32)


def type_of(x):
    if isinstance(x, tuple):
        return type(x)(*map(type_of, x))
    return mangle_type(x)


def translate(kernel, args, constexprs):
    """Triton takes the kernel: its types, layouts and calls are those of real Gluon."""
    positions = {p.name: i for i, p in enumerate(kernel.params)}
    names = [p.name for p in kernel.params if not p.is_constexpr]
    types = {name: type_of(arg) for name, arg in zip(names, args, strict=True)}
    signature = {name: types.get(name, "constexpr") for name in positions}
    constants = {(positions[name],): value for name, value in constexprs.items()}
    source, backend = GluonASTSource(kernel, signature, constants), make_backend(HOPPER)
    options, context = backend.parse_options({"num_warps": 4}), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    source.make_ir(HOPPER, options, functions, backend.get_module_map(), context)


@gluon.jit
def fetch(desc, row, column, bar, buf):
    """Begin the copy of a block, whose bytes the barrier counts."""
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], bar, buf)


@gluon.jit
def make_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def put(desc, row, column, buf, value):
    """Write a block through shared memory, once the block before has left it."""
    tma.store_wait(0)
    gl.thread_barrier()
    buf.store(value)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, column], buf)


@gluon.jit
def scale_ring(y_desc, x_desc, num_blocks, factor, STAGES: gl.constexpr):
    """y = factor · x: blocks of rows through a ring of stages."""
    SHAPE: gl.constexpr = x_desc.block_type.shape
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, SHAPE[0], SHAPE[1]], x_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, SHAPE, y_desc.layout)
    landed = make_barriers(STAGES, 1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        fetch(x_desc, s * SHAPE[0], 0, landed.index(s), ring.index(s))
    for i in range(num_blocks):
        stage = i % STAGES
        mbarrier.wait(landed.index(stage), (i // STAGES) & 1)
        x = ring.index(stage).load(LAYOUT)
        if i + STAGES < num_blocks:
            fetch(x_desc, (i + STAGES) * SHAPE[0], 0, landed.index(stage), ring.index(stage))
        put(y_desc, i * SHAPE[0], 0, out, (x * factor).to(y_desc.dtype))
    tma.store_wait(0)


@gluon.jit
def product_ring(c_ptr, a_desc, b_desc, rows, columns, steps, STAGES: gl.constexpr):
    """C = A Bᵀ, a tile of 64 x 64, two products in flight."""
    K: gl.constexpr = a_desc.block_type.shape[1]
    tile: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, ROWS, K], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, ROWS, K], b_desc.layout)
    landed = make_barriers(STAGES, 2)
    fence_async_shared()
    row, column = gl.program_id(0) * ROWS, gl.program_id(1) * ROWS
    for s in gl.static_range(STAGES):
        fetch(a_desc, row, s * K, landed.index(s), a_ring.index(s))
        fetch(b_desc, column, s * K, landed.index(s), b_ring.index(s))
    acc = gl.zeros([ROWS, ROWS], gl.float32, tile)
    for k in range(steps):
        stage = k % STAGES
        mbarrier.wait(landed.index(stage), (k // STAGES) & 1)
        b = b_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(a_ring.index(stage), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # The stage of the product before is free now.
        if (k > 0) & (k - 1 + STAGES < steps):
            free = (k - 1) % STAGES
            later = (k - 1 + STAGES) * K
            fetch(a_desc, row, later, landed.index(free), a_ring.index(free))
            fetch(b_desc, column, later, landed.index(free), b_ring.index(free))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    r = row + gl.arange(0, ROWS, gl.SliceLayout(1, tile))
    c = column + gl.arange(0, ROWS, gl.SliceLayout(0, tile))
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    gl.store(c_ptr + r[:, None] * columns + c[None, :], acc, mask=inside)


@gluon.jit
def produce(a_desc, b_desc, rings, bars, tiles_n, num_tiles, steps, STAGES: gl.constexpr):
    a_ring, b_ring = rings
    full, empty = bars
    K: gl.constexpr = a_desc.block_type.shape[1]
    it = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        for k in range(steps):
            stage = it % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            a_row, b_row = tile // tiles_n * ROWS, tile % tiles_n * ROWS
            tma.async_copy_global_to_shared(a_desc, [a_row, k * K], bar, a_ring.index(stage))
            tma.async_copy_global_to_shared(b_desc, [b_row, k * K], bar, b_ring.index(stage))
            it += 1


@gluon.jit
def consume(c_desc, out, rings, bars, tiles_n, num_tiles, steps, STAGES: gl.constexpr):
    a_ring, b_ring = rings
    full, empty = bars
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    it = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc = gl.zeros([ROWS, ROWS], gl.float32, layout)
        for _ in range(steps):
            stage = it % STAGES
            mbarrier.wait(full.index(stage), (it // STAGES) & 1)
            b = b_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(a_ring.index(stage), b, acc, is_async=True)
            mbarrier.wait(full.index(stage), (it // STAGES) & 1)  # redundant: complete; it pins
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(stage), count=1)
            it += 1
        put(c_desc, tile // tiles_n * ROWS, tile % tiles_n * ROWS, out, acc.to(c_desc.dtype))
    tma.store_wait(0)


@gluon.jit
def specialised_product(c_desc, a_desc, b_desc, tiles_n, num_tiles, steps, STAGES: gl.constexpr):
    """C = A Bᵀ by a producer of one warp and a consumer, tiles of 64 x 64 in turns."""
    K: gl.constexpr = a_desc.block_type.shape[1]
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, ROWS, K], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, ROWS, K], b_desc.layout)
    out = gl.allocate_shared_memory(c_desc.dtype, [ROWS, ROWS], c_desc.layout)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    fence_async_shared()
    rings, bars = (a_ring, b_ring), (full, empty)
    gl.warp_specialize(
        [
            (consume, (c_desc, out, rings, bars, tiles_n, num_tiles, steps, STAGES)),
            (produce, (a_desc, b_desc, rings, bars, tiles_n, num_tiles, steps, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def sum_by_tickets(total_ptr, parts_ptr, ticket_ptr, x_ptr, size, BLOCK: gl.constexpr):
    """The sum of x and the largest: the program that comes last adds what the others left."""
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, LINE)
    x = gl.load(x_ptr + at, mask=at < size, other=0.0)
    gl.store(parts_ptr + gl.program_id(0), gl.sum(x, 0))
    gl.atomic_max(total_ptr + 1, gl.max(x, 0))
    ticket = gl.atomic_add(ticket_ptr, 1)
    if ticket == gl.num_programs(0) - 1:
        part = gl.arange(0, BLOCK, LINE)
        parts = gl.load(parts_ptr + part, mask=part < gl.num_programs(0), other=0.0)
        gl.store(total_ptr, gl.sum(parts, 0))


@gluon.jit
def in_turn(y_ptr, flag_ptr, SEM: gl.constexpr):
    """y = 2 · y + program, one program after the other."""
    program = gl.program_id(0)
    while gl.atomic_add(flag_ptr, 0, sem=SEM) < program:
        pass
    gl.store(y_ptr, gl.load(y_ptr) * 2 + program)
    gl.atomic_add(flag_ptr, 1, sem=SEM)


@gluon.jit
def in_memory(y_ptr, y_desc, FAULT: gl.constexpr):
    """Mistakes of programs, or of copies, that meet in y, float32 [64, 64]."""
    at = gl.arange(0, 128, LINE)
    program = gl.program_id(0)
    mine = (program + at * 0).to(gl.float32)
    if FAULT == "two write":
        gl.store(y_ptr + at, mine)
    if FAULT == "the next one reads":
        gl.store(y_ptr + program * 128 + at, gl.load(y_ptr + (program + 1) * 128 + at) + mine + 1)
    if FAULT == "added and set":
        gl.atomic_add(y_ptr + at, mine + 1)
        gl.store(y_ptr + program, 0.5)
    if FAULT == "read after a TMA store":
        ones = gl.full([64, 64], 1.0, gl.float32, LAYOUT)
        buf = gl.allocate_shared_memory(gl.float32, [64, 64], y_desc.layout)
        put(y_desc, 0, 0, buf, ones)
        tma.store_wait(0)
        gl.thread_barrier()
        gl.store(y_ptr + at, gl.load(y_ptr + at) + 1)
    if FAULT == "none":
        gl.store(y_ptr + program * 128 + at, gl.load(y_ptr + program * 128 + at) + mine)
        gl.store(y_ptr + 1024 + at, at.to(gl.float32))
        gl.atomic_add(y_ptr + 2048 + at, mine + 1)


@gluon.jit
def copy_by_threads(y_ptr, x_ptr, num_blocks, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """y = x through shared memory by cp.async, a group of copies for each stage."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], layout)
    at = gl.arange(0, BLOCK, LINE)
    for stage in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(ring.index(stage), x_ptr + stage * BLOCK + at)
        async_copy.commit_group()
    for i in range(num_blocks):
        ahead = i + STAGES - 1
        if ahead < num_blocks:
            there = x_ptr + ahead * BLOCK + at
            async_copy.async_copy_global_to_shared(ring.index(ahead % STAGES), there)
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        gl.thread_barrier()
        gl.store(y_ptr + i * BLOCK + at, ring.index(i % STAGES).load(LINE))


@gluon.jit
def gather(x_ptr, index_ptr, ring, bars, columns, steps, STAGES: gl.constexpr):
    """Rows by their indices, 64 columns a step; each thread arrives when its copies are there."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    full, empty = bars
    rows = gl.load(index_ptr + gl.arange(0, ROWS, gl.SliceLayout(1, wide)))
    there = x_ptr + rows[:, None] * columns + gl.arange(0, ROWS, gl.SliceLayout(0, wide))[None, :]
    for k in range(steps):
        stage = k % STAGES
        mbarrier.wait(empty.index(stage), ((k // STAGES) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(ring.index(stage), there + k * ROWS)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def multiply_gathered(y_ptr, ring, bars, steps, STAGES: gl.constexpr):
    full, empty = bars
    tile: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    acc = gl.zeros([ROWS, ROWS], gl.float32, tile)
    for k in range(steps):
        stage = k % STAGES
        mbarrier.wait(full.index(stage), (k // STAGES) & 1)
        # What threads copied, tensor cores see after a fence, of whichever side.
        fence_async_shared()
        rows = ring.index(stage)
        acc = warpgroup_mma(rows, rows.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, tile))
    column = gl.arange(0, ROWS, gl.SliceLayout(0, tile))
    gl.store(y_ptr + row[:, None] * ROWS + column[None, :], acc)


@gluon.jit
def gram_of_gathered(y_ptr, x_ptr, index_ptr, columns, steps, STAGES: gl.constexpr):
    """G Gᵀ of 64 rows G of x, by a warpgroup that gathers and one that multiplies."""
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    ring = gl.allocate_shared_memory(gl.float16, [STAGES, ROWS, ROWS], shared)
    full, empty = make_barriers(STAGES, 128), make_barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_gathered, (y_ptr, ring, (full, empty), steps, STAGES)),
            (gather, (x_ptr, index_ptr, ring, (full, empty), columns, steps, STAGES)),
        ],
        [4],
        [64],
    )


@gluon.constexpr_function
def bar_text(verb, number):
    return f"bar.{verb} {number}, 256; mov.b32 $0, $1;"


@gluon.jit
def meet(x, VERB: gl.constexpr, NUMBER: gl.constexpr):
    text: gl.constexpr = bar_text(VERB, NUMBER)
    return gl.inline_asm_elementwise(text, "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def hand_out(x_ptr, buf, count, BLOCK: gl.constexpr):
    for i in range(count):
        at = i * BLOCK + gl.arange(0, BLOCK, LINE)
        buf.store(gl.load(x_ptr + at))
        meet(i, "arrive", 1)
        meet(i, "sync", 2)


@gluon.jit
def take_over(y_ptr, buf, count, BLOCK: gl.constexpr):
    for i in range(count):
        meet(i, "sync", 1)
        at = i * BLOCK + gl.arange(0, BLOCK, LINE)
        gl.store(y_ptr + at, buf.load(LINE))
        meet(i, "arrive", 2)


@gluon.jit
def copy_by_turns(y_ptr, x_ptr, count, BLOCK: gl.constexpr):
    """y = x, by two warpgroups that take turns at the hardware's barriers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    buf = gl.allocate_shared_memory(gl.float32, [BLOCK], layout)
    gl.warp_specialize(
        [(take_over, (y_ptr, buf, count, BLOCK)), (hand_out, (x_ptr, buf, count, BLOCK))],
        [4],
        [64],
    )


@gluon.jit
def ask_for_blocks(x_desc, buf, landed, free, num_blocks):
    for i in range(num_blocks):
        mbarrier.wait(free.index(0), (i & 1) ^ 1)
        fetch(x_desc, i * ROWS, 0, landed.index(0), buf)


@gluon.jit
def add_up_blocks(y_ptr, buf, landed, free, num_blocks, FENCED: gl.constexpr):
    total = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    for i in range(num_blocks):
        mbarrier.wait(landed.index(0), i & 1)
        x = buf.load(LAYOUT)
        if FENCED == "before":
            fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(free.index(0), count=1)
        if FENCED == "between":
            fence_async_shared()
            gl.thread_barrier()
        mbarrier.arrive(free.index(0), count=1)
        total += x
    gl.store(y_ptr + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.sum(total, 1))


@gluon.jit
def sums_of_rows(y_ptr, x_desc, num_blocks, FENCED: gl.constexpr):
    """Sums of rows over blocks of 64 rows, one buffer for all; its loads may be overtaken.

    Two arrivals let go of it, and a fence comes before both, between them, or nowhere ("").
    """
    buf = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], x_desc.layout)
    landed, free = make_barriers(1, 1), make_barriers(1, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (add_up_blocks, (y_ptr, buf, landed, free, num_blocks, FENCED)),
            (ask_for_blocks, (x_desc, buf, landed, free, num_blocks)),
        ],
        [1],
        [24],
    )
