"""What ships: the choices that tables and heuristics make for the bench cases of every GPU."""

import dataclasses
import functools

import pytest

import bench.shipped
from bench.shipped import compile_refusal, picks_of, shipped, uncompiled
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels import tables
from ferrum_triton.kernels.gpu import SHARED_LIMITS, gpu_of_arch
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.tables import Row, table_file, write_rows
from ferrum_triton.kernels.tuning import TUNABLES
from ferrum_triton.registry import OPS

load_kernels("interpret")

GPU = gpu_of_arch("sm_90")
SHIPPED = sorted(tables.SHIPPED.rglob("*.json"))


@functools.cache
def shipped_for(arch):
    return tuple(shipped(gpu_of_arch(arch)))


@pytest.fixture(scope="module")
def shapes():
    """The shapes that bench cases ask each choice for."""
    found = {}
    for choice in shipped_for(GPU.arch):
        found.setdefault(choice.pick.tunable.op, set()).add(choice.pick.shape)
    return found


def test_every_choice_is_gpu_by_a_bench_case(shapes):
    """Else nothing could tune or compile it."""
    assert not set(TUNABLES) - set(shapes)


@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_every_heuristic_fits(shapes, arch):
    """The bench cases' shapes, and other sizes of their first integer that a candidate takes."""
    gpu = gpu_of_arch(arch)
    for name, measured in shapes.items():
        tunable = TUNABLES[name]
        for shape in measured:
            for asked in (shape, *other_sizes(tunable, gpu, shape)):
                config = tunable.heuristic(gpu, *asked)
                assert not tunable.refusal(gpu, config, *asked), (name, asked, config)


def other_sizes(tunable, gpu, shape):
    """Shapes with another first integer, unless no candidate fits: launchers do not ask so."""
    first = next(i for i, value in enumerate(shape) if type(value) is int)
    for size in (1, 2, 3, 5, 8, 17, 64, 100, 512, 4096, 10**5):
        asked = (*shape[:first], size, *shape[first + 1 :])
        if any(not tunable.refusal(gpu, c, *asked) for c in tunable.candidates(gpu, *asked)):
            yield asked


@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_candidates_and_heuristics_keep_to_what_is_declared(shapes, arch):
    gpu = gpu_of_arch(arch)
    for name, measured in shapes.items():
        tunable = TUNABLES[name]
        for shape in measured:
            for config in (
                tunable.heuristic(gpu, *shape),
                *tunable.candidates(gpu, *shape),
            ):
                assert not tunable.outdated(gpu, Row(shape, config, 1.0)), (name, config)


# One op's rows take more than a minute to compile; in parts several workers share them.
PARTS = 4


def unfit_rows(op, choices, target, part=slice(None)):
    """Why each different configuration that an op's rows give cannot be launched.

    By the first case that has it, which ``test_kernels_compile.py`` mostly has compiled.
    """
    chosen = [c for c in choices if c.pick.tunable.op == op and c.pick.row is not None]
    different = {}
    for choice in chosen:
        different.setdefault(tuple(sorted(choice.pick.config.items())), choice)
    asked = list(different.values())[part]
    return [reason for c in asked if (reason := compile_refusal(c.op, c.case, target))]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_row_that_ships_is_compiled_for_its_architecture(file, part, caplog):
    op, arch = file.parent.name, file.stem
    assert op in TUNABLES
    assert arch in TARGETS, "what CI does not compile must not ship"
    rows = TUNABLES[op].read(file, gpu_of_arch(arch))
    assert not caplog.records, "a row is wrong"
    assert all(row.default_us is None or row.us <= row.default_us for row in rows)
    assert all(
        {"command", "commit", "torch", "triton", "gpu"} <= row.measured.keys() for row in rows
    )
    choices = shipped_for(arch)
    assert not [row for name, row in uncompiled(gpu_of_arch(arch), choices) if name.op == op]
    assert not unfit_rows(op, choices, TARGETS[arch], slice(part, None, PARTS))


def test_rows_that_ship_are_compiled(monkeypatch, tmp_path, request):
    """A table of an op's own, as it would ship."""
    op, target = OPS["rms_norm"], TARGETS["sm_90"]
    chosen, case = TUNABLES[op.name], op.bench[0]
    request.addfinalizer(chosen.forget)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    monkeypatch.setattr(op, "bench", [case])
    monkeypatch.setattr(bench.shipped, "TUNABLES", {op.name: chosen})
    shape = case.axes["num_tokens"], case.axes["hidden_size"]
    row = Row(shape, chosen.candidates(GPU, *shape)[0], 1.0)
    write_rows(table_file(tmp_path, op.name, GPU.arch), op.name, GPU.arch, chosen.dims, [row])
    chosen.forget()
    choices = list(shipped(GPU, [op]))
    assert [c.pick.row for c in choices] == [row]
    assert not uncompiled(GPU, choices)
    assert not unfit_rows(op.name, choices, target)
    found = uncompiled(GPU, shipped(GPU, [OPS["layer_norm"]]))
    assert found == [(chosen, row)], "no case of another op picks it"
    (reason,) = unfit_rows(op.name, choices, dataclasses.replace(target, shared_limit=0))
    assert "bytes of shared memory" in reason


def test_bench_cases_tell_the_choices_they_make():
    op = OPS["rms_norm"]
    case = op.bench[0]
    (pick,) = picks_of(op, case, (9, 0))
    assert pick.tunable is TUNABLES["rms_norm"]
    assert pick.shape == (case.axes["num_tokens"], case.axes["hidden_size"])
    assert pick.config == pick.tunable.heuristic(GPU, *pick.shape)
