"""The end of a decode step: what it chose is fed next, without the host."""

import torch
from torch import Tensor

from ferrum_triton.registry import Case, op


@op(
    tensors={
        "state": "int32[3, num_rows]",
        "chosen": "int32[num_rows]",
        "history": "int32[num_kept, num_rows]",
    },
    axes={"num_rows": (0, 1, 3, 300), "num_kept": (None, 1, 2, 5)},
    bench=[Case(f"m{m}", torch.float32, {"num_rows": m, "num_kept": 2}) for m in (1, 256)],
    mutates=("state", "history"),
    in_host_memory=("history",),
)
def advance_rows(state: Tensor, chosen: Tensor, history: Tensor | None = None) -> None:
    """token ← chosen; where pos ≥ 0: history[pos mod num_kept] ← chosen, pos and kv_len += 1.

    A step that ends so can be replayed as it is. The host follows it by the history: row i's token
    after position p stays at history[p mod num_kept, i] until the row has come num_kept further.

    Args:
        state: [3, num_rows], each row's token, position and number of keys, as
            :class:`~ferrum_triton.runtime.graph.DecodeState` has them. Columns may be a part of
            more. A negative position is padding: it keeps its position and its keys.
        chosen: [num_rows], the tokens that the step chose.
        history: [num_kept, num_rows], on the state's device or in pinned memory of the host, which
            a GPU writes itself: no copy then stands between two steps. None keeps nothing.
    """
    alive = state[1] >= 0
    if history is not None:
        place = torch.arange(history.shape[0], device=state.device)[:, None]
        noted = alive & (place == state[1] % history.shape[0])
        history.copy_(torch.where(noted, chosen, history.to(state.device)))
    state[0] = chosen
    state[1:] += alive


@advance_rows.rule
def _(state, chosen, history):
    if history is not None and history.shape[0] == 0:
        advance_rows.reject("history", "of no steps", "room for one or more")


@advance_rows.sample
def _(make, num_rows, num_kept=None):
    state = make.ints(-1, 100, 3, num_rows)
    return {
        "state": state,
        "chosen": make.ints(0, 1000, num_rows),
        "history": None if num_kept is None else make.ints(0, 1000, num_kept, num_rows),
    }
