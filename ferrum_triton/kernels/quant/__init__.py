"""Packed weights. One module a shape of work.

As files store them: ``decode`` reads blocks; ``gemv`` takes few activations, ``gemm`` many, and
``rows`` are looked up or decoded.

Repacked, in planes (:mod:`ferrum_triton.quant.planes`), where ``products`` chooses:

* ``gemv_repacked`` takes one or two tokens, and ``small_m`` three to eight, of one matrix or of
  several in one launch, which is what ``gemv_fused`` asks for;
* ``mma`` takes more, in the steps of ``mma_steps`` on what ``mma_operands`` reads, by pointers or
  ``descriptors``;
* ``plane_rows`` decodes rows.

What threads do: ``planes`` reads rows by ``loads``; ``plane_groups`` and ``integer_groups``
multiply 32 weights by activations that are float32 or integers, which ``integer_activations``
makes, two of them in one of ``words``; ``thread_sums`` adds up. ``fragments`` and ``quad_weights``
unpack for tensor cores, whose activations ``activations`` lays out. ``linear`` adds what follows a
product.
"""

from ferrum_triton.kernels.quant import (  # noqa: F401  registers the launchers
    gemm,
    gemv,
    gemv_fused,
    linear,
    rows,
)
