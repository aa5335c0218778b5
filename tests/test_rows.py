"""Tensors of any strides seen as rows."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from ferrum_triton import get_backend
from ferrum_triton.kernels.jit import processors
from ferrum_triton.kernels.rows import group_size, group_stride, row_views, tokens_per_program
from ferrum_triton.testing import assert_close

SIZES = st.integers(1, 3)


@st.composite
def laid_out(draw, shape):
    """Different numbers in some order of the leading dimensions, with gaps in some of them."""
    order = draw(st.permutations(range(len(shape) - 1)))
    gaps = [draw(st.integers(0, 1)) for _ in shape]
    memory = torch.arange(
        torch.tensor([size + gap for size, gap in zip(shape, gaps, strict=True)]).prod()
    )
    memory = memory.view([shape[dim] + gaps[dim] for dim in order] + [shape[-1] + gaps[-1]])
    back = [order.index(dim) for dim in range(len(order))]
    tensor = memory.permute([*back, len(order)])
    return tensor[tuple(slice(0, size) for size in shape)]


def starts_of_rows(view):
    """Where the rows of a view start, as kernels compute it."""
    num_rows = view.shape[:-1].numel()
    size = group_size(view) or num_rows
    for i in range(num_rows):
        group_offset = i // size * (group_stride(view) or 0)
        yield view.storage_offset() + group_offset + i % size * view.stride(-2)


@given(data=st.data(), leading=st.lists(SIZES, max_size=4))
def test_views_are_the_rows_in_order(data, leading):
    """Every row once, the same ones of every tensor, with strides that a kernel can follow."""
    x = data.draw(laid_out([*leading, 4]))
    y = data.draw(laid_out([*leading, 2]))
    pairs = []
    for views in row_views(y, x):
        y_rows, x_rows = (
            [v.as_strided(v.shape[-1:], (1,), start).tolist() for start in starts_of_rows(v)]
            for v in views
        )
        pairs += zip(map(tuple, y_rows), map(tuple, x_rows), strict=True)
    want = zip(y.reshape(-1, 2).tolist(), x.reshape(-1, 4).tolist(), strict=True)
    assert sorted(pairs) == sorted((tuple(a), tuple(b)) for a, b in want)


@given(
    tokens=st.integers(0, 70_000), heads=st.integers(1, 64), block=st.sampled_from((16, 128, 4096))
)
def test_tiles_of_tokens_fill_the_device_first(tokens, heads, block):
    """As many tokens as leave four programs a processor, or as make a tile of 2048 elements."""
    device = torch.device("cpu")
    size = tokens_per_program(tokens, heads, block, device)
    assert size & (size - 1) == 0 and (size == 1 or size * block <= 2048)
    if size > 1:
        assert tokens * heads > 2 * processors(device) * size
    if 2 * size * block <= 2048:
        assert tokens * heads < 8 * processors(device) * size


def test_one_launch_for_a_slice_of_heads_and_for_what_collapses():
    heads = torch.zeros(5, 8, 16)
    for x in (heads, heads[:, :8, :8], heads[:, :3], heads.transpose(0, 1), heads[:, :1]):
        assert len(row_views(torch.empty(x.shape), x)) == 1
    (views,) = row_views(torch.empty(5, 3, 16), heads[:, :3])
    assert [v.shape for v in views] == [(5, 3, 16)] * 2
    (views,) = row_views(heads, heads[:, :, :16])
    assert [v.shape for v in views] == [(40, 16)] * 2


def test_three_strides_take_a_launch_for_each_index_of_the_shortest():
    x = torch.randn(5, 2, 6, 16)[:, :, :3].transpose(1, 2)
    assert len(row_views(x)) == 2
    weight = torch.randn(16)
    interpret, cpu = get_backend("interpret"), get_backend("cpu")
    assert_close(interpret.rms_norm(x, weight), cpu.rms_norm(x, weight))
