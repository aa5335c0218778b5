"""One request's choice of tokens: its settings and seed, on the device, for the sampling ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.errors import InputError

INT32_MAX = 2**31 - 1


class Sampler:
    """Greedy, or seeded sampling with temperature, top-k and top-p.

    ``sample_rows`` draws with ``uniform_rows``: the n-th choice of a seed is the same on every
    device.

    Args:
        backend: the backend whose ops choose.
        temperature: the logits' divisor; 0 is greedy.
        top_k: the number of candidates kept; 0 keeps all.
        top_p: the probability that the likeliest of those are kept up to; 1 keeps all.
        seed: the seed of the draws; two samplers of one seed choose alike.

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
        on = {"device": backend.device}
        self._filters = {
            "temperature": torch.tensor([temperature], dtype=torch.float32, **on),
            "top_k": torch.tensor([min(top_k, INT32_MAX)], dtype=torch.int32, **on),
            "top_p": torch.tensor([top_p], dtype=torch.float32, **on),
        }
        self._seed = torch.tensor([seed], dtype=torch.int64, **on)
        self._step = torch.zeros(1, dtype=torch.int64, **on)

    def choose(self, logits: Tensor) -> int:
        """The next token after one row of logits [1, vocab_size]."""
        if self.temperature == 0:
            return int(self.backend.argmax_rows(logits))
        u = self.backend.uniform_rows(self._seed, self._step)
        self._step += 1
        return int(self.backend.sample_rows(logits, u, **self._filters))
