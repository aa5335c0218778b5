"""Gluon kernels are recorded, compiled and told apart as Triton's are."""

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ferrum_triton.gluon_emulator import idle_barriers
from ferrum_triton.kernels.gluon import describe, gluon_kernel
from ferrum_triton.kernels.gpu import gpu_of_arch
from ferrum_triton.kernels.hopper_config import serves
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from tests.compiling import compiled


@gluon_kernel(dynamic=("row",))
def _copy_block(y_ptr, x_desc, row, LAYOUT: gl.constexpr, SPARE: gl.constexpr = False):
    """y = the block of x that begins at a row. SPARE adds barriers that nobody uses."""
    block = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    if SPARE:
        spare = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(spare.index(i), count=1)
    mbarrier.expect(landed, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [row, 0], landed, block)
    mbarrier.wait(landed, 0)
    rows = gl.arange(0, x_desc.block_type.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, x_desc.block_type.shape[1], gl.SliceLayout(0, LAYOUT))
    at = rows[:, None] * x_desc.block_type.shape[1] + columns[None, :]
    gl.store(y_ptr + at, block.load(LAYOUT))


LAYOUT = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])


def launch(x, y, row, **options):
    x_desc = describe(x, y.shape)
    _copy_block.launch((1,), y_ptr=y, x_desc=x_desc, row=row, LAYOUT=LAYOUT, **options)


def test_a_gluon_kernel_is_recorded_and_compiles():
    x, y = (torch.empty(rows, 128, dtype=torch.float16, device="meta") for rows in (256, 64))
    with record_launches((9, 0)) as launches:
        launch(x, y, 3)
    (found,) = launches
    resources = compiled(found)
    assert resources.shared >= 64 * 128 * 2
    assert "cp.async.bulk.tensor" in resources.asm["ptx"]


def test_barriers_that_nobody_uses_are_found():
    """Triton gives their memory to others."""
    x, y = (torch.empty(rows, 128, dtype=torch.float16, device="meta") for rows in (256, 64))
    with record_launches((9, 0)) as launches:
        launch(x, y, 3, SPARE=True)
    code = compile_launch(launches[0], TARGETS["sm_90"]).asm["ttgir"]
    assert idle_barriers(code) == ["%spare"]
    with pytest.raises(AssertionError, match="_copy_block"):
        compiled(launches[0])


def test_layouts_of_descriptors_are_part_of_what_code_is_known_by():
    x = torch.empty(256, 128, dtype=torch.float16)
    swizzled, plain = describe(x, (64, 128)), describe(x, (64, 128), swizzled=False)
    assert swizzled.layout != plain.layout
    source = _copy_block.known_of_descriptors.format("d")
    keys = [eval(f"({source})", {"d": d}) for d in (swizzled, plain)]
    assert keys[0] != keys[1]
    assert [type(hash(key)) for key in keys] == [int, int]


def test_gluon_serves_hopper_alone():
    assert [serves(gpu_of_arch(arch)) for arch in ("sm_90", "sm_100", "sm_80", "gfx942")] == [
        True,
        False,
        False,
        False,
    ]
