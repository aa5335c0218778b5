"""The op definitions, one module a family. Importing this package fills ``registry.OPS``."""

from importlib import import_module

FAMILIES = (
    "norm",
    "shadow",
    "elementwise",
    "embedding",
    "linear",
    "open_norm",
    "quant",
    "quant_fused",
    "quant_open_norm",
    "kv_cache",
    "rope",
    "paged_cache",
    "attention",
    "linear_attention",
    "moe",
    "fp8",
    "sampling",
    "advance",
)

for _family in FAMILIES:
    import_module(f"ferrum_triton.ops.{_family}")
