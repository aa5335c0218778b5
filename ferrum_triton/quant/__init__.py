"""Block-quantised weights as GGUF files store them: layouts, decoding, encoding. torch only."""

from ferrum_triton.quant.encode import quantize_blocks
from ferrum_triton.quant.formats import FORMATS, BlockFormat, dequantize_blocks
from ferrum_triton.quant.tensor import QuantizedTensor

__all__ = ["FORMATS", "BlockFormat", "QuantizedTensor", "dequantize_blocks", "quantize_blocks"]
