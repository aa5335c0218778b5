"""What finds uniform registers that are read before anything writes them."""

import pytest

from ferrum_triton.kernels.sass import parse, unset_registers
from tests.test_overwritten_operands import listing

SET = "UMOV UR4, 0x400"


def unset(*lines):
    return [instruction.name for instruction in unset_registers(parse(listing(*lines)))]


def test_code_that_ptxas_wrote():
    """Of the gated delta rule by heads of 24 and values of one: descriptors of a second operand."""
    wrong = (
        "UIADD3 UR11, UR10, 0xc000, URZ",
        "USHF.R.U32.HI UR11, URZ, 0x4, UR11",
        "UIADD3 UR34, UP0, UR34, 0x20, URZ",
        "USGXT.U32 UR44, UR11, 0xe",
        "UIADD3.X UR35, UR35, -0x3ffffff0, URZ, UP0, !UPT",
        "UIADD3 UR38, UP0, UR34, 0x20, URZ",
        "UIADD3.X UR39, UR35, URZ, URZ, UP0, !UPT",
        "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR36].tnspB, R24",
    )
    before = ("UMOV UR10, 0x400", "ULDC.64 UR36, c[0x0][0x210]")
    assert unset(*before, *wrong) == ["UIADD3", "UIADD3.X"]
    right = [line.replace("UR34, UP0, UR34", "UR34, UP0, UR44") for line in wrong]
    right = [line.replace("UR35, UR35", "UR35, URZ") for line in right]
    right = [*right[:2], right[3], right[2], *right[4:]]
    assert unset(*before, *right) == []


@pytest.mark.parametrize(
    "read",
    [
        "IADD3 R2, R3, UR4, RZ",
        "LDS R2, [R3+UR4+0x80]",
        "LDG.E R2, desc[UR4][R2.64]",
        "@P0 ULEA UR8, UR4, UR5, 0x3",
        "UTMALDG.2D [UR4], [UR6]",
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24",
        "HGMMA.64x64x16.F32 R24, R84, gdesc[UR2], R24",
    ],
)
def test_a_read_before_any_write(read):
    others = [f"UMOV UR{i}, URZ" for i in (2, 3, 5, 6, 7)]
    assert unset(*others, read) == [read.removeprefix("@P0 ").split()[0]]
    assert unset(*others, SET, read) == []


@pytest.mark.parametrize(
    "write",
    [
        "ULDC.64 UR4, c[0x0][0x208]",
        "ULDC.64 UR3, c[0x0][0x208]",
        "LDCU.128 UR1, c[0x0][0x380]",
        "UMOV UR4, URZ",
        "UIMAD.WIDE UR4, UR10, 0x2, UR12",
        "LDCU.128 UR4, c[0x0][0x380]",
        "R2UR UR5, R7",
        "S2UR UR5, SR_CTAID.X",
        "VOTEU.ANY UR5, UPT, P0",
        "UISETP.NE.U32.AND UP0, UPT, UR5, URZ, UPT",
        "UIADD3 UR5, UP0, UR10, UR12, URZ",
        "ULOP3.LUT UP0, UR5, UR10, 0x1, URZ, 0xc0, !UPT",
    ],
)
def test_which_registers_a_write_sets(write):
    others = [f"UMOV UR{i}, URZ" for i in range(10, 14)]
    sets = not write.startswith(("ULDC.64 UR3", "LDCU.128 UR1", "UMOV", "UISETP"))
    found = unset(*others, write, "IADD3 R2, R3, UR5, RZ")
    assert ("IADD3" not in found) == sets


def test_any_way_that_sets_it_will_do():
    """Registers are unset where they are on every way: branches, loops, partitions."""
    read = "IADD3 R2, R3, UR4, RZ"
    assert unset("@P0 BRA 0x20", SET, read) == []
    assert unset("BRA.U UP0, 0x20", SET, read) == []
    assert unset("BRA 0x20", SET, read) == ["IADD3"]
    assert unset("BRA 0x20", read, SET, "BRA 0x10") == []  # out of the way
    assert unset("EXIT", read) == []  # where nothing leads
    assert unset("@P0 EXIT", SET, read) == []
    assert unset(SET, "BRX R2 -0x40", read, "EXIT", read) == []  # of a partition
    assert unset("BRX R2 -0x40", read, "EXIT", SET, read) == ["IADD3"]
    assert unset("NOP", read, SET, "@P0 BRA 0x10") == []  # what a loop set the time before
