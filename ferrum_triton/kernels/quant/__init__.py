"""Packed weights. One module a shape of work.

As files store them: ``decode`` reads blocks; ``gemv`` takes few activations, ``gemm`` many, and
``rows`` are looked up or decoded.

In planes (:mod:`ferrum_triton.quant.planes`), where ``plane_products`` chooses:

* ``planes`` reads them by the ``loads`` of a thread, and ``plane_groups`` and ``integer_groups``
  multiply 32 weights by activations that are float32 or integers, which ``int8``, ``int16`` and
  ``integer_activations`` make, four or two of them in one of ``words``;
* ``gemv_planes`` and ``gemv_walk`` take few activations, and ``gemv_fused`` several matrices in one
  launch; ``matrix_parts`` is what their threads take at a time, ``thread_sums`` adds up what they
  have;
* ``fragments`` unpacks for tensor cores, whose activations ``activations`` lays out;
* ``gemv_quads`` takes up to eight activations, what it unpacks being ``quad_weights``;
* ``mma`` takes many, in the steps of ``mma_steps`` on what ``mma_operands`` reads, by pointers or
  ``descriptors``;
* ``plane_rows`` decodes rows.

``linear`` adds what follows a layer's product.
"""

from ferrum_triton.kernels.quant import (  # noqa: F401  registers the launchers
    gemm,
    gemv,
    gemv_fused,
    gemv_planes,
    int8,
    linear,
    rows,
)
