"""What to replace in a model, found before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ferrum_triton.integrations.transformers import delta_net, layers
from ferrum_triton.integrations.transformers.file import File, Stored
from ferrum_triton.integrations.transformers.kernel import KINDS
from ferrum_triton.integrations.transformers.library import part
from ferrum_triton.integrations.transformers.recognise import (
    has_hooks,
    is_silu,
    mlp_of,
    norm_of,
    scale_of,
)
from ferrum_triton.integrations.transformers.report import Left
from ferrum_triton.quant import QuantizedTensor

# Flags of transformers' experts whose products are gate and up in one, then down.
EXPERT_FLAGS = {
    "has_gate": True,
    "is_concatenated": True,
    "has_bias": False,
    "is_transposed": False,
    "has_post_expert_norm": False,
}


@dataclass(frozen=True)
class Step:
    """The replacement of one module.

    Attributes:
        names: where it stands in the model.
        was: the module.
        build: makes what replaces it.
        release: frees weights that the replacement holds in its own form.
        give_back: makes them again of the replacement's.
        packs: whether the replacement holds packed weights.
        is_outer: whether it takes over modules that may be replaced themselves.
    """

    names: list[str]
    was: nn.Module
    build: Callable[[], nn.Module]
    release: Callable[[], None] = lambda: None
    give_back: Callable[[nn.Module], None] = lambda now: None
    packs: bool = False
    is_outer: bool = False


@dataclass
class Source:
    """Where a packed weight comes from, and how a module's own weight is made of it again.

    Attributes:
        load: reads the weight, as a file has it.
        unpack: makes the module's own of it.
        own: finds the module's own while something else still holds it, as a tied embedding.
    """

    load: Callable[[], QuantizedTensor]
    unpack: Callable[[QuantizedTensor], Tensor]
    own: Callable[[], nn.Parameter | None] = lambda: None
    packed: layers.Packed | None = None

    def pack(self) -> layers.Packed:
        """The weight in planes: once, however many modules share it."""
        if self.packed is None:
            self.packed = layers.Packed.of(self.load())
        return self.packed

    def parameter(self, weight: QuantizedTensor, requires_grad: bool) -> nn.Parameter:
        """The module's own weight, one for all that shared it."""
        parameter = self.own()
        if parameter is None or parameter.device != weight.device:
            parameter = nn.Parameter(self.unpack(weight), requires_grad=requires_grad)
            self.own = ref(parameter)
        self.packed = None
        return parameter


