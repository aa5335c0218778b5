"""Products with weights in FP8 that have a scale for every block of 128 x 128.

The format is that of DeepSeek-V3's and Qwen3's own files. A weight is w[n, k] = code · scale, the
code a float8_e4m3fn and the scale that of its block. Activations become codes too, with a scale for
each token and 128 columns, so that tensor cores multiply codes by codes.
"""

from ferrum_triton.ops.fp8 import codes, experts, product  # noqa: F401  declares the ops
