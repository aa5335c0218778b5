"""A decode step of sequences that are all as long, for timing by graph replay."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from torch import Tensor

from bench.timing import Replay
from ferrum_triton.models import Decoder
from ferrum_triton.models.step import Step
from ferrum_triton.runtime.graph import DecodeState

REPLAYS = 9


def replay_us(step: Callable[[], Tensor]) -> float:
    """Median microseconds of a step by graph replay."""
    replay = Replay([step])
    return statistics.median(replay.us() for _ in range(REPLAYS))


class TimedStep:
    """A step of a model over a cache of random keys and values.

    Args:
        model: the model.
        batch: sequences.
        context: tokens of each, with the one of the step.
    """

    def __init__(self, model: Decoder, batch: int, context: int) -> None:
        self.model = model
        self.cache = model.new_cache(context, batch)
        self.cache.reserve(dict.fromkeys(range(batch), context))
        for pool in (*self.cache.k, *self.cache.v):
            pool.normal_()
        state = DecodeState(model.backend.device, batch)
        state.set(1, context - 1)
        self._step = Step(state.token, self.cache.block_tables, state.pos, state.kv_len)

    def logits(self) -> Tensor:
        """What the step predicts, [batch, vocab_size]."""
        return self.model.run(self._step, self.cache)

    def tokens(self) -> Tensor:
        """The likeliest next tokens, [batch]."""
        return self.model.backend.argmax_rows(self.logits())
