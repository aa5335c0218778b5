"""What Hopper does asynchronously: TMA, mbarriers, products of warpgroups, cp.async, partitions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferrum_triton.gluon_emulator import barriers, tensors
from ferrum_triton.gluon_emulator.clocks import here
from ferrum_triton.gluon_emulator.errors import Misuse
from ferrum_triton.gluon_emulator.language import EMULATED, emulates
from ferrum_triton.gluon_emulator.memory import View
from ferrum_triton.gluon_emulator.schedule import Operation, Partition, current
from ferrum_triton.gluon_emulator.values import Value, torch_type

# Bytes that the first column of a tile of TMA is a multiple of.
TMA_ALIGNED = 16

EMULATED["mbarrier.init"] = barriers.init
EMULATED["mbarrier.invalidate"] = barriers.invalidate


@emulates("mbarrier.expect")
def expect(mbarrier: View, bytes: Any, pred: Any = True) -> None:
    me = current()
    me.program.checkpoint()
    if bool(pred):
        barriers.barrier_of(mbarrier).arrive(me, 1, int(bytes))


@emulates("mbarrier.arrive")
def arrive(mbarrier: View, *, count: Any = 1, pred: Any = True) -> None:
    me = current()
    me.program.checkpoint()
    if bool(pred):
        me.let_go()
        barriers.barrier_of(mbarrier).arrive(me, int(count))


@emulates("mbarrier.wait")
def wait(mbarrier: View, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if bool(pred):
        barriers.barrier_of(mbarrier).wait(current(), int(phase))


@emulates("fence_async_shared")
def fence_async_shared(cluster: Any = False) -> None:
    me = current()
    me.program.checkpoint()
    me.fence()


@emulates("thread_barrier")
def thread_barrier() -> None:
    me = current()
    me.program.checkpoint()
    me.synchronise()


@emulates("warp_specialize")
def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any) -> Any:
    warps = [int(each) for each in worker_num_warps]
    if not len(functions_and_args) - 1 == len(warps) == len(worker_num_regs):
        raise Misuse(
            f"gl.warp_specialize at {here()}: {len(functions_and_args)} functions, and beside the "
            f"first numbers of warps for {len(warps)}, of registers for {len(worker_num_regs)}"
        )
    pairs = [(function, tuple(args)) for function, args in functions_and_args]
    return current().program.specialise(pairs, warps)


# ---- TMA


@emulates("tma.make_tensor_descriptor")
def make_tensor_descriptor(
    base: Value,
    shape: Any,
    strides: Any,
    block_shape: Any,
    layout: Any,
    padding_option: str = "zero",
) -> tensors.Descriptor:
    if base.base is None:
        raise Misuse(f"a descriptor at {here()} of an address that was read from memory")
    sizes = shape, strides, block_shape
    dtype = base.dtype.element_ty
    return tensors.Descriptor(base.base, int(base.data), *sizes, dtype, layout, padding_option)


def _check_tile(desc: tensors.Descriptor, view: View, coord: Any) -> list[int]:
    if view.shape != desc.block_shape or view.dtype != desc.dtype:
        raise Misuse(
            f"{view} at {here()} is {view.dtype} {view.shape}; the descriptor of {desc} "
            f"copies {desc.dtype} {desc.block_shape}"
        )
    if not view.moved and view.layout != desc.layout:
        raise Misuse(f"{view} at {here()} has layout {view.layout}, the descriptor {desc.layout}")
    if len(coord) != len(desc.block_shape):
        raise Misuse(f"{len(coord)} coordinates at {here()} for {desc}, which has another rank")
    at = [int(each) for each in coord]
    if at[-1] * torch_type(desc.dtype).itemsize % TMA_ALIGNED:
        raise Misuse(
            f"TMA at {here()} begins at column {at[-1]} of {desc}, in {desc.dtype}; allowed: "
            f"columns at multiples of {TMA_ALIGNED} bytes; a GPU stops at any other"
        )
    return at


@emulates("tma.async_copy_global_to_shared")
def tma_load(
    tensor_desc: tensors.Descriptor, coord: Any, barrier: View, result: View, pred: Any = True
) -> None:
    me = current()
    program = me.program
    program.checkpoint()
    if not bool(pred):
        return
    at, signalled = _check_tile(tensor_desc, result, coord), barriers.barrier_of(barrier)
    operation = Operation(program, "TMA load")
    result.access("TMA load", writes=True, operation=operation)
    tensor_desc.note("TMA load", at, None, operation)
    result.poison()
    operation.bytes, operation.phase = result.nbytes, signalled.completed
    signalled.copies.append(operation)

    def land() -> None:
        result.tensor.copy_(tensor_desc.read(at))
        signalled.land(operation)

    program.loads.append(operation)
    program.fly(operation, land)


@emulates("tma.async_copy_shared_to_global")
def tma_store(tensor_desc: tensors.Descriptor, coord: Any, src: View) -> None:
    me = current()
    program = me.program
    program.checkpoint()
    at = _check_tile(tensor_desc, src, coord)
    operation = Operation(program, "TMA store")
    src.access("TMA store", writes=False, operation=operation)
    tile = src.tensor.clone()
    # What is written has a bit of its own, since nothing in a launch waits for that.
    tensor_desc.note("TMA store", at, tile, Operation(program, "TMA store"))
    me.stores.append(operation)
    program.fly(operation, lambda: tensor_desc.write(at, tile))


@emulates("tma.store_wait")
def store_wait(pendings: Any = 0) -> None:
    me = current()
    me.program.checkpoint()
    done, me.stores = _but_last(me.stores, int(pendings))
    # The thread that waits is one; the others learn of it at a barrier.
    for each in done:
        me.half_done |= each.bit
    me.after_wait()


def _but_last(operations: list, count: int) -> tuple[list, list]:
    cut = max(0, len(operations) - count)
    return operations[:cut], operations[cut:]


# ---- products of warpgroups


@emulates("warpgroup_mma_init")
def warpgroup_mma_init(value: Value) -> Value:
    return value


@emulates("warpgroup_mma")
def warpgroup_mma(
    a: Any,
    b: View,
    acc: Value,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Value:
    me = current()
    me.program.checkpoint()
    operation = Operation(me.program, "warpgroup_mma")
    _check_product(me, a, b, acc)
    operands = []
    for each in (a, b):
        if isinstance(each, View):
            each.access("warpgroup_mma", writes=False, operation=operation)
            operands.append(each.tensor)
        else:
            operands.append(each.data)
    data = _multiplied(operands[0], operands[1], acc.dtype)
    if bool(use_acc):
        # Products of a warpgroup are done in turn, so that one may add to another in flight.
        data = acc._data + data
    me.products.append(operation)
    result = Value(data, acc.dtype, acc.layout, product=operation)
    return result if bool(is_async) else warpgroup_mma_wait(0, (result,))


def _check_product(me: Partition, a: Any, b: Any, acc: Any) -> None:
    if me.num_warps % 4:
        raise Misuse(f"a product at {here()} by {me}, which has {me.num_warps} warps, not four")
    if not isinstance(b, View):
        raise Misuse(f"the second operand of the product at {here()} is not in shared memory")
    if not isinstance(acc, Value):
        raise Misuse(f"the accumulator of the product at {here()} is {type(acc).__name__}")
    (rows, inner), (inner_b, columns) = a.shape, b.shape
    if inner != inner_b or acc.shape != (rows, columns) or a.dtype != b.dtype:
        raise Misuse(
            f"a product at {here()} of {a.dtype} {a.shape} and {b.dtype} {b.shape} into {acc.shape}"
        )


def _multiplied(a: Tensor, b: Tensor, dtype: Any) -> Tensor:
    known = torch_type(dtype)
    if not a.dtype.is_floating_point:
        return (a.double() @ b.double()).to(known)
    if a.dtype == torch.float32:
        # Tensor cores read the ten highest bits of the fraction.
        a, b = (
            (each.view(torch.int32) & ~0x1FFF).view(torch.float32) for each in (a, b.contiguous())
        )
    return (a.float() @ b.float()).to(known)


@emulates("warpgroup_mma_wait")
def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    me = current()
    me.program.checkpoint()
    if deps is None:
        raise Misuse(f"warpgroup_mma_wait at {here()} takes deps")
    done, me.products = _but_last(me.products, int(num_outstanding))
    for each in done:
        me.clock.done |= each.bit
    if done:  # products prove that what was loaded is there
        me.land()
    results = tuple(_handed_back(me, each) for each in deps)
    return results[0] if len(results) == 1 else results


def _handed_back(me: Partition, value: Any) -> Any:
    pending = value.product if isinstance(value, Value) else None
    if pending is None or not me.clock.done & pending.bit:
        return value
    return Value(value._data, value.dtype, value.layout)


# ---- cp.async


@emulates("async_copy.async_copy_global_to_shared")
def copy_to_shared(
    smem: View,
    pointer: Value,
    mask: Any = None,
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> None:
    me = current()
    program = me.program
    # Lanes that are masked out are filled with zeros.
    value = tensors.load(pointer, mask, None if mask is None else 0)
    if smem.shape != value.shape or smem.dtype != value.dtype:
        raise Misuse(f"{smem} at {here()} is not copied to from {value.dtype} {value.shape}")
    operation = Operation(program, "cp.async")
    smem.access("cp.async", writes=True, operation=operation, generic=True)
    smem.poison()
    me.copies.append(operation)
    program.fly(operation, lambda: smem.tensor.copy_(value.data))


@emulates("async_copy.commit_group")
def commit_group() -> None:
    me = current()
    me.groups.append(me.copies)
    me.copies = []


@emulates("async_copy.wait_group")
def wait_group(num_outstanding: Any = 0) -> None:
    me = current()
    me.program.checkpoint()
    done, me.groups = _but_last(me.groups, int(num_outstanding))
    operations = [operation for group in done for operation in group]
    me.program.scheduler.land_now(operations)
    for each in operations:
        me.half_done |= each.bit
    me.after_wait()


@emulates("async_copy.mbarrier_arrive")
def mbarrier_arrive(mbarrier: View, increment_count: Any = True) -> None:
    """Each thread arrives, once its copies so far are there."""
    me = current()
    program, threads = me.program, me.num_warps * 32
    program.checkpoint()
    barrier = barriers.barrier_of(mbarrier)
    if bool(increment_count):
        barrier.pending += threads
    copies = [*me.copies, *(each for group in me.groups for each in group)]
    operation, clock, by = Operation(program, "cp.async"), me.publish(), f"{here()} by {me}"
    for each in copies:
        clock.done |= each.bit

    def land() -> None:
        program.scheduler.land_now(copies)
        barrier.arrive_with(clock, threads, by)

    me.copies, me.groups = [], []
    program.fly(operation, land)
