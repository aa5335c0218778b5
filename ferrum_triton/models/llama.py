"""The Llama family, from token ids to logits: how the ops of a backend compose into a decoder.

Llama 2 and 3, SmolLM2, Mistral (sliding window), Qwen2 (QKV bias) and Qwen3 (QK norm); with experts
in the place of the MLP also Mixtral and Qwen3-MoE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferrum_triton.models.decoder import Decoder, predicted_rows
from ferrum_triton.models.experts import Experts, mixture
from ferrum_triton.models.linear import Norm, apply, apply_to_norm, gated_norm
from ferrum_triton.models.step import Step
from ferrum_triton.models.weights import Mlp
from ferrum_triton.runtime.kv_cache import PagedKvCache


class Llama(Decoder):
    """x += attention(norm(x)), then x += mlp(norm(x)), in each layer."""

    def _layers(self, x: Tensor, step: Step, cache: PagedKvCache) -> Tensor:
        backend, weights, config = self.backend, self.weights, self.config
        eps = config.rms_norm_eps
        # The residual stream stays in float32 whatever the activations are: rounding it to bfloat16
        # alone changes the likeliest token at one position in a hundred.
        residual = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index, layer in enumerate(weights.layers):
            x = self._attention(
                apply_to_norm(backend, Norm(residual, x, layer.attn_norm, eps), layer.qkv),
                index,
                step,
                cache,
                tables=self.tables[0],
                sliding_window=config.sliding_window,
            )
            if index == config.num_layers - 1:
                residual = predicted_rows(residual, step)
            x = self._mlp(Norm(residual, x, layer.mlp_norm, eps), layer.mlp)
        return backend.fused_add_rms_norm(residual, x, weights.final_norm, eps)

    def _mlp(self, norm: Norm, mlp: Mlp | Experts) -> Tensor:
        """down(silu(gate(h)) · up(h)) of h = norm, or a mixture of such experts."""
        if isinstance(mlp, Experts):
            return mixture(self.backend, self.backend.fused_add_rms_norm(*norm), mlp)
        return apply(self.backend, gated_norm(self.backend, norm, mlp.gate_up), mlp.down)
