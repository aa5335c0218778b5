"""Set-up shared by every test: poisoned memory, hypothesis profiles, the GPU marker."""

import os
import sys

import hypothesis
import pytest
import torch

from tests.watched import watch

# torch fills what it allocates with NaN (or the largest integer), so that a kernel which leaves an
# element unwritten, or reads one it should not, shows.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True

# Reference models are transformers' on the CPU, which would hand their tensors to these packages'
# kernels for GPUs where they are installed.
for package in ("fla", "causal_conv1d"):
    sys.modules[package] = None

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

_settings = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, **_settings)
hypothesis.settings.register_profile("dev", max_examples=20, **_settings)
hypothesis.settings.register_profile("nightly", max_examples=500, **_settings)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser):
    parser.addoption(
        "--every-gpu",
        action="store_true",
        help="compile every bench case for every GPU, and every format in every tile",
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--every-gpu"):
        left_out = [item for item in items if item.get_closest_marker("every_gpu")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("every_gpu")]
    absent = {}
    if not torch.cuda.is_available():
        absent["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if not torch.backends.mps.is_available():
        absent["metal"] = pytest.mark.skip(reason="needs a Mac with Apple silicon")
    for item in items:
        for name, skip in absent.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


# What may be skipped where CI runs, and how often: more is something that CI could have run.
ABSENT_IN_CI = ("needs a CUDA device", "needs a Mac with Apple silicon", "needs two GPUs")
MOST_SKIPPED = 3610


def wrongly_skipped(reasons):
    """What is wrong with a run whose tests were skipped for these reasons, a line each."""
    others = sorted({reason for reason in reasons if reason not in ABSENT_IN_CI})
    found = [
        f"skipped where CI runs: {reason!r}; install it, or leave the case out" for reason in others
    ]
    if len(reasons) > MOST_SKIPPED:
        found.append(f"{len(reasons)} tests are skipped, of at most {MOST_SKIPPED}")
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if "CI" not in os.environ or reporter is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    skipped = reporter.stats.get("skipped", [])
    found = wrongly_skipped([report.longrepr[2].removeprefix("Skipped: ") for report in skipped])
    for line in found:
        reporter.write_line(line, red=True)
    if found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Watch what interpreted kernels read, as soon as something has imported the interpreter."""
    interpreter = sys.modules.get("ferrum_triton.kernels.interpreter")
    if interpreter is not None and not hasattr(interpreter, "watched"):
        interpreter.watched = True
        watch(interpreter)


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
