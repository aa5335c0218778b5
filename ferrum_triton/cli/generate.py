"""``ferrum-triton generate``: a model answers a prompt, text streaming to standard output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ferrum_triton.cli.bar import Bar
from ferrum_triton.cli.default_model import default_model
from ferrum_triton.cli.terminal import note, noted, panics_untold
from ferrum_triton.errors import FerrumError

SUMMARY = "let a model answer a prompt"
DTYPES = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; standard input if left out")
    parser.add_argument(
        "--model",
        type=Path,
        help="GGUF file or Hugging Face directory (default: SmolLM2-135M-Instruct, if installed)",
    )
    backends = ("auto", "cuda", "cpu", "interpret", "metal")
    parser.add_argument("--backend", default="auto", choices=backends)
    parser.add_argument("--dtype", choices=DTYPES, help="of activations (default: by backend)")
    parser.add_argument("--max-tokens", type=_whole(0), default=256, help="(default: 256)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="put the prompt into the model's chat template (default: if it has one)",
    )
    form.add_argument(
        "--raw", dest="chat", action="store_false", help="let the model continue the prompt itself"
    )
    parser.add_argument("--system", help="the chat's system message")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=_whole(0), default=0, help="0 keeps all (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0, help="0 keeps all (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=_whole(1, 4096), help="CPU threads (default: torch's choice)"
    )
    parser.add_argument(
        "--allow-non-finite",
        action="store_true",
        help="load weights that are NaN, infinite, or too large for their dtype",
    )
    parser.add_argument("--quiet", action="store_true", help="the text alone: no bar, no speeds")


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A reader of whole numbers in a range."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            reason = f"{text!r} is no whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(reason)
        return number

    return read


def run(options: argparse.Namespace) -> int:
    prompt = _prompt(options)
    if options.backend == "interpret" and not options.quiet:
        note("[interpret runs kernels in Python: a model of 135M takes minutes for a token]")
    import torch

    from ferrum_triton.backends import get_backend
    from ferrum_triton.models import load_model, load_tokenizer
    from ferrum_triton.models.generation import Stats, generate_text
    from ferrum_triton.runtime.sampling import Sampling

    if options.threads:
        torch.set_num_threads(options.threads)
    path = options.model or default_model()
    backend = get_backend(options.backend)
    sampling = Sampling(
        options.temperature, options.top_k, options.top_p, options.min_p, seed=options.seed
    )
    with panics_untold():
        tokenizer = load_tokenizer(path)
        ids = _encode(tokenizer, prompt, options)
    # bfloat16 has float32's range, which not every model's activations can do without.
    dtype = options.dtype or ("bfloat16" if backend.device.type == "cuda" else "float32")
    with noted(options.quiet), Bar(path.name, "tensor", options.quiet) as bar:
        model = load_model(
            path,
            backend,
            getattr(torch, dtype),
            bar,
            allow_non_finite=options.allow_non_finite,
        )

    stats = Stats()
    on_gpu = backend.device.type == "cuda"
    title, unit = ("compiling", "kernel") if on_gpu else ("prompt", "token")
    with Bar(title, unit, options.quiet) as bar:
        shown = (None, bar) if on_gpu else (bar, None)
        settings = (sampling, options.max_tokens, stats, *shown)
        for piece in generate_text(model, tokenizer, ids, *settings):
            bar.close()
            print(piece, end="", flush=True)
    print(flush=True)
    if not options.quiet:
        share = _share_of_roof(model, stats) if on_gpu else ""
        ready = f"ready after {stats.setup_seconds:.1f} s, " if stats.setup_seconds > 0.1 else ""
        note(
            f"[{backend.name}, {dtype}: {ready}{stats.prompt_tokens} prompt tokens at "
            f"{stats.prefill_speed:.1f} tokens/s, {stats.new_tokens} new at "
            f"{stats.decode_speed:.1f} tokens/s{share}, stopped by {stats.stopped_by}]"
        )
    return 0


def _share_of_roof(model: Any, stats: Any) -> str:
    """How near decoding came to reading its weights and keys at the speed of a copy."""
    from ferrum_triton.models.roof import bytes_of_step, copy_rate

    context = stats.prompt_tokens + stats.new_tokens // 2
    roof = copy_rate(model.backend.device) / bytes_of_step(model, 1, context)
    return f" ({100 * stats.decode_speed / roof:.0f} % of the roof)"


def _prompt(options: argparse.Namespace) -> str:
    """The argument, or what standard input holds; both are UTF-8 whatever the locale."""
    if options.system is not None:
        options.system = _utf8("--system", os.fsencode(options.system))
    if options.prompt is None:
        if sys.stdin is None:
            raise FerrumError("standard input is closed; give the prompt as an argument")
        return _utf8("the prompt", sys.stdin.buffer.read())
    return _utf8("the prompt", os.fsencode(options.prompt))


def _utf8(name: str, raw: bytes) -> str:
    """The text of bytes as they were given: Python may have decoded them by another locale."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise FerrumError(f"{name} is not UTF-8; convert it, for instance with iconv") from None


def _encode(tokenizer: Any, prompt: str, options: argparse.Namespace) -> list[int]:
    from ferrum_triton.files.chat import ChatTemplate

    chat = tokenizer.chat_template is not None if options.chat is None else options.chat
    if not chat:
        if options.system is not None:
            raise FerrumError("--system needs a chat; leave --raw out, or the system message")
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    text = ChatTemplate.from_tokenizer(tokenizer).render(messages)
    return tokenizer.encode(text, add_special=False)
