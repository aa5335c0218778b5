"""Launch choices by the time of a whole decode step."""

import pytest
import torch

from bench import tune_step
from bench.random_models import CONFIGS
from bench.tune import Machine
from bench.tune_step import TunedStep
from ferrum_triton.kernels.gpu import gpu_of
from ferrum_triton.kernels.norm import fused_add_rms_norm_config as norm
from ferrum_triton.kernels.tables import table_file
from tests.tiny_models import shrunk

CPU = torch.device("cpu")


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """Runs the tool over a tiny model in the interpreter; returns the rows it wrote of the norm."""
    gpu = gpu_of(CPU)
    monkeypatch.setitem(CONFIGS, "tiny", shrunk("qwen3-8b", width=32))
    monkeypatch.setattr(tune_step, "this_machine", lambda: Machine("interpret", gpu, None))
    now = norm.heuristic(gpu, 2, 32)
    changed = [dict(now, num_warps=2 * now["num_warps"]), dict(now, num_warps=16)]
    monkeypatch.setattr(norm, "candidates", lambda gpu, *shape: [now, *changed])

    def run(us):
        # Of all norms, which are of one shape.
        monkeypatch.setattr(
            TunedStep, "time", lambda step: us[norm.pick(CPU, 2, 32)["num_warps"] // 2]
        )
        only = ["--only", "fused_add_rms_norm", "--out", str(tmp_path)]
        tune_step.main(["tiny", "--formats", "bf16", "--batches", "2", "--context", "20", *only])
        return norm.read(table_file(tmp_path, norm.op, gpu.arch), gpu)

    assert now["num_warps"] == 1
    return run


def test_the_launch_that_makes_the_step_fastest_is_written(tune, capsys):
    (row,) = tune({0: 100.0, 1: 98.0, 8: 99.0})
    assert (row.shape, row.config["num_warps"]) == ((2, 32), 2)
    assert (row.us, row.default_us) == (98.0, 100.0)
    assert "bench.tune_step tiny --formats bf16 --batches 2" in row.measured["command"]
    assert "98.0 us a step, 1 rows" in capsys.readouterr().out


def test_a_gain_within_the_noise_is_none(tune):
    assert tune({0: 100.0, 1: 99.9, 8: 101.0}) == []


def test_a_launch_that_changes_the_logits_is_dropped(tune, monkeypatch, capsys):
    monkeypatch.setattr(tune_step, "MOST_APART", -1.0)
    assert tune({0: 100.0, 1: 50.0, 8: 50.0}) == []
    assert capsys.readouterr().out.count("dropped, logits are") == 2
