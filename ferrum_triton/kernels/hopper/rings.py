"""A ring of buffers in shared memory, filled by a producer and emptied by consumers.

Each buffer has two barriers. ``full`` completes when the bytes that were asked for have landed;
``empty`` completes when every consumer has let go. A barrier's completions alternate between the
phases 0 and 1, and a wait names the phase that has to be over: step i of a ring is the
``i // stages``-th use of its buffer. No buffer has been let go before its first use, so the producer
waits for phase 1 there, which a new barrier takes to be over.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Ring(NamedTuple):
    """Buffers used in turn.

    Attributes:
        buffers: [stages, ...] in shared memory.
        full: barriers of the landed bytes, [stages].
        empty: barriers of the consumers, [stages].
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
def acquire(ring, step, num_bytes: gl.constexpr, STAGES: gl.constexpr):
    """The producer's buffer of a step, once it is empty, and the barrier that its bytes go to."""
    stage = step % STAGES
    mbarrier.wait(ring.empty.index(stage), ((step // STAGES) & 1) ^ 1)
    full = ring.full.index(stage)
    mbarrier.expect(full, num_bytes)
    return stage, full


@gluon.jit
def wait_full(ring, step, STAGES: gl.constexpr):
    """A consumer's wait for the bytes of a step; the buffer's place."""
    stage = step % STAGES
    mbarrier.wait(ring.full.index(stage), (step // STAGES) & 1)
    return stage


@gluon.jit
def release(ring, step, STAGES: gl.constexpr):
    """Let go of the buffer of a step: one arrival of a consumer."""
    mbarrier.arrive(ring.empty.index(step % STAGES), count=1)
