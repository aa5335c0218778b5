"""The program that stresses kernels in Gluon: what it draws, what it notices, and how it ends."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from bench.launches import meta_backend
from ferrum_triton import OPS, get_backend
from ferrum_triton.kernels.ahead import compile_key
from ferrum_triton.kernels.gluon import GluonKernel
from ferrum_triton.kernels.gpu import gpu_of, gpu_of_arch
from ferrum_triton.kernels.hopper_config import is_gluon, serves
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.tuning import record_picks
from ferrum_triton.testing import TensorFactory
from tests import soak
from tests.harness import clone, tensors
from tests.soak_axes import LARGE, SMALL, routed
from tests.soak_draws import (
    draws,
    gluon_options,
    group,
    launches_gluon,
    launches_of,
    named,
    served_ops,
)
from tests.soak_streams import Ready, Soak, pool
from tests.test_attention_fuzz import ALIKE
from tests.watchdog import HUNG, Watchdog

HOPPER = gpu_of_arch("sm_90")
# Some of each kind: products with experts and without, packed or not, and attention.
EMULATED = (
    "gemm_quant",
    "gemv_quant_gate_up_silu",
    "gemm_quant_moe_id",
    "gemm_moe_id",
    "gemm_moe_id_gate_up_fp8_128x128",
    "flash_attention",
    "paged_varlen_attention",
)


@pytest.fixture(scope="module")
def drawn():
    """Two groups of each op."""
    names = served_ops()
    return list(draws(names, 7, 2 * ALIKE * len(names), LARGE))


def test_a_seed_draws_the_same_calls(drawn):
    fifth = drawn[5]
    group.cache_clear()
    again, other = named(fifth.name, 7), named(fifth.name, 8)
    assert (again.about, again.config, again.shape) == (fifth.about, fifth.config, fifth.shape)
    assert other.about != again.about
    one, two = named("gemm_moe_id/0/3", 7, SMALL), named("gemm_moe_id/0/3", 7, SMALL)
    found, same = (tensors(each.build("cpu")) for each in (one, two))
    assert all(torch.equal(found[name], same[name]) for name in found)


def test_every_op_with_a_kernel_in_gluon_is_drawn(drawn):
    """Those whose bench cases may launch one, and all launch choices that have one."""
    meta_backend()
    ops, choices = set(), set()
    for op in (op for op in OPS.values() if "triton" in op.impls):
        for case in op.bench:
            call = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
            with record_launches((9, 0)), record_picks() as picks:
                op.impls["triton"](**call)
            for tunable, shape, config in gluon_options(picks)[:1]:
                choices.add(tunable.op)
                with tunable.forced(config, shape), record_launches((9, 0)) as launches:
                    op.impls["triton"](**call)
                if launches_gluon(launches):
                    ops.add(op.name)
    assert len(choices) >= 10
    assert ops <= set(served_ops())
    assert choices <= {each.tunable.op for each in drawn}
    assert {each.op.name for each in drawn} == set(served_ops())


def test_what_is_drawn_fits_and_launches_a_kernel_in_gluon(drawn):
    assert len({each.name for each in drawn}) == len(drawn)
    for each in drawn:
        assert is_gluon(each.config)
        assert not each.tunable.refusal(HOPPER, each.config, *each.shape), each
        assert launches_gluon(launches_of(each.name, 7)), each


def test_calls_of_a_group_differ_and_share_kernels(drawn):
    kernels = 0
    for first in range(0, len(drawn), ALIKE):
        alike = drawn[first : first + ALIKE]
        assert len({each.about for each in alike}) == ALIKE
        launches = [launch for each in alike for launch in launches_of(each.name, 7)]
        gluon = {compile_key(x) for x in launches if isinstance(x.kernel, GluonKernel)}
        kernels += len(gluon)
    assert kernels < 0.4 * len(drawn)


def test_shards_are_parts_of_the_whole():
    names = served_ops()[:4]
    whole = [each.name for each in draws(names, 3, 75, LARGE)]
    parts = [each.name for i in (1, 2, 3) for each in draws(names, 3, 75, LARGE, i, 3)]
    assert len(whole) == 75
    assert sorted(parts) == sorted(whole)


@pytest.mark.parametrize("op", ["gemm_moe_id", "gemm_quant_moe_id"])
def test_routings(op):
    axes = {"num_tokens": 40, "num_experts": 6, "top_k": 3, "n": 5}
    call = {"bucket_ids": None, "tpe": None} if "quant" in op else {"ids": None}

    def counts(routing):
        made = routed(call, axes, routing, 4, "cpu")
        if "tpe" in made:
            return made["tpe"].tolist()
        return [int((made["ids"] == expert).sum()) for expert in range(6)]

    assert counts("one") == [0, 0, 0, 0, 120, 0]
    assert not any(counts("none"))
    assert all(counts("uniform")) and sum(counts("uniform")) < 120  # the others are no expert's
    skewed = counts("skewed")
    assert skewed[0] > 3 * skewed[3]


def test_bounds_allow_for_errors_that_add_up():
    weights = torch.tensor([[0.5, 1.0, 2.0], [2.0, 1.0, 2.0]])
    errors = {
        (0, 0, 0): 3.5,  # one expert
        (0, 1, 0): 2.5**2 + 1,
        (0, 1, 2): 0.25 + 1 + 4,
        (-1, 1, 3): 1.0,  # which are none of three experts
        (-1, -1, 3): 1.0,
    }
    for ids, want in errors.items():
        found = soak.error_of_sums(torch.tensor([ids]), weights[:1], 3)
        assert found == pytest.approx(want if len(set(ids)) == 1 else want**0.5)
    assert soak.error_of_sums(torch.tensor([[0, 1, 2], [1, 1, 1]]), weights, 3) == 5.0


def test_bounds_of_calls(drawn):
    def scales(name, kind, **config):
        op = OPS[name]
        kinds = {axis: kind for axis in op.axes if axis.endswith("kind")}
        axes = op.bench[0].axes | kinds | {"n": 3, "num_blocks": 1}
        call = op.make_sample(TensorFactory(torch.float16, "meta"), **axes)
        return soak.scale_of(replace(drawn[0], op=op, config=config), call) / soak.TAILS

    assert scales("gemm_quant", "Q4_0:planes", sums_offsets=True) == 1
    gated = "gemv_quant_gate_up_silu"
    assert scales(gated, "Q4_0:planes", sums_offsets=True) == 2
    assert scales(gated, "Q4_0:planes", sums_offsets=False) == scales(gated, "Q4_0:planes") == 1
    assert scales(gated, "Q4_K:planes", sums_offsets=True) == 1  # which the tests' bound allows for


@pytest.mark.parametrize("op", EMULATED)
def test_drawn_calls_are_right_in_the_emulator(op, capsys):
    assert soak.main([op, "--backend", "interpret", "--count", "2", "--seed", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"2 configurations, 2 compared, 0 failed: {op} 2"


class Perturbed:
    """The interpreter, of whose calls one gives another number."""

    def __init__(self, wrong):
        self.device, self.calls, self.wrong = torch.device("cpu"), 0, wrong

    def __getattr__(self, name):
        def call(**arguments):
            y = getattr(get_backend("interpret"), name)(**arguments)
            self.calls += 1
            if self.calls == self.wrong:
                y.view(torch.int16).flatten()[3] ^= 1 if self.wrong == 2 else 1 << 14
            return y

        return call


@pytest.mark.parametrize(
    "wrong, fault", [(1, "gemm_moe_id output 0: "), (2, "a second run gives other bits")]
)
def test_a_difference_is_told_with_how_to_run_it_again(wrong, fault, monkeypatch, capsys):
    monkeypatch.setattr(soak, "get_backend", lambda name: Perturbed(wrong))
    assert soak.main(["gemm_moe_id", "--backend", "interpret", "--count", "2", "--seed", "1"]) == 1
    said = capsys.readouterr().out.splitlines()
    command, _, told = said[-2].partition(": ")
    assert told.startswith(fault)
    assert said[-1] == "2 configurations, 2 compared, 1 failed: gemm_moe_id 2"
    program, *arguments = command.split()[2:]
    assert program == "tests.soak" and arguments[-1] == "gemm_moe_id/0/0"
    assert soak.main(arguments) == 1
    assert fault in capsys.readouterr().out
    monkeypatch.undo()
    assert soak.main(arguments) == 0


def test_the_plain_kernel_is_not_taken_for_one_in_gluon():
    one = named("gemm_moe_id/0/0", 1, SMALL)
    plain = one.tunable.heuristic(gpu_of(torch.device("cpu")), *one.shape)
    backend = get_backend("interpret")
    tally = soak.fuzz([replace(one, config=plain)], backend, "again", Watchdog(600))
    assert (tally.compared, tally.failed) == (0, {one.name})


def test_an_error_is_told_and_the_others_run(capsys):
    one, two = (named(f"gemm_moe_id/0/{i}", 1, SMALL) for i in range(2))
    broken = replace(one, build=lambda device: {"a": None})
    tally = soak.fuzz([broken, two], get_backend("interpret"), "again", Watchdog(600))
    assert "again gemm_moe_id/0/0: " in capsys.readouterr().out
    assert (tally.ops.total(), tally.compared, tally.failed) == (2, 1, {one.name})


def test_launches_are_held_to_the_bits_of_the_first():
    one, backend = named("gemm_moe_id/0/0", 1, SMALL), get_backend("interpret")
    call, differing = one.build("cpu"), torch.zeros(2, dtype=torch.int32)
    with one.forced(torch.device("cpu")):
        ready = Ready(one, call, one.results(backend, clone(call)))
        ready.launch(backend, differing[0])
        ready.first[0].view(torch.int16).flatten()[-1] ^= 1
        ready.launch(backend, differing[1])
    assert differing.tolist() == [0, 1]


def test_a_pool_has_a_call_of_every_op_and_one_choice_a_shape():
    calls = pool(served_ops(), 2, 80)
    assert {each.op.name for each in calls} == set(served_ops())
    assert 60 <= len(calls) <= 100
    assert len({(each.tunable.op, each.shape) for each in calls}) == len(calls)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_parts_share_ops_out_and_take_other_groups_where_they_are_more(parts):
    names = ("paged_varlen_attention", "flash_attention", "mla_attention")
    shares = [soak.share_of(names, part, parts) for part in range(1, parts + 1)]
    taken = [(name, number) for own, number in shares for name in own]
    assert len(set(taken)) == len(taken) == max(parts, len(names))
    assert {name for name, number in taken if number == 0} == set(names)


WATCHED = """
import time
from tests.watchdog import Watchdog
with Watchdog(2) as watchdog:
    for _ in range(4):
        watchdog.expect(["gemm_moe_id/0/0", "mla_attention/0/1"])
        time.sleep({seconds})
    watchdog.rest()
    time.sleep(2.2)
