"""Conversion of a model of transformers to this package's products, norms, MLPs and attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ferrum_triton.errors import InputError
from ferrum_triton.integrations.transformers import attention as ferrum
from ferrum_triton.integrations.transformers.file import File
from ferrum_triton.integrations.transformers.library import part
from ferrum_triton.integrations.transformers.plan import Plan, Step
from ferrum_triton.integrations.transformers.report import Left, Replaced, Report, describe

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda", "mps")
MARK = "_ferrum_report"


def convert(model: Any, *, gguf_file: str | Path | None = None, attention: bool = True) -> Report:
    """Let a model of transformers compute with this package: on CUDA with its kernels.

    Weights that transformers kept packed (:func:`keep_packed`) go into planes and are multiplied by
    as they are, for any number of rows; so do those it unpacked, if ``gguf_file`` holds them.
    RMSNorms and gated MLPs are replaced where they compute a formula that is known, which is tried;
    everything else stays as it is, and the report says why. The model is changed in place, or not
    at all.

    Args:
        model: what ``from_pretrained`` returned, in eval mode, in float32, float16 or bfloat16.
        gguf_file: the file it was loaded from, for architectures that transformers unpacks. A
            sample of each weight's rows is held against the model's.
        attention: use the attention ``"ferrum"`` too, which is inference alone and knows causal,
            sliding-window and full masks with padding.

    Returns:
        What was replaced and what was not; its ``undo()`` takes everything back.

    Raises:
        FerrumError: transformers is absent, or not of the version this was tested with.
        InputError: the model is none, or converted already, or of another dtype, device or mode;
            the file is none, or not the model's.
    """
    pretrained = part("modeling_utils").PreTrainedModel
    _check(model, pretrained)
    plan = Plan(model, None if gguf_file is None else File(gguf_file, model))
    if plan.file is not None and not any(step.packs for step in plan.steps):
        plan.file.reject("one that holds no packed weight of this model", "Leave it out.")
    done: list[tuple[Step, nn.Module]] = []
    settings: list[tuple[Any, Any]] = []

    def undo() -> None:
        for step, now in reversed(done):
            step.give_back(now)
            for name in step.names:
                model.set_submodule(name, step.was)
        for config, chosen in settings:
            config._attn_implementation_internal = chosen
        vars(model).pop(MARK, None)

    replaced = []
    try:
        for step in plan.steps:
            now = step.build()
            done.append((step, now))
            for name in step.names:
                model.set_submodule(name, now)
            step.release()
            replaced.append(Replaced(step.names[0], type(step.was).__name__, describe(now)))
        if attention:
            parts = [m for m in model.modules() if isinstance(m, pretrained)]
            fixed = [m for m in parts if not m._can_set_attn_implementation()]
            if fixed:
                reason = "it cannot be chosen for this model"
                plan.left.append(Left("attention", type(fixed[0]).__name__, reason))
            else:
                configs = {id(m.config): m.config for m in parts}.values()
                settings += [(config, config._attn_implementation) for config in configs]
                ferrum.register()
                model.set_attn_implementation(ferrum.NAME)
    except BaseException:
        undo()
        raise
    used = str(model.config._attn_implementation)
    report = Report(tuple(replaced), tuple(plan.left), used, undo)
    setattr(model, MARK, report)
    return report


def revert(model: Any) -> None:
    """Undo the conversion of a model.

    Raises:
        InputError: it is not converted.
    """
    report = getattr(model, MARK, None)
    if report is None:
        raise InputError("revert", "model", "not converted", "a converted model", "Convert it.")
    report.undo()


def _check(model: Any, pretrained: type) -> None:
    if not isinstance(model, pretrained):
        _reject(f"a {type(model).__name__}", "a model of transformers", "Pass it unwrapped.")
    here = __name__.rpartition(".")[0]
    if hasattr(model, MARK) or any(type(m).__module__.startswith(here) for m in model.modules()):
        _reject("converted already", "one that is not", "Call revert(model) first.")
    if model.training:
        _reject("in training mode", "a model in eval mode", "Call model.eval().")
    if model.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        _reject(f"of {model.dtype}", allowed, "Load it with dtype=torch.bfloat16.")
    devices = {p.device.type for p in model.parameters()} - {*DEVICES}
    if devices:
        _reject(f"on {', '.join(sorted(devices))}", ", ".join(DEVICES), "Load it onto a device.")


def _reject(got: str, allowed: str, advice: str) -> None:
    raise InputError("convert", "model", got, allowed, advice)
