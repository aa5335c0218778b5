"""The command line, run as users run it."""

import argparse
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ferrum_triton import __version__
from ferrum_triton.cli import doctor, generate, is_this_process, main
from ferrum_triton.cli.default_model import INSTALL, find_default_model
from ferrum_triton.files.ggml_types import GGML_TYPES
from ferrum_triton.models import roof
from ferrum_triton.models.generation import Stats
from ferrum_triton.quant.formats import GGUF_FORMATS
from ferrum_triton.registry import OPS
from tests import gguf_writer as w

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


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_and_version_import_no_torch(arguments):
    result = run(*arguments, env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"})
    assert result.returncode == 0, result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "ferrum_triton.cli.generate" in imported
    assert not {"torch", "numpy", "triton"} & imported
    if arguments == ["--help"]:
        for command in ("generate", "inspect", "doctor", "ops", "--version"):
            assert command in result.stdout
    if arguments == ["--version"]:
        assert result.stdout == f"ferrum-triton {__version__}\n"


def test_what_a_command_is():
    assert not is_this_process()
    for words, command in (
        (["python", "/usr/bin/ferrum-triton", "ops"], True),
        (["python", "-m", "ferrum_triton", "ops"], True),
        (["python", "-m", "ferrum_triton.backends.stub"], False),
        (["python", "-m", "pytest", "ferrum-triton"], False),
        (["python"], False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "orig_argv", words)
            assert is_this_process() == command, words


@needs_model
def test_generate_answers():
    result = run("generate", "What is the capital of France?", "--backend", "cpu")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "tokens/s" in result.stderr
    assert "packed weights take 538 MB as float32" in result.stderr
    assert result.stdout.count("tokens/s") == 0


@needs_model
def test_generate_reads_standard_input_and_keeps_quiet():
    result = run("generate", "--raw", "--max-tokens", "4", "--quiet", input="One two three")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr == ""


@needs_model
def test_decoding_is_held_against_the_bytes_it_reads(monkeypatch):
    """At the context that its tokens saw on average, and at the speed of a copy."""
    model, stats = SimpleNamespace(backend=SimpleNamespace(device="cuda")), Stats()
    stats.prompt_tokens, stats.new_tokens, stats.decode_seconds = 70, 61, 3.0  # 20 a second
    asked = []
    monkeypatch.setattr(roof, "bytes_of_step", lambda *call: asked.append(call) or 25e9)
    monkeypatch.setattr(roof, "copy_rate", lambda device: 1e12)
    assert generate._share_of_roof(model, stats) == " (50 % of the roof)"
    assert asked == [(model, 1, 100)]


def test_a_copy_reads_and_writes(monkeypatch):
    """Twice its bytes, as often as it is timed."""
    copied, times = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            times.append(len(copied))

        def synchronize(self):
            times.append("waited")

        def elapsed_time(self, end):
            return 4.0 if times[-1] == "waited" else 0.0

    class Bytes:
        def __init__(self, size, dtype, device):
            assert (dtype, device) == (torch.uint8, "cuda")
            self.size = size

        def copy_(self, source):
            copied.append(min(self.size, source.size))

    monkeypatch.setattr(torch, "empty", Bytes)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 20, 8 << 20))
    rate = roof.copy_rate("cuda")
    first, last, _ = times
    assert set(copied) == {1 << 20} and first > 0
    assert rate == pytest.approx(2 * sum(copied[first:last]) / 4e-3)


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


def test_whole_numbers_have_a_range():
    least = random.randrange(1, 100)
    for most, read in ((2**31 - 1, generate._whole(least)), (200, generate._whole(least, 200))):
        assert [read(str(n)) for n in (least, most)] == [least, most]
        for wrong in (least - 1, most + 1, "1.5"):
            with pytest.raises(argparse.ArgumentTypeError, match=f"from {least} to {most}"):
                read(str(wrong))


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
    assert f"needs {library}: pip install {library}\n" in result.stderr


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


