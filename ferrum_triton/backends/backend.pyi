"""Generated from the registry by ``python -m ferrum_triton.backends.stub``; do not edit."""

from collections.abc import Sequence

import torch
from torch import Tensor

class Backend:
    name: str
    device: torch.device
    providers: tuple[str, ...]
    def __init__(self, name: str, device: str, providers: Sequence[str]) -> None: ...
    def provider_of(
        self,
        name: str,
    ) -> str | None: ...
    def supports(
        self,
        name: str,
    ) -> bool: ...
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float = 1e-06,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = x / sqrt(mean(x²) + eps) · weight, over the last dimension.

        Args:
            x: [..., hidden_size]; fp32, fp16 or bf16; rows may be strided.
            weight: [hidden_size], any float dtype. Gemma's ``1 + weight`` is folded in by the caller.
            eps: added to the mean square.

        Returns:
            A tensor of x's shape and dtype; computed in float32, rounded once.

        Source: Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019.
        """
    def fused_add_rms_norm(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float = 1e-06,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """residual ← residual + x, then y = rms_norm(residual) · weight.

        The sum is rounded to the residual's dtype once, and the variance is taken from what was stored,
        so that the result equals ``rms_norm`` of the residual that the next layer will read.

        Args:
            residual: [..., hidden_size], updated in place; of x's dtype, or float32: a residual stream
                kept in float32 loses nothing to 16-bit rounding from layer to layer.
            x: same shape as residual.
            weight: [hidden_size], any float dtype.
            eps: added to the mean square.

        Returns:
            A tensor of x's shape and dtype.
        """
    def fused_silu_mul_split(
        self,
        gate_up: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = silu(gate) · up, with silu(g) = g / (1 + e⁻ᵍ) and each row packed as [gate | up].

        Args:
            gate_up: [..., 2 · intermediate_size].

        Returns:
            [..., intermediate_size] in the input's dtype; computed in float32, rounded once.

        Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
        """
    def fused_gelu_tanh_mul_split(
        self,
        gate_up: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = gelu(gate) · up with gelu(g) = g/2 · (1 + tanh z), z = √(2/π) · (g + 0.044715 g³).

        1 + tanh z is computed as 2 · sigmoid(2z), which does not cancel where z is negative.

        Args:
            gate_up: [..., 2 · intermediate_size], each row packed as [gate | up].

        Returns:
            [..., intermediate_size] in the input's dtype; computed in float32, rounded once.

        Source: Shazeer 2020 (GeGLU), with the tanh form of Hendrycks & Gimpel, "GELUs", 2016.
        """
    def add_bias(
        self,
        x: Tensor,
        bias: Tensor,
    ) -> None:
        """x ← x + bias, the bias added to every row, in place.

        Args:
            x: [..., hidden_size], updated in place.
            bias: [hidden_size], any float dtype.
        """
    def add_inplace(
        self,
        residual: Tensor,
        x: Tensor,
    ) -> None:
        """residual ← residual + x, in place; same shape and dtype, computed in float32.
        """
    def scaled_add_inplace(
        self,
        dst: Tensor,
        src: Tensor,
        scale: float,
    ) -> None:
        """dst ← dst + scale · src, in place; same shape and dtype, computed in float32.
        """
    def copy_slice(
        self,
        src: Tensor,
        dst: Tensor,
        src_offset: int = 0,
        dst_offset: int = 0,
        length: int | None = None,
    ) -> None:
        """dst[dst_offset : dst_offset + length] ← src[src_offset : src_offset + length], converted.

        Both tensors are contiguous and addressed as one row of elements, whatever their shape.

        Args:
            src: contiguous tensor of any dtype.
            dst: contiguous tensor of any dtype, written in place; it must not share memory with src.
            src_offset: first element read.
            dst_offset: first element written.
            length: elements copied; None means as many as both tensors have left.

        Raises:
            InputError: the range leaves either tensor, or a tensor is not contiguous.
        """
    def transpose_head_to_token(
        self,
        x: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """[num_heads, num_tokens, head_dim] → [num_tokens, num_heads, head_dim], contiguous.
        """
    def transpose_token_to_head(
        self,
        x: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads, head_dim] → [num_heads, num_tokens, head_dim], contiguous.
        """
    def embedding_lookup_dev(
        self,
        table: Tensor,
        ids: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[i] = table[ids[i]] for ids on the table's device; safe inside a captured graph.

        Args:
            table: [vocab_size, hidden_size], rows may be strided.
            ids: [...] int32 or int64. An id outside [0, vocab_size) gives a row of zeros: it can be
                neither checked without a host sync nor allowed to read foreign memory.

        Returns:
            [..., hidden_size] in the table's dtype.
        """
    def embedding_lookup(
        self,
        table: Tensor,
        ids: Sequence[int],
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[i] = table[ids[i]] for ids held by the host.

        The ids are copied to the device by the call, so it cannot be captured in a graph: a replay
        would read the ids of the capture. Use :func:`embedding_lookup_dev` there.

        Args:
            table: [vocab_size, hidden_size].
            ids: token ids, each in [0, vocab_size).

        Returns:
            [len(ids), hidden_size] in the table's dtype.

        Raises:
            InputError: an id is out of range.
        """
    def gemm(
        self,
        a: Tensor,
        b: Tensor,
        wide: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[m, n] = Σₖ a[m, k] · b[n, k]: activations by a weight stored [out_features, in_features].

        Args:
            a: [m, k].
            b: [n, k], same dtype.
            wide: return the float32 sums unrounded, as logits want to be.

        Returns:
            [m, n] in the input's dtype, or float32 if wide.
        """
    def dequantize(
        self,
        blocks: Tensor,
        kind: str,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[..., i] = the i-th weight of each packed row, decoded in float32 and rounded once.

        Args:
            blocks: uint8 [..., row_bytes].
            kind: the blocks' format, e.g. ``"Q4_K"``.
            dtype: float32, float16 or bfloat16. In float32 the result has the bits of ggml's reference.

        Returns:
            [..., K] in ``dtype``. Weights beyond float16's range become infinite there.

        Source: the decoders in :mod:`ferrum_triton.quant.formats`.
        """
    def embedding_lookup_quant(
        self,
        blocks: Tensor,
        ids: Tensor,
        kind: str,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[i] = row ids[i] of a packed table, decoded; only those rows are read.

        Args:
            blocks: uint8 [vocab_size, row_bytes].
            ids: [...] int32 or int64 on the table's device. An id outside [0, vocab_size) gives a row
                of zeros.
            kind: the table's format.
            dtype: of the result: float32, float16 or bfloat16.

        Returns:
            [..., K] in ``dtype``.
        """
    def gemv_quant(
        self,
        a: Tensor,
        blocks: Tensor,
        kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[m, n] = Σₖ a[m, k] · W[n, k] for few rows of a, where reading W takes the time.

        W is decoded exactly and the products are summed in float32, whatever a's dtype.

        Args:
            a: [m, K] with m <= 8.
            blocks: uint8 [n, row_bytes], W's packed rows.
            kind: W's format.

        Returns:
            [m, n] in a's dtype.
        """
    def gemm_quant(
        self,
        a: Tensor,
        blocks: Tensor,
        kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[m, n] = Σₖ a[m, k] · W[n, k] for any number of rows of a.

        W is decoded exactly and, where m > 8, rounded to a's dtype for the tensor cores; sums are in
        float32. In float16 a weight beyond 65504 then counts as infinite.

        Args:
            a: [m, K].
            blocks: uint8 [n, row_bytes], W's packed rows.
            kind: W's format.

        Returns:
            [m, n] in a's dtype.
        """
    def kv_cache_append_head_major(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        cache_len: int = 0,
        slots: Tensor | None = None,
    ) -> None:
        """Write new keys and values into a contiguous head-major cache; one launch.

        Args:
            k_cache, v_cache: [num_kv_heads, capacity, head_dim], written in place.
            k, v: [num_kv_heads, num_tokens, head_dim].
            cache_len: cache row of token 0 when slots is None.
            slots: [num_tokens] cache rows on the device; rows outside the cache are skipped.

        Raises:
            InputError: cache_len + num_tokens exceeds the capacity; nothing is written then.
        """
    def split_qkv(
        self,
        qkv: Tensor,
        q_dim: int,
        kv_dim: int,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split each row [q | k | v] into three contiguous tensors.

        Args:
            qkv: [num_tokens, q_dim + 2 · kv_dim].
            q_dim: num_heads · head_dim.
            kv_dim: num_kv_heads · head_dim.

        Returns:
            q [num_tokens, q_dim], k and v [num_tokens, kv_dim].
        """
    def qk_norm_rope(
        self,
        x: Tensor,
        weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None = None,
        pos_offset: int = 0,
        eps: float = 1e-06,
        qk_mode: int = 1,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Per-head RMSNorm and rotary embedding of Q or K, turned from token-major to head-major.

        Args:
            x: [num_tokens, num_heads, head_dim]; token and head strides are free.
            weight: [head_dim], the head norm's weight, shared by all heads; read in mode 1 only.
            cos, sin: [max_positions, rotary_dim / 2], any float dtype.
            positions: [num_tokens] on x's device; None means pos_offset, pos_offset + 1, ...
            pos_offset: position of token 0 when positions is None.
            eps: added to the mean square of the norm.
            qk_mode: 0 copies, 1 normalises and rotates, 2 rotates, 3 rotates interleaved pairs.

        Returns:
            [num_heads, num_tokens, head_dim]. For token-major output pass
            ``out=buffer.transpose(0, 1)`` of a [num_tokens, num_heads, head_dim] buffer.

        Source: Su et al., "RoFormer", 2021.
        """
    def split_qkv_norm_rope(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        positions: Tensor | None = None,
        pos_offset: int = 0,
        eps: float = 1e-06,
        qk_mode: int = 1,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split [q | k | v] rows, prepare Q and K as :func:`qk_norm_rope` does, copy V; one launch.

        Args:
            qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim].
            q_weight, k_weight: [head_dim], read in mode 1 only.
            cos, sin: [max_positions, rotary_dim / 2].
            num_heads: query heads.
            num_kv_heads: key and value heads; divides num_heads.
            positions: [num_tokens] on the device; None means pos_offset, pos_offset + 1, ...
            pos_offset: position of token 0 when positions is None.
            eps: added to the mean square of the norms.
            qk_mode: as in :func:`qk_norm_rope`; V is always copied.

        Returns:
            q [num_heads, num_tokens, head_dim], k and v [num_kv_heads, num_tokens, head_dim].
        """
    def split_qkv_norm_rope_into_cache(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        num_heads: int,
        cache_len: int = 0,
        positions: Tensor | None = None,
        slots: Tensor | None = None,
        pos_offset: int = 0,
        eps: float = 1e-06,
        qk_mode: int = 1,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """:func:`split_qkv_norm_rope` with K and V written straight into a contiguous cache.

        Args:
            qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim].
            q_weight, k_weight: [head_dim], read in mode 1 only.
            cos, sin: [max_positions, rotary_dim / 2].
            k_cache, v_cache: [num_kv_heads, capacity, head_dim], written in place.
            num_heads: query heads.
            cache_len: cache row of token 0 when slots is None; rows cache_len, cache_len + 1, ...
            positions: [num_tokens] rotary positions on the device; None counts up from pos_offset.
            slots: [num_tokens] cache rows on the device; tokens whose row is negative or not below
                capacity are not written. Rows must differ.
            pos_offset: rotary position of token 0 when positions is None.
            eps: added to the mean square of the norms.
            qk_mode: as in :func:`qk_norm_rope`.

        Returns:
            q [num_heads, num_tokens, head_dim].

        Raises:
            InputError: cache_len + num_tokens exceeds the capacity; nothing is written then.
        """
    def flash_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_len: int | None = None,
        kv_lens: Tensor | None = None,
        pos_offset: int | None = None,
        causal: bool = True,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = softmax(scale · q kᵀ + mask) v, for prefill and decode over a contiguous cache.

        Query i has the absolute position p = pos_offset + i and sees the keys [lo, hi), where
        hi = min(p + 1, kv_len) if causal, else kv_len, and lo = max(0, p + 1 - sliding_window) if
        causal with a window, else 0. A query that sees no key, or only scores of -inf, gives zeros.
        Query head h reads KV head h // (num_heads / num_kv_heads). Rows of the cache past kv_len may
        hold anything; an infinite or NaN value inside it may turn queries that do not see it into NaN
        (a weight of 0 times it).

        Args:
            q: [batch, num_heads, q_len, head_dim].
            k, v: [batch, num_kv_heads, capacity, head_dim]; a cache may be longer than what is valid,
                and its strides are free.
            kv_len: valid keys; None means capacity.
            kv_lens: [batch] valid keys per sequence on the device, read when the kernel runs (so a
                captured graph sees new lengths); overrides kv_len, is clamped to [0, capacity], and
                then query i of sequence b has the position kv_lens[b] - q_len + i unless pos_offset
                is given.
            pos_offset: position of query 0; None means kv_len - q_len: the queries are the newest.
            causal: whether a query sees only keys up to its own position.
            softmax_scale: None means 1 / sqrt(head_dim).
            sliding_window: keys a causal query sees, itself included; 0 means all.

        Returns:
            [batch, num_heads, q_len, head_dim] in q's dtype; computed in float32.

        Source: Dao et al., "FlashAttention", 2022; windows as in Mistral 7B, 2023.
        """
    def argmax_rows(
        self,
        logits: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[i] = the lowest j with logits[i, j] = max over the row, NaN never chosen.

        A row of nothing but NaN and -inf gives 0.

        Args:
            logits: [num_rows, vocab_size], rows may be strided.

        Returns:
            [num_rows] int32.
        """
