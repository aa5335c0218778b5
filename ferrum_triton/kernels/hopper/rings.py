"""Rings of buffers in shared memory: a producer fills stages, consumers use them, in turns.

Two barriers stand beside each stage. ``full`` ends a phase when all that was asked for has landed,
and ``empty`` when every consumer is done with it. Step i of a loop that never starts over uses
stage i % STAGES, in phase i // STAGES. A wait is for the end of a phase of even or odd number; on
``empty`` the first round is for the phase before the first, which counts as over.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


class Ring(NamedTuple):
    """mbarriers [STAGES, 1] each."""

    full: Any
    empty: Any


@gluon.jit
def new_ring(STAGES: gl.constexpr, FILLERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """A :class:`Ring`. FILLERS and CONSUMERS arrive at a stage's barriers in a round."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=FILLERS)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()  # TMA sees them
    return Ring(full, empty)


@gluon.jit
def to_fill(ring, i):
    """The stage of step i, once its last consumers are done with it."""
    STAGES: gl.constexpr = ring.empty.shape[0]
    stage = i % STAGES
    mbarrier.wait(ring.empty.index(stage), (i // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def to_use(ring, i, is_new=True):
    """The stage of step i, once it is full; of one that is not new, at once."""
    STAGES: gl.constexpr = ring.full.shape[0]
    stage = i % STAGES
    mbarrier.wait(ring.full.index(stage), i // STAGES & 1, pred=is_new)
    return stage
