"""Barriers that a compiled kernel has no use for.

The emulator cannot tell them from those that a short run happens to leave alone.
"""

import re
from collections import defaultdict
from collections.abc import Iterator


def idle_barriers(ttgir: str) -> list[str]:
    """Allocations of barriers, by name, that are initialised and then used by no code.

    Triton takes their memory to be free from there on, and gives it to a buffer. PTX allows no
    other use of a barrier's memory before ``mbarrier.inval``, and a buffer has had the barrier in
    it.

    Args:
        ttgir: what Triton makes of a kernel before LLVM, ``compiled.asm["ttgir"]``.
    """
    found = (re.match(r"(?:(%\w+) = )?(.*)", line.strip()) for line in ttgir.splitlines())
    operations = [each.groups() for each in found if each]
    uses: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for result, operation in operations:
        for name in set(re.findall(r"%\w+", operation)):
            uses[name].append((result, operation))

    def ends(name: str) -> Iterator[str]:
        """What an allocation is used for, itself or an element of it."""
        for result, operation in uses[name]:
            if operation.startswith("ttg.memdesc_index"):
                yield from ends(result)
            else:
                yield operation

    allocated = [name for name, operation in operations if operation.startswith("ttg.local_alloc")]
    return [
        name
        for name in allocated
        if uses[name] and all(end.startswith("ttng.init_barrier") for end in ends(name))
    ]
