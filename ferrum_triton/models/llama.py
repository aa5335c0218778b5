"""The Llama family, from token ids to logits: how the ops of a backend compose into a decoder.

Llama 2 and 3, SmolLM2, Mistral (sliding window), Qwen2 (QKV bias) and Qwen3 (QK norm); with experts
in the place of the MLP also Mixtral and Qwen3-MoE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferrum_triton.models.decoder import Decoder
from ferrum_triton.models.experts import Experts, mixture
from ferrum_triton.models.linear import apply, gated
from ferrum_triton.models.weights import Mlp
from ferrum_triton.runtime.kv_cache import KvCache


class Llama(Decoder):
    """x += attention(norm(x)), then x += mlp(norm(x)), in each layer."""

    def _layers(self, x: Tensor, cache: KvCache, all_logits: bool) -> Tensor:
        backend, weights, eps = self.backend, self.weights, self.config.rms_norm_eps
        # The residual stream stays in float32 whatever the activations are: rounding it to bfloat16
        # alone changes the likeliest token at one position in a hundred.
        residual = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for layer, k_cache, v_cache in zip(weights.layers, cache.k, cache.v, strict=True):
            h = backend.fused_add_rms_norm(residual, x, layer.attn_norm, eps)
            # Past the last layer's keys and values, only the newest token's output is of use.
            newest = layer is weights.layers[-1] and not all_logits
            x = self._attention(
                h,
                layer,
                k_cache,
                v_cache,
                cache.length,
                newest,
                tables=self.tables[0],
                sliding_window=self.config.sliding_window,
            )
            residual = residual[-1:] if newest else residual
            h = backend.fused_add_rms_norm(residual, x, layer.mlp_norm, eps)
            x = self._mlp(h, layer.mlp)
        return backend.fused_add_rms_norm(residual, x, weights.final_norm, eps)

    def _mlp(self, h: Tensor, mlp: Mlp | Experts) -> Tensor:
        """down(silu(gate(h)) · up(h)), or a mixture of such experts."""
        if isinstance(mlp, Experts):
            return mixture(self.backend, h, mlp)
        return apply(self.backend, gated(self.backend, h, mlp.gate_up), mlp.down)
