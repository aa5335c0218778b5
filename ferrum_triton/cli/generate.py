"""``ferrum-triton generate``: a model answers a prompt, text streaming to standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ferrum_triton.cli.default_model import default_model
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
    parser.add_argument("--max-tokens", type=int, default=256, help="(default: 256)")
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
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=_count, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quiet", action="store_true", help="the text alone: no bar, no speeds")


def _count(text: str) -> int:
    if not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text} is not in 1 to 4096")
    return int(text)


def run(options: argparse.Namespace) -> int:
    import torch

    from ferrum_triton.backends import get_backend
    from ferrum_triton.models import load_model, load_tokenizer
    from ferrum_triton.models.generation import Stats, generate_text
    from ferrum_triton.runtime.sampling import Sampler

    if options.threads:
        torch.set_num_threads(options.threads)
    path = options.model or default_model()
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    backend = get_backend(options.backend)
    sampler = Sampler(backend, options.temperature, options.top_k, options.top_p, options.seed)
    tokenizer = load_tokenizer(path)
    ids = _encode(tokenizer, prompt, options)
    # bfloat16 has float32's range, which not every model's activations can do without.
    dtype = options.dtype or ("bfloat16" if backend.device.type == "cuda" else "float32")
    with _Bar(path, options.quiet) as bar:
        model = load_model(path, backend, getattr(torch, dtype), bar)

    stats = Stats()
    for piece in generate_text(model, tokenizer, ids, sampler, options.max_tokens, stats):
        print(piece, end="", flush=True)
    print(flush=True)
    if not options.quiet:
        print(
            f"[{backend.name}, {dtype}: {stats.prompt_tokens} prompt tokens at "
            f"{stats.prefill_speed:.1f} tokens/s, {stats.new_tokens} new at "
            f"{stats.decode_speed:.1f} tokens/s, stopped by {stats.stopped_by}]",
            file=sys.stderr,
        )
    return 0


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


class _Bar:
    """A progress bar over the tensors loaded, where standard error is a terminal."""

    def __init__(self, path: Path, quiet: bool) -> None:
        self._path, self._quiet = path, quiet
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __call__(self, loaded: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            # None: shown on a terminal only.
            disable = True if self._quiet else None
            name = self._path.name
            self._bar = tqdm(total=total, desc=name, unit="tensor", leave=False, disable=disable)
        self._bar.update(loaded - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
