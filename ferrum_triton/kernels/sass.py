"""An NVIDIA GPU's machine code: instructions, spills, registers overwritten or never set."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton


class Instruction(NamedTuple):
    """One line of machine code.

    Attributes:
        address: bytes from the kernel's start.
        name: with its modifiers, such as ``"LDG.E.128"``; without a predicate.
        operands: in their order.
        guarded: whether a predicate decides if it is done.
    """

    address: int
    name: str
    operands: list[str]
    guarded: bool = False

    def __str__(self) -> str:
        return f"{self.address:#06x} {self.name} {', '.join(self.operands)}"


_LINE = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?"
    r"(?P<name>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
_REGISTER = re.compile(r"R(\d+)")
_UNIFORM = re.compile(r"UR(\d+)")
_PRODUCT = re.compile(r"[HIQ]GMMA\.")
_ANY_PRODUCT = re.compile(r"[HIQ]G?MMA\.")

# What writes no register of a thread though one may be its first operand, and what writes a
# predicate before its register.
_NO_RESULT = ("ST", "RED", "LDGSTS", "BAR", "BRA")
_PREDICATE_FIRST = ("SHFL", "ATOM", "MATCH")
# What writes a register of all threads together, and what goes on where a register says.
_WRITES_UNIFORM = ("U", "R2UR", "S2UR", "CS2UR", "LDCU", "VOTEU", "REDUX", "CREDUX")
_JUMPS = ("BRX", "JMX", "CALL", "RET", "JMP")
# A warp's part of a matrix of 64 x 16 float16, in four registers.
_OPERAND_REGISTERS = 4


def instructions(cubin: bytes) -> list[Instruction]:
    """The machine code of a compiled kernel."""
    return parse(cuobjdump(cubin, "-sass"))


def parse(listing: str) -> list[Instruction]:
    """The instructions of a disassembler's listing."""
    return [
        Instruction(
            int(line["address"], 16),
            line["name"],
            [operand.strip() for operand in line["operands"].split(",") if operand.strip()],
            line["guard"] is not None,
        )
        for line in _LINE.finditer(listing)
    ]


def cuobjdump(cubin: bytes, option: str) -> str:
    """What the tool prints of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Usage(NamedTuple):
    """What a thread of a kernel takes.

    Attributes:
        registers: how many.
        spilled: bytes; none where they are few and no loop of tensor cores' products touches any.
    """

    registers: int
    spilled: int


# Spilled bytes that are few. Of the kernels in Gluon that bench cases launch, packed products by
# 256 tokens spill most beside loops, 184 (``cuobjdump --dump-resource-usage``, sm_90, 56db563).
FEW_BYTES = 192


def usage(cubin: bytes) -> Usage:
    """What a thread of a compiled kernel takes.

    Few registers that are spilled before a loop of products and filled after it cost next to
    nothing. Heads of 192 by 128 take 1,091 us in tiles that spill 32 bytes so, and 1,637 in tiles
    that spill none (``python -m bench.tune flash_attention --case d192v128 --path hopper``, H200,
    ece2be4). Many do cost: :func:`~ferrum_triton.kernels.hopper.packed_sums.departs_early` has the
    figures.
    """
    told = re.search(r"REG:(\d+) STACK:(\d+)", cuobjdump(cubin, "--dump-resource-usage"))
    registers, spilled = map(int, told.groups())
    if 0 < spilled <= FEW_BYTES and spills_beside_loops(instructions(cubin)):
        spilled = 0
    return Usage(registers, spilled)


def spills_beside_loops(code: list[Instruction]) -> bool:
    """Whether there are loops of tensor cores' products, and no spill in any of the innermost.

    A loop ends with a branch that is guarded; others lead back from what was put out of its way.
    """
    products = [each.address for each in code if _ANY_PRODUCT.match(each.name)]
    loops = []
    for instruction in code:
        target = _branch_target(instruction)
        if instruction.guarded and target is not None and target <= instruction.address:
            loops.append(range(target, instruction.address + 1))
    loops = [loop for loop in loops if any(address in loop for address in products)]
    inner = [
        loop
        for loop in loops
        if not any(each != loop and each[0] in loop and each[-1] in loop for each in loops)
    ]
    spilled = [each.address for each in code if each.name.startswith(("LDL", "STL"))]
    return bool(inner) and not any(address in loop for address in spilled for loop in inner)


class _InFlight(NamedTuple):
    """Registers that tensor cores have yet to read, of each group of products and of one begun."""

    groups: tuple[frozenset[int], ...] = ()
    begun: frozenset[int] = frozenset()

    def registers(self) -> frozenset[int]:
        return self.begun.union(*self.groups)


def overwritten_operands(code: list[Instruction]) -> list[Instruction]:
    """Instructions that write a register which a product in flight may still read.

    Hopper's products (``wgmma``) run on while their thread does, and read an operand in registers
    until a wait for them returns. ptxas before CUDA 13.3 gives such registers away at once
    (https://github.com/triton-lang/triton/issues/9433), so that a product may be of other numbers.

    Every loop is followed twice: what its end left in flight meets its beginning.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}
    found: dict[int, Instruction] = {}
    state, done = _InFlight(), 0
    for i, instruction in enumerate(code):
        target = _branch_target(instruction)
        if target is None or target > instruction.address or target not in index:
            continue
        state = _follow(code[done : i + 1], state, found)
        _follow(code[index[target] : i + 1], state, found)
        done = i + 1
    _follow(code[done:], state, found)
    return [found[address] for address in sorted(found)]


