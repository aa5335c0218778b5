"""What an op is: a torch reference, a tensor contract, sample inputs and implementations.

One declaration (:func:`op`) feeds everything else: the two doors (``backend.<op>`` and
``torch.ops.ferrum.<op>``), their checks, the fake implementation, the tests, the benches, the
compile-only matrix and the command line's table.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ferrum_triton.contract import ACTIVATIONS, Contract
from ferrum_triton.errors import InputError

# Kept alive for the life of the process: ops vanish with the Library that defined them.
LIB = torch.library.Library("ferrum", "DEF")
OPS: dict[str, Op] = {}

# Called with every op that is declared, whenever that is: how ops reach torch's dispatcher.
ON_DECLARE: list[Callable[[Op], None]] = []


def has_tangent(tensor: Tensor | None) -> bool:
    """Whether forward-mode differentiation goes through a tensor."""
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


@dataclass(frozen=True)
class Case:
    """One benchmarked point: ``<op>/<id>`` names it in result files.

    ``op`` is the name there if it is another than the op's own, of which the case is a variant.
    ``metric`` is what it is judged by: ``"us"`` a call, ``"tflops"`` of useful operations, or
    ``"tbs"``, terabytes of compulsory traffic a second. ``graph`` tells whether the call can be
    captured in a CUDA graph; one that cannot is timed with the host's part.
    """

    id: str
    dtype: torch.dtype
    axes: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "us"
    op: str = ""
    graph: bool = True


class Op:
    """An operation, defined by its torch reference.

    Attributes:
        name: the name under ``backend.`` and ``torch.ops.ferrum.``.
        reference: the definition. Computes in float32, or in float64 if given float64.
        axes: values each sample axis takes in tests.
        bench: the cases timed and compiled ahead of time.
        dtypes: activation dtypes the samples are drawn in.
        mutates: names of the parameters written in place.
        finite: parameters whose values must be finite: a weight of zero times infinity is NaN.
        over: parameters that what the op writes may be exactly: each element is read before it, or
            the row that it is in, is written.
        in_host_memory: parameters that may lie in pinned memory of the host, wherever others lie.
        rounded: parameters that are written in a wider dtype than what they are sums of, and the
            activations whose dtype that is.
        num_outputs: tensors returned; ops that return none only mutate.
        after_norm: parameter of the activations of a product that reads its weights as soon as it
            is launched. Calls of few tokens are timed behind a norm that writes these activations,
            as in a decoder; ``""`` for an op that is timed by itself.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        *,
        tensors: Mapping[str, str],
        axes: Mapping[str, Sequence[Any]],
        bench: Sequence[Case],
        dtypes: Sequence[torch.dtype] = ACTIVATIONS,
        mutates: Sequence[str] = (),
        static: Sequence[str] = (),
        finite: Sequence[str] = (),
        over: Sequence[str] = (),
        in_host_memory: Sequence[str] = (),
        rounded: Mapping[str, str] | None = None,
        after_norm: str = "",
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self.fake = reference
        self.signature = inspect.signature(reference)
        self.mutates = tuple(mutates)
        self.finite = tuple(finite)
        self.rounded = dict(rounded or {})
        self.after_norm = after_norm
        optional = {
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.annotation == Tensor | None
        }
        self.contract = Contract(self.name, tensors, self.mutates, optional, over, in_host_memory)
        self.axes, self.bench, self.dtypes = axes, tuple(bench), tuple(dtypes)
        self.impls: dict[str, Callable[..., Any]] = {}
        self.kinds: dict[str, frozenset[str]] = {}
        self.shape_rules: list[Callable[..., None]] = []
        self.call_rules: list[Callable[..., None]] = []
        self.data_rules: list[Callable[..., None]] = []
        self.static = tuple(
            name
            for name, parameter in self.signature.parameters.items()
            if name in static or parameter.annotation in (str, bool, torch.dtype)
        )
        self._sample: Callable[..., dict[str, Any]] | None = None
        self._traffic: Callable[..., int] | None = None
        self._flops: Callable[..., int] | None = None

        schema = torch.library.infer_schema(reference, mutates_args=self.mutates)
        arguments, _, returns = schema.rpartition(" -> ")
        self.num_outputs = 0 if returns == "()" else returns.count("Tensor")
        self.has_out = self.num_outputs > 0
        self._define(arguments, returns)
        OPS[self.name] = self
        for call in ON_DECLARE:
            call(self)

    def _define(self, arguments: str, returns: str) -> None:
        tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
        LIB.define(f"{self.name}{arguments} -> {returns}", tags=tags)
        torch.library.register_fake(f"ferrum::{self.name}", self._call_fake, lib=LIB)
        if self.has_out:
            outs = ", ".join(f"Tensor(o{i}!) out{i}" for i in range(self.num_outputs))
            keyword = "" if ", *, " in arguments else "*, "
            LIB.define(f"{self.name}.out{arguments[:-1]}, {keyword}{outs}) -> ()", tags=tags)
            torch.library.register_fake(f"ferrum::{self.name}.out", lambda *_, **__: None, lib=LIB)

    def _call_fake(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.contract.check(bound.arguments, None)
        tensors = [t for t in bound.arguments.values() if isinstance(t, Tensor)]
        wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if wants or any(map(has_tangent, tensors)):
            self.refuse_gradient(bound.arguments)
        result = self.fake(*args, **kwargs)
        return None if result is None else contiguous(result)

    @property
    def torch_op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.ferrum, self.name).default

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call through the torch dispatcher: traceable by torch.compile and torch.export."""
        return self.torch_op(*args, **kwargs)

    def impl(
        self, provider: str, kinds: Iterable[str] | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register ``provider``'s implementation.

        Its parameters are the reference's; ops that return tensors add a keyword ``out``. ``kinds``
        are the formats of packed weights it has kernels for, where that is not all of them.
        """

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            want = [*self.signature.parameters, *(["out"] if self.has_out else [])]
            got = [*inspect.signature(fn).parameters]
            if got != want:
                raise TypeError(f"{provider} {self.name} takes {got}, its op declares {want}")
            self.impls[provider] = fn
            if kinds is not None:
                self.kinds[provider] = frozenset(kinds)
            return fn

        return register

    def sample(self, fn: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Register how one call is built: ``fn(make, **axes) -> {parameter: value}``."""
        self._sample = fn
        return fn

    def traffic(self, fn: Callable[..., int]) -> Callable[..., int]:
        """Register the compulsory bytes of a call, where "every tensor once" is wrong."""
        self._traffic = fn
        return fn

    def flops(self, fn: Callable[..., int]) -> Callable[..., int]:
        """Register the useful arithmetic operations of a call."""
        self._flops = fn
        return fn

    def rule(self, fn: Callable[..., None]) -> Callable[..., None]:
        """Register a check on shapes and static arguments, run once for each new combination."""
        self.shape_rules.append(fn)
        return fn

    def call_rule(self, fn: Callable[..., None]) -> Callable[..., None]:
        """Register a check on scalar arguments, run at every call. It must read no tensor data."""
        self.call_rules.append(fn)
        return fn

    def data_rule(self, fn: Callable[..., None]) -> Callable[..., None]:
        """Register a check of what tensors hold, which waits for it: for debugging doors alone."""
        self.data_rules.append(fn)
        return fn

    def reject(self, argument: str, got: str, allowed: str, advice: str = "") -> NoReturn:
        raise InputError(
            self.name, argument, got, allowed, advice or f"See {self.name}'s docstring."
        )

    def refuse_gradient(self, arguments: Mapping[str, Any]) -> NoReturn:
        """Raise :class:`InputError` for a call of which autograd wants a gradient."""
        tensors = {n: t for n, t in arguments.items() if isinstance(t, Tensor)}
        name = next((n for n, t in tensors.items() if t.requires_grad or has_tangent(t)), "out")
        advice = f"Ops have no backward: call under torch.inference_mode(), or detach {name}."
        self.reject(name, "a tensor that requires grad", "tensors without gradient", advice)

    def make_sample(self, make: Any, **axes: Any) -> dict[str, Any]:
        """Arguments of one call, by parameter name, every parameter present."""
        if self._sample is None:
            raise TypeError(f"{self.name} declares no sample")
        bound = self.signature.bind(**self._sample(make, **axes))
        bound.apply_defaults()
        return dict(bound.arguments)

    def bytes_moved(self, arguments: Mapping[str, Any], outputs: Sequence[Tensor]) -> int:
        """Compulsory device-memory traffic of a call: each input read once, each output written."""
        if self._traffic is not None:
            return self._traffic(**arguments)
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        tensors += [arguments[name] for name in self.mutates if arguments[name] is not None]
        return sum(t.numel() * t.element_size() for t in (*tensors, *outputs))

    def left_in(self, name: str, arguments: Mapping[str, Any]) -> Tensor:
        """What a call left in a parameter, in the dtype in which it can be held against another."""
        written = arguments[name]
        if name not in self.rounded:
            return written
        dtypes = written.dtype, arguments[self.rounded[name]].dtype
        return written.to(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps))

    def operations(self, arguments: Mapping[str, Any]) -> int | None:
        """Useful arithmetic operations of a call, or None for an op bound by memory."""
        return None if self._flops is None else self._flops(**arguments)


def contiguous(result: Tensor | Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """What an op returns, contiguous: every op's outputs are, whatever its inputs' strides."""
    if isinstance(result, Tensor):
        return result.contiguous()
    return tuple(tensor.contiguous() for tensor in result)


def op(**declaration: Any) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op; the decorated function is its reference. See :class:`Op` for the keywords."""
    return lambda reference: Op(reference, **declaration)
