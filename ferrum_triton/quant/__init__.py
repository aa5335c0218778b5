"""Block-quantised weights as GGUF files store them: layouts, decoding, encoding. torch only.

Integers of GPTQ, AWQ and compressed-tensors become such blocks, exactly, and so does what NVFP4 and
MXFP4 are elsewhere. :class:`Fp8Blocks` are
weights in FP8 with a scale for every block of 128 x 128.
"""

from ferrum_triton.quant.encode import quantize_blocks
from ferrum_triton.quant.float4 import load_mxfp4, load_nvfp4
from ferrum_triton.quant.formats import FORMATS, BlockFormat, dequantize_blocks
from ferrum_triton.quant.fp8 import Fp8Blocks
from ferrum_triton.quant.integers import load_awq, load_compressed_tensors, load_gptq
from ferrum_triton.quant.kinds import dequantize_rows, quantize_rows
from ferrum_triton.quant.load import load_quant, load_quant_experts, load_quant_fused
from ferrum_triton.quant.planes import from_planes, to_planes
from ferrum_triton.quant.reordered import Reordered
from ferrum_triton.quant.tensor import FusedTensor, QuantizedTensor

__all__ = [
    "FORMATS",
    "BlockFormat",
    "Fp8Blocks",
    "FusedTensor",
    "QuantizedTensor",
    "Reordered",
    "dequantize_blocks",
    "dequantize_rows",
    "from_planes",
    "load_awq",
    "load_compressed_tensors",
    "load_gptq",
    "load_mxfp4",
    "load_nvfp4",
    "load_quant",
    "load_quant_experts",
    "load_quant_fused",
    "quantize_blocks",
    "quantize_rows",
    "to_planes",
]
