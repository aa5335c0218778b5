"""What tells spills that a loop of tensor cores' products pays for from those that it does not."""

import pytest

from ferrum_triton.kernels import sass
from ferrum_triton.kernels.sass import parse, spills_beside_loops, usage
from tests.test_overwritten_operands import listing

PRODUCT = "HGMMA.64x64x16.F32 R24, gdesc[UR16], R24, gsb0"
OF_A_WARP = "HMMA.16816.F32 R4, R8, R12, R4"
STORE, LOAD = "STL [R1+0x8], R0", "LDL R154, [R1+0x8]"


def with_loops(*lines):
    """A listing of lines, of which ``loop n`` leads back to line n, where a predicate says so."""
    return listing(
        *(f"@!P0 BRA {16 * int(x.split()[1]):#x}" if x.startswith("loop") else x for x in lines)
    )


def beside(*lines):
    return spills_beside_loops(parse(with_loops(*lines)))


def test_before_and_after_a_loop():
    assert beside(STORE, PRODUCT, "loop 1", LOAD)
    assert beside(STORE, OF_A_WARP, "loop 1", LOAD)
    assert beside(STORE, PRODUCT, "loop 1", LOAD, "loop 0")


@pytest.mark.parametrize("spill", [STORE, LOAD])
def test_within_a_loop(spill):
    assert not beside(PRODUCT, spill, "loop 0")
    assert not beside(OF_A_WARP, spill, "loop 0")
    assert not beside(spill, PRODUCT, "loop 0", "loop 0")
    assert not beside(STORE, PRODUCT, "loop 1", LOAD, PRODUCT, spill, "loop 4", "loop 0")


def test_a_wait_within_a_loop_is_no_loop_of_products():
    assert not beside(PRODUCT, "SYNCS R0", "loop 1", LOAD, "loop 0")


def test_without_a_loop_of_products():
    assert not beside(STORE, PRODUCT, LOAD)
    assert not beside(PRODUCT, STORE, "IADD R1, R2", "loop 2", LOAD)


def test_code_out_of_the_way_leads_back_to_a_loop_and_is_none():
    assert beside(STORE, PRODUCT, "loop 1", LOAD, "EXIT", LOAD, "BRA 0x10")


@pytest.mark.parametrize(
    ("lines", "stack", "counted"),
    [
        ((STORE, PRODUCT, "loop 1", LOAD), 32, 0),
        ((PRODUCT, STORE, LOAD, "loop 0"), 32, 32),
        ((STORE, PRODUCT, LOAD), 8, 8),
        ((STORE, PRODUCT, "loop 1", LOAD), 192, 0),
        ((STORE, PRODUCT, "loop 1", LOAD), 200, 200),
        ((PRODUCT, "loop 0"), 0, 0),
    ],
)
def test_bytes_that_count(lines, stack, counted, monkeypatch):
    said = {"--dump-resource-usage": f"REG:168 STACK:{stack} SHARED:0", "-sass": with_loops(*lines)}
    monkeypatch.setattr(sass, "cuobjdump", lambda cubin, option: said[option])
    assert usage(b"") == (168, counted)
