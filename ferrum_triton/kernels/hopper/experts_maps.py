"""Experts' weights as TMA sees them: the rows of all matrices one below the other."""

from typing import Any

from torch import Tensor

from ferrum_triton.kernels.gluon import describe
from ferrum_triton.kernels.hopper.gemm_tiles import ROWS, mappable
from ferrum_triton.kernels.hopper_config import ALIGNED, STEP_BYTES


def rows_apart(weights: Tensor) -> int | None:
    """Rows from an expert's matrix to the next one's, in a map of all; None if there is no map."""
    between, row = weights.stride()[:2]
    return None if row == 0 or between % row else between // row


def rows_of(weights: Tensor) -> Any:
    """A map of the matrices [num_experts, n, k] as rows of k, ROWS of a step at a time."""
    num_experts, num_rows, num_cols = weights.shape
    shape = (rows_apart(weights) * (num_experts - 1) + num_rows, num_cols)
    step = STEP_BYTES // weights.element_size()
    return describe(weights, (ROWS.value, step), shape, weights.stride()[1:])


def gathers(a: Tensor) -> bool:
    """Whether rows of activations can be gathered, 16 bytes a thread."""
    apart = all(step % ALIGNED == 0 for step in a.stride()[:-1])
    return a.stride(-1) == 1 and a.data_ptr() % 16 == 0 and apart


def maps(*stacks: Tensor) -> bool:
    """Whether stacks of weights can be described to TMA, and rows be taken in whole words."""
    return all(
        stack.shape[2] % ALIGNED == 0 and rows_apart(stack) is not None and mappable(stack[0])
        for stack in stacks
    )
