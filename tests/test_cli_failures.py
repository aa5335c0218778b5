"""Whatever is wrong around the command line: one line on standard error, and an exit status."""

import os
import pty
import random
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import textwrap

import pytest
import torch

from ferrum_triton.cli import doctor, main
from ferrum_triton.cli.bar import Bar
from ferrum_triton.cli.default_model import INSTALL, find_default_model
from ferrum_triton.cli.terminal import complain, printable

COMMAND = [sys.executable, "-m", "ferrum_triton"]
needs_model = pytest.mark.skipif(
    find_default_model() is None, reason=f"the real model is absent: {INSTALL}"
)


def failure(arguments, status=2, **options):
    """The one line that a command ends with."""
    # Buffered output is written as the process ends; unbuffered at once. Both can fail.
    for unbuffered in ("", "1"):
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered} | options.get("env", {})
        result = subprocess.run(
            [*COMMAND, *arguments], stderr=subprocess.PIPE, **options | {"env": environment}
        )
        assert result.returncode == status, result.stderr
        assert result.stderr.count(b"\n") == 1
        assert result.stderr.startswith(b"ferrum-triton: ")
    return result.stderr.decode()


def run_with_closed_stderr(arguments):
    command = shlex.join([*COMMAND, *arguments]) + " 2>&-"
    return subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, timeout=600).returncode


