"""Launches: what they may be given, and what they say of what they may not."""

import threading

import pytest
import torch
import triton.language as tl

from ferrum_triton.kernels.jit import kernel, note_launches


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
