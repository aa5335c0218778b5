"""Compiling ahead: what every thread asks of Triton, and what is left to the first launch."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from bench.cases import launches_of
from bench.random_models import random_model
from ferrum_triton import get_backend
from ferrum_triton.backends import Backend
from ferrum_triton.kernels import ahead, compiled
from ferrum_triton.kernels.sources import hash_source
from ferrum_triton.models.generation import engine_of
from ferrum_triton.models.runner import Runner
from tests.test_bench_decode import shrunk


@pytest.fixture
def triton(monkeypatch):
    """Triton that notes what it is asked for, and by which thread."""
    seen = []

    def note(what):
        seen.append((what, threading.current_thread()))

    class Compiled:
        @property
        def run(self):
            assert compiled.LOADING.locked()  # one thread at a time
            note("load")

    def warmup(*_, **__):
        note("compile")
        return Compiled()

    monkeypatch.setattr(ahead.cache, "triton_key", lambda: note("hash"))
    backend = SimpleNamespace(hash=lambda: note("assembler"))
    monkeypatch.setattr(ahead, "make_backend", lambda target: backend)
    active = SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr(ahead.driver, "_active", active)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(JITFunction, "warmup", warmup)
    monkeypatch.setattr(ahead, "refuse_wrong_code", lambda made, name: note("read"))
    return seen


def test_threads_compile_and_load_what_one_has_hashed(triton, monkeypatch):
    launches = launches_of("rms_norm/bf16/h4096/m1") + launches_of("silu_mul/bf16/h4096/m64")
    different = {ahead.compile_key(launch) for launch in launches}
    told = []

    def step():
        for launch in launches * 2:
            launch.kernel.launch(launch.grid, *launch.args, **launch.meta)

    count = ahead.compile_ahead(step, lambda *numbers: told.append(numbers))
    assert count == len(different) and told == [(n, count) for n in range(count + 1)]
    asked = [what for what, _ in triton]
    assert sorted(asked[2:]) == ["compile"] * count + ["load"] * count + ["read"] * count
    here = threading.current_thread()
    assert triton[:2] == [("hash", here), ("assembler", here)]
    assert here not in {thread for _, thread in triton[2:]}


def test_what_is_compiled_asks_triton_for_nothing(triton, monkeypatch):
    monkeypatch.setattr(ahead, "_is_compiled", lambda launch: True)
    (launch,) = launches_of("rms_norm/bf16/h4096/m1")
    run = lambda: launch.kernel.launch(launch.grid, *launch.args, **launch.meta)  # noqa: E731
    assert ahead.compile_ahead(run) == 0
    assert triton == []


def test_an_engine_compiles_all_its_steps_at_once(monkeypatch):
    ran, ahead_of = [], []

    def compile_ahead(backend, step, progress):
        before = len(ran)
        step()
        ahead_of.append(ran[before:])

    model = random_model("", "bf16", get_backend("cpu"), shrunk("llama-3.1-8b"))
    run, start = type(model).run, Runner.__init__
    note = lambda self, step, cache: ran.append(len(step.ids)) or run(self, step, cache)  # noqa: E731
    monkeypatch.setattr(type(model), "run", note)
    monkeypatch.setattr(Backend, "compile_ahead", compile_ahead)

    def on_cuda(runner, *arguments):
        start(runner, *arguments)
        runner._on_cuda = True

    monkeypatch.setattr(Runner, "__init__", on_cuda)
    engine = engine_of(model, 3, 64, num_tokens=21)
    assert ahead_of == [[4, 2, 1, 21]]
    assert {(count, True) for count in (4, 2, 1)} == {*engine.runner.graph._captured}
    engine.runner._on_cuda = False  # nor is anything else pinned or awaited
    for _ in range(2):
        engine.add(torch.randint(90, (21,)).tolist(), max_tokens=5)
        while engine.busy:
            engine.step()
    assert len(ahead_of) == 1
    engine.add(torch.randint(90, (40,)).tolist(), max_tokens=1)
    engine.step()
    assert len(ahead_of) == 2


_STEP = tl.constexpr(3)


def _called(x):
    return x + _STEP


def _calling(x):
    return _called(x)


def test_a_hash_does_not_depend_on_what_was_hashed_before(monkeypatch):
    """Triton's own does: it takes in the constants of such functions alone as it has met."""
    hashes = set()
    for is_met in (True, False):
        called, calling = JITFunction(_called), JITFunction(_calling)
        monkeypatch.setitem(globals(), "_called", called)
        if is_met:
            _ = called.cache_key
        hash_source(calling)
        monkeypatch.undo()
        hashes.add(calling.cache_key)
    assert len(hashes) == 1