def _follow(code: list[Instruction], state: _InFlight, found: dict[int, Instruction]) -> _InFlight:
    """What is in flight after ``code``; its writes to registers in flight go to ``found``."""
    groups, begun = state
    for instruction in code:
        name, operands = instruction.name, instruction.operands
        if _PRODUCT.match(name):
            # Result, first operand, second operand (of shared memory), sum, and what counts them.
            if first := _REGISTER.match(operands[1]):
                begun |= _registers(int(first[1]), _OPERAND_REGISTERS)
            if "gsb0" in operands:
                groups, begun = (*groups, begun), frozenset()
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(operands[1], 16)
            groups = groups[max(len(groups) - left, 0) :]
        elif _results(instruction) & _InFlight(groups, begun).registers():
            found[instruction.address] = instruction
    return _InFlight(groups, begun)


def unset_registers(code: list[Instruction]) -> list[Instruction]:
    """Instructions that read a uniform register which nothing has written on any way to them.

    ptxas of CUDA 12.8 writes such code for descriptors of products that stand in a loop. Those
    products then read their operand from wrong places, all but its first 16 rows.
    ``tests/test_machine_code.py`` has a call of which it does, and its refusal.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}
    # Registers that are written where a branch leads to, and where a register says what is next.
    arriving: dict[int | None, set[int]] = {}
    while True:
        before = {at: set(registers) for at, registers in arriving.items()}
        found: list[Instruction] = []
        written: set[int] | None = set()  # None where nothing leads
        for i, instruction in enumerate(code):
            if i in arriving:
                written = arriving[i] | (written or set())
            if written is None:
                continue
            if _uniform_operands(instruction) - written:
                found.append(instruction)
            written = written | _uniform_results(instruction)
            target = _branch_target(instruction)
            if target in index:
                arriving.setdefault(index[target], set()).update(written)
            elif instruction.name.startswith(_JUMPS):
                arriving.setdefault(None, set()).update(written)
            if _ends_here(instruction):
                written = arriving.get(None)
        if arriving == before:
            return found


def _ends_here(instruction: Instruction) -> bool:
    """Whether what lies behind an instruction does not follow it."""
    if instruction.guarded:
        return False
    # A branch may have a condition among its operands.
    is_branch = instruction.name.startswith("BRA") and len(instruction.operands) == 1
    return is_branch or instruction.name.startswith(("EXIT", *_JUMPS))


def _uniform_results(instruction: Instruction) -> set[int]:
    """Uniform registers that an instruction writes."""
    name = instruction.name
    if not name.startswith(_WRITES_UNIFORM):
        return set()
    # A predicate may stand before the register.
    first = next(filter(None, map(_UNIFORM.fullmatch, instruction.operands[:2])), None)
    if first is None:
        return set()
    count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    return set(_registers(int(first[1]), count))


def _uniform_operands(instruction: Instruction) -> set[int]:
    """Uniform registers that an instruction reads; of several that follow each other the first.

    Of descriptors all: of a product's first operand and then of its second, unless the first lies
    in registers.
    """
    operands = list(instruction.operands)
    if _uniform_results(instruction):
        operands.remove(next(filter(_UNIFORM.fullmatch, operands)))
    if described := re.search(r"gdesc\[UR(\d+)\]", " ".join(operands)):
        in_registers = _REGISTER.match(operands[1]) is not None
        return {int(described[1]) + i for i in range(2 if in_registers else 0, 4)}
    return {int(number) for each in operands for number in _UNIFORM.findall(each)}


def _branch_target(instruction: Instruction) -> int | None:
    if not instruction.name.startswith("BRA"):
        return None
    address = re.fullmatch(r"0x([0-9a-f]+)", instruction.operands[-1])
    return int(address[1], 16) if address else None


def _results(instruction: Instruction) -> frozenset[int]:
    """Registers an instruction writes."""
    name, operands = instruction.name, instruction.operands
    if name.startswith(_NO_RESULT):
        return frozenset()
    candidates = operands[: 2 if name.startswith(_PREDICATE_FIRST) else 1]
    first = next(filter(None, map(_REGISTER.match, candidates)), None)
    if first is None:
        return frozenset()
    if ".128" in name or re.match(r"LDSM.*\.4$|[HI]MMA\.", name):
        count = 4
    elif ".64" in name or re.match(r"LDSM.*\.2$|IMAD\.WIDE|CS2R$|D(ADD|MUL|FMA)", name):
        count = 2
    else:
        count = 1
    return _registers(int(first[1]), count)


def _registers(first: int, count: int) -> frozenset[int]:
    return frozenset(range(first, first + count))
