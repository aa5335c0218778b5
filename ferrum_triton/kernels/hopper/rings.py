"""A ring of buffers in shared memory, filled by a producer and emptied by consumers.

Each buffer has two barriers. ``full`` completes when the bytes that were asked for have landed;
``empty`` completes when every consumer has let go. A barrier's completions alternate between the
phases 0 and 1, and a wait names the phase that has to be over. Step i of a ring is the use
i // stages of buffer i % stages. Before its first use no consumer has let a buffer go, so there the
producer waits for phase 1, which a new barrier takes to be over.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Ring(NamedTuple):
    """Buffers used in turn.

    Attributes:
        buffers: [stages, ...] in shared memory; None where roles know them by another name.
        full: barriers of the landed bytes, or of the producers that wrote them, [stages].
        empty: barriers of the consumers, [stages]; None where nobody waits for room.
    """

    buffers: Any
    full: Any
    empty: Any


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that are completed by a number of arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def wait_empty(ring, step):
    """A producer's wait for the buffer of a step."""
    STAGES: gl.constexpr = ring.empty.shape[0]
    mbarrier.wait(ring.empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)


@gluon.jit
def acquire(ring, step, num_bytes: gl.constexpr):
    """A producer's wait for the buffer of a step, which that many bytes go to next; its stage."""
    wait_empty(ring, step)
    stage = step % ring.full.shape[0]
    mbarrier.expect(ring.full.index(stage), num_bytes)
    return stage


@gluon.jit
def wait_full(ring, step, is_new=True):
    """A consumer's wait for the bytes of a step, none where they are not new; their stage."""
    STAGES: gl.constexpr = ring.full.shape[0]
    stage = step % STAGES
    mbarrier.wait(ring.full.index(stage), (step // STAGES) & 1, pred=is_new)
    return stage


@gluon.jit
def release(ring, step, is_held=True):
    """Let go of the buffer of a step, where it is held: one arrival of a consumer."""
    STAGES: gl.constexpr = ring.empty.shape[0]
    mbarrier.arrive(ring.empty.index(step % STAGES), count=1, pred=is_held)
