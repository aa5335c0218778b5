"""Choosing the next token from logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import InputError


class Sampler:
    """Greedy, or seeded sampling with temperature, top-k and top-p.

    The filters apply in this order: temperature, top-k, top-p (computed among the top-k).

    Args:
        backend: whose argmax is used for greedy choice.
        temperature: 0 is greedy; the logits are divided by it otherwise.
        top_k: candidates kept; 0 keeps all.
        top_p: the smallest set of most likely candidates whose probability reaches this is kept.
        seed: of the random generator; two samplers of one seed choose alike.

    Raises:
        InputError: an argument is out of range.
    """

    def __init__(
        self,
        backend: Backend,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        checks = (
            ("temperature", temperature, 0 <= temperature < math.inf, "0 or more, finite"),
            ("top_k", top_k, top_k >= 0, "0 (all) or more"),
            ("top_p", top_p, 0 < top_p <= 1, "above 0, up to 1"),
            ("seed", seed, 0 <= seed < 2**63, "0 to 2**63 - 1"),
        )
        for name, value, fine, allowed in checks:
            if not fine:
                raise InputError("Sampler", name, str(value), allowed, "Choose a value in range.")
        self.backend, self.temperature = backend, temperature
        self.top_k, self.top_p = top_k, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """The next token after one row of logits [1, vocab_size]."""
        if self.temperature == 0:
            return int(self.backend.argmax_rows(logits))
        weights = self.probabilities(logits[0].float().cpu())
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution sampled from, for float32 logits [vocab_size]; NaN is never chosen."""
        logits = logits.masked_fill(logits.isnan(), -torch.inf)
        if self.temperature == 0 or not logits.max() > -torch.inf:
            return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
        # The largest is subtracted first: a tiny temperature may then not overflow.
        logits = (logits - logits.max()).nan_to_num(0.0) / self.temperature
        if 0 < self.top_k < logits.numel():
            kept = logits.topk(self.top_k).indices
            logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
        weights = torch.softmax(logits, dim=0)
        if self.top_p < 1:
            ordered, order = weights.sort(descending=True, stable=True)
            before = ordered.cumsum(0) - ordered  # probability of what is likelier
            weights = weights.index_fill(0, order[before >= self.top_p], 0.0)
        return weights / weights.sum()
