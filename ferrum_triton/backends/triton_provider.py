"""Importing the kernels: the one place that reports a missing triton."""

from importlib import import_module

from ferrum_triton.errors import BackendUnavailable


def load_kernels(backend: str) -> None:
    """Import every kernel module, which registers the ``"triton"`` provider.

    Raises:
        BackendUnavailable: triton is not installed.
    """
    try:
        import_module("triton")
    except ImportError as error:
        raise BackendUnavailable(
            f"backend {backend!r} needs triton>=3.6 (pip install triton); "
            "get_backend('cpu') does not."
        ) from error
    import_module("ferrum_triton.kernels")


def ops_by_gluon() -> set[str]:
    """Ops for which tables of this machine's GPU ask for kernels in Gluon.

    The kernels have to be loaded before.
    """
    import torch

    from ferrum_triton.kernels.gpu import gpu_of
    from ferrum_triton.kernels.hopper_config import is_gluon
    from ferrum_triton.kernels.tuning import TUNABLES

    if not torch.cuda.is_available():
        return set()
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    return {
        tunable.op
        for tunable in TUNABLES.values()
        for row in tunable.rows(gpu, with_users=True)
        if is_gluon(row.config)
    }
