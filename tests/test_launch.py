"""Launches: what they may be given, and what they say of what they may not."""

import contextlib
import itertools
import threading

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.errors import FerrumError
from ferrum_triton.kernels import compiled, jit
from ferrum_triton.kernels.jit import Kernel, kernel, note_launches
from ferrum_triton.registry import OPS
from tests.fake_gpu import fake_gpu  # noqa: F401

load_kernels("interpret")

compile_and_launch = Kernel._slowly  # which a fake GPU replaces


@kernel(dynamic=["length"])
def _add_length_kernel(y_ptr, x_ptr, n, length, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + length, mask=i < n)


def test_launches_name_what_is_missing_or_unknown():
    x = torch.zeros(8)
    launch = _add_length_kernel.launch
    for call, message in (
        (lambda: launch((1,), x, x, 8, BLOCK=8), r"_add_length_kernel.launch\(\).*'length'"),
        (lambda: launch((1,), x, x, 8, 1), "'BLOCK'"),
        (lambda: launch((1,), x, x, 8, 1, BLOCK=8, BLOCKS=8), "'BLOCKS'"),
        (lambda: launch((1,), x, x, 8, 1, BLOCK=8, num_wraps=8), "'num_wraps'"),
        (lambda: launch((1,), x, x, 8, 1, y_ptr=x, BLOCK=8), "multiple values.*'y_ptr'"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_runtime_arguments_go_by_position_or_by_name():
    x = torch.arange(8.0)
    a, b = torch.zeros(8), torch.zeros(8)
    _add_length_kernel.launch((1,), a, x, 8, 3, BLOCK=8)
    _add_length_kernel.launch((1,), length=3, n=8, x_ptr=x, y_ptr=b, BLOCK=8, num_warps=1)
    assert torch.equal(a, x + 3) and torch.equal(b, x + 3)


def test_parameters_may_not_be_named_as_a_launch_names_its_own():
    @kernel
    def _grid_kernel(x_ptr, grid):
        tl.store(x_ptr, grid)

    with pytest.raises(TypeError, match="grid"):
        _grid_kernel.launch((1,), torch.zeros(1), 1)


def test_recordings_of_one_thread_do_not_stop_anothers_launches():
    x, y = torch.ones(8), torch.zeros(8)
    with note_launches(runs=False) as launches:
        thread = threading.Thread(
            target=lambda: _add_length_kernel.launch((1,), y, x, 8, 1, BLOCK=8)
        )
        thread.start()
        thread.join()
        assert launches == [] and torch.equal(y, x + 1)
        _add_length_kernel.launch((1,), x, y, 8, 1, BLOCK=8)
    assert len(launches) == 1 and torch.equal(x, torch.ones(8))


def new_kernel():
    """One that was never launched."""

    @kernel(dynamic=["length"])
    def _new_kernel(y_ptr, x_ptr, n, length, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + length, mask=i < n)

    return _new_kernel


def test_code_for_aligned_addresses_serves_no_others(fake_gpu):  # noqa: F811
    """Each pointer counts by itself; where off the grid it points to makes no difference."""
    made, found = new_kernel(), []
    for remainders in itertools.product((0, 4), repeat=2):
        y, x = (fake_gpu.tensor(torch.zeros(8), remainder) for remainder in remainders)
        made.launch((1,), y, x, 8, 3, BLOCK=8)
        found.append(made.find((1,), y, x, 8, 3, BLOCK=8))
    assert len(set(found)) == len(made._entries) == 4
    y, x = (fake_gpu.tensor(torch.zeros(8), remainder) for remainder in (8, 16))
    assert made.find((1,), y, x, 8, 3, BLOCK=8) is found[2]


def test_compiling_is_refused_in_a_capture(fake_gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Kernel, "_slowly", compile_and_launch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made, x = new_kernel(), fake_gpu.tensor(torch.zeros(8))
    with pytest.raises(FerrumError, match=r"_new_kernel is not compiled .* before capturing"):
        made.launch((1,), x, x, 8, 3, BLOCK=8)
    assert not made._entries and not fake_gpu.calls


def test_only_what_is_not_compiled_yet_is_loaded_by_one_thread_at_a_time(fake_gpu, monkeypatch):  # noqa: F811
    made, x, locked = new_kernel(), fake_gpu.tensor(torch.zeros(8)), []
    launched = lambda *_, **__: locked.append(compiled.LOADING.locked())  # noqa: E731
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: launched)
    monkeypatch.setattr(Kernel, "_slowly", compile_and_launch)
    monkeypatch.setattr(compiled, "entry_of", lambda result: None)  # Triton launches it every time
    read = []
    monkeypatch.setattr(jit, "refuse_wrong_code", lambda made, name: read.append(name))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    for _ in range(2):
        made.launch((1,), x, x, 8, 3, BLOCK=8)
    assert locked == [True, False]
    assert read == [made.name]


def test_ids_of_the_host_are_refused_in_a_capture(fake_gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    table = fake_gpu.tensor(torch.zeros(10, 16))
    with pytest.raises(FerrumError, match="capture embedding_lookup_dev instead"):
        OPS["embedding_lookup"].impls["triton"](table, [1, 2])
    assert not fake_gpu.calls
