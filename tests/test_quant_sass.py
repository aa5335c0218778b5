"""What products with weights in planes are to an H200: its own instructions, read without one."""

import pytest
import torch

from ferrum_triton.kernels.gpu import gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.gemv_config import gemv
from ferrum_triton.kernels.quant.mma_config import mma_heuristic
from ferrum_triton.kernels.quant.products import mma, product, products
from ferrum_triton.kernels.sass import instructions
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import PLANE_FORMATS
from tests.compiling import compiled, in_turns

KINDS = pytest.mark.parametrize("kind", PLANE_FORMATS)
N, K = 4096, 4096
ROWS, WARPS = 4, 2


def planes_of(kind):
    row_bytes = PLANE_FORMATS[kind].row_bytes(K)
    return torch.empty(N, row_bytes, dtype=torch.uint8, device="meta")


def machine_code(launches):
    """The last launch's instructions; none of them may take registers to memory."""
    cubin = compiled(launches[-1]).asm["cubin"]
    code = [instruction.name for instruction in instructions(cubin)]
    assert not [name for name in code if name.startswith(("LDL", "STL"))]
    return code


def count(code, prefix):
    return sum(name.startswith(prefix) for name in code)


@KINDS
def test_few_activations(kind):
    """16-byte loads of weights, and conversions of scales at most: none for each weight."""
    a = torch.empty(1, K, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)) as launches, products.forced(gemv(ROWS, WARPS)):
        product(a, planes_of(kind), kind)
    code = machine_code(launches)
    # A short row of Q2_K has more threads than 16 bytes each would leave.
    wide = "LDG.E.EF.64" if file_kind(kind) == "Q2_K" else "LDG.E.EF.128"
    per_group = {"Q8_0": 2}.get(file_kind(kind), 1)
    assert count(code, wide) == ROWS * per_group
    # A thread takes 32 or 64 weights of each row at a time, which have up to four sub-scales.
    conversions = count(code, "I2F")
    assert conversions <= ROWS * 5 + 8
    # Q2_K's minimums are bytes of a word.
    assert count(code, "IDP.4A") <= ROWS
    assert count(code, "IDP.2A") >= ROWS * 16  # two products an instruction
    # Activations have a sign, as weights may have; what multiplies minimums has none.
    dots = {name for name in code if name.startswith("IDP")}
    unsigned = {"IDP.2A.LO.S16.U8", "IDP.4A.U8.U8"} if file_kind(kind) == "Q2_K" else set()
    assert dots == {"IDP.2A.LO.S16.S8", "IDP.2A.HI.S16.S8", *unsigned}


@pytest.mark.parametrize(("kind", "num_tokens"), in_turns(PLANE_FORMATS, [(8,), (64,)]))
def test_many_activations(kind, num_tokens):
    """Wide copies; tensor cores take what words become in registers; no weight is converted."""
    a = torch.empty(num_tokens, K, dtype=torch.bfloat16, device="meta")
    with record_launches((9, 0)) as launches:
        config = mma_heuristic(gpu_of_capability((9, 0)), kind, num_tokens, N, K)
        with products.forced(mma(config._replace(splits=1))):
            product(a, planes_of(kind), kind)
    code = machine_code(launches)
    assert count(code, "HMMA" if config.tokens == 8 else "HGMMA")
    assert count(code, "UTMALDG" if config.use_tma else "LDGSTS.E.BYPASS.128")
    assert count(code, "I2F") <= 1  # of the division that finds a program's tile
