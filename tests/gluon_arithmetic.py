"""Kernels of values alone: in Triton, which its interpreter runs too, and in Gluon."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, tma
from triton.language.core import _aggregate as aggregate


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def integers(y_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    i, j = tl.load(x_ptr + at), tl.load(x_ptr + BLOCK + at)
    u, v, s, k = i.to(tl.uint32), j.to(tl.uint32), i.to(tl.int16), i % 1000
    f = i.to(tl.float32) * 0.01
    results = (
        *(i // j, i % j, i * j, i + 7, i - j, -i, ~i, i & j, i | j, i ^ j, i << 3, i >> 3),
        *(u // v, u % v, u >> 5, u * v, u < v, u + 1, u - 1, u.to(tl.float32).to(tl.int64)),
        *(s * s, s + i, s + u, (i < j) & (u < v), i == j, 5 - i, 100 // j, 1 << (u & 31)),
        *(f.to(tl.int32, bitcast=True), (k * 0.7).to(tl.int32), tl.cdiv(i, 7), tl.abs(k)),
        *(tl.minimum(i, j), tl.maximum(u, v), tl.where(i > j, i, u), tl.umulhi(u, v)),
        *(i.to(tl.int8), i.to(tl.uint8), i.to(tl.int1), i.to(tl.int64) * j, i / j > 1),
        *(tl.cumsum(k, 0), tl.sum(k, 0) + at, tl.xor_sum(i, 0) + at, tl.max(i, 0) + at),
        *(tl.min(s, 0) + at, tl.argmax(f, 0) + at, tl.reduce(i, 0, larger) + at),
    )
    for n in tl.static_range(len(results)):
        tl.store(y_ptr + n * BLOCK + at, results[n].to(tl.int64))


@triton.jit
def floats(y_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    f, g = tl.load(x_ptr + at), tl.load(x_ptr + BLOCK + at)
    h = f.to(tl.float16)
    nan = tl.where(f > 0, f, float("nan"))
    scale, shift = tl.associative_scan((f, g), 0, affine)
    results = (
        *(f + g, f * g, f - 0.1, f / g, 1 / f, f % g, -f, f < g, tl.fma(f, g, f)),
        *(h * 0.1, h * h, h / h, h + f, h < 0.5, tl.where(f > g, h, 1.5), at * 0.5, at / 3),
        *(tl.exp2(f), tl.exp(g), tl.log2(tl.abs(f)), tl.sqrt(tl.abs(g)), tl.erf(f)),
        *(tl.floor(f * 10), tl.ceil(f), tl.clamp(f, -0.5, 0.5), tl.softmax(f), tl.sigmoid(f)),
        *(tl.minimum(nan, g), tl.maximum(g, nan), tl.max(nan, 0) + at, tl.min(nan, 0) + at),
        *(tl.sum(f, 0) + at, tl.max(h, 0) + f, tl.sum(tl.reshape(f, [BLOCK // 8, 8]), 1)),
        *(scale, shift),
    )
    for n in tl.static_range(len(results)):
        x = results[n].to(tl.float32)
        if x.shape[0] == BLOCK:
            tl.store(y_ptr + n * BLOCK + at, x)
        else:
            tl.store(y_ptr + n * BLOCK + tl.arange(0, BLOCK // 8), x)


class Matrix(NamedTuple):
    ptr: gl.tensor
    stride: gl.tensor


@aggregate
class Block:
    rows: gl.tensor
    columns: gl.tensor
    SIZE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, columns, SIZE):
        self.rows, self.columns, self.SIZE = rows, columns, gl.constexpr(SIZE)

    @gluon.jit
    def offsets(self, stride):
        return self.rows[:, None] * stride + self.columns[None, :]


WIDE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def copied(y, x, SIZE: gl.constexpr, FACTOR: gl.constexpr = 2):
    """y = FACTOR · x of a block, through shared memory by parts and in other shapes."""
    rows = gl.arange(0, SIZE, gl.SliceLayout(1, WIDE))
    columns = gl.arange(0, SIZE, gl.SliceLayout(0, WIDE))
    block = Block(rows, columns, SIZE)
    value = gl.load(x.ptr + block.offsets(x.stride)) * FACTOR
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    buf = gl.allocate_shared_memory(gl.float32, [block.SIZE, block.SIZE], layout)
    buf.store(value)
    HALF: gl.constexpr = SIZE // 2
    part = gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
    for half in gl.static_range(2):
        lines = buf.slice(half * HALF, HALF, dim=0).load(WIDE)
        gl.store(y.ptr + (half * HALF + part)[:, None] * y.stride + columns[None, :], lines)
    # There and back: as a third dimension of two, and transposed twice.
    low, high = gl.split(gl.reshape(value, [SIZE, HALF, 2]))
    again = gl.convert_layout(gl.reshape(gl.join(low, high), [SIZE, SIZE]), WIDE)
    turned = gl.permute(gl.permute(again, (1, 0)), (1, 0))
    y_ptr = y.ptr + SIZE * y.stride
    gl.store(y_ptr + block.offsets(y.stride), gl.convert_layout(turned, WIDE))


@gluon.jit
def rounded(y_ptr, x_ptr, BLOCK: gl.constexpr, DTYPE: gl.constexpr):
    at = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y_ptr + at, gl.load(x_ptr + at).to(DTYPE).to(gl.float32))


@gluon.jit
def counted_and_masked(count_ptr, y_ptr, x_ptr, BLOCK: gl.constexpr):
    """Atomics of lanes that meet at an address, and a load whose masked lanes are undefined."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, BLOCK, line)
    ones = gl.full([BLOCK], 1, gl.int32, line)
    old = gl.atomic_add(count_ptr + at % 3, ones, mask=at < BLOCK - 2)
    gl.store(y_ptr + at, old.to(gl.float32))
    gl.store(y_ptr + BLOCK + at, gl.load(x_ptr + at, mask=at < 5))
    gl.store(y_ptr + 2 * BLOCK + at, gl.load(x_ptr + at, mask=at < 5, other=7.0))


