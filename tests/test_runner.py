"""Decode steps in flight: what each chose is there when it is collected, whatever ran since."""

import dataclasses

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.models import Llama
from ferrum_triton.models.runner import Row, Runner
from ferrum_triton.models.weights import load_weights
from ferrum_triton.runtime.sampling import GREEDY
from tests.tiny_models import PACKED, PackedSource

CONFIG = dataclasses.replace(PACKED, max_positions=64)


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_wait_to_be_collected(name):
    """More steps than the state's history has, and rows that take another's place."""
    backend = get_backend(name)
    weights = load_weights(PackedSource(CONFIG), CONFIG, backend, torch.float32)
    model = Llama(CONFIG, weights, backend, torch.float32)

    def tokens_of(plan, at_once):
        runner = Runner(model, num_rows=2, capacity=32)
        runner.cache.reserve({0: 16, 1: 16})
        found = []
        for rows in plan:
            runner.decode(rows)
            while runner.num_in_flight and not at_once:
                found.append(runner.collect())
        assert runner.num_in_flight == (len(plan) if at_once else 0)
        while runner.num_in_flight:
            found.append(runner.collect())
        return found

    def rows(key, first, start):
        ids = [first] + [0] * 16
        ids[start] = first
        return {row: Row(key + row, ids, start, start + 1, GREEDY) for row in range(2)}

    # The second pair of rows starts at positions that have the places of the first pair's last.
    plan = [rows(0, 7, i) for i in range(3)] + [rows(2, 31, i) for i in range(4)]
    assert tokens_of(plan, at_once=True) == tokens_of(plan, at_once=False)
    chosen = tokens_of(plan, at_once=False)
    assert len({step[0] for step in chosen}) > 2