@dataclass
class Plan:
    """The steps of a model's conversion, and the modules that it leaves alone."""

    model: nn.Module
    file: File | None
    steps: list[Step] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    _sources: dict[int, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names: dict[nn.Module, list[str]] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
        self._parameters: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self._parameters.setdefault(id(parameter), []).append(name)
        gguf = part("integrations.gguf.utils")
        self._makers = {
            gguf.GgufLinear: self._gguf_linear,
            gguf.GgufEmbedding: self._gguf_embedding,
            gguf.GgufExperts: self._gguf_experts,
            nn.Linear: self._linear,
            nn.Embedding: self._embedding,
        }
        for module in names:
            found = self._step(names[module], module)
            if isinstance(found, str):
                self.left.append(Left(names[module][0], type(module).__name__, found))
            elif found is not None:
                self.steps.append(found)
        self.steps.sort(key=lambda step: step.is_outer)

    def _step(self, names: list[str], module: nn.Module) -> Step | str | None:
        """What to do with a module: a step, why not, or nothing to speak of."""
        make = self._makers.get(type(module))
        name = type(module).__name__
        if make is None and isinstance(module, nn.Linear):
            return "a class of its own, whose weight stays as it is"
        if make is None and isinstance(module, nn.Embedding):
            make = self._embedding
        if make is None and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            make = self._experts if isinstance(module.gate_up_proj, nn.Parameter) else None
        if make is None and "Norm" in name:
            make = self._norm
        has_layers = hasattr(module, "gate_proj") and hasattr(module, "down_proj")
        if make is None and (has_layers or name.endswith(("MLP", "FeedForward"))):
            make = self._mlp
        if make is None and name.endswith("GatedDeltaNet"):
            make = self._delta_net
        if make is None:
            return None
        if has_hooks(module):
            return "it has hooks, which a replacement would not call"
        return make(names, module)

    def _gguf_linear(self, names: list[str], module: nn.Module) -> Step | str:
        kind = KINDS.get(module.ggml_type)
        if kind is None:
            return f"no kernel takes blocks of ggml's type {module.ggml_type}"
        return self._linear_step(names, module, self._of_module(module.weight, kind))

    def _gguf_embedding(self, names: list[str], module: nn.Module) -> Step | str:
        kind = KINDS.get(module.ggml_type)
        if kind is None:
            return f"no kernel takes blocks of ggml's type {module.ggml_type}"
        source = self._of_module(module.weight, kind)
        return self._embedding_step(names, module, source, module.compute_dtype)

    def _linear(self, names: list[str], module: nn.Module) -> Step | str:
        source = self._of_file(module.weight)
        return source if isinstance(source, str) else self._linear_step(names, module, source)

    def _embedding(self, names: list[str], module: nn.Module) -> Step | str:
        source = self._of_file(module.weight)
        if isinstance(source, str):
            return source
        if module.max_norm is not None:
            return "its max_norm changes its weight"
        scale = None if type(module) is nn.Embedding else scale_of(module)
        if scale is None and type(module) is not nn.Embedding:
            return "its formula is not known"
        return self._embedding_step(names, module, source, module.weight.dtype, scale)

    def _of_module(self, weight: nn.Parameter, kind: str) -> Source:
        """A weight that transformers kept packed."""
        own: Any = ref(weight)
        return self._sources.setdefault(
            id(weight),
            Source(
                load=lambda: QuantizedTensor(own().data, kind),
                unpack=lambda packed: packed.blocks,
                own=own,
            ),
        )

    def _of_file(self, weight: nn.Parameter) -> Source | str:
        """A weight that the file holds packed, or why not."""
        if self.file is None:
            return "its weight is not packed; pass gguf_file"
        if id(weight) in self._sources:
            return self._sources[id(weight)]
        names = self._parameters[id(weight)]
        stored = next((s for n in names if (s := self.file.take(n, weight)) is not None), None)
        if stored is None:
            reasons = [self.file.reasons[name] for name in names if name in self.file.reasons]
            return reasons[0] if reasons else "the file has no such weight"
        source = _from_file(stored, weight.device, weight.dtype)
        source.own = ref(weight)
        self._sources[id(weight)] = source
        return source

    def _linear_step(self, names: list[str], module: nn.Module, source: Source) -> Step:
        needs_gradient = module.weight.requires_grad

        def build() -> nn.Module:
            order = getattr(module, "input_permutation", None)
            return layers.PackedLinear(source.pack(), module.bias, order)

        def give_back(now: nn.Module) -> None:
            module.weight = source.parameter(now.as_in_file("weight"), needs_gradient)
            if now.input_permutation is not None:
                module.input_permutation = now.input_permutation

        return Step(names, module, build, lambda: _free(module, "weight"), give_back, True)

    def _embedding_step(
        self,
        names: list[str],
        module: nn.Module,
        source: Source,
        dtype: torch.dtype,
        scale: Tensor | None = None,
    ) -> Step:
        needs_gradient = module.weight.requires_grad

        def build() -> nn.Module:
            return layers.PackedEmbedding(source.pack(), dtype, scale)

        def give_back(now: nn.Module) -> None:
            module.weight = source.parameter(now.as_in_file("weight"), needs_gradient)

        return Step(names, module, build, lambda: _free(module, "weight"), give_back, True)

    def _gguf_experts(self, names: list[str], module: nn.Module) -> Step | str:
        numbers = module.gate_up_type, module.down_type
        if not {*numbers} <= KINDS.keys():
            return f"no kernel takes blocks of ggml's types {numbers[0]} and {numbers[1]}"
        if not is_silu(module.act_fn):
            return "its activation is not silu"
        n, (gate_up_kind, down_kind) = module.intermediate_dim, (KINDS[i] for i in numbers)

        def part_of(weight: str, rows: slice, kind: str) -> Source:
            return Source(
                load=lambda: QuantizedTensor(getattr(module, weight)[:, rows].contiguous(), kind),
                unpack=lambda packed: packed.blocks,
            )

        gate = part_of("gate_up_proj", slice(0, n), gate_up_kind)
        up = part_of("gate_up_proj", slice(n, None), gate_up_kind)
        return self._experts_step(
            names, module, (gate, up, part_of("down_proj", slice(None), down_kind))
        )

    def _experts(self, names: list[str], module: nn.Module) -> Step | str:
        if self.file is None:
            return "its experts are not packed; pass gguf_file"
        flags = {name: getattr(module, name, None) for name in EXPERT_FLAGS}
        gated = getattr(getattr(module, "_apply_gate", None), "__name__", "")
        if flags != EXPERT_FLAGS or gated != "_default_apply_gate" or not is_silu(module.act_fn):
            return "no experts that are known"
        gate_up, down = module.gate_up_proj, module.down_proj
        stored = next(
            (s for n in names if (s := self.file.take_experts(n, gate_up, down)) is not None), None
        )
        if stored is None:
            return "the file has no such experts"
        sources = [_from_file(one, gate_up.device, gate_up.dtype) for one in stored]
        return self._experts_step(names, module, (sources[0], sources[1], sources[2]))

    def _experts_step(
        self, names: list[str], module: nn.Module, sources: tuple[Source, Source, Source]
    ) -> Step:
        gate, up, down = sources
        needs_gradient = module.gate_up_proj.requires_grad

        def build() -> nn.Module:
            return layers.PackedExperts(gate.pack(), up.pack(), down.pack())

        def release() -> None:
            _free(module, "gate_up_proj")
            _free(module, "down_proj")

        def give_back(now: nn.Module) -> None:
            halves = [
                source.unpack(now.as_in_file(name))
                for source, name in ((gate, "gate_proj"), (up, "up_proj"))
            ]
            module.gate_up_proj = nn.Parameter(torch.cat(halves, 1), requires_grad=needs_gradient)
            module.down_proj = down.parameter(now.as_in_file("down_proj"), needs_gradient)

        return Step(names, module, build, release, give_back, True)

    def _norm(self, names: list[str], module: nn.Module) -> Step | str:
        norm = norm_of(module)
        if norm is None:
            return "its formula is not known"
        weight = module.weight
        if weight.dtype != self.model.dtype:
            return f"its weight is {weight.dtype} in a model of {self.model.dtype}"
        if norm.gated:
            return Step(names, module, lambda: layers.GatedRMSNorm(weight, norm.eps))
        return Step(names, module, lambda: layers.RMSNorm(weight, norm.eps, norm.offset))

    def _mlp(self, names: list[str], module: nn.Module) -> Step | str:
        mlp = mlp_of(module)
        if mlp is None:
            return "its formula is not known"

        def build() -> nn.Module:
            return layers.GatedMLP({n: getattr(module, n) for n in mlp.layers}, mlp.activation)

        return Step(names, module, build, is_outer=True)

    def _delta_net(self, names: list[str], module: nn.Module) -> Step | str:
        reason = delta_net.why_not(module)
        if reason is not None:
            return reason
        return Step(names, module, lambda: delta_net.GatedDeltaNet(module), is_outer=True)


def _from_file(stored: Stored, device: torch.device, dtype: torch.dtype) -> Source:
    return Source(load=lambda: stored.load(device), unpack=lambda packed: packed.dequantize(dtype))


def _free(module: nn.Module, name: str) -> None:
    setattr(module, name, None)
