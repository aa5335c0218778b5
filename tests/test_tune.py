"""bench.tune from end to end on the CPU: everything but the timing, which needs a GPU."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import bench.behind
import bench.shipped
from bench import tune
from ferrum_triton import OPS, FerrumError, get_backend
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels import tables
from ferrum_triton.kernels.gpu import SHARED_LIMITS, gpu_of_arch
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.resources import TARGETS, compile_launch
from ferrum_triton.kernels.tuning import TUNABLES
from ferrum_triton.registry import Case

load_kernels("interpret")

GPU = gpu_of_arch("sm_90")
TUNABLE = TUNABLES["rms_norm"]
HIDDEN = 256
VERSIONS = {"torch": "2.0", "triton": "3.0", "gpu": "Test", "commit": "abc", "date": "today"}


def case(name, dtype, num_tokens):
    return Case(name, dtype, {"num_tokens": num_tokens, "hidden_size": HIDDEN})


CASES = (
    case("bf16/m2", torch.bfloat16, 2),
    case("f32/m2", torch.float32, 2),
    case("bf16/m16", torch.bfloat16, 16),
)


def config(warps, rows=1, reads=1):
    return {"READS": reads, "BLOCK_T": rows, "BLOCK_H": HIDDEN, "num_warps": warps}


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """A stand-in for the GPU: times by warps, and how much slower each call is, by turns."""
    found = SimpleNamespace(
        us={}, default=10.0, calls=[], slower=itertools.repeat(1.0), versions=dict(VERSIONS)
    )

    def device_us(call, sets):
        key = TUNABLE._forced[None]["num_warps"], TUNABLE._forced[None]["BLOCK_T"]
        found.calls.append(key)
        return found.us.get(key, found.default) * next(found.slower)

    def compile_launch(launch, target):
        warps = launch.meta["num_warps"]
        if warps == 16:
            raise RuntimeError("no such instruction\nmore")
        spilled = 8 if warps == 8 else 0
        return SimpleNamespace(spilled=spilled, shared=0)

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tables, "_told", set())
    monkeypatch.setattr(OPS["rms_norm"], "bench", CASES)
    monkeypatch.setattr(tune, "OPS", {"rms_norm": OPS["rms_norm"]})
    monkeypatch.setattr(
        tune, "this_machine", lambda: tune.Machine("interpret", GPU, TARGETS["sm_90"])
    )
    monkeypatch.setattr(tune, "environment", lambda commit: found.versions)
    monkeypatch.setattr(bench.behind, "device_us", device_us)
    monkeypatch.setattr(tune, "copies_of", lambda arguments, nbytes: [arguments])
    monkeypatch.setattr(bench.shipped, "compile_launch", compile_launch)
    TUNABLE.forget()
    yield found
    TUNABLE.forget()


def rows(directory=None):
    file = tables.table_file(directory or tables.user_directory(), "rms_norm", "sm_90")
    table = json.loads(file.read_text())
    assert (table["op"], table["arch"]) == ("rms_norm", "sm_90")
    return {row["shape"]["num_tokens"]: row for row in table["rows"]}


def test_a_faster_candidate_is_written_down(timed, capsys):
    timed.us = {(4, 4): 5.0, (8, 4): 1.0}
    tune.main([])
    found = rows()
    assert found.keys() == {2, 16}
    assert found[16]["config"] == config(4, rows=4)
    assert (found[16]["us"], found[16]["default_us"]) == (5.0, 10.0)
    assert found[16]["measured"] == VERSIONS | {
        "command": "python -m bench.tune rms_norm --case rms_norm/bf16/m16"
    }
    # Two cases ask for two tokens; nothing beats the heuristic there.
    assert found[2]["config"] == TUNABLE.heuristic(GPU, 2, HIDDEN)
    assert found[2]["us"] == found[2]["default_us"] == 20.0
    said = capsys.readouterr().out
    assert "[1/2] rms_norm num_tokens=2 hidden_size=256" in said
    assert "[2/2] rms_norm num_tokens=16" in said and " left\n" in said
    assert "2 shapes in" in said


def test_what_spills_or_does_not_compile_is_not_timed(timed, capsys, monkeypatch):
    wide = [
        config(4, rows=2),
        config(8, rows=4),
        config(16),
        config(64),
        config(2, reads=2, rows=2),
    ]
    monkeypatch.setattr(TUNABLE, "candidates", lambda gpu, m, n: wide)
    tune.main(["rms_norm", "--case", "m16"])
    said = capsys.readouterr().out
    assert {warps for warps, _ in timed.calls} == {1, 4}
    assert "dropped, _rms_norm_kernel spills 8 bytes" in said
    assert "dropped, _rms_norm_kernel does not compile: no such instruction\n" in said
    assert "dropped, num_warps is 64" in said
    assert "dropped, rows are read twice one at a time" in said


def test_what_computes_wrongly_is_not_timed(timed, capsys, monkeypatch):
    real = get_backend("interpret")

    def rms_norm(**arguments):
        y = real.rms_norm(**arguments)
        return y + 1 if TUNABLE._forced[None]["BLOCK_T"] == 4 else y

    wrong = SimpleNamespace(device=real.device, rms_norm=rms_norm)
    monkeypatch.setattr(tune, "get_backend", lambda name: wrong)
    timed.us = {(4, 4): 1.0}
    tune.main(["--case", "m16"])
    assert rows()[16]["config"]["BLOCK_T"] != 4
    assert "'BLOCK_T': 4, 'BLOCK_H': 256, 'num_warps': 4}: dropped, " in capsys.readouterr().out


def test_a_heuristic_that_does_not_run_is_replaced(timed, monkeypatch, capsys):
    default = TUNABLE.heuristic(GPU, 16, HIDDEN)
    real = tune.check

    def check(op, call, arguments):
        if TUNABLE._forced[None] == default:
            raise FerrumError("out of resources")
        return real(op, call, arguments)

    monkeypatch.setattr(tune, "check", check)
    tune.main(["--case", "m16"])
    assert rows()[16]["default_us"] is None
    assert rows()[16]["config"] != default
    assert "does not run: kept" in capsys.readouterr().out
    monkeypatch.setattr(tune, "check", lambda *_: (_ for _ in ()).throw(FerrumError("no")))
    tune.main(["--case", "m2"])
    assert rows().keys() == {16}
    assert "nothing runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("us", "slower", "kept"),
    [
        (9.9, itertools.repeat(1.0), False),
        (9.5, itertools.repeat(1.0), True),
        (9.5, itertools.cycle((1.0, 1.0, 1.2)), False),  # gains differ by more
        (9.5, (1.006**n for n in itertools.count()), True),  # it grows warm
    ],
)
def test_a_gain_within_the_noise_is_refused(timed, us, slower, kept):
    """Noise is 2%, or by how much gains differ that were measured in turns."""
    timed.us, timed.slower = {(4, 4): us}, slower
    tune.main(["--case", "m16"])
    assert (rows()[16]["config"] == config(4, rows=4)) == kept


def test_a_run_goes_on_where_it_stopped(timed, monkeypatch, capsys):
    real, seen = tune.tune, []

    def stop(job, machine, versions):
        seen.append(job.shape[0])
        if job.shape[0] == 16 and len(seen) < 3:
            raise KeyboardInterrupt
        return real(job, machine, versions)

    monkeypatch.setattr(tune, "tune", stop)
    with pytest.raises(KeyboardInterrupt):
        tune.main([])
    assert rows().keys() == {2}
    tune.main([])
    assert rows().keys() == {2, 16}
    tune.main([])
    assert seen == [2, 16, 16]
    assert "0 shapes in 0:00:00, 2 skipped" in capsys.readouterr().out
    tune.main(["--again"])
    assert seen[3:] == [2, 16]
    timed.versions["triton"] = "3.1"
    tune.main([])
    assert seen[5:] == [2, 16]
    assert rows()[2]["measured"]["triton"] == "3.1"


def test_what_is_no_table_is_moved_aside_and_bad_rows_go(timed, tmp_path, capsys):
    file = tables.table_file(tables.user_directory(), "rms_norm", "sm_90")
    file.parent.mkdir(parents=True)
    file.write_text("not a table")
    tune.main(["--case", "m16"])
    assert file.with_name("sm_90.json.bad").read_text() == "not a table"
    assert "moved to sm_90.json.bad" in capsys.readouterr().out
    table = json.loads(file.read_text())
    old = table["rows"][0] | {"shape": {"num_tokens": 7, "hidden_size": HIDDEN}}
    table["rows"] += [old, old | {"config": {"BLOCK": 1}}]
    file.write_text(json.dumps(table))
    tune.main(["--case", "m2"])
    assert rows().keys() == {2, 7, 16}


def test_tables_go_where_they_are_asked_to(timed, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tune.main(["--case", "m16", "--ship"])
    tune.main(["--case", "m2", "--out", str(tmp_path / "elsewhere")])
    assert rows(tmp_path / "shipped").keys() == {16}
    assert rows(tmp_path / "elsewhere").keys() == {2}
    assert not tables.user_directory().exists()


def test_what_ships_is_a_candidate_too(timed, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(TUNABLE, "candidates", lambda gpu, m, n: [config(4, rows=2)])
    timed.us = {(4, 2): 5.0}
    tune.main(["--ship"])
    TUNABLE.forget()
    expected = [TUNABLE.heuristic(GPU, 16, HIDDEN), config(4, rows=2)]
    assert tune.candidates_of(TUNABLE, (16, HIDDEN), GPU) == expected


def test_a_path_alone_is_timed_beside_what_is_chosen(timed, tmp_path, monkeypatch):
    fast = config(4, rows=2) | {"path": "fast"}
    monkeypatch.setattr(TUNABLE, "candidates", lambda gpu, m, n: [config(8), fast])
    default = TUNABLE.heuristic(GPU, 16, HIDDEN)
    assert tune.candidates_of(TUNABLE, (16, HIDDEN), GPU, "fast") == [default, fast]
    assert tune.find_jobs({TUNABLE.op}, "", GPU, "fast")
    assert not tune.find_jobs({TUNABLE.op}, "", GPU, "slow")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["made_up"], "no launch choice: made_up"), (["--ship", "--out", "x"], "not allowed")],
)
def test_wrong_arguments_are_told(timed, capsys, arguments, reason):
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert reason in capsys.readouterr().err


def test_a_case_that_memory_cannot_hold_is_left_out(timed, monkeypatch, capsys):
    def make_sample(factory, **axes):
        if str(factory.device) == "cpu":
            raise torch.OutOfMemoryError("much")
        return real(factory, **axes)

    real = OPS["rms_norm"].make_sample
    monkeypatch.setattr(OPS["rms_norm"], "make_sample", make_sample)
    tune.main([])
    assert "left out" in capsys.readouterr().out


@pytest.mark.parametrize("arch", [*SHARED_LIMITS, "gfx1100"])
def test_every_gpu_has_a_target(arch):
    target = tune.target_of(gpu_of_arch(arch))
    assert target.shared_limit == gpu_of_arch(arch).shared_limit
    assert target.gpu.warp_size == (64 if arch == "gfx942" else 32)
    with record_launches(target.capability) as launches:
        OPS["rms_norm"].impls["triton"](*(torch.empty(s, device="meta") for s in ((2, 64), (64,))))
    assert compile_launch(launches[0], target).registers > 0
