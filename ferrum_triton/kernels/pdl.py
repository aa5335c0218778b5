"""Programmatic dependent launch (PDL): a kernel starts while the one before it ends.

On GPUs of capability 9.0 and up a launch may begin once every program of the launch before it has
triggered or ended, which hides the time of a launch and of a kernel's first instructions. A kernel
that takes part has a constexpr ``PDL``, which
:meth:`~ferrum_triton.kernels.jit.Kernel.launch` fills in, and follows three rules:

* every program waits, whatever branch it takes. The wait ends when the launch before has ended,
  which waited in its turn, so everything launched earlier has ended too;
* nothing but packed weights is read before the wait, and nothing is written before it. No kernel
  here writes packed weights, and whoever else does (a copy, a load) never triggers early. Lines of
  other tensors may be brought to L2 (:func:`prefetch_l2`), where all SMs see what is written later.
  A number that leads to such lines may be read too if it is read past L1 (``.cg``), kept inside its
  tensor and used for nothing else: it may be of the step before. What was written two launches
  before may be read past L1 if the launch in between triggers behind its own wait: this one begins
  after that wait has ended in every program;
* the trigger may stand anywhere, since it promises nothing about results. Row kernels, whose
  programs are few and short, trigger at entry, which lets the product behind them load weights
  soonest. All others trigger after their wait: else programs of three launches share the SMs, and
  unevenly.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until everything launched before has ended and its writes can be seen."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_trigger(PDL: tl.constexpr):
    """Let the next launch begin once every program has come this far."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(ptr):
    """Ask for the lines at ``ptr``, a block of pointers, to be brought to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
