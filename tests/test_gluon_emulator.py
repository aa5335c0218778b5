"""Gluon kernels run in Python: results, and an error for each missing piece of synchronisation."""

import re

import pytest
import torch

from ferrum_triton.gluon_emulator import Deadlock, EmulationError, Misuse, OutOfBounds, Race, run
from ferrum_triton.gluon_emulator.mutants import mutants, redundant, survivors
from ferrum_triton.kernels.gluon import describe
from tests import gluon_kernels as kernels
from tests.gluon_faults import faulty
from tests.gluon_kernels import translate


def scale_ring(seed=0, mutant=None):
    x = torch.randn(300, 64, dtype=torch.float32)
    y = torch.full_like(x, torch.nan)
    args = (describe(y, [64, 64]), describe(x, [64, 64]), 5, 3.0)
    run(kernels.scale_ring, 1, args, {"STAGES": 2}, seed=seed, mutant=mutant)
    torch.testing.assert_close(y, x * 3, rtol=0, atol=0)


def product_ring(seed=0, mutant=None):
    a, b = torch.randn(70, 200).half(), torch.randn(100, 200).half()
    c = torch.full((70, 100), torch.nan)
    args = (c, describe(a, [64, 32]), describe(b, [64, 32]), 70, 100, 7)
    run(kernels.product_ring, (2, 2), args, {"STAGES": 3}, seed=seed, mutant=mutant)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, rtol=1e-4, atol=1e-4)


def specialised_product(seed=0, mutant=None):
    a, b = torch.randn(130, 160).bfloat16(), torch.randn(64, 160).bfloat16()
    c = torch.full((130, 64), torch.nan, dtype=torch.bfloat16)
    tiles = (describe(x, [64, 64]) for x in (c, a, b))
    args = (*tiles, 1, 3, 3)
    run(kernels.specialised_product, 2, args, {"STAGES": 2}, seed=seed, mutant=mutant)
    exact = a.double() @ b.double().T
    torch.testing.assert_close(c.double(), exact, rtol=2**-8, atol=2**-8)


def sum_by_tickets(seed=0, mutant=None):
    x = torch.randn(1000)
    total, parts, ticket = torch.full((2,), -1e9), torch.full((8,), torch.nan), torch.zeros(1).int()
    run(kernels.sum_by_tickets, 8, (total, parts, ticket, x, 1000), {"BLOCK": 128}, seed=seed)
    torch.testing.assert_close(total, torch.stack((x.double().sum(), x.max())).float())
    assert ticket.item() == 8


def copy_by_threads(seed=0, mutant=None):
    x = torch.randn(6 * 128)
    y = torch.full_like(x, torch.nan)
    options = {"BLOCK": 128, "STAGES": 3}
    run(kernels.copy_by_threads, 1, (y, x, 6), options, seed=seed, mutant=mutant)
    assert torch.equal(x, y)


def gram_of_gathered(seed=0, mutant=None):
    x, index = torch.randn(100, 320).half(), torch.randint(100, (64,)).int()
    y = torch.full((64, 64), torch.nan)
    args = (y, x, index, 320, 5)
    run(kernels.gram_of_gathered, 1, args, {"STAGES": 2}, seed=seed, mutant=mutant)
    rows = x[index].double()
    torch.testing.assert_close(y.double(), rows @ rows.T, rtol=1e-4, atol=1e-3)


def copy_by_turns(seed=0, mutant=None):
    x = torch.randn(4 * 128)
    y = torch.full_like(x, torch.nan)
    run(kernels.copy_by_turns, 1, (y, x, 4), {"BLOCK": 128}, seed=seed, mutant=mutant)
    assert torch.equal(x, y)


LAUNCHES = {
    launch.__name__: launch
    for launch in (
        scale_ring,
        product_ring,
        specialised_product,
        sum_by_tickets,
        copy_by_threads,
        gram_of_gathered,
        copy_by_turns,
    )
}
by_kernel = pytest.mark.parametrize("name", LAUNCHES)


@by_kernel
@pytest.mark.parametrize("seed", range(4))
def test_results_are_right_in_every_order(name, seed):
    LAUNCHES[name](seed)


