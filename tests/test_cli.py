"""The command line, run as users run it."""

import json
import subprocess
import sys

import pytest
import torch

from ferrum_triton.cli import main
from ferrum_triton.cli.default_model import INSTALL, find_default_model
from ferrum_triton.registry import OPS

needs_model = pytest.mark.skipif(
    find_default_model() is None, reason=f"the real model is absent: {INSTALL}"
)


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "ferrum_triton", *arguments],
        capture_output=True,
        text=True,
        **options,
    )


def test_help_is_quick_and_names_the_commands():
    code = "import sys, ferrum_triton.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for command in ("generate", "doctor", "ops"):
        assert command in result.stdout


@needs_model
def test_generate_answers():
    result = run("generate", "What is the capital of France?", "--backend", "cpu")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "tokens/s" in result.stderr
    assert result.stdout.count("tokens/s") == 0


@needs_model
def test_generate_reads_standard_input_and_keeps_quiet():
    result = run("generate", "--raw", "--max-tokens", "4", "--quiet", input="One two three")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr == ""


@needs_model
def test_generate_options_reach_the_model(capsys):
    base = ["generate", "Hello", "--backend", "cpu", "--max-tokens", "6", "--quiet"]
    outputs = set()
    for extra in ([], ["--raw"], ["--system", "You speak only French."]):
        assert main([*base, *extra]) == 0
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 3
    sampled = []
    for seed in ("1", "1", "2", "3"):
        assert main([*base, "--temperature", "1.5", "--top-k", "40", "--seed", seed]) == 0
        sampled.append(capsys.readouterr().out)
    assert sampled[0] == sampled[1]
    assert len(set(sampled)) > 1


@pytest.mark.parametrize("threads", ["0", "-1", "1000000", "two"])
def test_thread_counts_are_checked(threads, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "Hi", "--threads", threads])
    assert stopped.value.code == 2
    assert "--threads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere/model.gguf"], "model.gguf"),
        (["--model", "pyproject.toml"], "pyproject.toml"),
        (["--backend", "metal"], "needs macOS"),
        (["--temperature", "-1"], "temperature"),
        (["--seed", str(2**64)], "seed"),
        (["--raw", "--system", "x"], "--system"),
    ],
)
@needs_model
def test_failures_are_one_line(arguments, message, capsys):
    assert main(["generate", "Hi", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_absent_default_model_names_the_install(monkeypatch, capsys):
    monkeypatch.setattr("ferrum_triton.cli.default_model.find_default_model", lambda: None)
    assert main(["generate", "Hi"]) == 2
    assert INSTALL in capsys.readouterr().err


@needs_model
@pytest.mark.parametrize("library", ["tokenizers", "jinja2"])
def test_absent_libraries_name_the_extra(library):
    code = f"import sys; sys.modules[{library!r}] = None; from ferrum_triton.cli import main; "
    code += "sys.exit(main(['generate', 'Hi', '--backend', 'cpu']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert f"needs {library}: pip install 'ferrum-triton[cli]'" in result.stderr


def test_hugging_face_directory(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers makes the tiny model")
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tests.tiny_models import SHAPE, save_tiny

    save_tiny(tmp_path, "qwen3")
    words = {f"w{i}": i for i in range(SHAPE["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = ["generate", "w5 w9", "--model", str(tmp_path), "--backend", "cpu"]
    assert main([*arguments, "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "2 prompt tokens" in captured.err


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "cpu          works" in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["libraries"]["torch"] == torch.__version__
    assert set(found["backends"]) == {"cuda", "cpu", "interpret", "metal"}
    assert found["backends"]["interpret"] == "works"
    if not torch.cuda.is_available():
        assert "visible NVIDIA GPU" in found["backends"]["cuda"]


def test_doctor_needs_no_triton_and_survives_broken_probes():
    code = """
        import json, sys
        sys.modules["triton"] = None
        import ferrum_triton.cli.doctor as doctor
        import torch
        def broken(): raise OSError("driver mismatch")
        torch.cuda.is_available = broken
        print(json.dumps(doctor.report()))
    """
    source = "\n".join(line.strip() for line in code.splitlines())
    source = source.replace("def broken(): raise", "def broken():\n    raise")
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["backends"]["cpu"] == "works"
    assert "pip install triton" in found["backends"]["interpret"]
    assert "driver mismatch" in found["backends"]["cuda"]
    assert "driver mismatch" in found["devices"]


def test_doctor_warns_of_the_interpreter_variable(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    main(["doctor"])
    assert "unset it" in capsys.readouterr().out


def test_ops_table(capsys):
    assert main(["ops"]) == 0
    text = capsys.readouterr().out
    assert main(["ops", "--json"]) == 0
    rows = {row["op"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) >= set(OPS)
    assert all(name in text for name in OPS)
    assert rows["rms_norm"]["backends"]["cuda"] == "triton"
    assert rows["gemm"]["backends"]["interpret"] == "blas"
    assert rows["rms_norm"]["dtypes"] == ["float32", "float16", "bfloat16"]
