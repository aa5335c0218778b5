"""Launch choices: tables, their nearest rows, and the heuristics behind them."""

import pytest
import torch

from ferrum_triton.kernels import tuning
from ferrum_triton.kernels.gpu import SHARED_LIMITS, Gpu, gpu_of, gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.tuning import TUNABLES, Tunable, nearest

GPU = gpu_of_capability((9, 0))
META = torch.device("meta")


def test_meta_tensors_stand_for_the_gpu_of_the_recording():
    assert gpu_of(META) == Gpu((8, 0), 166_912, 132, "sm_80")
    with record_launches((9, 0)):
        assert gpu_of(META) == Gpu((9, 0), 232_448, 132, "sm_90")
    with record_launches((0, 0)):
        assert gpu_of(META).arch == "gfx942"
        assert gpu_of(META).max_warps == 16


def test_the_interpreter_is_a_gpu_of_its_own():
    assert gpu_of(torch.device("cpu")).arch == "interpreter"
    assert gpu_of(torch.device("cpu")).num_sms == 4


def test_limits_of_shared_memory_agree_with_those_compiled_for():
    assert {arch: SHARED_LIMITS[arch] for arch in TARGETS} == {
        arch: target.shared_limit for arch, target in TARGETS.items()
    }


def test_a_choice_on_meta_tensors_is_the_recorded_gpus(tunable):
    tunable.heuristic = lambda gpu, m, n: {"num_warps": gpu.capability[0]}
    for capability in ((8, 0), (9, 0), (8, 0)):
        with record_launches(capability):
            assert tunable.pick(META, 16, 64) == {"num_warps": capability[0]}


TABLE = [
    {"shape": {"m": 1, "n": 64}, "config": {"num_warps": 1}},
    {"shape": {"m": 16, "n": 64}, "config": {"num_warps": 2}},
    {"shape": {"m": 16, "n": 128}, "config": {"num_warps": 4}},
]


@pytest.mark.parametrize(
    ("shape", "warps"),
    [
        ((1, 64), 1),
        ((2, 64), 1),
        ((4, 64), None),
        ((9, 64), 2),
        ((32, 64), 2),
        ((33, 64), None),
        ((16, 128), 4),
        ((16, 80), 2),
        ((16, 96), 4),
        ((16, 257), None),
    ],
)
def test_nearest_is_near(shape, warps):
    found = nearest(TABLE, ("m", "n"), shape)
    assert (found and found["num_warps"]) == warps


@pytest.fixture
def tunable():
    yield Tunable(
        "made_up",
        ("m", "n"),
        lambda gpu, m, n: {"BLOCK": n, "num_warps": 8},
        lambda gpu, m, n: [{"BLOCK": n // k, "num_warps": w} for k in (1, 2) for w in (4, 8)],
    )
    del TUNABLES["made_up"]


def test_tables_come_before_the_heuristic(tunable, monkeypatch):
    cpu, pretended = torch.device("cpu"), torch.device("meta")
    monkeypatch.setattr(tuning, "read_table", lambda op, arch: TABLE if arch == "sm_80" else [])
    assert tunable.pick(pretended, 16, 64) == {"num_warps": 2}
    assert tunable.pick(cpu, 16, 64) == {"BLOCK": 64, "num_warps": 8}
    with tunable.forced({"num_warps": 16}):
        assert tunable.pick(pretended, 16, 64) == {"num_warps": 16}
    assert tunable.pick(pretended, 16, 64) == {"num_warps": 2}


def test_absent_tables_are_empty():
    assert tuning.read_table("made_up", "sm_90") == []
    assert tuning.read_table("rms_norm", "interpreter") == []


def test_candidates_serve_tritons_autotuner(tunable):
    configs = tunable.triton_configs(GPU, 16, 64)
    assert [(c.kwargs["BLOCK"], c.num_warps) for c in configs] == [
        (64, 4),
        (64, 8),
        (32, 4),
        (32, 8),
    ]


@pytest.mark.parametrize(
    ("shape", "warps"), [(("Q4_K", True, 5), 1), (("Q6_K", True, 5), 2), (("Q4_K", False, 5), None)]
)
def test_strings_and_bools_have_to_be_equal(shape, warps):
    table = [
        {"shape": {"kind": "Q4_K", "gated": True, "m": 4}, "config": {"num_warps": 1}},
        {"shape": {"kind": "Q6_K", "gated": True, "m": 5}, "config": {"num_warps": 2}},
        {"shape": {"kind": "Q4_K", "gated": 0, "m": 5}, "config": {"num_warps": 4}},
    ]
    found = nearest(table, ("kind", "gated", "m"), shape)
    assert (found and found["num_warps"]) == warps


def test_a_row_that_does_not_fit_leaves_it_to_the_heuristic(tunable, monkeypatch):
    monkeypatch.setattr(tuning, "read_table", lambda op, arch: TABLE)
    tunable.fits = lambda gpu, config, m, n: "" if n <= 64 else "too wide"
    assert tunable.pick(META, 16, 64) == {"num_warps": 2}
    assert tunable.pick(META, 16, 128) == {"BLOCK": 128, "num_warps": 8}
