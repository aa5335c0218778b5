"""Kernels for Hopper in Gluon: copies, products and what threads compute, side by side.

Plain Triton has a warp take turns: it waits for tensor cores, then tensor cores wait for it. Here a
program's warps have roles. A producer asks for tiles through tensor maps, as far ahead as there are
buffers (:mod:`.rings`); consumers multiply them and compute on what comes out while the next product
runs. Roles talk through barriers in shared memory alone.

Nothing here is imported where :data:`ferrum_triton.kernels.gluon.TESTED` is False. Each launcher
stands behind one of the plain kernels, which serves whatever this one cannot.
"""
