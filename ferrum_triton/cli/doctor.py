"""``ferrum-triton doctor``: what works on this machine, and what to do about what does not."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

SUMMARY = "say what works on this machine and what to do about what does not"

LIBRARIES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "tqdm")
OPTIONAL = {
    "triton": "the cuda and interpret backends need it",
    "tokenizers": "`generate` needs it",
    "jinja2": "`generate` needs it for chats",
    "tqdm": "`generate` needs it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report; the status is 1 if not even the CPU backend works."""
    found = report()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    backends = found["backends"]  # a text where they could not be probed
    return 0 if isinstance(backends, dict) and backends["cpu"] == "works" else 1


def report() -> dict[str, Any]:
    """Everything the command knows. No probe may end it: a failure is reported in its place."""
    return {
        "ferrum_triton": _guarded(lambda: __import__("ferrum_triton").__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "devices": _guarded(_devices),
        "backends": _guarded(_backends),
        "default_model": _guarded(_default_model),
        "advice": _guarded(_advice),
    }


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:
        return f"could not be probed: {type(error).__name__}: {error}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _devices() -> list[str]:
    import torch

    devices = [f"cpu, {torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            gib = found.total_memory / 2**30
            name = f"cuda:{index}, {found.name}, sm_{found.major}{found.minor}"
            devices.append(f"{name}, {found.multi_processor_count} processors, {gib:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices


def _backends() -> dict[str, str]:
    """Each backend with "works" or what keeps it from working, found by running an op."""
    import torch

    import ferrum_triton.ops  # noqa: F401  declares what is run below
    from ferrum_triton.backends import NAMES, get_backend

    results = {}
    for name in NAMES:
        try:
            backend = get_backend(name)
            x = torch.arange(1.0, 9.0, device=backend.device).view(2, 4)
            y = backend.rms_norm(x, torch.ones(4, device=backend.device), 0.0)
            want = x / x.square().mean(-1, keepdim=True).sqrt()
            near = torch.allclose(y, want, rtol=1e-5)
            results[name] = "works" if near else "runs, but rms_norm is wrong; please report this"
        except Exception as error:
            results[name] = str(error) or type(error).__name__
    return results


def _default_model() -> str:
    from ferrum_triton.cli.default_model import INSTALL, find_default_model

    path = find_default_model()
    return str(path) if path else f"not installed: {INSTALL}"


def _advice() -> list[str]:
    advice = [
        f"{name} is absent, and {why}: pip install {name}"
        for name, why in OPTIONAL.items()
        if _version(name) == "absent"
    ]
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        advice.append(
            "TRITON_INTERPRET is set, which keeps kernels from being compiled: unset it; "
            "get_backend('interpret') needs no variable"
        )
    return advice


def _print(found: dict[str, Any]) -> None:
    for key in ("ferrum_triton", "python", "system"):
        print(f"{key:<14} {found[key]}")
    for title in ("libraries", "devices", "backends", "default_model", "advice"):
        value = found[title]
        print(f"\n{title.replace('_', ' ')}")
        if isinstance(value, dict):
            for name, text in value.items():
                print(f"  {name:<12} {text}")
        else:
            lines = value if isinstance(value, list) else [value]
            for line in lines or ["nothing to do"]:
                print(f"  {line}")
