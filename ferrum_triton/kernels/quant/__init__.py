"""Packed weights. One module a shape of work.

``products`` has the ops of one matrix and chooses their kernels, ``gemv_fused`` those of several,
``add_norm`` those behind a norm, ``open_norm`` those that share one; ``rows`` decodes rows or looks
them up.

Blocks as files store them: ``decode`` reads them; ``gemv`` takes few activations, ``gemm`` many.

Planes (:mod:`ferrum_triton.quant.planes`):

* ``gemv_repacked`` takes one or two tokens, as ``gemv_plan`` says. ``planes`` reads rows,
  ``thread_products`` multiplies by integers, and ``thread_sums`` adds up over threads.
  ``half_groups`` multiplies Q2_K and Q3_K, and ``float_groups`` by float32;
  ``integer_activations`` makes the integers in a launch before.
* ``small_m`` takes three to eight tokens, as ``small_m_config`` says, by the products of
  ``quad_products`` on tensor cores that ``quad_weights`` feeds; so do experts of few pairs.
* ``mma`` takes more, in the steps of ``mma_steps`` on what ``mma_operands`` reads, by pointers or
  ``descriptors``.
* ``plane_rows`` decodes rows.

Tensor cores' activations are laid out by ``activations``; ``fragments`` unpacks their weights, by
what ``ptx`` writes. ``codebooks`` looks codes up, ``matrices`` tells of several in a launch, and
``partials`` adds up what a product left in parts.
"""

from ferrum_triton.kernels.quant import (  # noqa: F401  registers the launchers
    add_norm,
    gemv_fused,
    open_norm,
    products,
    rows,
)
