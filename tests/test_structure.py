"""The package's shape: who may import whom, and what importing costs."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import MOST_SKIPPED, wrongly_skipped

PACKAGE = Path(__file__).parent.parent / "ferrum_triton"

# What the modules of each layer may import from the package; a layer may always import itself.
LAYERS = {
    "errors": set(),
    "overlap": set(),
    "contract": {"errors", "overlap"},
    "registry": {"errors", "contract"},
    "testing": set(),
    "types": {"errors"},
    "quant": {"errors"},
    "ops": {"errors", "contract", "registry", "quant"},
    "gluon_emulator": {"errors"},
    "kernels": {"errors", "registry", "quant", "ops", "gluon_emulator"},
    "backends": {"errors", "contract", "registry", "quant", "ops", "kernels"},
    "files": {"errors", "quant"},
    "runtime": {"errors", "contract", "registry", "types", "quant", "ops", "backends"},
    "models": {"errors", "registry", "types", "quant", "ops", "backends", "files", "runtime"},
    "integrations": {"errors", "quant", "ops", "backends"},
    "cli": {"errors", "registry", "quant", "ops", "backends", "files", "models", "runtime"},
}


# Dataclasses whose values are assigned to after they are made.
CHANGING = {
    *("Generation", "Plan", "Report", "Source", "Stats", "TensorFactory"),
    *("_InFlight", "_Sequence"),
}


def modules():
    return [p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem in LAYERS]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = LAYERS[layer] | {layer}
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "ferrum_triton" and rest:
            target = rest.split(".")[0]
            known = target in LAYERS
            assert not known or target in allowed, f"{layer} imports {name}"
        if package == "triton":
            assert layer in ("kernels", "gluon_emulator"), f"{layer} imports triton"


def beside_the_package():
    """Tests, benches and pages."""
    root = PACKAGE.parent
    modules = [*(root / "tests").rglob("*.py"), *(root / "bench").rglob("*.py")]
    pages = [path for folder in ("", "bench", "docs") for path in (root / folder).glob("*.md")]
    return sorted(modules + pages)


@pytest.mark.parametrize(
    "path",
    [*modules(), *beside_the_package()],
    ids=lambda path: str(path.relative_to(PACKAGE.parent)),
)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 500


def test_what_is_constant_is_frozen():
    """A dataclass is frozen where nothing assigns to it: of the others, each is known to change."""
    plain = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(
            "dataclass" in (by := ast.unparse(decorator)) and "frozen=True" not in by
            for decorator in node.decorator_list
        )
    }
    assert plain == CHANGING


def run(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout


def test_import_needs_no_triton_and_probes_no_device():
    out = run(
        """
        import sys
        sys.modules["triton"] = None  # any import of it raises ImportError
        import torch

        def probed(*_, **__):
            raise AssertionError("a device was probed at import")

        torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = probed
        torch.cuda.get_device_properties = torch.backends.mps.is_available = probed
        import ferrum_triton
        x = torch.randn(2, 8)
        print(ferrum_triton.get_backend("cpu").rms_norm(x, torch.ones(8)).shape)
        try:
            ferrum_triton.get_backend("interpret")
        except ferrum_triton.BackendUnavailable as error:
            print(error)
        """
    )
    assert "torch.Size([2, 8])" in out
    assert "pip install triton" in out


def test_import_brings_no_optional_library():
    out = run(
        """
        import sys
        import ferrum_triton
        print([m for m in ("tokenizers", "transformers") if m in sys.modules])
        """
    )
    # Not triton, jinja2 or tqdm: torch may import those itself.
    assert out.strip() == "[]"


def test_the_interpreting_backend_brings_its_kernels():
    """In a process that has imported none of them."""
    out = run(
        """
        import torch
        from ferrum_triton import get_backend
        backend = get_backend("interpret")
        print(backend.rms_norm(torch.full((2, 4), 3.0), torch.ones(4), 0.0).tolist())
        print(backend.provider_of("rms_norm"))
        """
    )
    assert out.splitlines() == ["[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]", "triton"]


def test_products_import_no_tracer():
    """torch._dynamo takes seconds to import, which a first prompt would wait for."""
    out = run(
        """
        import sys
        import torch
        from ferrum_triton import get_backend
        from ferrum_triton.quant import quantize_rows
        backend, a = get_backend("cpu"), torch.randn(3, 32)
        backend.gemm(a, torch.randn(4, 32), out=torch.empty(3, 4))
        for op in (backend.gemv_quant, backend.gemm_quant):
            op(a, quantize_rows(torch.randn(4, 32), "Q4_0"), "Q4_0", out=torch.empty(3, 4))
        print("torch._dynamo" in sys.modules)
        """
    )
    assert out.strip() == "False"


def test_ci_skips_nothing_that_it_could_run():
    absent = ["needs a CUDA device"] * MOST_SKIPPED
    assert wrongly_skipped(absent) == []
    assert "of at most" in wrongly_skipped([*absent, absent[0]])[0]
    assert "needs clang" in wrongly_skipped(["needs clang", absent[0]])[0]
