"""Seconds from the start of a process to a model's first token, and where they go.

    python -m bench.first_answer MODEL [--format q4_K] [--prompt 928] [--tokens 96] [--profile N]
                                 [--json FILE]

MODEL is a name of :mod:`bench.random_models`, or a file or directory that ``load_model`` reads. Two
processes of its own answer a random prompt, one after the other: the first finds no compiled kernel
(``cold``), the second those that the first has left (``warm``). Rows
``first_answer/<model>/<cold or warm>/<part>``, in seconds, are the parts of PARTS and ``total``, up
to the last token. ``--profile`` prints, for each process, the functions that the answer's own
thread spends most in.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# What the time to the last token is made of, in order. ``first`` is what the first token takes
# beside compiling and capturing: the cache's memory, the prompt, what libraries set up when used.
PARTS = ("import", "gpu", "load", "compile", "capture", "first", "decode")


def answer(make_model: Callable[[], Any], num_prompt: int, num_tokens: int) -> dict[str, float]:
    """Seconds of the parts from ``load`` on.

    Args:
        make_model: loads the model.
        num_prompt: tokens of the prompt.
        num_tokens: tokens of the answer.
    """
    import torch

    from ferrum_triton.models.generation import generate_ids
    from ferrum_triton.models.runner import Runner
    from ferrum_triton.runtime.graph import Graph
    from ferrum_triton.runtime.sampling import GREEDY

    start = time.perf_counter()
    model = make_model()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    loaded = time.perf_counter()
    prompt = torch.randint(0, model.config.vocab_size, (num_prompt,)).tolist()
    with timed(Runner, "_compile_ahead") as compiling, timed(Graph, "capture") as capturing:
        tokens = generate_ids(model, prompt, GREEDY, num_tokens)
        next(tokens)
        first = time.perf_counter()
        before = {"compile": sum(compiling), "capture": sum(capturing)}
        for _ in tokens:
            pass
        end = time.perf_counter()
    return {
        "load": loaded - start,
        **before,
        "first": first - loaded - sum(before.values()),
        "decode": end - first,
    }


@contextlib.contextmanager
def timed(owner: type, name: str) -> Iterator[list[float]]:
    """Seconds of each call of a method, while the block runs."""
    method, seconds = getattr(owner, name), []

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, call)
    try:
        yield seconds
    finally:
        setattr(owner, name, method)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """All parts of this process, which has just started."""
    import torch

    from bench.random_models import CONFIGS, random_model
    from ferrum_triton import get_backend
    from ferrum_triton.models import load_model

    if options.model not in CONFIGS and not Path(options.model).exists():
        raise SystemExit(f"{options.model}: no file, and no model of {', '.join(CONFIGS)}")
    backend = get_backend("cuda")
    imported = time.time()
    torch.zeros(1, device=backend.device)
    torch.cuda.synchronize()
    ready = time.time()

    def make_model() -> Any:
        if options.model in CONFIGS:
            return random_model(options.model, options.format, backend)
        return load_model(options.model, backend)

    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    parts = answer(make_model, options.prompt, options.tokens)
    if options.profile:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumtime").print_stats(options.profile)
    return {"import": imported - options.began, "gpu": ready - imported, **parts}


def child(options: argparse.Namespace, cache: str) -> dict[str, float]:
    """What a process of its own finds, with Triton's cache in a directory."""
    command = [sys.executable, "-m", "bench.first_answer", *sys.argv[1:], "--began"]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(
        [*command, str(time.time())], env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"the process that answers failed:\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def line(state: str, parts: dict[str, float]) -> str:
    """The parts of one process, and the times of its first and last token."""
    total = sum(parts.values())
    each = "  ".join(f"{part} {parts[part]:.2f}" for part in PARTS)
    return f"{state}: first token {total - parts['decode']:.2f} s, last {total:.2f} s:  {each}"


def main() -> None:
    from bench.random_models import FORMATS_OF_MODELS
    from bench.results import Row, add_options, save_rows

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="a name, or a file or directory")
    parser.add_argument("--format", choices=FORMATS_OF_MODELS, default="q4_K")
    parser.add_argument("--prompt", type=int, default=928, metavar="N", help="its tokens")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="those of the answer")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="functions printed")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.began is not None:
        print(json.dumps(measure(options)))
        return
    name = Path(options.model).stem if Path(options.model).exists() else options.model
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            parts = child(options, cache)
            print(line(state, parts), flush=True)
            rows = [
                Row(f"first_answer/{name}/{state}/{part}", seconds, "s")
                for part, seconds in {**parts, "total": sum(parts.values())}.items()
            ]
            if options.json:
                save_rows(options.json, rows, options.commit, options.dirty)


if __name__ == "__main__":
    main()
