"""Choosing tokens from logits, without the host.

A step of decoding samples in two calls, both deterministic and safe inside a captured graph::

    u = backend.uniform_rows(seeds, steps)  # a request's seed, and how far it has come
    ids = backend.sample_rows(logits, u, temperature, top_k, top_p)

A repetition penalty goes before either choice: ``repetition_penalty_inplace``, then
``argmax_rows`` or ``sample_rows``.
"""

import torch
from torch import Tensor

from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op

LARGEST = torch.finfo(torch.float32).max

# Philox 4x32-10: the multipliers of its rounds and the increments of its key.
PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def _cases(*num_rows: int) -> list[Case]:
    return [
        Case(f"fp16/v152064/m{m}", torch.float16, {"num_rows": m, "vocab_size": 152064})
        for m in num_rows
    ]


@op(
    tensors={"logits": "T[num_rows, vocab_size]", "mask": "flags[mask_size]"},
    axes={"num_rows": (0, 1, 3), "vocab_size": (1, 100, 2, 5000), "masked": (False, True)},
    bench=_cases(1, 32, 256),
)
def argmax_rows(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """y[i] = the lowest j with logits[i, j] = max over the row, NaN never chosen.

    Without a mask, a row of nothing but NaN and -inf gives 0. With one, only finite logits in
    columns that the mask allows can be chosen, and a row that has none gives -1.

    Args:
        logits: [num_rows, vocab_size], rows may be strided.
        mask: [mask_size] int8 or uint8, or None: column j may be chosen where mask[j] is not 0;
            columns past its end may not.

    Returns:
        [num_rows] int32.
    """
    usable = ~logits.isnan()
    if mask is not None:
        allowed = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        shared = min(mask.shape[0], logits.shape[1])
        allowed[:shared] = mask[:shared] != 0
        usable = logits.isfinite() & allowed
    clean = torch.where(usable, logits, -torch.inf)
    top = clean.amax(dim=-1, keepdim=True)
    index = (clean == top).to(torch.int8).argmax(dim=-1).to(torch.int32)
    return index if mask is None else torch.where(top[:, 0] == -torch.inf, -1, index)


@argmax_rows.rule
def _(logits, mask):
    _check_columns(argmax_rows, logits)


@argmax_rows.sample
def _(make, num_rows, vocab_size, masked=False):
    size = vocab_size - vocab_size // 8
    return {
        "logits": make.randn(num_rows, vocab_size),
        "mask": make.ints(0, 2, size, dtype=torch.int8) if masked else None,
    }


def _check_columns(of_op, logits):
    if logits.shape[1] == 0:
        of_op.reject("logits", "of no columns", "at least one column")


@op(
    tensors={
        "logits": "T[num_rows, vocab_size]",
        "row_offsets": "int[num_offsets]",
        "token_ids": "int[num_listed]",
        "penalties": "float[num_rows]",
    },
    axes={"num_rows": (0, 1, 3), "vocab_size": (1, 50, 2, 3000), "num_listed": (0, 1, 30, 2000)},
    bench=[
        Case(
            f"fp16/v152064/m{m}/listed1024",
            torch.float16,
            {"num_rows": m, "vocab_size": 152064, "num_listed": 1024 * m},
        )
        for m in (1, 32)
    ],
    mutates=("logits",),
)
def repetition_penalty_inplace(
    logits: Tensor, row_offsets: Tensor, token_ids: Tensor, penalties: Tensor
) -> None:
    """logits[i, j] ← l / p where l > 0, else l · p, for every j in row i's list; p = penalties[i].

    A token listed more than once counts once. What only the device knows is not trusted: ids
    outside the vocabulary are skipped, offsets outside the list are clamped to it. Offsets ascend.

    Args:
        logits: [num_rows, vocab_size], updated in place, rounded once.
        row_offsets: [num_rows + 1]; row i's list is token_ids[row_offsets[i] : row_offsets[i + 1]].
        token_ids: [num_listed], the lists one after the other.
        penalties: [num_rows], any float dtype; 1 leaves the row as it is.

    Source: Keskar et al., "CTRL", 2019.
    """
    vocab_size, listed = logits.shape[1], token_ids.shape[0]
    position = torch.arange(listed, device=logits.device)
    start, end = row_offsets[:-1, None], row_offsets[1:, None]
    known = (token_ids >= 0) & (token_ids < vocab_size)
    mine = (position >= start) & (position < end) & known
    # One column more than the vocabulary takes what is to be skipped.
    column = torch.where(mine, token_ids, vocab_size).long()
    repeated = torch.zeros(logits.shape[0], vocab_size + 1, dtype=torch.bool, device=logits.device)
    repeated = repeated.scatter(1, column, True)[:, :vocab_size]
    wide, penalty = widen(logits), widen(penalties)[:, None]
    penalised = torch.where(wide > 0, wide / penalty, wide * penalty)
    logits.copy_(torch.where(repeated & (penalty != 1), penalised, wide))


@repetition_penalty_inplace.rule
def _(logits, row_offsets, token_ids, penalties):
    if row_offsets.shape[0] != logits.shape[0] + 1:
        allowed = f"num_rows + 1 = {logits.shape[0] + 1} offsets"
        repetition_penalty_inplace.reject("row_offsets", f"{row_offsets.shape[0]} long", allowed)


@repetition_penalty_inplace.sample
def _(make, num_rows, vocab_size, num_listed):
    cuts = make.ints(0, num_listed + 1, max(num_rows - 1, 0)).sort().values
    ends = make.ints(num_listed, num_listed + 1, 1)
    offsets = (ends - num_listed, cuts, ends) if num_rows else (ends - num_listed,)
    return {
        "logits": make.randn(num_rows, vocab_size),
        "row_offsets": torch.cat(offsets),
        "token_ids": make.ints(-1, vocab_size + 1, num_listed),
        "penalties": make.weight(num_rows),
    }


@repetition_penalty_inplace.traffic
def _(logits, row_offsets, token_ids, penalties):
    touched = min(token_ids.numel(), logits.numel())
    lists = (row_offsets, token_ids, penalties)
    read = sum(t.numel() * t.element_size() for t in lists)
    return read + 2 * touched * logits.element_size()


@op(
    tensors={"seeds": "int[num_rows]", "offsets": "int[num_rows]"},
    axes={"num_rows": (0, 1, 3, 300), "seed_bits": (8, 62)},
    bench=[Case(f"m{m}", torch.float32, {"num_rows": m}) for m in (1, 256)],
)
def uniform_rows(seeds: Tensor, offsets: Tensor) -> Tensor:
    """y[i] = ⌊w / 2⁸⌋ / 2²⁴, w the first word of Philox4x32-10 under key seeds[i] at offsets[i].

    A pure function: the same seed and offset give the same number on every device, and advancing
    the offset by one gives the next. There is no generator to keep or to capture.

    Args:
        seeds: [num_rows], one a request; all 64 bits count.
        offsets: [num_rows], the position in the request's stream, such as the step.

    Returns:
        [num_rows] float32 in [0, 1), multiples of 2⁻²⁴.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    return (_philox(seeds.long(), offsets.long())[0] >> 8).float() * 2.0**-24


def _philox(key: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words, in int64, of 64-bit keys at 64-bit counters."""
    k0, k1 = key & WORD, (key >> 32) & WORD
    c0, c1 = counter & WORD, (counter >> 32) & WORD
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = (
            _multiply(c, m) for c, m in zip((c0, c2), PHILOX_MULTIPLIERS, strict=True)
        )
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_INCREMENTS[0]) & WORD, (k1 + PHILOX_INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and low word of a 32 by 32 bit product, which int64 cannot hold unsigned."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & WORD


@uniform_rows.sample
def _(make, num_rows, seed_bits=62):
    return {
        "seeds": make.ints(0, 2**seed_bits, num_rows, dtype=torch.int64),
        "offsets": make.ints(0, 1000, num_rows),
    }


@op(
    tensors={
        "logits": "T[num_rows, vocab_size]",
        "u": "float[num_rows]",
        "temperature": "float[num_temperature]",
        "top_k": "int[num_top_k]",
        "top_p": "float[num_top_p]",
        "min_p": "float[num_min_p]",
    },
    axes={
        "num_rows": (0, 1, 3),
        "vocab_size": (1, 100, 2, 700),
        "given": ("none", "one", "each"),
    },
    bench=_cases(1, 32, 256),
)
def sample_rows(
    logits: Tensor,
    u: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """y[i] = the lowest j with Σ w[i, :j+1] > u[i] · Σ w[i], w[i] the weights that filters keep.

    Weights are w = e^((logit - max) / temperature). Order the row by logit, largest first, equal
    ones by column. The filters keep a prefix of that order, the shortest of these: the first top_k;
    of those, the fewest that together reach top_p of their sum; those with w ≥ min_p. At least one
    is kept. Drawing then walks the columns in their own order, so a call is a pure function of its
    arguments, and u uniform in [0, 1) gives every kept column its share.

    NaN and -inf are never chosen, +inf counts as the largest float32; a row of nothing else gives
    0. Values on the device are not checked but defined: u outside [0, 1) chooses the first or last
    column kept.

    Args:
        logits: [num_rows, vocab_size], rows may be strided.
        u: [num_rows], any float dtype, uniform in [0, 1): see :func:`uniform_rows`.
        temperature: [num_rows], or [1] for all; None is 1. 0 and below choose the largest.
        top_k: [num_rows] or [1]; None, 0 and below keep all.
        top_p: [num_rows] or [1]; None, 1 and above keep all.
        min_p: [num_rows] or [1], relative to the likeliest; None and 0 keep all.

    Returns:
        [num_rows] int32.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019 (top-p); Minh et
    al., "Turning Up the Heat", 2024 (min-p).
    """
    wide = widen(logits)
    wide = torch.where(wide.isnan(), -torch.inf, wide).clamp(max=LARGEST)
    top = wide.amax(dim=-1, keepdim=True)
    heat, count, share, floor = (
        torch.full_like(top, off) if value is None else widen(value)[:, None]
        for value, off in ((temperature, 1.0), (top_k, 0.0), (top_p, 1.0), (min_p, 0.0))
    )
    greedy = ~(heat > 0)
    heat, count = torch.where(greedy, 1.0, heat), torch.where(greedy, 1.0, count)
    weights = torch.where(wide == -torch.inf, 0.0, ((wide - top) / heat).exp())

    order = wide.argsort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(1, order)
    rank = torch.arange(wide.shape[1], device=wide.device)
    kept = (rank < count) | (count <= 0)
    mass = torch.where(kept, ranked, 0.0).cumsum(dim=-1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept = kept & ((before < share * mass[:, -1:]) | ~(share < 1) | (rank == 0))
    kept = kept & ~(ranked < floor.clamp(max=1.0)) & (ranked > 0)

    kept = torch.zeros_like(kept).scatter(1, order, kept)
    prefix = torch.where(kept, weights, 0.0).cumsum(dim=-1)
    hit = kept & (prefix > widen(u)[:, None] * prefix[:, -1:])
    last = torch.where(kept, rank, 0).amax(dim=-1)
    first = hit.to(torch.int8).argmax(dim=-1)
    return torch.where(hit.any(dim=-1), first, last).to(torch.int32)


@sample_rows.rule
def _(logits, u, temperature, top_k, top_p, min_p):
    _check_columns(sample_rows, logits)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, value in given.items():
        if value is not None and value.shape[0] not in (1, logits.shape[0]):
            got, allowed = f"{value.shape[0]} long", f"1 or num_rows = {logits.shape[0]}"
            sample_rows.reject(name, got, allowed)


@sample_rows.sample
def _(make, num_rows, vocab_size, given="each"):
    count = 1 if given == "one" else num_rows
    # Far apart logits: columns whose borders u can miss by a rounding are then few.
    arguments = {
        "logits": make.randn(num_rows, vocab_size, scale=4.0),
        "u": make.ints(0, 2**24, num_rows).float() * 2.0**-24,
    }
    if given != "none":
        arguments["temperature"] = make.ints(0, 20, count).float() / 10
        arguments["top_k"] = make.ints(0, 50, count)
        arguments["top_p"] = make.ints(2, 12, count).float() / 10
        arguments["min_p"] = make.ints(0, 4, count).float() / 40
    return arguments
