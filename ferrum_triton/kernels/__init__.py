"""The ``"triton"`` provider: importing this package registers every kernel's launcher."""

from importlib import import_module

from ferrum_triton.ops import FAMILIES

# Dense products are cuBLAS's, and all families of packed weights in the package ``quant``.
for _family in FAMILIES:
    if _family != "linear" and not _family.startswith("quant_"):
        import_module(f"ferrum_triton.kernels.{_family}")
# An op of the family norm, in a file of its own.
import_module("ferrum_triton.kernels.softmax")
