"""A Gluon kernel of mistakes, one at a time, which test_gluon_emulator.py has the emulator find."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tests.gluon_kernels import LAYOUT, ROWS, fetch, meet


@gluon.jit
def idle(buf):
    pass


@gluon.jit
def read(y_ptr, buf):
    gl.store(y_ptr + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.sum(buf.load(LAYOUT), 1))


@gluon.jit
def write(buf):
    buf.store(gl.zeros([ROWS, ROWS], gl.float16, LAYOUT))


@gluon.jit
def arrive_three_times(bar):
    for _ in range(3):
        mbarrier.arrive(bar, count=1)


@gluon.jit
def wait_twice(bar):
    mbarrier.wait(bar, 0)
    mbarrier.wait(bar, 1)


@gluon.jit
def meet_twice(bar):
    x = gl.num_warps()
    meet(x, "arrive", 3)
    meet(x, "arrive", 3)


@gluon.jit
def faulty(y_ptr, x_desc, FAULT: gl.constexpr):
    """One mistake, by name; x is float16 [64, 64], y has 64 elements of float32."""
    tile: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    buf = gl.allocate_shared_memory(gl.float16, [ROWS, ROWS], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    zeros = gl.zeros([ROWS, ROWS], gl.float16, LAYOUT)
    acc = gl.zeros([ROWS, ROWS], gl.float32, tile)
    at = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    SIZE: gl.constexpr = x_desc.block_type.nbytes
    if FAULT != "barrier never initialised":
        mbarrier.init(bar, count=1)
    if FAULT == "initialised twice":
        mbarrier.init(bar, count=1)
    if FAULT != "barrier not fenced":
        fence_async_shared()
    if FAULT == "barrier never initialised" or FAULT == "barrier not fenced":
        mbarrier.arrive(bar, count=1)
    if FAULT == "too many arrivals":
        mbarrier.arrive(bar, count=2)
    if FAULT == "more bytes copied than expected":
        mbarrier.expect(bar, SIZE // 2)
        tma.async_copy_global_to_shared(x_desc, [0, 0], bar, buf)
        mbarrier.wait(bar, 0)
    if FAULT == "fewer bytes copied than expected":
        mbarrier.expect(bar, SIZE * 2)
        tma.async_copy_global_to_shared(x_desc, [0, 0], bar, buf)
        mbarrier.wait(bar, 0)
    if FAULT == "wrong parity":
        fetch(x_desc, 0, 0, bar, buf)
        mbarrier.wait(bar, 1)
        read(y_ptr, buf)
    if FAULT == "phase overtaken":
        gl.warp_specialize([(wait_twice, (bar,)), (arrive_three_times, (bar,))], [1], [24])
    if FAULT == "copied over in flight":
        fetch(x_desc, 0, 0, bar, buf)
        buf.store(zeros)
    if FAULT == "read in flight":
        fetch(x_desc, 0, 0, bar, buf)
        read(y_ptr, buf)
    if FAULT == "copy never waited for":
        fetch(x_desc, 0, 0, bar, buf)
    if FAULT == "never written":
        read(y_ptr, buf)
    if FAULT == "partitions unordered":
        gl.warp_specialize([(read, (y_ptr, buf)), (write, (buf,))], [4], [64])
    if FAULT == "written while read":
        buf.store(zeros)
        gl.warp_specialize([(write, (buf,)), (read, (y_ptr, buf))], [4], [64])
    if FAULT == "stored without fence":
        buf.store(zeros)
        gl.thread_barrier()
        tma.async_copy_shared_to_global(x_desc, [0, 0], buf)
        tma.store_wait(0)
    if FAULT == "fence without barrier":
        buf.store(zeros)
        fence_async_shared()
        tma.async_copy_shared_to_global(x_desc, [0, 0], buf)
        tma.store_wait(0)
    if FAULT == "multiplied without fence":
        buf.store(zeros)
        acc = warpgroup_mma(buf, buf.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if FAULT == "written while stored" or FAULT == "store never waited for":
        buf.store(zeros)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(x_desc, [0, 0], buf)
    if FAULT == "written while stored":
        buf.store(zeros)
    if FAULT == "waited without barrier":
        buf.store(zeros)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(x_desc, [0, 0], buf)
        tma.store_wait(0)
        buf.store(zeros)
    EARLY: gl.constexpr = FAULT == "product not handed back" or FAULT == "product outstanding"
    if EARLY or FAULT == "product's operand overwritten" or FAULT == "product never waited for":
        buf.store(zeros)
        fence_async_shared()
        gl.thread_barrier()
        product = warpgroup_mma(buf, buf.permute((1, 0)), acc, is_async=True)
        if FAULT == "product outstanding":
            product = warpgroup_mma_wait(1, deps=(product,))
        if FAULT == "product not handed back":
            acc = warpgroup_mma_wait(0, deps=(acc,))
        if FAULT == "product's operand overwritten":
            buf.store(zeros)
        if EARLY:
            halves = gl.convert_layout(gl.sum(product, 1), gl.SliceLayout(1, LAYOUT))
            gl.store(y_ptr + at, halves)
    if FAULT == "loaded outside":
        gl.store(y_ptr + at, gl.load(y_ptr + at + 1))
    if FAULT == "stored outside":
        gl.store(y_ptr + at - 1, at.to(gl.float32))
    if FAULT == "added outside":
        gl.atomic_add(y_ptr + at * 2, at.to(gl.float32))
    if FAULT == "begun off 16 bytes":
        tma.async_copy_global_to_shared(x_desc, [0, 4], bar, buf)
    if FAULT == "stage out of range":
        two = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(two.index(gl.num_programs(0) + 1), count=1)
    if FAULT == "nobody arrives":
        mbarrier.wait(bar, 0)
    if FAULT == "everybody waits":
        gl.warp_specialize([(wait_twice, (bar,)), (wait_twice, (bar,))], [1], [24])
    if FAULT == "endless":
        while gl.atomic_add(y_ptr, 0.0) < 1.0:
            gl.store(y_ptr + 1, 0.0)
    if FAULT == "two in one turn":
        gl.warp_specialize([(meet_twice, (bar,)), (idle, (bar,))], [1], [24])
    if FAULT == "unknown assembly":
        gl.inline_asm_elementwise("ex2 $0, $1;", "=r,r", [at], gl.int32, is_pure=True, pack=1)
    if FAULT == "assertion":
        gl.device_assert(at < 63, "too far")
