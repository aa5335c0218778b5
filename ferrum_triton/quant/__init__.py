"""Block-quantised weights as GGUF files store them: layouts, decoding, encoding. torch only."""

from ferrum_triton.quant.encode import quantize_blocks
from ferrum_triton.quant.formats import FORMATS, BlockFormat, dequantize_blocks
from ferrum_triton.quant.load import load_quant, load_quant_experts, load_quant_fused
from ferrum_triton.quant.tensor import FusedTensor, QuantizedTensor

__all__ = [
    "FORMATS",
    "BlockFormat",
    "FusedTensor",
    "QuantizedTensor",
    "dequantize_blocks",
    "load_quant",
    "load_quant_experts",
    "load_quant_fused",
    "quantize_blocks",
]
