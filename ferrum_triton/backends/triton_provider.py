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
