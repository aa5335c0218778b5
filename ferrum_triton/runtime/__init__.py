"""What an engine needs beside the ops.

:mod:`context` (device, stream), :mod:`timer`, :mod:`buffers` (flat tensors from host numbers),
:mod:`kv_cache` (contiguous and paged), :mod:`graph` (captured decode steps), :mod:`collective`, and
the command line's own :mod:`sampling` and :mod:`generation` loop. docs/runtime.md shows their use.
"""