@by_kernel
def test_triton_takes_the_kernel(name, monkeypatch):
    launched = []
    monkeypatch.setitem(globals(), "run", lambda *args, **options: launched.append(args))
    with pytest.raises(AssertionError):
        LAUNCHES[name]()
    ((kernel, _, args, constexprs),) = launched
    translate(kernel, args, constexprs)


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "sum_by_tickets"])
def test_no_synchronisation_can_be_removed(name):
    assert not survivors(getattr(kernels, name), LAUNCHES[name])
    assert list(mutants(getattr(kernels, name)))


def test_redundant_statements_are_marked_with_a_reason():
    (found,) = redundant(kernels.specialised_product).items()
    assert "in consume: without mbarrier.wait(full.index(stage)" in found[0]
    assert found[1] == "complete; it pins"


# What is raised for each mistake of `faulty`, and what its message has to say.
FAULTS = {
    "barrier never initialised": (Misuse, "bar is used .* as a barrier, and mbarrier.init never"),
    "initialised twice": (Misuse, "mbarrier.invalidate is missing"),
    "barrier not fenced": (Misuse, "bar is used .* fence_async_shared is missing"),
    "too many arrivals": (Misuse, "bar: 2 arrivals at .* has 1 of 1 left"),
    "more bytes copied than expected": (Misuse, "bar: more bytes are copied in phase 0"),
    "fewer bytes copied than expected": (Deadlock, "lacks 0 of 1 arrivals and 8192 bytes"),
    "wrong parity": (Race, "(buf: load at .* TMA load at|waits at .* the phase before the first)"),
    "phase overtaken": (Race, "bar: .*phase 1 can complete before"),
    "copied over in flight": (Race, "buf: store at .* TMA load at .* no wait on the copy's"),
    "read in flight": (Race, "buf: load at .* TMA load at .* no wait on the copy's barrier"),
    "copy never waited for": (Misuse, "the kernel ends, and nobody has waited for TMA load"),
    "never written": (Misuse, "buf: load at .* nobody has written to it"),
    "partitions unordered": (EmulationError, "buf: (load|store) at .* by (read|write)"),
    "written while read": (Race, "no chain of arrivals and waits leads from (read|write)"),
    "stored without fence": (Race, "buf: TMA store at .* written by store .* fence_async_shared"),
    "fence without barrier": (Race, "needs a gl.thread_barrier after it"),
    "multiplied without fence": (Race, "buf: warpgroup_mma at .* fence_async_shared and then"),
    "written while stored": (Race, "buf: store at .* tma.store_wait and then gl.thread_barrier"),
    "store never waited for": (Misuse, "no tma.store_wait has waited for TMA store"),
    "waited without barrier": (Race, "gl.thread_barrier is missing after tma.store_wait"),
    "product not handed back": (Misuse, "pass it through `deps`"),
    "product outstanding": (Misuse, "leaves few enough products outstanding"),
    "product's operand overwritten": (Race, "buf: store .* no warpgroup_mma_wait comes before"),
    "product never waited for": (Misuse, "nobody has waited for warpgroup_mma"),
    "loaded outside": (OutOfBounds, "gl.load at .* byte 4 to 260 of y_ptr, which has 256"),
    "stored outside": (OutOfBounds, "gl.store at .* byte -4 to 252 of y_ptr"),
    "added outside": (OutOfBounds, "gl.atomic_add at .* byte 0 to 508 of y_ptr"),
    "begun off 16 bytes": (Misuse, "begins at column 4 of x_desc, in fp16; allowed: columns at"),
    "stage out of range": (OutOfBounds, "index 2 of two at .*, which has 2"),
    "nobody arrives": (Deadlock, "the kernel waits at .* phase 0 of bar"),
    "everybody waits": (Deadlock, "wait_twice 0 waits .*\n.*wait_twice 1 waits"),
    "endless": (Deadlock, "the time given is over"),
    "two in one turn": (Misuse, "named barrier 3: meet_twice arrives a second time"),
    "unknown assembly": (Misuse, "has no twin: pass one to run"),
    "assertion": (Misuse, "gl.device_assert at .*: too far"),
}


