"""The ``"triton"`` provider: importing this package registers every kernel's launcher."""

from importlib import import_module

from ferrum_triton.ops import FAMILIES

# All families of packed weights are in the package ``quant``.
for _family in FAMILIES:
    if not _family.startswith("quant_"):
        import_module(f"ferrum_triton.kernels.{_family}")
# Ops of the families norm and sampling, in files of their own.
for _module in ("softmax", "sample_rows"):
    import_module(f"ferrum_triton.kernels.{_module}")
