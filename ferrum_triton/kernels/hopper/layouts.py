"""How products of a warpgroup lie in the registers of its 128 threads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def sums_layout(columns: int, bits: int = 16) -> gl.NVMMADistributedLayout:
    """Sums of 64 rows, of operands of ``bits``: an instruction takes 256 bits of K."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // bits]
    )


@gluon.constexpr_function
def operand_layout(columns: int) -> gl.DotOperandLayout:
    """A first operand of 16 bits that comes from registers, of a product with such sums."""
    return gl.DotOperandLayout(operand_index=0, parent=sums_layout(columns), k_width=2)
