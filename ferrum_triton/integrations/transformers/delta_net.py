"""The Gated DeltaNet of a converted model: that of Qwen3.5, its mixtures, and Qwen3-Next.

Its projections, its norm and its weights stay the modules and parameters that they are. What
transformers computes between them by functions of its own, or of other libraries where they are
installed, is two launches here. States are those of transformers' cache, updated where they lie.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ferrum_triton.errors import InputError
from ferrum_triton.integrations.transformers.layers import backend_of
from ferrum_triton.integrations.transformers.recognise import has_hooks
from ferrum_triton.ops.linear_attention.conv import MAX_WIDTH
from ferrum_triton.ops.linear_attention.delta import MAX_HEAD_DIM, MOST_IN_TURN

# Classes whose ``forward`` is the formula, as the tested version has them.
_MODELS = "transformers.models."
KNOWN = {
    f"{_MODELS}qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet",
    f"{_MODELS}qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    f"{_MODELS}qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet",
}
MAX_BATCH = 256  # sequences whose slots are made ahead
# What tells sequences apart that lie behind each other, in place of rows.
PACKED = ("cu_seq_lens_q", "seq_idx")


def why_not(module: nn.Module) -> str | None:
    """Why a module cannot be replaced by :class:`GatedDeltaNet`; None where it can."""
    kind, forward = type(module), module.forward
    if f"{kind.__module__}.{kind.__qualname__}" not in KNOWN:
        return "its formula is not known"
    if getattr(forward, "__module__", None) != kind.__module__:
        return "its forward is not its class's own"
    if module.A_log.device.type not in ("cpu", "cuda"):
        return f"{module.A_log.device.type} has no kernel for it"
    if module.activation not in ("silu", "swish"):
        return "its activation is not silu"
    if module.conv_kernel_size > MAX_WIDTH:
        return f"no kernel convolves {module.conv_kernel_size} tokens"
    width = max(module.head_k_dim, module.head_v_dim)
    if width > MAX_HEAD_DIM:
        return f"no kernel takes heads of {width}"
    if has_hooks(module.conv1d):
        return "its convolution has hooks, which a replacement would not call"
    return None


class GatedDeltaNet(nn.Module):
    """y = out_proj(norm(rule(silu(conv(qkv)), β, g), z)), of projections qkv, z, b and a.

    Args:
        was: the module it replaces, whose children and parameters it shares.
    """

    def __init__(self, was: Any) -> None:
        super().__init__()
        for name, child in was.named_children():
            self.add_module(name, child)
        self.A_log, self.dt_bias = was.A_log, was.dt_bias
        self.layer_idx, self.width = was.layer_idx, was.conv_kernel_size
        self.num_k_heads, self.num_v_heads = was.num_k_heads, was.num_v_heads
        self.head_k_dim, self.head_v_dim = was.head_k_dim, was.head_v_dim
        self.sizes = was.conv_dim, was.value_dim
        device = was.A_log.device
        slots = torch.arange(MAX_BATCH, dtype=torch.int32, device=device)
        self.register_buffer("slots", slots, persistent=False)
        order = _by_parts(was).to(device) if hasattr(was, "in_proj_qkvz") else None
        self.register_buffer("order", order, persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The tokens of some sequences, each after those that the cache has of it.

        Args:
            hidden_states: [batch, length, hidden_size].
            cache_params: transformers' cache, or None.
            attention_mask: [batch, length], zero where tokens are padding: they count as zeros.

        Returns:
            As hidden_states.

        Raises:
            InputError: sequences are packed into one row, or the cache has others than these.
        """
        for name in PACKED:
            if others.get(name) is not None:
                _refuse(name, "given", "None", "Give each sequence a row, with padding.")
        if attention_mask is not None:
            masked = hidden_states * attention_mask[..., None]
            hidden_states = masked.to(hidden_states.dtype)
        batch, length = hidden_states.shape[:2]
        qkv, z, b, a = self._projected(hidden_states.flatten(0, 1))
        device, state = qkv.device, None
        if cache_params is not None:  # before it takes in anything of these tokens
            state = cache_params.get_recurrent_state(self.layer_idx)
        if state is None:
            shape = batch, self.num_v_heads, self.head_k_dim, self.head_v_dim
            state = torch.zeros(shape, dtype=torch.float32, device=device)
        elif len(state) != batch:
            got, allowed = f"of {len(state)} sequences", f"one of {batch}, as hidden_states"
            _refuse("cache_params", got, allowed, "Begin another cache.")
        inputs = self._inputs(cache_params, qkv.unflatten(0, (batch, length)))
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        where = {"slots": self.slots[:batch]}
        if batch > MAX_BATCH:
            where["slots"] = torch.arange(batch, **ints)
        if batch > 1 and length > 1:
            where["cu_seqlens"] = torch.arange(0, batch * length + 1, length, **ints)
        backend = backend_of(qkv)
        prepared = backend.gdn_prepare(
            qkv,
            b,
            a,
            self.conv1d.weight.squeeze(1),
            self.A_log,
            self.dt_bias,
            self.num_k_heads,
            self.head_k_dim,
            inputs,
            **where,
        )
        rule = backend.gdn_prefill if length > MOST_IN_TURN else backend.gdn_decode
        core = rule(*prepared, state, **where)
        if cache_params is not None:
            cache_params.update_recurrent_state(state, self.layer_idx)
        out = self.norm(core, z.unflatten(1, core.shape[1:]))
        return self.out_proj(out.flatten(1)).unflatten(0, (batch, length))

    def extra_repr(self) -> str:
        heads = f"{self.num_k_heads} key heads of {self.head_k_dim}"
        return f"{heads}, {self.num_v_heads} value heads of {self.head_v_dim}, width={self.width}"

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """qkv, z, b and a of rows x: columns of one product where it has several."""
        if self.order is None:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        qkvz = self.in_proj_qkvz(x).index_select(1, self.order)
        ba = self.in_proj_ba(x).unflatten(1, (self.num_k_heads, 2, -1)).transpose(1, 2)
        return *qkvz.split(self.sizes, dim=1), *ba.flatten(1).chunk(2, dim=1)

    def _inputs(self, cache: Any, qkv: Tensor) -> Tensor:
        """Inputs of the convolution before these, [batch, width - 1, num_channels], to be updated.

        Those that the cache holds, or where it holds none or records all of them, a copy: then it
        takes in qkv [batch, length, num_channels] here.
        """
        history, batch = self.width - 1, len(qkv)
        held = None if cache is None else cache.get_conv_state(self.layer_idx)
        records = cache is not None and cache.is_recording_past(self.layer_idx)
        if held is not None and not records:
            held = self._by_token(cache)
            return held[:, held.shape[1] - history :]
        if held is None:
            before = qkv.new_zeros(batch, history, qkv.shape[2])
        else:
            before = nn.functional.pad(held, (history - held.shape[2], 0))
            before = before.transpose(1, 2).contiguous()
        if cache is not None:
            new = qkv.transpose(1, 2)
            cache.update_conv_state(new, self.layer_idx, conv_kernel_size=self.width)
            if not records:
                self._by_token(cache)
        return before

    def _by_token(self, cache: Any) -> Tensor:
        """The cache's inputs as [batch, width, num_channels], channels innermost in memory.

        The cache makes them channel by channel, and beam search does so again at each step. From
        then on they lie as the op takes them; the first of them is one that no output depends on,
        and is not kept up to date.
        """
        held = cache.get_conv_state(self.layer_idx)
        if held.stride(1) != 1:
            held = held.transpose(1, 2).contiguous().transpose(1, 2)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(held)  # as the cache does, for captured graphs
            cache.layers[self.layer_idx].conv_states[0] = held
        return held.transpose(1, 2)


def _refuse(argument: str, got: str, allowed: str, advice: str) -> NoReturn:
    raise InputError("gated DeltaNet", argument, got, allowed, advice)


def _by_parts(was: Any) -> Tensor:
    """The order of a product's columns in which q, k, v and z come one after the other.

    In Qwen3-Next they take turns, by key heads.
    """
    values = was.value_dim // was.num_k_heads
    columns = torch.arange(was.conv_dim + was.value_dim).view(was.num_k_heads, -1)
    parts = columns.split([was.head_k_dim, was.head_k_dim, values, values], dim=1)
    return torch.cat([part.flatten() for part in parts])
