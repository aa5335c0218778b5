"""What a call launches on a GPU, from running it on meta tensors: no GPU needed.

Triton's launches are recorded by the kernels' own recorder; torch's operations that compute, such
as a product by cuBLAS, by a dispatch mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ferrum_triton.backends import PROVIDERS, Backend
from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels.jit import Launch, record_launches
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.registry import OPS, Case, Op
from ferrum_triton.testing import TensorFactory

ARCH = "sm_90"
# Operations that allocate or tell a dtype.
QUIET = ("empty", "new_empty", "promote_types")


@dataclass(frozen=True)
class Recorded:
    """What a call asks of the device.

    Attributes:
        launches: Triton's launches.
        operations: torch's operations, each with what it was given.
    """

    launches: list[Launch] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)


def arch_here() -> str:
    """``"sm_90"`` and the like: the GPU's, and ARCH on a machine without one."""
    if not torch.cuda.is_available():
        return ARCH
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


class MetaBackend(Backend):
    """The CUDA backend on meta tensors, without the checks at its doors, which compute too."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        op = OPS[name]
        implementation = self._implementation(op)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = {"out": kwargs.pop("out", None)} if op.has_out else {}
            bound = op.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return implementation(**bound.arguments, **out)

        self.__dict__[name] = call
        return call


@functools.cache
def meta_backend() -> MetaBackend:
    """The one MetaBackend of a process."""
    load_kernels("cuda")
    return MetaBackend("cuda", "meta", PROVIDERS["cuda"])


def record(call: Callable[[], Any], arch: str = ARCH) -> Recorded:
    """What a call on meta tensors would launch on a GPU of ``arch``."""
    operations = _Operations()
    with record_launches(_capability(arch)) as launches, operations:
        call()
    return Recorded(launches, operations.seen)


def record_case(op: Op, case: Case, arch: str = ARCH) -> Recorded:
    """What one bench case launches."""
    call = getattr(meta_backend(), op.name)
    arguments = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    return record(lambda: call(**arguments), arch)


def _capability(arch: str) -> tuple[int, int]:
    if arch in TARGETS:
        return TARGETS[arch].capability
    return divmod(int(arch.removeprefix("sm_")), 10)


class _Operations(TorchDispatchMode):
    """Notes torch's operations, but for those that allocate or view."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if func.namespace == "aten" and not views and not func.__name__.startswith(QUIET):
            given = [_described(a) for a in (*args, *(kwargs or {}).values())]
            self.seen.append(f"{func}({', '.join(given)})")
        return func(*args, **(kwargs or {}))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)