def test_prompts_that_are_no_text():
    assert "the prompt is not UTF-8" in failure(["generate", b"caf\xe9"])
    assert "--system is not UTF-8" in failure(["generate", "Hi", "--system", b"caf\xe9"])
    with subprocess.Popen(["printf", "caf\\351"], stdout=subprocess.PIPE) as source:
        result = subprocess.run([*COMMAND, "generate"], stdin=source.stdout, capture_output=True)
    assert (result.returncode, result.stderr.count(b"\n")) == (2, 1)
    assert b"the prompt is not UTF-8" in result.stderr
    of_stdin = ["generate", "--system", b"caf\xe9"]
    assert "--system is not UTF-8" in failure(of_stdin, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("length", [0, 999, 1000, 1001, 5000])
def test_long_complaints_keep_both_ends(length, capsys):
    text = "".join(random.choices("abc ", k=length))
    complain(text)
    whole = f"{text[:500]} … {text[-500:]}" if length > 1000 else text
    assert capsys.readouterr().err == f"ferrum-triton: {whole}\n"


def test_closed_input():
    command = f"exec '{sys.executable}' -m ferrum_triton generate <&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == (
        "ferrum-triton: standard input is closed; give the prompt as an argument\n"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ops"]], ids=" ".join)
def test_output_that_cannot_be_written(arguments):
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        assert "No space left on device" in failure(arguments, stdout=full)


def test_a_terminal_of_ascii_gets_escapes(tmp_path):
    path = tmp_path / "é.gguf"
    path.write_bytes(b"GGML")
    environment = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    assert r"\xe9.gguf" in failure(["inspect", str(path)], status=1, env=environment)
    code = "import sys; from ferrum_triton.cli.terminal import accept_any_text as accept; "
    code += r"accept(); print('caf\xe9')"
    argv, environment = [sys.executable, "-c", code], os.environ | environment
    assert subprocess.run(argv, env=environment, stdout=subprocess.PIPE).stdout == b"caf\\xe9\n"


def test_prompts_are_utf8_whatever_python_decoded_them_by():
    as_ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "import sys; from ferrum_triton.cli.generate import _prompt; from types import "
    code += "SimpleNamespace as Options; assert not sys.argv[1].isprintable(); "
    code += "print(ascii(_prompt(Options(prompt=sys.argv[1], system=sys.argv[1]))))"
    argv = [sys.executable, "-c", code, "café".encode()]
    run = subprocess.run(argv, env=os.environ | as_ascii, stdout=subprocess.PIPE)
    assert run.stdout == b"'caf\\xe9'\n"


def test_no_bar_is_drawn_where_nobody_sees_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with Bar("reading", "tensor", quiet=False) as bar:
        bar(1, 2)
        assert bar._bar.disable


def test_a_bar_that_nobody_reads_any_more_ends(monkeypatch):
    with Bar("reading", "tensor", quiet=False) as bar:
        bar._disable = False
        monkeypatch.setattr("tqdm.tqdm.display", lambda *_, **__: os.write(-1, b""))
        bar(1, 2)
        bar._thread.join(timeout=60)
        assert not bar._thread.is_alive()


@pytest.mark.parametrize("last", ["ferrum_triton.cli.ops", "torch.version", "torch.nn.init"])
def test_interrupts_during_imports(last, tmp_path):
    code = f"""
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
        class Finder:
            def find_spec(self, name, *_):
                if name == {last!r}:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Finder())
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(code))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*COMMAND, "doctor"], capture_output=True, text=True, env=environment)
    assert "Traceback" not in done.stderr
    assert done.returncode == 130


@pytest.mark.parametrize("failure", [ImportError, AttributeError, None])
def test_interrupts_that_a_library_takes_for_a_failure_of_its_own(failure, monkeypatch):
    def run(_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if failure:
                raise failure from None
        return 0

    monkeypatch.setattr(doctor, "run", run)
    of_tests = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["doctor"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, of_tests)


def test_the_doctor_reports_backends_that_cannot_be_probed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_backends", lambda: 1 / 0)
    assert main(["doctor"]) == 1
    assert "could not be probed: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:7"], "unrecognized arguments: --device cuda:7; see "),
        (["--backend", "cuda:7"], "invalid choice: 'cuda:7'"),
        (["--threads", "two"], "--threads: 'two' is no whole number from 1 to 4096"),
        (["--max-tokens", "-1"], "--max-tokens: '-1' is no whole number from 0 to"),
        (["--top-k", "1.5"], "--top-k: '1.5' is no whole number"),
        (["--\x1b[2J"], r"--\x1b[2J"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "Hi", *arguments])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.err.count("\n"), captured.out) == (1, "")
    assert "\x1b" not in captured.err


@pytest.mark.parametrize("command", [["inspect"], ["generate", "Hi", "--model"]], ids=" ".join)
@pytest.mark.parametrize("path", ["a" * 100_000, "a\0b", "a\x1b[2J\n", "\udcff", "."])
def test_paths_that_cannot_be_opened_are_one_short_line(command, path, tmp_path, capsys):
    path = str(tmp_path) if path == "." else path
    assert main([*command, path]) == (1 if command == ["inspect"] else 2)
    captured = capsys.readouterr()
    assert captured.err.startswith("ferrum-triton: ")
    assert captured.err.count("\n") == 1
    assert captured.err[:-1].isprintable()
    assert len(captured.err) < 1100
    assert captured.out == ""


def test_printable_text_is_one_line_and_left_alone():
    assert printable("naïve ▁ 日本") == "naïve ▁ 日本"
    assert printable("a\n\x1b\x9b\u202e\udcff") == r"a\n\x1b\x9b\u202e\udcff"


@needs_model
def test_interpreting_says_that_it_takes_long(monkeypatch, capsys):
    def loaded(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ferrum_triton.models.load_model", loaded)
    for quiet, words in (([], "minutes for a token"), (["--quiet"], "")):
        assert main(["generate", "Hi", "--backend", "interpret", *quiet]) == 130
        assert words in capsys.readouterr().err


def test_progress_is_drawn_on_a_terminal_while_nothing_is_done():
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    with os.fdopen(follower, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with Bar("prompt\x1b", "token", quiet=False) as bar:
            bar(0, 4925)
            assert select.select([leader], [], [], 60)[0]
            drawn = os.read(leader, 10_000).decode()
        with Bar("quick", "token", quiet=False) as bar:
            bar(0, 5)
        with Bar("quiet", "token", quiet=True) as bar:
            bar(0, 5)
        drawn += os.read(leader, 10_000).decode()
    os.close(leader)
    assert r"prompt\x1b:   0%" in drawn
    assert re.search(r"0/4925 \[00:(?!00)\d\d", drawn)
    assert drawn.endswith(" \r"), "the line is cleared"
    assert "qui" not in drawn


@needs_model
def test_progress_of_a_prompt_comes_before_each_part():
    from ferrum_triton import get_backend
    from ferrum_triton.models import generation, load_model
    from ferrum_triton.models.engine import Engine
    from ferrum_triton.runtime.sampling import Sampling

    model = load_model(find_default_model(), get_backend("cpu"))
    model.engine = Engine(model, max_seqs=1, capacity=16, chunk=4)
    seen = []
    prompt = torch.arange(10).tolist()
    tokens = generation.generate_ids(
        model, prompt, Sampling(), 1, progress=lambda *counts: seen.append(counts)
    )
    assert len(list(tokens)) == 1
    assert seen == [(0, 10), (4, 10), (8, 10)]
