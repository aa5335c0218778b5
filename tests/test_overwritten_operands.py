"""What finds registers that are overwritten while tensor cores may still read them."""

import pytest

from ferrum_triton.kernels.sass import overwritten_operands, parse

PRODUCT = "HGMMA.64x64x16.F32 R24, R84, gdesc[UR16], R24, gsb0"
UNCOUNTED = "HGMMA.64x64x16.F32 R24, R84, gdesc[UR16], R24"
COUNTED = "HGMMA.64x64x16.F32 R24, gdesc[UR16], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
OTHER = "HGMMA.64x64x16.F32 R24, R60, gdesc[UR16], R24, gsb0"


def listing(*lines):
    """Lines as a disassembler prints them."""
    return "\n".join(
        f"        /*{16 * i:04x}*/                   {x} ;" for i, x in enumerate(lines)
    )


def overwritten(*lines):
    return [instruction.name for instruction in overwritten_operands(parse(listing(*lines)))]


@pytest.mark.parametrize(
    "write",
    [
        "LOP3.LUT R84, R25.reuse, 0xf000f, R62, 0xea, !PT",
        "@!P0 MOV R87, RZ",
        "LDS.64 R86, [R60+UR4+0xc000]",
        "LDS.64 R83, [R60+UR4+0xc000]",
        "LDSM.16.M88.4 R81, [R82+UR6+0x3000]",
        "LDG.E.128 R84, desc[UR4][R2.64]",
        "IMAD.WIDE R86, R109, 0x2, R98",
        "CS2R R84, SRZ",
        "SHFL.BFLY PT, R85, R2, 0x1, 0x1f",
        "ATOMG.E.ADD.STRONG.GPU PT, R84, desc[UR4][R2.64], R6",
    ],
)
def test_a_write_before_the_wait(write):
    name = write.removeprefix("@!P0 ").split()[0]
    assert overwritten(PRODUCT, write, WAIT) == [name]
    assert overwritten(UNCOUNTED, write, COUNTED, WAIT) == [name]
    assert overwritten(PRODUCT, WAIT, write) == []
    assert overwritten(PRODUCT, OTHER, WAIT_FOR_ALL_BUT_ONE, write, WAIT) == []
    assert overwritten(OTHER, PRODUCT, WAIT_FOR_ALL_BUT_ONE, write, WAIT) == [name]


@pytest.mark.parametrize(
    "harmless",
    [
        "LOP3.LUT R88, R84, 0xf000f, R62, 0xea, !PT",
        "MOV R83, R84",
        "STS.128 [R84], R84",
        "LDGSTS.E.BYPASS.128 [R84+0xc000], desc[UR14][R86.64], !P0",
        "ISETP.GE.AND P0, PT, R84, R85, PT",
        "R2UR UR4, R84",
    ],
)
def test_what_only_reads(harmless):
    assert overwritten(PRODUCT, harmless, WAIT) == []


def test_what_a_loop_left_in_flight():
    write = "MOV R84, RZ"
    assert overwritten(write, PRODUCT, "@P0 BRA 0x0", WAIT) == ["MOV"]
    assert overwritten(write, PRODUCT, WAIT, "@P0 BRA 0x0") == []
    assert overwritten("NOP", WAIT, write, PRODUCT, "@P0 BRA 0x10") == []
    assert overwritten("NOP", write, WAIT, PRODUCT, "@P0 BRA 0x20", write) == ["MOV"]
