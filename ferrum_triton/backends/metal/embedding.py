"""Rows of an embedding table as a shader: a thread an element."""

from torch import Tensor

from ferrum_triton.backends.metal.elementwise import grid
from ferrum_triton.backends.metal.shader import Shader, delivered, result
from ferrum_triton.ops import embedding as ops

EMBEDDING = Shader("embedding", "embedding", "y table ids", "count hidden_size vocab_size")


@ops.embedding_lookup_dev.impl("metal")
def embedding_lookup_dev(table: Tensor, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    vocab_size, hidden_size = table.shape
    y = result(table, (*ids.shape, hidden_size), out)
    if count := y.numel():
        types = {"SCALAR": table.dtype, "ID": ids.dtype}
        buffers = (y, table.contiguous(), ids.contiguous())
        EMBEDDING.launch(types, buffers, (count, hidden_size, vocab_size), **grid(count))
    return delivered(y, out)
