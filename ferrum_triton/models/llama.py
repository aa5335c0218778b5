"""The Llama family, from token ids to logits: how the ops of a backend compose into a decoder.

Llama 2 and 3, SmolLM2, Mistral (sliding window), Qwen2 (QKV bias) and Qwen3 (QK norm); with experts
in the place of the MLP also Mixtral and Qwen3-MoE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferrum_triton.models.decoder import Decoder, predicted_rows
from ferrum_triton.models.experts import Experts, norm_after_mixture
from ferrum_triton.models.linear import (
    AnyNorm,
    Norm,
    OpenNorm,
    apply_to_norm,
    gated_norm,
    norm_after,
)
from ferrum_triton.models.step import Step
from ferrum_triton.runtime.kv_cache import PagedKvCache


class Llama(Decoder):
    """x += attention(norm(x)), then x += mlp(norm(x)), in each layer."""

    def _layers(self, x: Tensor, step: Step, cache: PagedKvCache) -> Tensor:
        backend, weights, config = self.backend, self.weights, self.config
        eps = config.rms_norm_eps
        # The residual stream stays in float32 whatever the activations are: rounding it to bfloat16
        # alone changes the likeliest token at one position in a hundred.
        residual = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        norm: AnyNorm = Norm(residual, x, weights.layers[0].attn_norm, eps)
        for index, layer in enumerate(weights.layers):
            attended = self._attended(norm, index, step, cache)
            # What follows the MLP: the next layer, or the last norm.
            after = weights.layers[index + 1] if index + 1 < config.num_layers else None
            residual = norm.residual if after else predicted_rows(norm.residual, step)
            weight = after.attn_norm if after else weights.final_norm
            mlp = layer.mlp
            if isinstance(mlp, Experts):
                norm = norm_after(
                    backend, attended, layer.attn_out, residual, layer.mlp_norm, eps, None
                )
                assert not isinstance(norm, OpenNorm)  # routing wants it whole
                h = norm.values(backend)
                norm = norm_after_mixture(backend, h, mlp, residual, weight, eps)
                continue
            norm = norm_after(
                backend, attended, layer.attn_out, residual, layer.mlp_norm, eps, mlp.gate_up
            )
            gated, residual = gated_norm(backend, norm, mlp.gate_up), norm.residual
            then = after.qkv if after else None
            norm = norm_after(backend, gated, mlp.down, residual, weight, eps, then)
        assert not isinstance(norm, OpenNorm)  # nothing follows the last product
        return norm.values(backend)

    def _attended(self, norm: AnyNorm, index: int, step: Step, cache: PagedKvCache) -> Tensor:
        """What a layer's tokens take from each other, before its last product.

        Returns:
            As :meth:`_attention`.
        """
        return self._attention(
            apply_to_norm(self.backend, norm, self.weights.layers[index].qkv),
            index,
            step,
            cache,
            tables=self.tables[0],
            sliding_window=self.config.sliding_window,
        )