def inspected(path, capsys):
    """The lines that ``inspect`` prints of a file it accepts."""
    assert main(["inspect", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def test_inspect_says_what_a_file_holds(tmp_path, capsys):
    pairs = [
        w.pair("general.name", w.STRING, "tiny"),
        w.pair("tokenizer.chat_template", w.STRING, "{%x" * 999),
        w.array("tokenizer.ggml.tokens", w.STRING, [f"t{i}" for i in range(2000)]),
        w.array("short", w.I32, [1, -2]),
    ]
    records, offset = [], 0
    for t in GGML_TYPES.values():
        records.append(w.tensor(f"a.{t.name}", (256, 2), t.id, offset))
        offset += -(-512 // t.block_size * t.block_bytes // 32) * 32
    path = tmp_path / "model.gguf"
    path.write_bytes(w.gguf(pairs, records, b"\0" * offset))
    lines = inspected(path, capsys)
    text = "\n".join(lines)
    assert f"GGUF version 3, {path.stat().st_size:,} bytes" in lines[0]
    assert lines[1].startswith("model: not one that generate runs: ")
    assert "general.name             'tiny'" in text
    assert "['t0', 't1', 't2', 't3', 't4', 't5', …] of 2,000" in text
    assert "… of 2,997 characters" in text
    assert "short                    [1, -2]" in text
    assert max(map(len, lines[2:])) < 130
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  a.")}
    for t in GGML_TYPES.values():
        plain = t.dtype is not None and t.dtype.is_floating_point
        runs = "plain" if plain else "packed" if t.id in GGUF_FORMATS else "refused"
        nbytes = 512 // t.block_size * t.block_bytes
        assert rows[f"a.{t.name}"] == [t.name, "2×256", f"{nbytes:,}", runs]
    assert "  type     tensors  bytes  runs" in lines


@needs_model
def test_inspect_of_a_real_model(capsys):
    lines = inspected(find_default_model(), capsys)
    assert lines[1] == "model: one that generate runs, by its metadata and types"
    assert lines[-3:] == [
        "  Q4_1      210  66,355,200  packed",
        "  Q8_0        1  30,081,024  packed",
        "  F32        61     140,544  plain",
    ]


def test_inspect_keeps_control_characters_from_the_terminal(tmp_path, capsys):
    path = tmp_path / "hostile.gguf"
    evil = "\x1b[2J\x9b\u202e\n"
    pairs = [
        w.pair("k" + evil, w.STRING, evil),
        w.array("list", w.STRING, [evil]),
        w.pair("general.architecture", w.STRING, evil),
    ]
    path.write_bytes(w.gguf(pairs, [w.tensor("t" + evil, (2,), 24, 0)], b"\0" * 32))
    lines = inspected(path, capsys)
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML", "does not start with 'GGUF'"),
        (b"", "empty"),
        (w.gguf((), [w.tensor("t", (4,), 99, 0)]), "unknown type 99"),
        (w.gguf((), [w.tensor("t", (2**30, 4), 0, 0)]), "past the file's end"),
        (None, "No such file"),
    ],
)
def test_inspect_of_a_malformed_file_is_one_error(tmp_path, data, message, capsys):
    path = tmp_path / "model.gguf"
    if data is not None:
        path.write_bytes(data)
    assert main(["inspect", str(path)]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith(f"ferrum-triton: {path}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@needs_model
def test_inspect_as_json_is_the_whole_of_it(capsys):
    assert main(["inspect", "--json", str(find_default_model())]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "GGUF version 3"
    assert len(found["metadata"]["tokenizer.ggml.tokens"]) == 49152
    assert len(found["tensors"]) == 272
    assert {"name": "output_norm.weight", "type": "F32", "shape": [576]}.items() <= {
        t["name"]: t for t in found["tensors"]
    }["output_norm.weight"].items()


def test_inspect_of_a_directory(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers makes the tiny model")
    from safetensors.torch import load_file, save_file

    from tests.tiny_models import save_tiny

    save_tiny(tmp_path, "llama")
    capsys.readouterr()
    lines = inspected(tmp_path, capsys)
    assert lines[1] == "model: one that generate runs, by its metadata and types"
    assert lines[-1].split()[::3] == ["F32", "plain"]
    shards = tmp_path / "model.safetensors"
    tensors = load_file(shards)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert lines[0] == f"{tmp_path}: safetensors, {stored:,} bytes"
    save_file(tensors | {"model.norm.weight": torch.ones(64).to(torch.complex64)}, shards)
    assert "tensor 'model.norm.weight' is C64 of shape [64]" in inspected(tmp_path, capsys)[1]
    assert "name the directory" in inspected(shards, capsys)[1]
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metadata"] == {}
    assert "architecture None is not supported" in found["model"]


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


def test_doctor_says_what_is_absent(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "absent" if name == "triton" else "1")
    why = "the cuda and interpret backends need it"
    assert doctor.report()["advice"] == [f"triton is absent, and {why}: pip install triton"]


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
    assert rows["flash_attention"]["backends"]["cuda"].startswith("triton")
    assert rows["gemm"]["backends"]["cpu"] == "blas"
    assert rows["rms_norm"]["dtypes"] == ["float32", "float16", "bfloat16"]