def run_faulty(fault, seed=0, **options):
    args = (torch.zeros(64), describe(torch.randn(64, 64).half(), [64, 64]))
    run(faulty, 1, args, {"FAULT": fault}, seed=seed, **{"timeout": 0.3} | options)
    return args


@pytest.mark.parametrize("fault", FAULTS)
def test_each_mistake_is_found_whatever_the_order(fault):
    for seed in range(4):
        with pytest.raises(FAULTS[fault][0], match=FAULTS[fault][1]) as raised:
            run_faulty(fault, seed)
    assert re.search(r"tests/gluon_(faults|kernels)\.py:\d", str(raised.value))
    assert raised.value.__notes__ == ["in program (0, 0, 0) of faulty, seed 3"]


# Triton's own types refuse a product that was never waited for at all.
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "product not handed back"])
def test_triton_takes_what_is_faulty(fault):
    args = (torch.zeros(64), describe(torch.zeros(64, 64).half(), [64, 64]))
    translate(faulty, args, {"FAULT": fault})


@pytest.mark.parametrize(
    "fault", ["barrier not fenced", "fence without barrier", "waited without barrier"]
)
def test_what_triton_adds_may_be_counted_on(fault):
    run_faulty(fault, strict=False)


@pytest.mark.parametrize("seed", range(4))
def test_programs_wait_for_another_where_they_run_together(seed):
    y, flag = torch.zeros(1), torch.zeros(1).int()
    run(kernels.in_turn, 4, (y, flag), {"SEM": None}, seed=seed, concurrent=4)
    assert y.item() == 11
    with pytest.raises(Race, match=r"y_ptr: gl\.(load|store) .* no atomic of one program"):
        run(kernels.in_turn, 4, (y, flag * 0), {"SEM": "relaxed"}, seed=seed, concurrent=4)


def test_a_program_cannot_wait_for_a_later_one():
    args = torch.zeros(1), -torch.ones(1).int()
    with pytest.raises(Deadlock, match=r"the time given is over\n.* goes on at .* in in_turn"):
        run(kernels.in_turn, 4, args, {"SEM": None}, timeout=0.3)
    translate(kernels.in_turn, args, {"SEM": None})


@pytest.mark.parametrize(
    ("fault", "message"),
    {
        "two write": "y_ptr: gl.store .* program .1, 0, 0., and gl.store .* no atomic",
        "the next one reads": "y_ptr: gl.store .* and gl.load .* no atomic",
        "added and set": "y_ptr: gl.(store .* and gl.atomic_add|atomic_add .* and gl.store)",
        "read after a TMA store": "y_ptr: gl.load .* and TMA store .* nothing in a launch waits",
    }.items(),
)
def test_programs_that_meet_in_memory_race(fault, message):
    y = torch.zeros(64, 64)
    with pytest.raises(Race, match=message):
        run(kernels.in_memory, 3, (y, describe(y, [64, 64])), {"FAULT": fault})
    translate(kernels.in_memory, (y, describe(y, [64, 64])), {"FAULT": fault})


def test_programs_that_write_the_same_or_add_do_not_race():
    y = torch.zeros(64, 64)
    run(kernels.in_memory, 3, (y, describe(y, [64, 64])), {"FAULT": "none"}, seed=1, concurrent=2)
    assert torch.equal(y[32:34].flatten(), torch.full((128,), 6.0))


@pytest.mark.parametrize("fenced", ["before", "between"])
@pytest.mark.parametrize("seed", range(3))
def test_copies_may_overtake_loads_that_an_arrival_lets_go_of(seed, fenced):
    """One thread arrives, while other warps' loads may be in flight unless they have fenced.

    An arrival before the fence does no harm where the copy waits for one behind it too.
    """
    x, y = torch.randn(192, 64), torch.full((64,), torch.nan)
    args, options = (y, describe(x, [64, 64]), 3), {"seed": seed}
    run(kernels.sums_of_rows, 1, args, {"FENCED": fenced}, **options)
    torch.testing.assert_close(y, x.view(3, 64, 64).sum((0, 2)), rtol=1e-4, atol=1e-4)
    with pytest.raises(Race, match="may overtake load"):
        run(kernels.sums_of_rows, 1, args, {"FENCED": ""}, **options)
