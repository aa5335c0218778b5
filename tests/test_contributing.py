"""The example in CONTRIBUTING works as printed, and the harness picks the new op up."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PREAMBLE = """
import torch
import triton
import triton.language as tl
from torch import Tensor
from ferrum_triton.kernels.elementwise import BLOCK, row_and_columns
from ferrum_triton.kernels.jit import kernel
from ferrum_triton.kernels.rows import as_rows, cdiv
from ferrum_triton.ops.precision import widen
from ferrum_triton.registry import Case, op
"""


def snippets():
    return re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)


# Declares the op before tests are collected. What fails is enough to know: the least example that
# does takes a while to find.
PLUGIN = """
import hypothesis
import new_op

def pytest_collection():
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("any", hypothesis.settings.default, phases=phases)
    hypothesis.settings.load_profile("any")
"""


def run_harness(tmp_path, source, files, *options):
    """Run files of tests in a process in which ``source`` has declared its op first."""
    (tmp_path / "new_op.py").write_text(source)
    (tmp_path / "plugin_for_new_op.py").write_text(PLUGIN)
    tests = [f"{ROOT}/tests/{file}.py" for file in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin_for_new_op", "-p", "no:xdist"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-k", "relu_squared", *options, *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # As CI runs them: the same draws each time.
        env={
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "CI": "1",
        },
    )


def declared():
    declaration, launcher = snippets()
    # In the tree the launcher is in another file and names the op through its module.
    return PREAMBLE + declaration + launcher.replace("ops.relu_squared", "relu_squared")


def test_example_passes_the_whole_harness(tmp_path):
    result = run_harness(tmp_path, declared(), ("test_ops", "test_kernels_compile"))
    assert result.returncode == 0, result.stdout + result.stderr
    passed = int(re.search(r"(\d+) passed", result.stdout)[1])
    assert passed >= 14, result.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("x < 0.0, 0.0", "x < 0.1, 0.0"),  # another function
        ("mask=mask)\n\n", "mask=col <= num_cols)\n\n"),  # writes past the row
        ("row * stride_x_row", "row * num_cols"),  # forgets the stride
        ("x_ptr + row", "x_ptr + row.to(tl.int32)"),
    ],
)
def test_harness_catches_a_wrong_kernel(tmp_path, right, wrong):
    source = declared()
    assert right in source
    result = run_harness(tmp_path, source.replace(right, wrong), ("test_ops",), "-x")
    # A test fails, or the process dies of reading far outside its memory.
    assert result.returncode in (1, -signal.SIGSEGV), result.stdout + result.stderr
