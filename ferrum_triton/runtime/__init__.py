"""What an engine needs beside the ops.

:mod:`context` (device, stream), :mod:`timer`, :mod:`buffers` (flat tensors from host numbers),
:mod:`kv_cache` (contiguous and paged), :mod:`graph` (captured decode steps), :mod:`collective`,
:mod:`expert_parallel` (experts over ranks), and a request's :mod:`sampling`. docs/runtime.md shows
their use.
"""
