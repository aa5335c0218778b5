"""Activations in the orders that products take, by the launch that only arranges."""

import itertools

import pytest
import torch

from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant import activations as arranging
from ferrum_triton.kernels.quant.activations import (
    GROUP,
    Order,
    Programs,
    arrange,
    block_and_warps,
    programs_of,
    takes_whole_rows,
)
from ferrum_triton.kernels.quant.products import product
from ferrum_triton.kernels.quant.small_m import small_m_order
from ferrum_triton.quant.planes import PLANE_FORMATS
from tests.compiling import compiled


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """On the CPU kernels are interpreted."""
    return request.param


def test_activations_lie_as_the_fragments_take_them(device):
    """Of 256 elements a thread's 64, of which 16 at a time are two loads of eight."""
    a = torch.arange(512, device=device).float().repeat(3, 1) / 512
    a[1] *= 2
    x, sums, factor, tickets = arrange(a.half(), Order(32, interleave=8))
    assert tickets is None  # products of few tokens never split K
    pieces = x.view(2, 4, 2, 8, 4, 8)[:, :, :, :3]  # block, 16 weights, half, token, thread, pair
    got = pieces.float().permute(3, 0, 4, 1, 2, 5).reshape(3, -1) * factor[:3, None]
    order = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7], device=device)
    want = a.view(3, -1, 8)[:, :, order].flatten(1)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    words = sums.view(2, 8, 32)[:, :3].float().transpose(0, 1).reshape(3, -1) * factor[:3, None]
    torch.testing.assert_close(words, a.view(3, -1, 8).sum(-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_arranging_clears_the_tickets_of_the_product_behind_it(num_tokens, monkeypatch):
    """Whatever lay in their memory."""
    room_for = arranging.room_for

    def used_room(*args, **options):
        room = room_for(*args, **options)
        room.tickets.fill_(7)
        return room

    monkeypatch.setattr(arranging, "room_for", used_room)
    assert not arrange(torch.randn(num_tokens, 256), Order(16)).tickets.any()


# Of few tokens that small_m takes, of two groups of them, and of more than there are processors.
@pytest.mark.parametrize(
    "order, k",
    [
        *itertools.product([small_m_order(5), Order(32, halves=4, sums=GROUP)], [8480, 16384]),
        (small_m_order(16), 480),
        (small_m_order(16), 4096),
    ],
)
def test_rows_arranged_without_a_loop_have_the_same_bits(order, k, monkeypatch):
    room_for, a = arranging.room_for, torch.randn(5, k).bfloat16()

    def clean_room(*args, **options):
        room = room_for(*args, **options)
        for part in (room.x, room.sums):
            part.fill_(0)
        return room

    monkeypatch.setattr(arranging, "room_for", clean_room)
    with record_launches() as launches:
        whole = arrange(a, order)
        looped_programs = Programs(*block_and_warps(k), False)
        monkeypatch.setattr(arranging, "programs_of", lambda *shape: looped_programs)
        looped = arrange(a, order)
    assert [launch.meta["WHOLE"] for launch in launches] == [True, False]
    assert torch.equal(whole.factor[:5], looped.factor[:5])
    assert torch.equal(whole.x, looped.x) and torch.equal(whole.sums, looped.sums)


def test_which_rows_are_arranged_without_a_loop():
    few, many = small_m_order(8), Order(32, halves=4, sums=0)
    assert [m for m in range(1, 9) if takes_whole_rows(m, 14336, few, 132)] == [5, 6, 7, 8]
    assert not takes_whole_rows(16, 14336, small_m_order(16), 132)
    assert takes_whole_rows(133, 14336, many, 132) and not takes_whole_rows(132, 14336, many, 132)
    lengths = 4096, 8192, 8448, 16384, 16640
    assert [k for k in lengths if takes_whole_rows(8, k, few, 132)] == [8448, 16384]
    of_sixteen = [programs_of(9, k, small_m_order(9), 132) for k in (1024, *lengths)]
    assert [each.is_whole for each in of_sixteen] == [True, True, True, False, False, False]
    assert [each.warps for each in of_sixteen] == [2, 4, 4, 16, 16, 16]


def test_two_programs_that_arrange_without_a_loop_fit_an_sm():
    row_bytes, registers = PLANE_FORMATS["Q4_K:planes"].row_bytes(14336), []
    planes = torch.empty(4096, row_bytes, dtype=torch.uint8, device="meta")
    for num_tokens in (128, 256):
        a = torch.empty(num_tokens, 14336, dtype=torch.bfloat16, device="meta")
        with record_launches((9, 0)) as launches:
            product(a, planes, "Q4_K:planes")
        registers.append(compiled(launches[0]).registers)
        assert launches[0].meta["num_warps"] == 16
    looped, whole = registers
    assert 2 * 512 * whole <= 65536 < 2 * 512 * looped
