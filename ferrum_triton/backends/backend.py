"""A backend is a device and an ordered list of providers; ops appear on it as attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.backends.door import make_door
from ferrum_triton.errors import MissingKernel, UnknownOp
from ferrum_triton.registry import OPS, Op, contiguous


class Backend:
    """Runs ops on one device through the first provider that implements them.

    ``backend.rms_norm(x, weight)`` checks its arguments and calls the provider's launcher directly:
    no dispatcher, no string look-up after the first use. A fallback is a provider in the list, so
    a kernel that is missing is an error, never a silent slow path.
    """

    def __init__(
        self, name: str, device: str, providers: Sequence[str], checks_all: bool = False
    ) -> None:
        self.name, self.device, self.providers = name, torch.device(device), tuple(providers)
        self.checks_all = checks_all

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        op = OPS.get(name)
        if op is None:
            raise UnknownOp(f"{name!r} is not an op; `ferrum-triton ops` lists them")
        door = make_door(op, self._implementation(op), self.device.type, checks_all=self.checks_all)
        self.__dict__[name] = door  # later look-ups skip __getattr__
        return door

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *OPS]

    def __repr__(self) -> str:
        return f"Backend({self.name!r}, device={str(self.device)!r}, providers={self.providers})"

    def debug(self) -> Backend:
        """This backend, checking every call in full, addresses included, and replaying none."""
        return Backend(self.name, str(self.device), self.providers, checks_all=True)

    def provider_of(self, name: str) -> str | None:
        """The provider that serves op ``name`` here, or None where it is missing."""
        return next((p for p in self.providers if p == "reference" or p in OPS[name].impls), None)

    def supports(self, name: str) -> bool:
        """Whether op ``name`` runs on this backend."""
        return name in OPS and self.provider_of(name) is not None

    def has_kernel(self, name: str, kind: str = "") -> bool:
        """Whether op ``name`` has one; for packed weights of ``kind``: no call decodes them."""
        provider = self.provider_of(name)
        if provider is None or provider == "reference":
            return False
        return kind in OPS[name].kinds.get(provider, (kind,))

    def compile_ahead(
        self, step: Callable[[], object], progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Compile on all cores what a step would launch here, without running it.

        Args:
            step: calls ops of this backend.
            progress: a function called with the numbers of kernels compiled and to compile.

        Returns:
            How many kernels were compiled: none where they are not compiled, or were before.
        """
        if self.device.type != "cuda":
            return 0
        from ferrum_triton.kernels.ahead import compile_ahead

        return compile_ahead(step, progress)

    def _implementation(self, op: Op) -> Callable[..., Any]:
        provider = self.provider_of(op.name)
        if provider is None:
            have = sorted(op.impls) or "none"
            raise MissingKernel(
                f"backend {self.name!r} has no kernel for {op.name}: it looks for "
                f"{self.providers}, implemented are {have}. Use another backend for this op, e.g. "
                "get_backend('cpu')."
            )
        return _reference_door(op) if provider == "reference" else op.impls[provider]


def _reference_door(op: Op) -> Callable[..., Any]:
    """The reference, given the ``out`` keyword that implementations have."""
    if not op.has_out:
        return op.reference

    def run(*args: Any, out: Tensor | tuple[Tensor, ...] | None = None) -> Any:
        result = op.reference(*args)
        if out is None:
            return contiguous(result)
        pairs = [(out, result)] if isinstance(out, Tensor) else zip(out, result, strict=True)
        for destination, source in pairs:
            destination.copy_(source)
        return out

    return run