"""


@pytest.mark.parametrize("seconds, status", [(0.7, 0), (60, HUNG)])
def test_a_hang_ends_the_process(seconds, status):
    command = [sys.executable, "-c", WATCHED.format(seconds=seconds)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert run.returncode == status
    is_told = "in flight: gemm_moe_id/0/0, mla_attention/0/1" in run.stderr
    assert is_told == (status == HUNG)
    assert ("time.sleep" in run.stderr or "line 7" in run.stderr) == is_told


def test_wrong_arguments_are_refused():
    on_a_cpu = ["--minutes", "1", "--backend", "interpret"]
    for wrong in ([], on_a_cpu, ["--count", "1", "--only", "a"]):
        with pytest.raises(SystemExit) as ended:
            soak.parsed(wrong)
        assert ended.value.code == 2


PARTS = 5


@pytest.fixture
def cuda():
    backend = get_backend("cuda")
    if not serves(gpu_of(backend.device)):
        pytest.skip("needs a GPU and a Triton that kernels in Gluon are for")
    return backend


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_calls_on_a_gpu(cuda, part):
    """A call of each op."""
    names = served_ops()[part::PARTS]
    with Watchdog(300) as watchdog:
        tally = soak.fuzz(pool(names, 5, len(names)), cuda, "", watchdog)
    assert not tally.failed
    assert tally.compared == len(names)


@pytest.mark.gpu
def test_launches_on_streams_and_in_graphs(cuda):
    """Two seconds of launches without a difference, and two with one that was planted."""
    calls = pool(EMULATED[:2], 5, 6)
    with Watchdog(300) as watchdog, Soak(calls, cuda, 1, watchdog) as run:
        run.launch_for(2)
        assert run.launches > 100
        assert run.differences == 0
        run.calls[0].first[0].view(torch.int16).flatten()[0] ^= 1
        run.launch_for(2)
        assert run.differences > 0
