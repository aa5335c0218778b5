"""A GPU that is not there: tensors without memory, and a C launcher that notes what it is given.

On it the generated source of launches and replays runs as on a GPU, up to the call of Triton's C
launcher, on a machine that has none.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.nvidia import driver

from ferrum_triton import kernels
from ferrum_triton.kernels import compiled, replay
from ferrum_triton.kernels.jit import Kernel, _given
from ferrum_triton.kernels.rehearsal import StandIn, _Rehearsal, is_descriptor

DEVICE = torch.device("cuda", 0)
STREAM = 77


class FakeGpu(_Rehearsal):
    """Allocates and views as a GPU's tensors do; what else is done to them counts as done.

    Attributes:
        calls: of the C launcher and of ``zero_``, as (what, arguments).
    """

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self.calls: list[tuple[Any, tuple]] = []

    def tensor(self, like: Tensor, remainder: int = 0) -> StandIn:
        """A tensor of the layout of ``like``, at an address of that remainder by 16."""
        size = max(like.untyped_storage().nbytes() // like.element_size(), like.numel())
        storage = torch.empty(size, dtype=like.dtype, device="meta")
        meta = storage.as_strided(like.shape, like.stride(), like.storage_offset())
        return self._new("tensor", meta, remainder)

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a call with every tensor on this GPU."""
        return {k: self.tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_ours = any(isinstance(arg, StandIn) for arg in args)
        if not is_ours and kwargs.get("device") != DEVICE:
            return func(*args, **kwargs)
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func is torch.ops.aten.zero_.default:
            self.calls.append(("zero_", (args[0].data_ptr(), args[0].numel())))
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note_call(self, name: str, *args: Any) -> None:
        self.calls.append((name, args))

    def compile(
        self, kernel: Kernel, key: tuple, device: int, grid: tuple, args: tuple, meta: dict
    ) -> None:
        """What stands for compiling: an entry that notes its calls, and the first of them."""
        assert device == DEVICE.index
        assert key not in kernel._entries, "a kernel that is compiled goes to the C launcher"

        # Triton's is not a Python function either.
        run = functools.partial(self.note_call, kernel.name)
        signature = {
            i: "tensordesc<fp16[1]>" if is_descriptor(arg) else "i32" for i, arg in enumerate(args)
        }
        encodings = [f"{kernel.name} {i}" for i, kind in signature.items() if kind != "i32"]
        kernel._entries[key] = compiled.Entry(
            driver.wrap_handle_tensordesc(run, signature, encodings),
            hash(key),
            False,
            bool(meta["launch_pdl"]),
            (meta["num_warps"] or 4, 1, 0),
        )
        kernel.launch(grid, *args, **_given(meta))


def every_kernel() -> list[Kernel]:
    """Those of the package."""
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, "ferrum_triton.kernels."):
        values = vars(importlib.import_module(module.name)).values()
        found |= {id(value): value for value in values if isinstance(value, Kernel)}
    return list(found.values())


def _encode(described: Any, encoding: Any) -> list[Any]:
    tensor_map = (encoding, described.base.data_ptr(), *described.shape, described.padding)
    return [tensor_map, *described.shape, *described.strides]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A GPU of capability 9.0, on which the test's tensors are made."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, whose properties are remembered")
    gpu = FakeGpu()
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(compiled, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(compiled, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(driver, "make_tensordesc_arg", _encode)
    monkeypatch.setattr(
        replay,
        "empty_on_gpu",
        lambda shape, strides, dtype: torch.empty_strided(
            shape, strides, dtype=dtype, device=DEVICE
        ),
    )
    monkeypatch.setattr(Kernel, "_slowly", lambda kernel, *args: gpu.compile(kernel, *args))
    all_kernels = every_kernel()
    _write_again(all_kernels)
    with gpu:
        yield gpu
    _write_again(all_kernels)


def _write_again(all_kernels: list[Kernel]) -> None:
    """Drop the launch functions, which name what this fixture replaces, and what they compiled."""
    for kernel in all_kernels:
        kernel._entries.clear()
        for name in ("launch", "find", "_functions"):
            vars(kernel).pop(name, None)
