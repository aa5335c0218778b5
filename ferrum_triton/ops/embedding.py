"""Embedding rows by token id.

An id outside the table gives a row of zeros, since ids in device memory can be neither trusted nor
read by the host without waiting for it. :func:`check_ids` is the check for whoever can wait.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.registry import Case, op


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise unless every id is in [0, vocab_size).

    Waits for the device and reads the ids' range back, so it is for where requests come in and for
    debugging, not for a decode step, and it cannot be captured in a graph.

    Args:
        ids: [...] int32 or int64, on any device.
        vocab_size: rows of the table.

    Raises:
        InputError: an id is out of range.
    """
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        advice = "Is the tokenizer the model's own?"
        raise InputError(
            "check_ids", "ids", f"holding {worst}", f"ids in [0, {vocab_size})", advice
        )


@op(
    tensors={"table": "T[vocab_size, hidden_size]", "ids": "int[...]"},
    axes={"num_tokens": (0, 1, 7), "vocab_size": (1, 19), "hidden_size": (1, 33, 64, 576)},
    bench=[
        Case(
            f"bf16/h4096/m{m}",
            torch.bfloat16,
            {"num_tokens": m, "vocab_size": 128256, "hidden_size": 4096},
        )
        for m in (1, 4096)
    ],
)
def embedding_lookup_dev(table: Tensor, ids: Tensor) -> Tensor:
    """y[i] = table[ids[i]] for ids on the table's device; safe inside a captured graph.

    Args:
        table: [vocab_size, hidden_size], rows may be strided.
        ids: [...] int32 or int64. An id outside [0, vocab_size) gives a row of zeros.

    Returns:
        [..., hidden_size] in the table's dtype.
    """
    known = (ids >= 0) & (ids < table.shape[0])
    rows = table[torch.where(known, ids, 0).long()]
    return torch.where(known[..., None], rows, 0).to(table.dtype)


@embedding_lookup_dev.sample
def _(make, num_tokens, vocab_size, hidden_size):
    return {
        "table": make.randn(vocab_size, hidden_size),
        "ids": make.ints(0, vocab_size, num_tokens),
    }


@embedding_lookup_dev.rule
def _(table, ids):
    if table.shape[0] == 0:
        embedding_lookup_dev.reject("table", "empty", "at least one row")


@embedding_lookup_dev.traffic
def _(table, ids):
    return ids.numel() * (2 * table.shape[1] * table.element_size() + ids.element_size())


@op(
    tensors={"table": "T[vocab_size, hidden_size]"},
    axes={"num_tokens": (0, 1, 7), "vocab_size": (1, 19), "hidden_size": (1, 33, 64)},
    bench=[
        Case(
            "bf16/h4096/m1",
            torch.bfloat16,
            {"num_tokens": 1, "vocab_size": 128256, "hidden_size": 4096},
            graph=False,
        )
    ],
)
def embedding_lookup(table: Tensor, ids: Sequence[int]) -> Tensor:
    """y[i] = table[ids[i]] for ids held by the host.

    The ids are copied to the device by the call, so it cannot be captured in a graph: a replay
    would read the ids of the capture. Use :func:`embedding_lookup_dev` there.

    Args:
        table: [vocab_size, hidden_size].
        ids: token ids, each in [0, vocab_size).

    Returns:
        [len(ids), hidden_size] in the table's dtype.

    Raises:
        InputError: an id is out of range.
    """
    return table[torch.tensor(ids, dtype=torch.int64, device=table.device)]


@embedding_lookup.call_rule
def _(table, ids):
    num_rows = table.shape[0]
    if not isinstance(ids, Sequence):
        embedding_lookup.reject("ids", f"a {type(ids).__name__}", "a list of integers")
    for i in ids:
        if type(i) is not int or not 0 <= i < num_rows:
            embedding_lookup.reject("ids", f"holding {i!r}", f"integers in [0, {num_rows})")


@embedding_lookup.sample
def _(make, num_tokens, vocab_size, hidden_size):
    return {
        "table": make.randn(vocab_size, hidden_size),
        "ids": make.int_list(0, vocab_size, num_tokens),
    }


@embedding_lookup.traffic
def _(table, ids):
    return len(ids) * (2 * table.shape[1] * table.element_size() + 8)
