"""Kernels for Hopper in Gluon: copies, products and what threads compute, side by side.

Plain Triton has a warp take turns: it waits for tensor cores, then tensor cores wait for it. Here
a program's warps have roles. A producer asks for tiles through tensor maps, as far ahead as there
are buffers (:mod:`.rings`); consumers multiply them, and compute on what comes out while the next
product runs. Roles talk through barriers in shared memory alone.

Versions of Triton that were not tested never import this room
(:data:`ferrum_triton.kernels.hopper_config.TESTED`). Each launcher stands behind a plain kernel,
which serves whatever this one cannot.
"""
