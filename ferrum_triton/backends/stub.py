"""Writes ``backend.pyi``, through which editors and type checkers see a backend's ops.

python -m ferrum_triton.backends.stub
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferrum_triton.backends.backend import Backend
from ferrum_triton.registry import OPS, Op

STUB = Path(__file__).with_name("backend.pyi")

HEADER = '''\
"""Generated from the registry by ``python -m ferrum_triton.backends.stub``; do not edit."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

class Backend:
    name: str
    device: torch.device
    providers: tuple[str, ...]
    def __init__(self, name: str, device: str, providers: Sequence[str]) -> None: ...
'''


def render() -> str:
    """The text of the stub for the ops registered now."""
    methods = (name for name in vars(Backend) if not name.startswith("_"))
    own = "".join(_method(name, inspect.signature(getattr(Backend, name))) for name in methods)
    return HEADER + own + "".join(_op(op) for op in OPS.values())


def _op(op: Op) -> str:
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += op.signature.parameters.values()
    returns = op.signature.return_annotation
    if op.has_out:
        out = inspect.Parameter(
            "out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=returns | None
        )
        parameters.append(out)
    doc = inspect.getdoc(op.reference) or ""
    body = "".join(f"        {line}".rstrip() + "\n" for line in doc.splitlines())
    signature = inspect.Signature(parameters, return_annotation=returns)
    head = _method(op.name, signature).removesuffix(" ...\n")
    return f'{head}\n        """{body.strip()}\n        """\n'


def _method(name: str, signature: inspect.Signature) -> str:
    arguments, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            arguments.append("*")
            keyword_only = True
        text = parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_type(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        arguments.append(text)
    lines = "".join(f"        {argument},\n" for argument in arguments)
    return f"    def {name}(\n{lines}    ) -> {_type(signature.return_annotation)}: ...\n"


def _type(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    if annotation in (None, Tensor):
        return "None" if annotation is None else "Tensor"
    if annotation is torch.dtype:
        return "torch.dtype"
    plain = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    text = annotation.__name__ if plain else str(annotation)
    return text.replace("torch.Tensor", "Tensor").replace("collections.abc.", "")


if __name__ == "__main__":
    STUB.write_text(render())
