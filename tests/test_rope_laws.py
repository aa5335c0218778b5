"""Rotary embedding as rotation, and the tables against an independent implementation."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.heads import head_tile
from ferrum_triton.models.config import RopeConfig
from ferrum_triton.models.rope import rope_tables
from ferrum_triton.ops import rope_tables as schemes
from ferrum_triton.ops.rope import NORM_ROPE, ROPE, ROPE_INTERLEAVED
from tests.harness import BACKENDS

on_backends = pytest.mark.parametrize("backend_name", BACKENDS)


def rotate(backend, x, cos, sin, positions, qk_mode=ROPE):
    """Token-major in and out."""
    where = torch.as_tensor(positions, dtype=torch.int32, device=x.device)
    tables = cos.to(x.device), sin.to(x.device)
    return backend.qk_norm_rope(x, None, *tables, where, qk_mode=qk_mode).transpose(0, 1)


@on_backends
@pytest.mark.parametrize("qk_mode", [ROPE, ROPE_INTERLEAVED])
@pytest.mark.parametrize("rotary_dim", [24, 16])
def test_rotation_keeps_norms_and_undoes_itself(backend_name, qk_mode, rotary_dim):
    backend = get_backend(backend_name)
    x = torch.randn(7, 3, 24, device=backend.device)
    cos, sin = schemes.tables(schemes.frequencies(rotary_dim, 10000.0), 900)
    positions = torch.randint(1, 900, (7,))
    turned = rotate(backend, x, cos, sin, positions, qk_mode)
    assert not torch.allclose(turned, x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(turned[..., rotary_dim:], x[..., rotary_dim:])
    back = rotate(backend, turned, cos, -sin, positions, qk_mode)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


@on_backends
@pytest.mark.parametrize("qk_mode", [ROPE, ROPE_INTERLEAVED])
def test_scores_depend_on_relative_positions(backend_name, qk_mode):
    backend = get_backend(backend_name)
    q, k = torch.randn(2, 5, 2, 32, device=backend.device)
    cos, sin = schemes.tables(schemes.frequencies(32, 10000.0), 600)
    positions = torch.tensor([3, 40, 0, 77, 12]), torch.tensor([0, 31, 50, 8, 12])

    def scores(shift):
        rotated = [
            rotate(backend, x, cos, sin, where + shift, qk_mode)
            for x, where in zip((q, k), positions, strict=True)
        ]
        return (rotated[0] * rotated[1]).sum(dim=-1)

    torch.testing.assert_close(scores(500), scores(0), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(0), (q * k).sum(dim=-1))


@on_backends
def test_interleaved_pairs_are_half_split_ones_permuted(backend_name):
    backend = get_backend(backend_name)
    x = torch.randn(4, 2, 40, device=backend.device)
    cos, sin = schemes.tables(schemes.frequencies(24, 500.0), 50)
    order = torch.cat((torch.arange(0, 24, 2), torch.arange(1, 24, 2), torch.arange(24, 40)))
    positions = [0, 9, 49, 50]  # the last one is outside the table
    halves = rotate(backend, x[..., order].contiguous(), cos, sin, positions)
    pairs = rotate(backend, x, cos, sin, positions, ROPE_INTERLEAVED)
    torch.testing.assert_close(halves, pairs[..., order], rtol=1e-6, atol=1e-6)
    assert torch.equal(pairs[3], x[3])


@on_backends
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3), (24, 8), (3, 1)])
def test_split_is_three_calls_in_one(backend_name, num_heads, num_kv_heads):
    """Whatever the heads have in common, and so however many a program takes."""
    backend = get_backend(backend_name)
    num_tokens, head_dim = 6, 16
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=backend.device)
    q_weight, k_weight = torch.randn(2, head_dim, device=backend.device)
    cos, sin = (t.to(backend.device) for t in schemes.tables(schemes.frequencies(16, 1e4), 20))
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    shared = {"pos_offset": 11, "qk_mode": NORM_ROPE}
    got = backend.split_qkv_norm_rope(
        qkv.flatten(1), q_weight, k_weight, cos, sin, num_heads, num_kv_heads, **shared
    )
    want = (
        backend.qk_norm_rope(q, q_weight, cos, sin, **shared),
        backend.qk_norm_rope(k, k_weight, cos, sin, **shared),
        v.transpose(0, 1),
    )
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)


def oracle(rope_type, head_dim, theta, max_positions, seq_len=None, **parameters):
    """Frequencies and attention factor of transformers."""
    config = SimpleNamespace(
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **parameters},
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len)


def assert_same(frequency, factor, want):
    # transformers computes in float32.
    torch.testing.assert_close(frequency.float(), want[0], rtol=1e-5, atol=0)
    assert factor == pytest.approx(want[1])


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (128, 5e5)])
def test_frequencies_are_those_of_transformers(head_dim, theta, part):
    dim = int(head_dim * part)
    shared = (head_dim, theta, 4096)
    partial = {"partial_rotary_factor": part}
    plain = schemes.frequencies(dim, theta)
    want = oracle("linear", *shared, factor=4.0, **partial)
    assert_same(schemes.linear(plain, 4.0), 1.0, want)
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = {"original_max_position_embeddings": 1024}
    want = oracle("llama3", *shared, factor=8.0, **bounds, **old, **partial)
    assert_same(schemes.llama3(plain, 8.0, 1.0, 4.0, 1024), 1.0, want)
    for seq_len in (100, 4096, 10000):
        want = oracle("dynamic", *shared, seq_len=seq_len, factor=2.0, **partial)
        assert_same(schemes.dynamic_ntk(dim, theta, 2.0, 4096, seq_len), 1.0, want)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("betas", [(32.0, 1.0), (16.0, 2.0), (4.0, 4.0)])
@pytest.mark.parametrize("scales", [{}, {"mscale": 0.7, "mscale_all_dim": 1.3}])
def test_yarn_is_that_of_transformers(truncate, betas, scales):
    frequency = schemes.yarn(128, 1e4, 40.0, 4096, *betas, truncate=truncate)
    factor = schemes.yarn_attention_factor(40.0, **scales)
    want = oracle(
        "yarn",
        128,
        1e4,
        163840,
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=betas[0],
        beta_slow=betas[1],
        truncate=truncate,
        **scales,
    )
    assert_same(frequency, factor, want)
    if betas[0] > betas[1]:
        plain = schemes.frequencies(128, 1e4)
        assert frequency[0] == plain[0] and frequency[-1] == pytest.approx(plain[-1] / 40)
        assert bool((frequency[1:] < frequency[:-1]).all())


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "dynamic"])
def test_models_tables_follow_their_kind(kind):
    rope = RopeConfig(1e4, 32, kind=kind, factor=4.0, original_positions=64)
    frequency, factor = {
        "default": lambda: (schemes.frequencies(32, 1e4), 1.0),
        "linear": lambda: (schemes.frequencies(32, 1e4) / 4, 1.0),
        "llama3": lambda: oracle(
            "llama3",
            32,
            1e4,
            256,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        "yarn": lambda: oracle(
            "yarn", 32, 1e4, 256, factor=4.0, original_max_position_embeddings=64
        ),
        "dynamic": lambda: oracle("dynamic", 32, 1e4, 64, seq_len=200, factor=4.0),
    }[kind]()
    cos, sin = rope_tables(rope, 200)
    assert cos.shape == sin.shape == (200, 16) and cos.dtype == torch.float32
    angle = torch.arange(200, dtype=torch.float64)[:, None] * frequency.double()
    torch.testing.assert_close(cos.double(), angle.cos() * factor, rtol=0, atol=1e-4)
    torch.testing.assert_close(sin.double(), angle.sin() * factor, rtol=0, atol=1e-4)
    assert rope_tables(rope, 0)[0].shape == (0, 16)


def test_unknown_kinds_are_refused():
    with pytest.raises(InputError, match="'longrope'"):
        rope_tables(RopeConfig(1e4, 32, kind="longrope"), 8)


def test_one_token_scaled_linearly_is_an_earlier_one():
    plain = schemes.tables(schemes.frequencies(64, 1e4), 16)
    scaled = schemes.tables(schemes.linear(schemes.frequencies(64, 1e4), 8.0), 121)
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(b[::8], a, rtol=0, atol=1e-6)


@given(
    num_tokens=st.integers(1, 10**6),
    num_kv_heads=st.integers(0, 64),
    group_size=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    num_processors=st.sampled_from((4, 108, 132, 304)),
)
def test_tiles_cover_heads_of_one_kind(
    num_tokens, num_kv_heads, group_size, head_dim, num_processors
):
    num_heads = max(num_kv_heads, 1) * group_size
    half = head_dim // 2
    tile, num_warps = head_tile(
        num_tokens, num_heads, num_kv_heads, head_dim, half, ROPE, num_processors
    )
    assert num_heads % tile.heads == num_kv_heads % tile.heads == 0
    for n in (tile.tokens, tile.heads, num_warps):
        assert n & (n - 1) == 0 and n > 0
    assert tile.tokens * tile.heads * head_dim <= 2048 and num_warps <= 4
    assert tile.tokens < 2 * num_tokens
    assert 2 * tile.half + tile.rest == head_dim


@given(
    num_tokens=st.integers(1, 10**5),
    num_kv_heads=st.integers(0, 16),
    group_size=st.integers(1, 16),
    head_dim=st.sampled_from((16, 64, 80, 128)),
    num_processors=st.sampled_from((4, 108, 132, 304)),
)
def test_tiles_grow_once_every_processor_is_busy(
    num_tokens, num_kv_heads, group_size, head_dim, num_processors
):
    num_heads = max(num_kv_heads, 1) * group_size
    tile, _ = head_tile(num_tokens, num_heads, num_kv_heads, head_dim, 0, ROPE, num_processors)
    groups = (num_heads + 2 * num_kv_heads) // tile.heads
    # Tokens a tile may have before processors are left with fewer than eight programs.
    share = num_tokens * groups / (8 * num_processors)
    assert tile.tokens < 2 * max(share, 1)
    is_full = 2 * tile.tokens * tile.heads * head_dim > 1024 or tile.tokens >= num_tokens
    assert is_full or tile.tokens > share - 1
