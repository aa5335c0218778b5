"""Products on tensor cores whose first operand a loop computes in registers."""

import triton
import triton.language as tl


@triton.jit
def settled(x, PTX: tl.constexpr):
    """x, float32, the result of such a product, after no instruction at all.

    A sum that a loop carries from product to product and nothing else reads is cut along K by the
    compiler, to be overlapped with what computes the next operands. ptxas before CUDA 13.3 lets
    those overwrite registers that tensor cores have yet to read
    (:func:`ferrum_triton.kernels.sass.overwritten_operands`), or else waits after every part. Read
    by something, a product stays whole and is waited for once.

    Args:
        PTX: whether there is such a compiler; elsewhere nothing is done.
    """
    if PTX:
        x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x
