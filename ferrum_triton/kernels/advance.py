"""The end of a decode step in one launch: state of a row is a lane's."""

import triton.language as tl
from torch import Tensor

from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.pdl import pdl_trigger, pdl_wait
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.ops import advance as ops

BLOCK = 128


@kernel(dynamic=("num_rows",))
def _advance_kernel(
    state_ptr,  # [3, num_rows]
    chosen_ptr,  # [num_rows]
    history_ptr,  # [num_kept, num_rows] or None; memory of the host's, perhaps
    stride_state,
    stride_history,
    num_kept,
    num_rows,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """token ← chosen, noted in the history; position and length of what is no padding += 1"""
    pdl_trigger(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = row < num_rows
    pos_ptr = state_ptr + stride_state + row
    pdl_wait(PDL)
    token = tl.load(chosen_ptr + row, mask=mask)
    pos = tl.load(pos_ptr, mask=mask, other=-1)
    kv_len = tl.load(pos_ptr + stride_state, mask=mask)
    alive = mask & (pos >= 0)
    if history_ptr is not None:
        place = (pos % num_kept).to(tl.int64)
        tl.store(history_ptr + place * stride_history + row, token, mask=alive)
    tl.store(state_ptr + row, token, mask=mask)
    tl.store(pos_ptr, pos + 1, mask=alive)
    tl.store(pos_ptr + stride_state, kv_len + 1, mask=alive)


@ops.advance_rows.impl("triton")
def advance_rows(state: Tensor, chosen: Tensor, history: Tensor | None = None) -> None:
    num_rows = state.shape[1]
    if num_rows == 0:
        return
    _advance_kernel.launch(
        (cdiv(num_rows, BLOCK),),
        state_ptr=state,
        chosen_ptr=chosen,
        history_ptr=history,
        stride_state=state.stride(0),
        stride_history=0 if history is None else history.stride(0),
        num_kept=1 if history is None else history.shape[0],
        num_rows=num_rows,
        BLOCK_R=BLOCK,
        num_warps=4,
    )
