"""A layer of linear attention made of ops, against transformers' own of Qwen3.5."""

import pytest
import torch

from ferrum_triton import get_backend
from ferrum_triton.testing import assert_close
from tests.harness import BACKENDS

pytest.importorskip("transformers", reason="transformers makes the layer")
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

K_HEADS, V_HEADS, K_DIM, V_DIM, HIDDEN = 2, 4, 16, 24, 32


def layer():
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=K_HEADS,
        linear_num_value_heads=V_HEADS,
        linear_key_head_dim=K_DIM,
        linear_value_head_dim=V_DIM,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    torch.manual_seed(0)
    made = qwen.Qwen3_5GatedDeltaNet(config, 0).float().eval()
    for parameter in (made.A_log, made.dt_bias, made.norm.weight):
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("backend_name", BACKENDS)
@torch.inference_mode()
def test_a_layer_of_qwen(backend_name):
    """A prompt in one call, and the same in a call for its start and one for each token more."""
    backend = get_backend(backend_name)
    made = layer()
    x = torch.randn(70, HIDDEN)
    want = made(x[None])[0]
    made = made.to(backend.device)
    x = x.to(backend.device)
    num_channels = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    inputs = x.new_zeros(1, 3, num_channels)
    states = x.new_zeros(1, V_HEADS, K_DIM, V_DIM)
    slots = torch.zeros(1, dtype=torch.int32, device=x.device)

    def ours(x, op, first):
        position = torch.full_like(slots, first)
        q, k, v, g, beta = backend.gdn_prepare(
            made.in_proj_qkv(x),
            made.in_proj_b(x),
            made.in_proj_a(x),
            made.conv1d.weight.squeeze(1),
            made.A_log,
            made.dt_bias,
            K_HEADS,
            K_DIM,
            inputs,
            slots,
            pos_offsets=position,
        )
        y = op(q, k, v, g, beta, states, slots, pos_offsets=position)
        z = made.in_proj_z(x).view(y.shape)
        y = backend.gated_rms_norm(y, z, made.norm.weight, made.layer_norm_epsilon)
        return made.out_proj(y.flatten(1))

    assert_close(ours(x, backend.gdn_prefill, 0), want, scale=4)  # transformers is in float32 too
    parts = [ours(x[:66], backend.gdn_prefill, 0)]
    parts += [ours(x[i : i + 1], backend.gdn_decode, i) for i in range(66, 70)]
    assert_close(torch.cat(parts), want, scale=4)