@gluon.jit
def described_on_the_device(y_ptr, rows, columns, SHARED: gl.constexpr):
    """y = 1 but where a tile of 16 x 16 at (1, -4) does not reach."""
    desc = tma.make_tensor_descriptor(y_ptr, [rows, columns], [columns, 1], [16, 16], SHARED)
    ones = gl.full([16, 16], 1.0, gl.float32, WIDE)
    buf = gl.allocate_shared_memory(gl.float32, [16, 16], SHARED, ones)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [1, -4], buf)
    tma.store_wait(0)


@gluon.jit
def squared(x):
    return gl.inline_asm_elementwise(
        "mul.f32 $0, $1, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def squared_by_assembly(y_ptr, x_ptr, BLOCK: gl.constexpr):
    at = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y_ptr + at, squared(gl.load(x_ptr + at)))


@gluon.jit
def constant_lost(y_ptr, BLOCK: gl.constexpr):
    size = BLOCK
    squared_by_assembly(y_ptr, y_ptr, size)


@gluon.jit
def smaller(a, b):
    return gl.minimum(a, b)


@gluon.jit
def uses(y_ptr, n_ptr, table_ptr, x_ptr):
    """What else the language has, each to 32 elements of y."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    at = gl.arange(0, 32, line)
    x = gl.load(x_ptr + at)
    square = gl.convert_layout(gl.reshape(x, [4, 8]), rows)
    gl.store(y_ptr + at, x.sum(0) + max(min(at, 7), 3) + min(2, 3))
    gl.store(y_ptr + 32 + at, gl.reshape(square - gl.max(square, 1, keep_dims=True), [32]))
    gl.store(y_ptr + 64 + at, gl.min(square) + 0 * x)
    gl.store(y_ptr + 96 + at, gl.reduce(x, 0, smaller) + 0 * x)
    gl.store(y_ptr + 128 + at, gl.gather(x, 31 - at, 0))
    # An address that lies in memory.
    other = gl.load(table_ptr).to(gl.pointer_type(gl.float32))
    gl.store(y_ptr + 160 + at, gl.load(other + at))
    old = gl.atomic_cas(n_ptr, 5, 9)
    again = gl.atomic_cas(n_ptr, 5, 7)
    if not (old < 5) and (old == 5 or old == 6):
        gl.store(n_ptr + 1, again)
    # Shared memory as other shapes and types.
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    buf = gl.allocate_shared_memory(gl.float32, [32], plain, x)
    bits = buf._reinterpret(gl.int32, [32], plain)
    bits.store(bits.load(line) ^ -(2**31))
    gl.store(y_ptr + 192 + at, buf.load(line))
    low = (n_ptr + 2).to(gl.pointer_type(gl.int8))
    gl.store(low + at % 4, at.to(gl.int8), mask=at < 4)


@gluon.jit
def worker(x):
    gl.warp_specialize([(other_worker, (x,)), (other_worker, (x,))], [1], [24])


@gluon.jit
def other_worker(x):
    pass


@gluon.jit
def misused(x_ptr, FAULT: gl.constexpr):
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    at = gl.arange(0, 32, line)
    x = gl.load(x_ptr + at)
    buf = gl.allocate_shared_memory(gl.float32, [4, 8], shared)
    if FAULT == "ranks differ":
        x = x + gl.zeros([32, 1], gl.float32, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1]))
    if FAULT == "shapes differ":
        x = x + gl.zeros([64], gl.float32, line)
    if FAULT == "truths added":
        x = (x > 0) + (x > 1)
    if FAULT == "bits of floats":
        x = x & 1
    if FAULT == "division of floats":
        x = x // 2
    if FAULT == "moved by a float":
        x = gl.load(x_ptr + x)
    if FAULT == "mask of integers":
        x = gl.load(x_ptr + at, mask=at)
    if FAULT == "between elements":
        address = x_ptr.to(gl.int64) + 2
        gl.store(address.to(gl.pointer_type(gl.float32)), 1.0)
    if FAULT == "nowhere":
        gl.store((x_ptr.to(gl.int64) - 2**40).to(gl.pointer_type(gl.float32)), 1.0)
    if FAULT == "load of a number":
        gl.load(at)
    if FAULT == "reshaped to more":
        x = gl.reshape(x, [64])
    if FAULT == "exponential of integers":
        x = gl.exp2(at)
    if FAULT == "stored shape":
        buf.store(x)
    if FAULT == "stored type":
        line_buf = gl.allocate_shared_memory(
            gl.float16, [32], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        line_buf.store(x)
    if FAULT == "order of three":
        buf = buf.permute((0, 2, 1))
    if FAULT == "slice too long":
        buf = buf.slice(2, 4)
    if FAULT == "reinterpreted as more":
        buf = buf._reinterpret(gl.float32, [8, 8], shared)
    if FAULT == "static assertion":
        gl.static_assert(buf.shape[0] == 5, "not five")
    if FAULT == "block as condition":
        while x > 0:
            x = -x
    if FAULT == "block as index":
        buf = buf.index(at)
    if FAULT == "indexed by a number":
        x = x[0]
    if FAULT == "unknown function":
        x = gl.fp4_to_fp(at.to(gl.uint8), gl.float16, 0)
    if FAULT == "unknown rounding":
        x = x.to(gl.float16, fp_downcast_rounding="rtz")
    if FAULT == "specialised twice":
        gl.warp_specialize([(worker, (x,)), (other_worker, (at,))], [1], [24])
    if FAULT == "copies unwaited":
        ring = gl.allocate_shared_memory(gl.float32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        async_copy.async_copy_global_to_shared(ring, x_ptr + at)
