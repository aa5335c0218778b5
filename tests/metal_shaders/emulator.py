"""Shaders compiled as C++ and run on the CPU, in the launch geometry they are given.

In this process as a library, or by a program of their own under sanitizers, from launches that were
recorded here: each buffer is an allocation of its own there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ferrum_triton.backends.metal import shader

SHIM = Path(__file__).parent / "shim"
CLANG = next(
    (found for name in ("clang++", "clang++-19", "clang++-14") if (found := shutil.which(name))),
    None,
)
needs_clang = pytest.mark.skipif(
    CLANG is None, reason="needs clang (Debian: apt install clang libclang-rt-14-dev)"
)
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
# A sanitizer is linked into every program, which takes ld.bfd as long as clang takes to compile.
LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []
# Else ThreadSanitizer waits a second at the end, for threads that a process left running.
ALONE = {**os.environ, "TSAN_OPTIONS": "atexit_sleep_ms=0"}
MOST_TOLD_APART = 254  # threads, by ThreadSanitizer
OPTIONS = (
    "-std=c++17 -O1 -gline-tables-only -ffp-contract=off -Wall -Werror -Wno-unknown-attributes "
    f"-Wno-unused-function -Wno-unused-const-variable -isystem{SHIM}"
).split()
# What stands for each of a kernel's parameters that are no buffer.
PLACES = {
    "thread_position_in_grid": "group * threads + thread_id",
    "threadgroup_position_in_grid": "group",
    "thread_position_in_threadgroup": "thread_id",
    "threads_per_threadgroup": "threads",
    "thread_index_in_simdgroup": "thread_id % 32",
    "simdgroup_index_in_threadgroup": "thread_id / 32",
}
KERNEL = re.compile(r"^kernel void (\w+)\((.*?)\) \{", re.DOTALL | re.MULTILINE)
PARAMETER = re.compile(r"(.+?)\s*\b(\w+) \[\[(\w+)(?:\((\d+)\))?\]\]$", re.DOTALL)

_main = r"""
int main(int, char** argv) {
    FILE* file = fopen(argv[1], "r+b");
    char name[256];
    int64_t head[4], sizes[32];
    void* buffers[32];
    if (fread(head, 8, 4, file) != 4 || fread(name, 1, head[0], file) != size_t(head[0])) return 3;
    name[head[0]] = 0;
    if (fread(sizes, 8, head[3], file) != size_t(head[3])) return 3;
    const long start = ftell(file);
    for (int i = 0; i < head[3]; i++) {
        buffers[i] = malloc(sizes[i] ? sizes[i] : 1);
        if (fread(buffers[i], 1, sizes[i], file) != size_t(sizes[i])) return 3;
    }
    const int status = ferrum_launch(name, buffers, uint(head[1]), uint(head[2]), false);
    fseek(file, start, SEEK_SET);
    for (int i = 0; i < head[3]; i++) fwrite(buffers[i], 1, sizes[i], file);
    for (int i = 0; i < head[3]; i++) free(buffers[i]);
    fclose(file);
    return status;
}
"""


@dataclass(frozen=True)
class Parameter:
    """One of a kernel's: its type, its name, its attribute and a buffer's index."""

    type: str
    name: str
    attribute: str
    index: int | None


def kernels(text: str) -> dict[str, list[Parameter]]:
    """A source's kernels and their parameters."""
    found = {}
    for name, inside in KERNEL.findall(text):
        matches = [PARAMETER.match(each.strip()) for each in inside.split(",")]
        assert all(matches), f"parameters of {name} are not understood"
        found[name] = [
            Parameter(m[1], m[2], m[3], None if m[4] is None else int(m[4])) for m in matches if m
        ]
    return found


def as_cpp(text: str) -> str:
    """The source with what C++ has no word for replaced, and a function that launches by name."""
    entries, table = [], []
    for name, parameters in kernels(text).items():
        arguments = []
        for p in parameters:
            plain = re.sub(r"\b(device|constant)\b", "", p.type).strip()
            if p.index is None:
                arguments.append(PLACES[p.attribute])
            elif plain.endswith("&"):
                arguments.append(f"*(const {plain[:-1]}*)buffers[{p.index}]")
            else:
                arguments.append(f"({plain})buffers[{p.index}]")
        entries.append(
            f"static void enter_{name}(void** buffers, uint group, uint thread_id, uint threads) {{"
            f" {name}({', '.join(arguments)}); }}"
        )
        table.append(
            f'if (!strcmp(name, "{name}")) '
            f"return emulator::launch(enter_{name}, buffers, groups, threads);"
        )
    text = re.sub(r"\bthreadgroup (\w+ \w+\[)", r"static \1", text)
    text = re.sub(r"\bthreadgroup (\w+\*)", r"\1", text)
    text = re.sub(r"\bconstant constexpr\b", "constexpr", text)
    text = re.sub(r"\bconstant (\w+&)", r"const \1", text)
    launch = "\n".join(table)
    return (
        f"{text}\n" + "\n".join(entries) + '\nextern "C" int ferrum_launch(const char* name, '
        f"void** buffers, uint groups, uint threads, bool backwards) {{\n"
        f"emulator::backwards = backwards;\n{launch}\nreturn 4;\n}}\n"
    )


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="ferrum-metal-")


