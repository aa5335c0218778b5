"""Compiling ahead: what every thread asks of Triton, and what is left to the first launch."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

from bench.cases import launches_of
from ferrum_triton.kernels import ahead


@pytest.fixture
def triton(monkeypatch):
    """Triton that notes what it is asked for, and by which thread."""
    seen = []

    def note(what):
        seen.append((what, threading.current_thread()))

    class Compiled:
        @property
        def run(self):
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
    assert sorted(asked[2:]) == ["compile"] * count + ["load"] * count
    here = threading.current_thread()
    assert triton[:2] == [("hash", here), ("assembler", here)]
    assert here not in {thread for _, thread in triton[2:]}


def test_what_is_compiled_asks_triton_for_nothing(triton, monkeypatch):
    monkeypatch.setattr(ahead, "_is_compiled", lambda launch: True)
    (launch,) = launches_of("rms_norm/bf16/h4096/m1")
    run = lambda: launch.kernel.launch(launch.grid, *launch.args, **launch.meta)  # noqa: E731
    assert ahead.compile_ahead(run) == 0
    assert triton == []
