"""flash-linear-attention as a peer of the gated delta rule.

It has no slots: a call is given the first states there are, one for each sequence, and returns new
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = {
    "gdn_prefill": "chunk_gated_delta_rule",
    "gdn_decode": "fused_recurrent_gated_delta_rule",
}


def fla_call(op: str, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A function that computes the op's call, or None where there is none.

    Sequences have to be of one length. They are passed as a batch, which saves it a lookup of where
    they begin.
    """
    bounds, slots = arguments.get("cu_seqlens"), arguments.get("slots")
    if op not in FUNCTIONS or arguments["tiled_values"] or arguments.get("kept_slots") is not None:
        return None
    batch = 1 if slots is None else len(slots)
    if bounds is not None and bounds.diff().unique().numel() > 1:
        return None
    from fla.ops import gated_delta_rule

    compute = getattr(gated_delta_rule, FUNCTIONS[op])

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor | None,
        query_scale: float | None,
        **_: Any,
    ) -> Tensor:
        q, k, v, g, beta = (x.unflatten(0, (batch, -1)) for x in (q, k, v, g, beta))
        with torch.no_grad():
            y, _state = compute(
                q,
                k,
                v,
                g,
                beta=beta,
                scale=query_scale,
                initial_state=None if states is None else states[:batch],
                output_final_state=states is not None,
            )
        return y.flatten(0, 1)

    return call
