"""Linear attention: gated delta rule, its convolution, its gates."""

from ferrum_triton.kernels.linear_attention import (  # noqa: F401  registers the launchers
    conv,
    delta,
    gate,
    prefill,
    prepare,
)