@functools.cache
def build(text: str, sanitizer: str = "") -> Path:
    """A library of the source, or a program under a sanitizer."""
    cpp = as_cpp(text) + (_main if sanitizer else "")
    name = hashlib.sha256((cpp + sanitizer).encode()).hexdigest()[:20]
    folder = Path(_folder().name)
    written, built = folder / f"{name}.cpp", folder / name
    written.write_text(cpp)
    options = SANITIZERS[sanitizer] if sanitizer else ["-shared", "-fPIC"]
    # Metal contracts products and sums; here the plain operations, so that every build agrees.
    command = [str(CLANG), *OPTIONS, *LINKER, *options, str(written), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


@dataclass(frozen=True)
class Launch:
    """One launch: its buffers as they were before it, and after."""

    text: str
    name: str
    groups: int
    threads: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


_recorded: list[list[Launch]] = []


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches made inside the block."""
    _recorded.append([])
    try:
        yield _recorded[-1]
    finally:
        _recorded.pop()


def _bytes_of(tensor: Tensor) -> bytes:
    """From its first element to its last, and what lies between."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,)).view(torch.uint8).numpy().tobytes()


class Library:
    """What ``torch.mps.compile_shader`` returns, for tensors on the CPU."""

    def __init__(self, text: str) -> None:
        self._text, self._names = text, kernels(text)
        self._launch = ctypes.CDLL(str(build(text))).ferrum_launch

    def __getattr__(self, name: str) -> Any:
        assert name in self._names, f"no kernel {name}"

        def call(*args: Any, threads: int, group_size: int) -> None:
            buffers = [
                arg if isinstance(arg, Tensor) else torch.tensor(arg, dtype=torch.int64)
                for arg in args
            ]
            assert threads % group_size == 0
            groups, before = threads // group_size, ()
            if _recorded:
                before = tuple(map(_bytes_of, buffers))
            pointers = [buffer.data_ptr() for buffer in buffers]
            self.run(name, pointers, groups, group_size)
            if _recorded:
                after = tuple(map(_bytes_of, buffers))
                _recorded[-1].append(Launch(self._text, name, groups, group_size, before, after))

        return call

    def run(
        self, name: str, pointers: list[int], groups: int, threads: int, backwards: bool = False
    ) -> None:
        given = (ctypes.c_void_p * len(pointers))(*pointers)
        status = self._launch(name.encode(), given, groups, threads, backwards)
        assert status == 0, f"{name}: threads wait for others that do not come"


def run_backwards(launch: Launch) -> tuple[bytes, ...]:
    """The buffers after the launch again, the last threadgroup first."""
    buffers = [ctypes.create_string_buffer(given, max(len(given), 1)) for given in launch.before]
    pointers = [ctypes.addressof(buffer) for buffer in buffers]
    _library(launch.text).run(launch.name, pointers, launch.groups, launch.threads, True)
    sizes = (len(given) for given in launch.before)
    return tuple(buffer.raw[:size] for buffer, size in zip(buffers, sizes, strict=True))


def run_alone(launch: Launch, sanitizer: str, text: str | None = None) -> tuple[int, str, tuple]:
    """The launch again under a sanitizer: its exit status, what it printed, and its buffers."""
    assert sanitizer != "thread" or launch.threads <= MOST_TOLD_APART
    program = build(launch.text if text is None else text, sanitizer)
    name = launch.name.encode()
    sizes = [len(buffer) for buffer in launch.before]
    head = struct.pack(
        f"<4q{len(name)}s{len(sizes)}q",
        len(name), launch.groups, launch.threads, len(sizes), name, *sizes,
    )  # fmt: skip
    with tempfile.NamedTemporaryFile(dir=_folder().name) as file:
        file.write(head + b"".join(launch.before))
        file.flush()
        done = subprocess.run(
            [program, file.name],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env=ALONE,
        )
        file.seek(len(head))
        after = tuple(file.read(size) for size in sizes)
    return done.returncode, done.stderr, after


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Shaders compile for the CPU inside the block."""
    real = shader.compile_source
    shader._library.cache_clear()
    shader.compile_source = _library
    try:
        yield
    finally:
        shader.compile_source = real
        shader._library.cache_clear()


_library = functools.cache(Library)
