"""Machine code that the assembler got wrong is refused.

Which arguments it gets wrong, tests of some shapes cannot tell. So every kernel with products of
Hopper's tensor cores is read once, when it was compiled; a file beside it in Triton's cache says
that it was.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

from triton.runtime.cache import get_cache_manager

from ferrum_triton.errors import FerrumError
from ferrum_triton.kernels.compiled import DIRECT_LAUNCH
from ferrum_triton.kernels.sass import instructions, unset_registers

# The Triton whose ptxas is known to write such code. Of others instructions may have other names.
READS = DIRECT_LAUNCH
READ = "ferrum_triton_read"


def refuse_wrong_code(kernel: Any, name: str) -> None:
    """Raise if a kernel that Triton compiled reads registers which nothing sets.

    A Triton that came without a disassembler is believed.

    Raises:
        FerrumError: it does.
    """
    if not READS or "wgmma" not in kernel.asm.get("ptx", ""):
        return
    cache = get_cache_manager(kernel.hash)
    if cache.get_file(READ):
        return
    try:
        wrong = unset_registers(instructions(kernel.asm["cubin"]))
    except (OSError, subprocess.CalledProcessError):
        return
    if wrong:
        raise FerrumError(
            f"{name}: ptxas wrote wrong machine code for these arguments, which reads registers "
            f"that nothing sets ({wrong[0]}), so its results mean nothing. Call it with another "
            'dtype or other sizes, or on the backend "cpu".'
        )
    with contextlib.suppress(OSError):  # of a cache that others write it is read every time
        cache.put(b"", READ)
