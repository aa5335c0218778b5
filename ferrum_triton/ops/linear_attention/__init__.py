"""Linear attention: gated delta rule, its convolution, its gates."""

from ferrum_triton.ops.linear_attention import (  # noqa: F401  declares the ops
    conv,
    delta,
    gate,
    prepare,
)
