"""Requests' choices of tokens: settings, seeds and what they do to logits, a row a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import InputError

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """How a request chooses tokens.

    Attributes:
        temperature: the logits' divisor; 0 is greedy.
        top_k: the number of candidates kept; 0 keeps all.
        top_p: the probability that the likeliest of those are kept up to; 1 keeps all.
        min_p: the least probability kept, relative to the likeliest token's; 0 keeps all.
        repetition_penalty: what the logits of tokens of the prompt and the answer are divided by
            where positive, multiplied by where negative; 1 is none.
        logit_bias: what is added to the logits of some tokens.
        logprobs: whether the log-probability of each chosen token is wanted: of the model's own
            distribution, before any of the above.
        seed: the seed of the draws. The draw at a position of a sequence is a function of the seed
            and the position alone.

    Raises:
        InputError: a setting is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        penalty, bias = self.repetition_penalty, self.logit_bias
        known = all(type(i) is int and not math.isnan(value) for i, value in bias.items())
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "0 or more, finite"),
            ("top_k", type(self.top_k) is int and self.top_k >= 0, "0 (all) or a larger integer"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0 < penalty < math.inf, "above 0, finite"),
            ("logit_bias", known, "integer ids with numbers, none of them NaN"),
            ("seed", type(self.seed) is int and 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
        )
        for name, fine, allowed in checks:
            if not fine:
                got, advice = str(getattr(self, name)), "Choose a value in range."
                raise InputError("Sampling", name, got, allowed, advice)

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed, or read on the host, before a token is chosen."""
        return self.repetition_penalty != 1 or bool(self.logit_bias) or self.logprobs


GREEDY = Sampling()


class Sampler:
    """The settings of some requests on the device, a row each, for the sampling ops.

    Args:
        backend: the backend whose ops choose.
        num_rows: requests at a time.
    """

    def __init__(self, backend: Backend, num_rows: int = 1) -> None:
        on = {"device": backend.device}
        self.backend = backend
        self._seeds = torch.zeros(num_rows, dtype=torch.int64, **on)
        self._floats = torch.zeros(3, num_rows, dtype=torch.float32, **on)
        self._top_k = torch.zeros(num_rows, dtype=torch.int32, **on)

    def set(self, settings: Sequence[Sampling]) -> None:
        """Settings of the first rows; three uploads."""
        if not settings:
            return
        count = len(settings)
        floats = [[s.temperature, s.top_p, s.min_p] for s in settings]
        uploads = (
            (self._seeds[:count], torch.tensor([s.seed for s in settings])),
            (self._floats[:, :count], torch.tensor(floats).T),
            (self._top_k[:count], torch.tensor([min(s.top_k, INT32_MAX) for s in settings])),
        )
        for kept, values in uploads:
            # Pageable memory is read before the call returns.
            kept.copy_(values.to(kept.dtype), non_blocking=True)

    def choose(self, logits: Tensor, positions: Tensor, greedy: bool = False) -> Tensor:
        """The next token of each row; nothing is read back, so a graph may hold it.

        Args:
            logits: [num_rows, vocab_size], of the first rows.
            positions: [num_rows] int32, each row's newest position: which of its draws this is.
            greedy: whether every row's temperature is known to be 0.

        Returns:
            [num_rows] int32.
        """
        if greedy:
            return self.backend.argmax_rows(logits)
        rows = slice(logits.shape[0])
        temperature, top_p, min_p = self._floats[:, rows].unbind()
        u = self.backend.uniform_rows(self._seeds[rows], positions)
        return self.backend.sample_rows(logits, u, temperature, self._top_k[rows], top_p, min_p)


def change_logits(
    backend: Backend, logits: Tensor, settings: Sequence[Sampling], ids: Sequence[Sequence[int]]
) -> None:
    """Apply biases and repetition penalties in place.

    Args:
        backend: the backend of the logits.
        logits: [num_rows, vocab_size].
        settings: each row's.
        ids: each row's tokens so far, its prompt included.
    """
    biases = [
        (row, token, bias) for row, s in enumerate(settings) for token, bias in s.logit_bias.items()
    ]
    if biases:
        rows, columns, values = zip(*biases, strict=True)
        where = tuple(torch.tensor(part, device=logits.device) for part in (rows, columns))
        added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        logits.index_put_(where, added, accumulate=True)
    if any(s.repetition_penalty != 1 for s in settings):
        listed = [
            tokens if s.repetition_penalty != 1 else []
            for s, tokens in zip(settings, ids, strict=True)
        ]
        offsets = [0]
        for tokens in listed:
            offsets.append(offsets[-1] + len(tokens))
        on = {"dtype": torch.int32, "device": logits.device}
        flat = torch.tensor([token for tokens in listed for token in tokens], **on)
        penalties = torch.tensor([s.repetition_penalty for s in settings], device=logits.device)
        backend.repetition_penalty_inplace(logits, torch.tensor(offsets, **on), flat, penalties)
