"""Set-up shared by every test: poisoned memory, hypothesis profiles, the GPU marker."""

import os
import sys

import hypothesis
import pytest
import torch

# torch fills what it allocates with NaN (or the largest integer), so that a kernel which leaves an
# element unwritten, or reads one it should not, shows.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

_settings = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, **_settings)
hypothesis.settings.register_profile("dev", max_examples=20, **_settings)
hypothesis.settings.register_profile("nightly", max_examples=500, **_settings)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items):
    absent = {}
    if not torch.cuda.is_available():
        absent["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if not torch.backends.mps.is_available():
        absent["metal"] = pytest.mark.skip(reason="needs a Mac with Apple silicon")
    for item in items:
        for name, skip in absent.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


@pytest.fixture
def monkeypatch(monkeypatch):
    """pytest's; what it replaces may be what launches were chosen by, so replays are forgotten."""
    replace = monkeypatch.setattr

    def forget():
        jit = sys.modules.get("ferrum_triton.kernels.jit")
        if jit is not None:
            jit.forget_replays()

    def setattr(*args, **kwargs):
        replace(*args, **kwargs)
        forget()

    monkeypatch.setattr = setattr
    yield monkeypatch
    monkeypatch.undo()
    forget()


@pytest.fixture
def interpreted(monkeypatch):
    """Names of the kernels that the test interprets."""
    from ferrum_triton.kernels import interpreter  # triton, which a Mac has not

    names = set()
    original = interpreter.run_raw

    def note(kernel, *args):
        names.add(kernel.fn.__name__)
        return original(kernel, *args)

    monkeypatch.setattr(interpreter, "run_raw", note)
    return names
