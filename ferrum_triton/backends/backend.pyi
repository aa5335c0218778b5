"""Generated from the registry by ``python -m ferrum_triton.backends.stub``; do not edit."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

class Backend:
    name: str
    device: torch.device
    providers: tuple[str, ...]
    def __init__(self, name: str, device: str, providers: Sequence[str]) -> None: ...
    def debug(
        self,
    ) -> Backend: ...
    def provider_of(
        self,
        name: str,
    ) -> str | None: ...
    def supports(
        self,
        name: str,
    ) -> bool: ...
    def has_kernel(
        self,
        name: str,
        kind: str = '',
    ) -> bool: ...
    def compile_ahead(
        self,
        step: Callable[[], object],
        progress: Callable[[int, int], None] | None = None,
    ) -> int: ...
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
    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float = 1e-05,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, over the last dimension.

        Args:
            x: [..., hidden_size]; fp32, fp16 or bf16; rows may be strided.
            weight: [hidden_size], any float dtype.
            bias: [hidden_size], any float dtype, or None.
            eps: added to the variance, which is the biased one (divided by hidden_size).

        Returns:
            A tensor of x's shape and dtype; computed in float32 from the centred row, rounded once.

        Source: Ba et al., "Layer Normalization", 2016.
        """
    def gated_rms_norm(
        self,
        core: Tensor,
        z: Tensor,
        weight: Tensor,
        eps: float = 1e-06,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = core / sqrt(mean(core²) + eps) · weight · silu(z), over the last dimension.

        The output norm of gated linear attention: a row is one head of one token.

        Args:
            core: [..., head_dim], usually float32: what the recurrence returns.
            z: the gate, of core's shape, any float dtype.
            weight: [head_dim], any float dtype, shared by the heads.
            eps: added to the mean square.

        Returns:
            A tensor of core's shape and dtype; computed in float32, rounded once.

        Source: Yang et al., "Gated Delta Networks", 2024.
        """
    def softmax_rows(
        self,
        x: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[i, j] = e^(x[i, j] - max(x[i])) / sum of those over j, over the last dimension.

        A row that holds NaN or +inf, or nothing but -inf, gives NaN throughout.

        Args:
            x: [..., num_cols]; rows may be strided.

        Returns:
            A tensor of x's shape and dtype; computed in float32, rounded once.
        """
    def rms_norm_to(
        self,
        x: Tensor,
        weight: Tensor,
        dtype: torch.dtype,
        eps: float = 1e-06,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = x / sqrt(mean(x²) + eps) · weight, rounded to ``dtype`` instead of x's own.

        Args:
            x: [..., hidden_size]; fp32, fp16 or bf16; rows may be strided.
            weight: [hidden_size], any float dtype.
            dtype: of the result: float32, float16 or bfloat16.
            eps: added to the mean square.

        Returns:
            A tensor of x's shape; computed in float32, rounded once.
        """
    def rms_norm_add_inplace(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float = 1e-06,
    ) -> None:
        """residual ← residual + x / sqrt(mean(x²) + eps) · weight, in place.

        The norm is not rounded before it is added, and the sum is rounded once.

        Args:
            residual: [..., hidden_size], updated in place; of x's dtype, or float32.
            x: same shape as residual.
            weight: [hidden_size], any float dtype.
            eps: added to the mean square.
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
    def fused_gelu_mul_split(
        self,
        gate_up: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = gelu(gate) · up, with the exact gelu(g) = g/2 · (1 + erf(g/√2)).

        Args:
            gate_up: [..., 2 · intermediate_size], each row packed as [gate | up].

        Returns:
            [..., intermediate_size] in the input's dtype; computed in float32, rounded once.

        Source: Shazeer 2020 (GeGLU).
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
    def silu_mul(
        self,
        gate: Tensor,
        up: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = silu(gate) · up, with silu(g) = g / (1 + e⁻ᵍ), for gate and up in tensors of their own.

        Args:
            gate: [..., intermediate_size]; rows may be strided.
            up: of gate's shape.

        Returns:
            A tensor of gate's shape and dtype; computed in float32, rounded once.

        Source: Shazeer 2020 (SwiGLU).
        """
    def gelu(
        self,
        x: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = x/2 · (1 + erf(x/√2)), the exact form.

        Args:
            x: [..., hidden_size]; rows may be strided.

        Returns:
            A tensor of x's shape and dtype; computed in float32, rounded once.

        Source: Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016.
        """
    def scale_inplace(
        self,
        x: Tensor,
        scale: float,
    ) -> None:
        """x ← scale · x, in place, computed in float32.

        Args:
            x: [..., hidden_size], updated in place.
            scale: the factor, as it is: Gemma's √hidden_size is rounded to bfloat16 by its caller.
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
        """residual ← residual + x, in place, computed in float32.

        Args:
            residual: [..., hidden_size], updated in place; of x's dtype, or float32.
            x: of residual's shape.
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
            ids: [...] int32 or int64. An id outside [0, vocab_size) gives a row of zeros.

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
    def gemm_gate_up_silu(
        self,
        a: Tensor,
        b: Tensor,
        activation: str = 'silu',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = silu(a · Gᵀ) · (a · Uᵀ), b = [G; U]: both halves of an MLP's first product.

        In float32 until the one rounding at the end. Of up to MOST_TOKENS tokens it is one launch where
        a kernel is faster than cuBLAS, else a product and a launch that gates it.

        Args:
            a: [m, k].
            b: [2 n, k], G's rows and then U's; same dtype.
            activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

        Returns:
            [m, n] in a's dtype.

        Source: Shazeer, "GLU Variants Improve Transformer", 2020.
        """
    def linear_open_norm(
        self,
        a: Tensor,
        b: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """r = residual + a · bᵀ, h = r · norm_weight, and sums of r² by eight columns.

        The product is that of :func:`gemm`; r is float32 until each result is rounded. With the
        squares, h is the norm that ``open_norm_linear`` and ``open_norm_gate_up_silu`` close. Of up to
        MOST_TOKENS tokens it is one launch where a kernel is faster than cuBLAS.

        Args:
            a: [m, k].
            b: [n, k], same dtype.
            residual: [m, n], of a's dtype or float32.
            norm_weight: [n], any float dtype.

        Returns:
            r, [m, n] in residual's dtype; h, [m, n] in a's dtype, infinite beyond float16's 65504; the
            sums of squares, float32 [m, ceil(n / 8)].
        """
    def open_norm_linear(
        self,
        h: Tensor,
        squares: Tensor,
        eps: float,
        b: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = (h / sqrt(Σ squares / k + eps)) · bᵀ: a product with a norm that another opened.

        One or two rows are one launch where a kernel is faster than cuBLAS; else h is divided and
        rounded to its dtype first.

        Args:
            h: [m, k], of ``linear_open_norm``; finite.
            squares: float32 [m, ceil(k / 8)], of the same.
            eps: added to the mean square.
            b: [n, k], of h's dtype. Sums of h · bᵀ that are too large for float32 are infinite.

        Returns:
            [m, n] in h's dtype.
        """
    def open_norm_gate_up_silu(
        self,
        h: Tensor,
        squares: Tensor,
        eps: float,
        b: Tensor,
        activation: str = 'silu',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = silu(n · Gᵀ) · (n · Uᵀ), n = h / sqrt(Σ squares / k + eps), b = [G; U].

        As :func:`gemm_gate_up_silu` behind a norm that another product opened. One or two rows are one
        launch where a kernel is faster than cuBLAS; else the launch that gates divides too.

        Args:
            h: [m, k], of ``linear_open_norm``; finite.
            squares: float32 [m, ceil(k / 8)], of the same.
            eps: added to the mean square.
            b: [2 n, k], G's rows and then U's; of h's dtype. Sums of h · bᵀ that are too large for
                float32 are infinite.
            activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

        Returns:
            [m, n] in h's dtype.
        """
    def linear_add_rms_norm(
        self,
        a: Tensor,
        b: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float = 1e-06,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """residual ← residual + a · bᵀ, then y = rms_norm(residual) · norm_weight.

        As :func:`gemm` and :func:`fused_add_rms_norm` behind it, but that the product is not rounded
        before it is added. Where K is split among programs, the launch that adds up their sums is the
        norm's.

        Args:
            a: [m, k].
            b: [n, k], same dtype.
            residual: [m, n], updated in place; of a's dtype, or float32.
            norm_weight: [n], any float dtype.
            eps: added to the mean square.

        Returns:
            [m, n] in a's dtype.
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

        W is decoded exactly and the products are summed in float32, whatever a's dtype. Over planes,
        up to four rows of float16 or bfloat16 are taken as integers of 16 bits, steps of a power of two
        for each 32, or 64 of Q3_K and of Q2_K in long rows, and more rows as in :func:`gemm_quant`; a
        float32 of 2^41 or more counts as infinite. Where an activation is not finite, nor is its row
        of the result.

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
        wide: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[m, n] = Σₖ a[m, k] · W[n, k] for any number of rows of a.

        W is decoded exactly and, where m > 8, rounded to a's dtype for the tensor cores, over planes to
        float16; sums are in float32. A weight beyond float16's 65504 may then count as infinite, and
        so may one of a group whose scale is 64 or more.

        Args:
            a: [m, K].
            blocks: uint8 [n, row_bytes], W's packed rows.
            kind: W's format.
            wide: return the float32 sums unrounded, as logits want to be.

        Returns:
            [m, n] in a's dtype, or float32 if wide.
        """
    def linear_quant(
        self,
        a: Tensor,
        blocks: Tensor,
        kind: str,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = a · Wᵀ + bias + residual: a layer's product with what follows it.

        The product is that of :func:`gemm_quant`, and the sum with the others is rounded once. For few
        rows of a over planes it is one launch.

        Args:
            a: [m, K].
            blocks: uint8 [n, row_bytes], W's packed rows.
            kind: W's format.
            bias: [n] in any float dtype, or None.
            residual: [m, n] in any float dtype, or None.

        Returns:
            [m, n] in a's dtype.
        """
    def gemv_quant_gate_up_silu(
        self,
        a: Tensor,
        gate_blocks: Tensor,
        up_blocks: Tensor,
        gate_kind: str,
        up_kind: str,
        activation: str = 'silu',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = silu(a · Gᵀ) · (a · Uᵀ) for any number of rows of a.

        Both products are those of :func:`gemm_quant`, in float32 until the one rounding at the end. By
        weights in planes they are one launch, if more than 8 rows meet one format. Where two products
        take more than 64 rows, gate and up are rounded to a's dtype in between.

        Args:
            a: [m, K], finite.
            gate_blocks: uint8 [n, row_bytes], G's packed rows.
            up_blocks: uint8 [n, row_bytes], U's, of a format that may be another.
            gate_kind, up_kind: the formats.
            activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

        Returns:
            [m, n] in a's dtype.

        Source: Shazeer, "GLU Variants Improve Transformer", 2020.
        """
    def gemv_quant_qkv(
        self,
        a: Tensor,
        q_blocks: Tensor,
        k_blocks: Tensor | None,
        v_blocks: Tensor,
        q_kind: str,
        k_kind: str,
        v_kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = a · [Q; K; V]ᵀ for any number of rows of a, three matrices over one K, of any formats.

        The products are those of :func:`gemm_quant`. By weights in planes they are one launch, if
        more than 8 rows meet one format, or two: both of 3 or 5 bits, or both of others.

        Args:
            a: [m, K], finite.
            q_blocks: uint8 [nq, row_bytes], packed rows.
            k_blocks: uint8 [nk, row_bytes], or None for two matrices: rows of one format lie in one.
            v_blocks: uint8 [nv, row_bytes].
            q_kind, k_kind, v_kind: the formats; k_kind is not read where k_blocks is None.

        Returns:
            [m, nq + nk + nv] in a's dtype.
        """
    def add_rms_norm_quant_gate_up_silu(
        self,
        residual: Tensor,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        gate_blocks: Tensor,
        up_blocks: Tensor,
        gate_kind: str,
        up_kind: str,
        activation: str = 'silu',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """residual ← residual + x and h = rms_norm(residual) · norm_weight, then silu(h Gᵀ) · (h Uᵀ).

        h is that of :func:`fused_add_rms_norm`, rounded to x's dtype, and y that of
        :func:`gemv_quant_gate_up_silu`. By weights in planes they are two launches, if more than 8
        rows meet one format.

        Args:
            residual: [m, K], updated in place; of x's dtype, or float32.
            x: [m, K].
            norm_weight: [K], any float dtype.
            eps: added to the mean square.
            gate_blocks: uint8 [n, row_bytes], G's packed rows.
            up_blocks: uint8 [n, row_bytes], U's, of a format that may be another.
            gate_kind, up_kind: the formats.
            activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

        Returns:
            [m, n] in x's dtype.
        """
    def add_rms_norm_quant_qkv(
        self,
        residual: Tensor,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        q_blocks: Tensor,
        k_blocks: Tensor | None,
        v_blocks: Tensor | None,
        q_kind: str,
        k_kind: str,
        v_kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """residual ← residual + x and h = rms_norm(residual) · norm_weight, then h · [Q; K; V]ᵀ.

        h is that of :func:`fused_add_rms_norm`, rounded to x's dtype, and y that of
        :func:`gemv_quant_qkv`. By weights in planes they are two launches, where that has one.

        Args:
            residual: [m, K], updated in place; of x's dtype, or float32.
            x: [m, K].
            norm_weight: [K], any float dtype.
            eps: added to the mean square.
            q_blocks: uint8 [nq, row_bytes], packed rows.
            k_blocks: uint8 [nk, row_bytes], or None: rows of one format lie in one matrix.
            v_blocks: uint8 [nv, row_bytes], or None.
            q_kind, k_kind, v_kind: the formats; that of None is not read.

        Returns:
            [m, nq + nk + nv] in x's dtype.
        """
    def linear_quant_open_norm(
        self,
        a: Tensor,
        blocks: Tensor,
        kind: str,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """r = residual + a · Wᵀ, h = r · norm_weight, and sums of r² by eight columns.

        The product is that of :func:`gemm_quant`; r is float32 until each result is rounded. With the
        squares, h is the norm that ``open_norm_quant_qkv`` and ``open_norm_quant_gate_up_silu`` close.
        For one or two rows of a over planes it is one launch where W's rows fill whole programs.

        Args:
            a: [m, K].
            blocks: uint8 [n, row_bytes], W's packed rows.
            kind: W's format.
            residual: [m, n], of a's dtype or float32.
            norm_weight: [n], any float dtype.

        Returns:
            r, [m, n] in residual's dtype; h, [m, n] in a's dtype, infinite beyond float16's 65504; the
            sums of squares, float32 [m, ceil(n / 8)].
        """
    def open_norm_quant_qkv(
        self,
        h: Tensor,
        squares: Tensor,
        eps: float,
        q_blocks: Tensor,
        k_blocks: Tensor | None,
        v_blocks: Tensor | None,
        q_kind: str,
        k_kind: str,
        v_kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = (h / sqrt(Σ squares / K + eps)) · [Q; K; V]ᵀ: products with a norm that another opened.

        The products are those of :func:`gemv_quant`. By weights in planes one or two rows are one
        launch; for more h is divided and rounded to its dtype first.

        Args:
            h: [m, K], of ``linear_quant_open_norm``; finite.
            squares: float32 [m, ceil(K / 8)], of the same.
            eps: added to the mean square.
            q_blocks: uint8 [nq, row_bytes], packed rows.
            k_blocks: uint8 [nk, row_bytes], or None: rows of one format lie in one matrix.
            v_blocks: uint8 [nv, row_bytes], or None.
            q_kind, k_kind, v_kind: the formats; that of None is not read.

        Returns:
            [m, nq + nk + nv] in h's dtype.
        """
    def open_norm_quant_gate_up_silu(
        self,
        h: Tensor,
        squares: Tensor,
        eps: float,
        gate_blocks: Tensor,
        up_blocks: Tensor,
        gate_kind: str,
        up_kind: str,
        activation: str = 'silu',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = silu(n · Gᵀ) · (n · Uᵀ), n = h / sqrt(Σ squares / K + eps).

        As :func:`gemv_quant_gate_up_silu` behind a norm that another product opened. By weights in
        planes one or two rows are one launch; for more h is divided and rounded to its dtype first.

        Args:
            h: [m, K], of ``linear_quant_open_norm``; finite.
            squares: float32 [m, ceil(K / 8)], of the same.
            eps: added to the mean square.
            gate_blocks: uint8 [n, row_bytes], G's packed rows.
            up_blocks: uint8 [n, row_bytes], U's, of a format that may be another.
            gate_kind, up_kind: the formats.
            activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

        Returns:
            [m, n] in h's dtype.
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
    def kv_cache_append_paged(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor | None = None,
        block_tables: Tensor | None = None,
        pos_offsets: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
        layout: str = 'hnd',
    ) -> None:
        """Write new keys and values into a paged pool, quantised where the pool is; one launch.

        Layouts, quantisation and placement are those of :mod:`ferrum_triton.ops.kv_pool`.

        Args:
            k_cache, v_cache: the pool, written in place; float, int8 or float8_e4m3fn.
            k, v: [num_tokens, num_kv_heads, head_dim]; pass head-major ones transposed.
            slots: [num_tokens], or None. Slots must differ.
            block_tables: [num_seqs, max_blocks], or None.
            pos_offsets: [num_seqs], with block_tables.
            cu_seqlens_q: [num_seqs + 1], not descending, with block_tables.
            k_scales, v_scales: float16 or float32, written in place; a float pool leaves them alone.
                A float16 scale is subnormal, and coarse, where a head's maximum is below 0.03.
            layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.
        """
    def split_qkv_norm_rope_into_paged_cache(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        num_heads: int,
        slots: Tensor | None = None,
        block_tables: Tensor | None = None,
        pos_offsets: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        positions: Tensor | None = None,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
        eps: float = 1e-06,
        qk_mode: int = 1,
        layout: str = 'hnd',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """:func:`split_qkv_norm_rope` with K and V written straight into a paged pool; one launch.

        One step may hold any mix of prompts and single tokens. Layouts, quantisation and placement are
        those of :mod:`ferrum_triton.ops.kv_pool`; keys are quantised unrounded, from float32.

        Args:
            qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim].
            q_weight, k_weight: [head_dim], read in mode 1 only.
            cos, sin: [max_positions, rotary_dim / 2].
            k_cache, v_cache: the pool, written in place; float, int8 or float8_e4m3fn.
            num_heads: query heads.
            slots: [num_tokens], or None. Slots must differ.
            block_tables: [num_seqs, max_blocks], or None.
            pos_offsets: [num_seqs], with block_tables.
            cu_seqlens_q: [num_seqs + 1], not descending, with block_tables.
            positions: [num_tokens] rotary positions, which slots require; None means the positions
                that place the tokens.
            k_scales, v_scales: float16 or float32, written in place; a float pool leaves them alone.
            eps: added to the mean square of the norms.
            qk_mode: as in :func:`qk_norm_rope`; V is always copied.
            layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.

        Returns:
            q [num_tokens, num_heads, head_dim]. For head-major output pass
            ``out=buffer.transpose(0, 1)`` of a [num_heads, num_tokens, head_dim] buffer.
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
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
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
            k, v: [batch, num_kv_heads, capacity, head_dim] and [..., value_dim]; a cache may be longer
                than what is valid, and its strides are free. Values may be of another width than
                keys, as in the prefill of latent attention: 192 and 128.
            kv_len: valid keys; None means capacity.
            kv_lens: [batch] valid keys per sequence on the device, read when the kernel runs (so a
                captured graph sees new lengths); overrides kv_len, is clamped to [0, capacity], and
                then query i of sequence b has the position kv_lens[b] - q_len + i unless pos_offset
                is given.
            pos_offset: position of query 0; None means kv_len - q_len: the queries are the newest.
            causal: whether a query sees only keys up to its own position.
            softmax_scale: None means 1 / sqrt(head_dim).
            sliding_window: keys a causal query sees, itself included; 0 means all.
            softcap: scaled scores s become softcap · tanh(s / softcap) before the mask; 0 means off.
            sinks: [num_heads] a logit of each head that joins the softmax's denominator and has no
                value: as one more key, whose value is zero. Finite, or -inf for a head without one;
                None means none.
            lse: [batch, num_heads, q_len] in float32, written in place: the natural logarithm of the
                sum of exp over what a query's softmax runs over, its sink included; -inf for a query
                that sees no key and has no sink.

        Returns:
            [batch, num_heads, q_len, value_dim] in q's dtype; computed in float32.

        Source: Dao et al., "FlashAttention", 2022; windows as in Mistral 7B, 2023; capped scores as in
        Gemma 2, 2024; sinks as in gpt-oss, 2025.
        """
    def merge_attention_states(
        self,
        outs: Tensor,
        lses: Tensor,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """lse = log Σᵢ exp(lseᵢ) and out = Σᵢ exp(lseᵢ - lse) outᵢ, for each token and head.

        If outᵢ is softmax attention over the keys of part i and lseᵢ the logarithm of its
        denominator, the result is attention over the keys of all parts, whatever their order or
        grouping: what a prefix shared by many sequences, attended to once, needs to be joined with
        each sequence's own suffix.

        A part that saw no key has lse = -inf; its out is not read and may hold anything. Where every
        part is such, or there are none, out is 0 and lse is -inf. A NaN or +inf among lses makes
        the result of its token and head NaN.

        Args:
            outs: [num_parts, num_tokens, num_heads, head_dim].
            lses: [num_parts, num_tokens, num_heads] float32, natural logarithms.

        Returns:
            out [num_tokens, num_heads, head_dim] in outs' dtype, computed in float32, and lse
            [num_tokens, num_heads] in float32.

        Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
        """
    def mla_attention(
        self,
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor | None,
        kv_lens: Tensor,
        kv_lora_rank: int,
        softmax_scale: float,
        scale: Tensor | None = None,
        lse: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = softmax(softmax_scale · q rowᵀ + mask) row[:kv_lora_rank] over a cache of latent rows.

        Absorbed form: one row of the cache, [latent | rope], is the key of every head, and its latent
        is the value of every head. The projections between heads and latents are the caller's, applied
        to q before and to y after: q = [latent | rope] with the latent part W_UKᵀ q_nope, and the
        output of a head W_UV y. The scale of the scores is therefore that of the heads as they were,
        usually (nope_dim + rope_dim) ** -0.5, and must be given.

        Sequence b holds the keys [0, kv_lens[b]), its queries' own the last of them: query i sees the
        keys [0, kv_lens[b] - q_len + 1 + i). Key n is row n of cache[b], or with block_tables row
        n % block_size of the block block_tables[b, n // block_size]. Lengths are clamped to what the
        cache or the table has room for; a key whose table entry is not a block of the cache is not
        seen. Rows and entries that belong to no key may hold anything. A query that sees no key, or
        only scores of -inf, gives zeros and an lse of -inf. An infinite or NaN value in a row may turn
        queries that do not see it into NaN (a weight of 0 times it).

        Args:
            q: [batch, q_len, num_heads, kv_lora_rank + rope_dim].
            cache: [num_blocks, block_size, kv_lora_rank + rope_dim], or without block_tables
                [batch, capacity, kv_lora_rank + rope_dim]; in q's dtype or in float8_e4m3fn, which is
                widened to q's dtype. Strides of the first two dimensions are free.
            block_tables: [batch, max_blocks] integers, or None for a contiguous cache.
            kv_lens: [batch] integers, on the device: a captured graph sees new lengths.
            kv_lora_rank: width of the latents, up to 512; rope_dim is up to 128.
            softmax_scale: factor of the scores.
            scale: [1] factor of a float8_e4m3fn cache; None means 1.
            lse: [batch, q_len, num_heads] float32, written in place if given: the natural logarithm
                of the sum of exp of the scaled scores.

        Returns:
            [batch, q_len, num_heads, kv_lora_rank] in q's dtype; computed in float32.

        Source: DeepSeek-V2, 2024, section 2.1 and appendix C.
        """
    def paged_decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        kv_lens: Tensor,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        softcap: float = 0.0,
        layout: str = 'hnd',
        batch_invariant: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """One decode step of every sequence, or a few newest tokens of each (speculative verify).

        Query i of sequence b has the position kv_lens[b] - q_len + i: lengths are final, the queries'
        own keys included. What the queries see is told in :mod:`ferrum_triton.ops.attention.pool`.

        Args:
            q: [batch, q_len, num_heads, head_dim]; head_dim up to 256. 1 to 8 queries a sequence are
                what this is for; more are right, but not fast.
            k_cache, v_cache: the pool, of q's dtype, int8 or float8_e4m3fn; block_size a power of two.
            block_tables: [batch, max_blocks].
            kv_lens: [batch], at most max_blocks · block_size.
            k_scales, v_scales: of a quantised pool.
            sinks: [num_heads], or None.
            lse: [batch, q_len, num_heads] float32, written if given: the natural logarithm of the
                softmax's denominator, for :func:`merge_attention_states`.
            softmax_scale: None means 1 / sqrt(head_dim).
            sliding_window: keys a query sees, itself included; 0 means all.
            softcap: 0 means none.
            layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.
            batch_invariant: a sequence's result does not depend on the batch, not by a bit; slower
                where few long sequences would be cut finer.

        Returns:
            [batch, q_len, num_heads, head_dim] in q's dtype; computed in float32.

        Source: Dao et al., "Flash-Decoding", 2023; Kwon et al., "PagedAttention", 2023.
        """
    def qkv_paged_decode_attention(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        kv_lens: Tensor,
        sinks: Tensor | None = None,
        eps: float = 1e-06,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        softcap: float = 0.0,
        qk_mode: int = 1,
        layout: str = 'hnd',
        tickets: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """:func:`split_qkv_norm_rope_into_paged_cache` and :func:`paged_decode_attention` of a token.

        The token of sequence b has the position kv_lens[b] - 1, by which it is rotated, written and
        attended. A quantised pool takes those two.

        Args:
            qkv: [batch, (num_heads + 2 · num_kv_heads) · head_dim], one token of each sequence.
            q_weight, k_weight: [head_dim], read in mode 1 only.
            cos, sin: [max_positions, rotary_dim / 2].
            k_cache, v_cache: the pool, of qkv's dtype, written in place. No other sequence may see the
                slot that a sequence's token is written to.
            block_tables: [batch, max_blocks].
            kv_lens: [batch], keys with the new one; 0 for padding, which is not written and sees none.
            sinks: [num_heads], or None.
            eps: added to the mean square of the norms.
            softmax_scale: None means 1 / sqrt(head_dim).
            sliding_window: keys a query sees, itself included; 0 means all.
            softcap: 0 means none.
            qk_mode: as in :func:`qk_norm_rope`; V is always copied.
            layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.
            tickets: int32 [batch · num_kv_heads or more] zeros, which the call leaves so; no other call
                may have them while it runs. With them a sequence that is cut is merged in the same
                launch; None takes a launch more.

        Returns:
            [batch, num_heads, head_dim] in qkv's dtype.
        """
    def paged_varlen_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cu_seqlens_q: Tensor,
        pos_offsets: Tensor,
        block_tables: Tensor,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        max_q_len: int | None = None,
        softmax_scale: float | None = None,
        sliding_window: int = 0,
        softcap: float = 0.0,
        layout: str = 'hnd',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """One step of any mix of prompts, chunks of prompts and single tokens.

        The tokens of sequence s are [cu_seqlens_q[s], cu_seqlens_q[s + 1]), the first of them at
        position pos_offsets[s]; their own keys are in the pool already. What a query sees is told in
        :mod:`ferrum_triton.ops.attention.pool`. Tokens before the first and past the last sequence
        are padding: their results are undefined.

        Args:
            q: [num_tokens, num_heads, head_dim]; head_dim up to 256.
            k_cache, v_cache: the pool, of q's dtype, int8 or float8_e4m3fn; block_size a power of two.
            cu_seqlens_q: [num_seqs + 1], not descending; tokens outside of q are left out.
            pos_offsets: [num_seqs].
            block_tables: [num_seqs, max_blocks].
            k_scales, v_scales: of a quantised pool.
            sinks: [num_heads], or None.
            lse: [num_tokens, num_heads] float32, written if given, as in
                :func:`paged_decode_attention`.
            max_q_len: a bound on the tokens of any sequence, if known: 8 or less may spare a launch,
                and one near the mean says that no sequence is a decode's. Where ``cu_seqlens_q`` lies
                on the host it is checked; on a GPU a sequence of more tokens than a bound of 8 or less
                may be left out, its rows of the result unwritten.
            softmax_scale: None means 1 / sqrt(head_dim).
            sliding_window: keys a query sees, itself included; 0 means all.
            softcap: 0 means none.
            layout: ``"hnd"``, ``"nhd"`` or ``"vllm_x"``.

        Returns:
            [num_tokens, num_heads, head_dim] in q's dtype; computed in float32.
        """
    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        states: Tensor | None = None,
        slots: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pos_offsets: Tensor | None = None,
        kept_slots: Tensor | None = None,
        bias: Tensor | None = None,
        activation: str = 'silu',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t, c] = f(bias[c] + Σ_j weight[c, j] · x[t - (width - 1) + j, c]), within each sequence.

        Inputs before a sequence's first token are in its state: its last width - 1 inputs, oldest
        first, unrounded by the activation f. A decode step is a call of one token a sequence.

        Args:
            x: [num_tokens, num_channels]; rows may be strided.
            weight: [num_channels, width], any float dtype; width up to 16.
            states: [num_slots, width - 1, num_channels], written in place; None means zeros, and that
                none is kept. Channels are innermost, as in x, so that both are read alike.
            slots, cu_seqlens, pos_offsets, kept_slots: as in
                :mod:`ferrum_triton.ops.linear_attention.sequences`.
            bias: [num_channels], or None.
            activation: ``"silu"`` or ``"none"``.

        Returns:
            [num_tokens, num_channels] in x's dtype; computed in float32, rounded once.
        """
    def gdn_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor | None = None,
        slots: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pos_offsets: Tensor | None = None,
        kept_slots: Tensor | None = None,
        query_scale: float | None = None,
        tiled_values: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """S ← e^g · S; S ← S + k ⊗ β · (v - Sᵀ k); y = query_scale · Sᵀ q, token by token.

        For a decode step, and for the few tokens of a sequence whose guesses are verified. Any number
        of tokens is right; :func:`gdn_prefill` is faster for many.

        Args:
            q, k: [num_tokens, num_k_heads, head_k_dim], normalised by the caller; widths up to 256.
            v: [num_tokens, num_v_heads, head_v_dim].
            g: [num_tokens, num_v_heads] in float32, the logarithm of what a state is multiplied by;
                0 or less in a model, -inf forgets.
            beta: [num_tokens, num_v_heads] in float32.
            states: [num_slots, num_v_heads, head_k_dim, head_v_dim], written in place; any float
                dtype, to which a state is rounded when it is written, while it is float32 from token to
                token of a call. None means zeros, and that none is kept.
            slots, cu_seqlens, pos_offsets, kept_slots: as in
                :mod:`ferrum_triton.ops.linear_attention.sequences`.
            query_scale: None means 1 / sqrt(head_k_dim).
            tiled_values: whether value head h has key head h % num_k_heads, and not
                h // (num_v_heads / num_k_heads).

        Returns:
            [num_tokens, num_v_heads, head_v_dim] in v's dtype; computed in float32.

        Source: Yang et al., "Gated Delta Networks", 2024.
        """
    def gdn_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor | None = None,
        slots: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pos_offsets: Tensor | None = None,
        query_scale: float | None = None,
        tiled_values: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """S ← e^g · S; S ← S + k ⊗ β · (v - Sᵀ k); y = query_scale · Sᵀ q, by chunks of 64 tokens.

        :func:`gdn_decode` for prompts: the same result, from products of matrices. A value that is not
        finite may make NaN of any result of its sequence from its own chunk on; other sequences do not
        see it.

        Args:
            q, k: [num_tokens, num_k_heads, head_k_dim], normalised by the caller; widths up to 256.
            v: [num_tokens, num_v_heads, head_v_dim].
            g: [num_tokens, num_v_heads] in float32, 0 or less; -inf forgets.
            beta: [num_tokens, num_v_heads] in float32.
            states: [num_slots, num_v_heads, head_k_dim, head_v_dim], written in place, as in
                :func:`gdn_decode`.
            slots, cu_seqlens, pos_offsets: as in
                :mod:`ferrum_triton.ops.linear_attention.sequences`.
            query_scale: None means 1 / sqrt(head_k_dim).
            tiled_values: whether value head h has key head h % num_k_heads, and not
                h // (num_v_heads / num_k_heads).

        Returns:
            [num_tokens, num_v_heads, head_v_dim] in v's dtype. Products are of values in v's dtype,
            summed in float32; a state is in float32 from chunk to chunk. Float32 itself is computed
            token by token, as by :func:`gdn_decode`.

        Source: Yang et al., "Gated Delta Networks", 2024; Yang et al., "Parallelizing Linear
        Transformers with the Delta Rule over Sequence Length", 2024 (the WY form).
        """
    def sigmoid_gate(
        self,
        values: Tensor,
        gate: Tensor,
        residual: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = residual + values · sigmoid(gate), with a gate for each value or for each row.

        In place with ``out=values``, or with ``out=residual``.

        Args:
            values: [..., hidden_size]; rows may be strided.
            gate: [..., hidden_size], as beside the queries of gated attention, or [..., 1], as of a
                shared expert; any float dtype.
            residual: [..., hidden_size], of values' dtype or float32; None adds nothing.

        Returns:
            A tensor of values' shape, in residual's dtype where there is one, else in values'; computed
            in float32, rounded once.

        Source: Qiu et al., "Gated Attention for Large Language Models", 2025.
        """
    def gdn_prepare(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        num_k_heads: int,
        head_k_dim: int,
        states: Tensor | None = None,
        slots: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pos_offsets: Tensor | None = None,
        kept_slots: Tensor | None = None,
        l2_norm: bool = True,
        eps: float = 1e-06,
        *,
        out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x = silu(conv(qkv)); q, k = x / sqrt(Σ x² + eps); β = σ(b); g = -e^a_log · softplus(a + dt).

        The convolution is :func:`causal_conv1d`'s, and nothing is rounded after it before it is
        returned. One launch for any mix of prompts and single tokens.

        Args:
            qkv: [num_tokens, num_channels], each row packed as [q | k | v]; rows may be strided, as
                columns of one projection are. Qwen3-Next's projection, whose rows are interleaved by
                key head, is put into this order when it is loaded.
            b, a: [num_tokens, num_v_heads].
            weight: [num_channels, width], the convolution's, any float dtype.
            a_log, dt_bias: [num_v_heads], any float dtype.
            num_k_heads: heads of q and of k.
            head_k_dim: their width; values have the other channels.
            states: [num_slots, width - 1, num_channels], the convolution's, written in place; None
                means zeros, and that none is kept.
            slots, cu_seqlens, pos_offsets, kept_slots: as in
                :mod:`ferrum_triton.ops.linear_attention.sequences`.
            l2_norm: whether q and k are divided by their norms.
            eps: added to the sum of squares.

        Returns:
            q, k [num_tokens, num_k_heads, head_k_dim] and v [num_tokens, num_v_heads, head_v_dim] in
            qkv's dtype; g and beta [num_tokens, num_v_heads] in float32.

        Source: Yang et al., "Gated Delta Networks", 2024; Qwen3-Next, 2025.
        """
    def clamped_swiglu_moe_id(
        self,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor,
        up_bias: Tensor,
        ids: Tensor,
        alpha: float = 1.702,
        limit: float = 7.0,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = (u + 1) · g · sigmoid(alpha · g), where g and u are bounded and have their expert's bias.

        g[t, s] is gate[t, s] + gate_bias[ids[t, s]], and at most limit; u[t, s] is up[t, s] +
        up_bias[ids[t, s]], and from -limit to limit.

        Args:
            gate: [num_tokens, top_k, intermediate_size], a product of each pair with its expert.
            up: of gate's shape.
            gate_bias, up_bias: [num_experts, intermediate_size], any float dtype.
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) adds no bias.
            alpha: the slope of the sigmoid.
            limit: the bound of g and u, 0 or more.

        Returns:
            A tensor of gate's shape and dtype; computed in float32, rounded once.

        Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, and its reference code.
        """
    def moe_combine(
        self,
        packed: Tensor,
        pairs: Tensor,
        weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t] = Σ_k weights[t, k] · packed[pairs[t, k]], in the order of k.

        Args:
            packed: [num_rows, hidden_size], what the experts returned, in packed rows.
            pairs: [num_tokens, top_k] packed row of each pair; a pair outside [0, num_rows) adds
                nothing, whatever its weight.
            weights: [num_tokens, top_k], any float dtype.

        Returns:
            [num_tokens, hidden_size] in packed's dtype; summed in float32, rounded once.
        """
    def weighted_sum(
        self,
        slots: Tensor,
        weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t] = Σ_k weights[t, k] · slots[t, k], in the order of k.

        Args:
            slots: [num_tokens, top_k, hidden_size], strided as they come; ``slots[None]`` for one
                token, a slice for an offset.
            weights: [num_tokens, top_k], any float dtype.

        Returns:
            [num_tokens, hidden_size] in slots' dtype; summed in float32, rounded once.
        """
    def weighted_sum_residual(
        self,
        slots: Tensor,
        weights: Tensor,
        residual: Tensor,
    ) -> None:
        """residual[t] ← residual[t] + Σ_k weights[t, k] · slots[t, k], rounded once.

        Args:
            slots: [num_tokens, top_k, hidden_size].
            weights: [num_tokens, top_k], any float dtype.
            residual: [num_tokens, hidden_size], updated in place; of slots' dtype, or float32.
        """
    def weighted_sum_residual_norm(
        self,
        slots: Tensor,
        weights: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float = 1e-06,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """:func:`weighted_sum_residual`, then y = rms_norm(residual) · norm_weight; one launch.

        The variance is taken from the residual as stored, so that the result equals ``rms_norm`` of
        what the next layer reads.

        Args:
            slots: [num_tokens, top_k, hidden_size].
            weights: [num_tokens, top_k], any float dtype.
            residual: [num_tokens, hidden_size], updated in place; of slots' dtype, or float32.
            norm_weight: [hidden_size], the next layer's norm, any float dtype.
            eps: added to the mean square.

        Returns:
            [num_tokens, hidden_size] in slots' dtype.
        """
    def weighted_sum_norm_quant_qkv(
        self,
        residual: Tensor,
        slots: Tensor,
        weights: Tensor,
        norm_weight: Tensor,
        eps: float,
        q_blocks: Tensor,
        k_blocks: Tensor | None,
        v_blocks: Tensor | None,
        q_kind: str,
        k_kind: str,
        v_kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """:func:`add_rms_norm_quant_qkv` of x = Σ_k weights[:, k] · slots[:, k], in slots' dtype.

        It is what lies between two layers, if the first ends in a mixture of experts. By weights in
        planes of one format it is two launches, if there are more than 16 rows.

        Args:
            residual: [m, K], updated in place; of slots' dtype, or float32.
            slots: [m, top_k, K], what a token's experts return.
            weights: [m, top_k], any float dtype.
            norm_weight: [K], any float dtype.
            eps: added to the mean square.
            q_blocks: uint8 [nq, row_bytes], packed rows.
            k_blocks: uint8 [nk, row_bytes], or None: rows of one format lie in one matrix.
            v_blocks: uint8 [nv, row_bytes], or None.
            q_kind, k_kind, v_kind: the formats; that of None is not read.

        Returns:
            [m, nq + nk + nv] in slots' dtype.
        """
    def compute_ids_tpe(
        self,
        ids: Tensor,
        num_experts: int,
        gate_up_rows: int,
        down_rows: int,
        token_tile: int = 32,
        row_tile: int = 64,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Bucket e = the pairs with ids[p] = e, ascending; tpe[e] = their number; one launch.

        Buckets cost num_experts · num_pairs entries. That is the layout of a decode step; for long
        prompts :func:`moe_align_block_size` and :func:`moe_build_pairs_by_token` are compact.

        Args:
            ids: [num_tokens, top_k] expert ids; num_pairs = num_tokens · top_k.
            num_experts: up to 1024.
            gate_up_rows, down_rows: output rows of an expert's gate-up and down matrices.
            token_tile, row_tile: pairs and rows one program of the expert product will take.

        Returns:
            bucket_ids [num_experts, num_pairs] int32, -1 from tpe[e] on; tpe [num_experts] int32;
            grid_args [2, 3] int32, a row for gate-up and one for down: tiles of the fullest bucket, at
            least 1, tiles of the rows, num_experts. The grid covers every bucket and stays on the
            device.
        """
    def moe_align_block_size(
        self,
        ids: Tensor,
        num_experts: int,
        block_size: int,
        pair_ids: bool = True,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs sorted by expert, each expert padded to whole blocks; one launch.

        Args:
            ids: [num_tokens, top_k] expert ids; num_pairs = num_tokens · top_k.
            num_experts: up to 1024.
            block_size: entries of a block; a block belongs to one expert.
            pair_ids: entries are pair numbers: the consumer reads token ``entry // top_k`` and writes
                row ``entry``. False: entries are packed rows, for activations gathered beforehand.

        Returns:
            sorted_ids [capacity] int32, num_pairs where an entry is padding; block_experts
            [capacity / block_size] int32, -1 past the last block; total [1] int32, entries in use, a
            multiple of block_size. capacity is the largest total there can be:
            num_pairs + min(num_pairs, num_experts) · (block_size - 1), rounded down to whole blocks.
        """
    def moe_build_pairs_by_token(
        self,
        ids: Tensor,
        num_experts: int,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The stable sort of pairs by expert, and its inverse; one launch.

        Args:
            ids: [num_tokens, top_k] expert ids; num_pairs = num_tokens · top_k.
            num_experts: up to 1024.

        Returns:
            pairs [num_tokens, top_k] int32, the packed row of each pair, -1 if it is dropped;
            packed_tokens [num_pairs] int32, the token of each packed row, -1 past the last;
            expert_offsets [num_experts + 1] int32: expert e owns the packed rows from
            expert_offsets[e] to expert_offsets[e + 1].
        """
    def gemv_quant_moe_id(
        self,
        a: Tensor,
        blocks: Tensor,
        ids: Tensor,
        kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t, s, n] = Σₖ a[t, s, k] · W[ids[t, s]][n, k], for few tokens.

        W is decoded exactly and the products are summed in float32, whatever a's dtype. Only the
        experts that ids names are read. Over planes, where an expert has more than about one pair of
        16-bit activations, pairs are sorted by expert and taken as in :func:`gemm_quant_moe_id`.

        Args:
            a: [num_tokens, K], a token's row for all its slots, as for gate and up; or
                [num_tokens, top_k, K], a row a slot, as for down. A slice is an offset, and a single
                token a batch of one.
            blocks: uint8 [num_experts, n, row_bytes], the experts' packed rows.
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
                zeros.
            kind: the format of blocks.

        Returns:
            [num_tokens, top_k, n] in a's dtype.
        """
    def gemv_quant_moe_id_gate_up_silu(
        self,
        a: Tensor,
        gate_blocks: Tensor,
        up_blocks: Tensor,
        ids: Tensor,
        gate_kind: str,
        up_kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t, s] = silu(a[t, s] · Gᵀ) · (a[t, s] · Uᵀ), G and U the gate and up of expert ids[t, s].

        Both products are those of :func:`gemv_quant_moe_id`, in float32 until the one rounding at the
        end.

        Args:
            a: [num_tokens, K] or [num_tokens, top_k, K].
            gate_blocks: uint8 [num_experts, n, row_bytes].
            up_blocks: uint8 [num_experts, n, row_bytes], of a format that may be another.
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
                zeros.
            gate_kind, up_kind: the formats.

        Returns:
            [num_tokens, top_k, n] in a's dtype.
        """
    def gemm_quant_moe_id(
        self,
        a: Tensor,
        blocks: Tensor,
        bucket_ids: Tensor,
        tpe: Tensor,
        kind: str,
        top_k: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[p // top_k, p mod top_k] = a[p] · W[e]ᵀ for p in the first tpe[e] of bucket_ids[e].

        :func:`compute_ids_tpe` makes the buckets. A tile of an expert's weights is decoded once for up
        to 64 of its pairs. As in ``gemm_quant``, weights are rounded to a's dtype for the tensor cores
        and sums are in float32. Of planes and a in float32 nothing is rounded, and each pair reads its
        expert's rows.

        Args:
            a: [num_tokens, K], a token's row for all its pairs, as for gate and up; or
                [num_tokens, top_k, K], a row a pair, as for down.
            blocks: uint8 [num_experts, n, row_bytes], the experts' packed rows; up to 1024 experts.
            bucket_ids: [num_experts, capacity] int32 or int64, the pairs of each expert. A pair is in
                one bucket, once, or in none: then its row is zeros. Entries that are no pair, outside
                [0, num_tokens · top_k), are passed over.
            tpe: [num_experts] int32 or int64, entries of each bucket; more than capacity counts as
                capacity, less than 0 as 0.
            kind: the format of blocks.
            top_k: slots of a token.

        Returns:
            [num_tokens, top_k, n] in a's dtype.
        """
    def gemm_quant_moe_id_gate_up_silu(
        self,
        a: Tensor,
        gate_blocks: Tensor,
        up_blocks: Tensor,
        bucket_ids: Tensor,
        tpe: Tensor,
        gate_kind: str,
        up_kind: str,
        top_k: int,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[p] = silu(a[p] · G[e]ᵀ) · (a[p] · U[e]ᵀ) for p in the first tpe[e] of bucket_ids[e].

        :func:`gemm_quant_moe_id` of gate and up in one launch where both are one kind of planes, with
        its arguments and its rounding of weights. What the two give is not rounded in between.

        Args:
            a: [num_tokens, K] or [num_tokens, top_k, K].
            gate_blocks: uint8 [num_experts, n, row_bytes]; up to 1024 experts.
            up_blocks: uint8 [num_experts, n, row_bytes], of a format that may be another.
            bucket_ids: [num_experts, capacity] int32 or int64, the pairs of each expert.
            tpe: [num_experts] int32 or int64, entries of each bucket.
            gate_kind, up_kind: the formats.
            top_k: slots of a token.

        Returns:
            [num_tokens, top_k, n] in a's dtype; zeros for pairs in no bucket.
        """
    def gemm_moe_id(
        self,
        a: Tensor,
        weights: Tensor,
        ids: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t, s, n] = Σₖ a[t, s, k] · W[e][n, k] + bias[e][n], with e = ids[t, s].

        Of few pairs each reads its expert by itself. More are sorted by expert first, and an expert's
        weights are read once for a tile of them. Nothing is asked of the host; no expert is read that
        ids does not name.

        Args:
            a: [num_tokens, k], a token's row for all its slots; or [num_tokens, top_k, k], a row a
                slot, as for down.
            weights: [num_experts, n, k], in a's dtype.
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
                zeros, so that each of several ranks may have some of the experts.
            bias: [num_experts, n], any float dtype, or None.

        Returns:
            [num_tokens, top_k, n] in a's dtype; sums in float32, rounded once.
        """
    def gemm_moe_id_sum(
        self,
        a: Tensor,
        weights: Tensor,
        ids: Tensor,
        slot_weights: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t] = Σₛ slot_weights[t, s] · (W[e] · a[t, s] + bias[e]), with e = ids[t, s].

        Of few tokens it is one launch, which rounds nothing before the sum. Of more it is
        :func:`gemm_moe_id`, whose products are rounded to a's dtype, and a sum.

        Args:
            a: [num_tokens, k] or [num_tokens, top_k, k].
            weights: [num_experts, n, k], in a's dtype.
            ids: [num_tokens, top_k] int32 or int64. A slot whose id is outside [0, num_experts) adds
                nothing, whatever its weight.
            slot_weights: [num_tokens, top_k], any float dtype.
            bias: [num_experts, n], any float dtype, or None.

        Returns:
            [num_tokens, n] in a's dtype; summed in float32, in a fixed order.
        """
    def gemm_moe_id_gate_up(
        self,
        a: Tensor,
        weights: Tensor,
        ids: Tensor,
        bias: Tensor | None = None,
        activation: str = 'silu',
        alpha: float = 1.702,
        limit: float = 7.0,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t, s] = act(a[t, s] · Gᵀ + bias_G) · (a[t, s] · Uᵀ + bias_U), [G; U] = W[ids[t, s]].

        Products are those of :func:`gemm_moe_id`, in float32 until the one rounding at the end.

        Args:
            a: [num_tokens, k] or [num_tokens, top_k, k].
            weights: [num_experts, 2 n, k], of each expert G's rows and then U's; in a's dtype.
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
                zeros.
            bias: [num_experts, 2 n], any float dtype, or None.
            activation: ``"silu"``; ``"gelu_tanh"``; or ``"clamped_swiglu"``, gpt-oss's
                (u + 1) · g · sigmoid(alpha · g) with g at most limit and u from -limit to limit.
            alpha: the slope of that sigmoid.
            limit: the bound of g and u there, 0 or more.

        Returns:
            [num_tokens, top_k, n] in a's dtype.
        """
    def gemv_quant_moe_id_sum(
        self,
        a: Tensor,
        blocks: Tensor,
        ids: Tensor,
        weights: Tensor,
        kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t] = Σ_s weights[t, s] · (W[ids[t, s]] · a[t, s]), for few tokens.

        The sum over slots of :func:`gemv_quant_moe_id`, whose products stay in float32 until y is
        rounded once. Sums are of a fixed order. Of up to 4 tokens, whose slots are 16 at most, stacks
        in planes take one launch; all else is two.

        Args:
            a: [num_tokens, K] or [num_tokens, top_k, K].
            blocks: uint8 [num_experts, n, row_bytes], the experts' packed rows.
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) adds nothing,
                whatever its weight.
            weights: [num_tokens, top_k], any float dtype.
            kind: the format of blocks.

        Returns:
            [num_tokens, n] in a's dtype.
        """
    def mlp_quant_moe_id(
        self,
        a: Tensor,
        gate_blocks: Tensor,
        up_blocks: Tensor,
        down_blocks: Tensor,
        ids: Tensor,
        gate_kind: str,
        up_kind: str,
        down_kind: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t, s] = (silu(a[t] · Gᵀ) · (a[t] · Uᵀ)) · Dᵀ of expert ids[t, s], for pairs by expert.

        It is :func:`gemm_quant_moe_id_gate_up_silu`, in a's dtype, and :func:`gemm_quant_moe_id` of
        that, with the buckets of ``compute_ids_tpe``. By experts in planes it is three launches while
        an expert has few pairs.

        Args:
            a: [num_tokens, K].
            gate_blocks: uint8 [num_experts, inner, row_bytes]; up to 1024 experts.
            up_blocks: uint8 [num_experts, inner, row_bytes], of a format that may be another.
            down_blocks: uint8 [num_experts, n, row_bytes] over ``inner``, likewise.
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
                zeros.
            gate_kind, up_kind, down_kind: the formats.

        Returns:
            [num_tokens, top_k, n] in a's dtype.
        """
    def route_topk_softmax(
        self,
        logits: Tensor,
        top_k: int,
        norm_topk_prob: bool = True,
        counted: bool = True,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """p = softmax(logits) over all experts; the top_k of p, and how many tokens chose each expert.

        Experts are ranked by their logits, that is by p before any rounding, equal logits by the lower
        id. A NaN logit counts as -inf: probability 0, chosen after every number. Logits of +inf share
        the probability equally; a row without any logit above -inf has probabilities 0.

        Args:
            logits: [num_tokens, num_experts], up to 1024 experts; rows may be strided.
            top_k: experts a token, up to 32.
            norm_topk_prob: divide by the sum over the chosen experts (Mixtral, Qwen3-MoE), which is
                also the softmax over the chosen logits; where the sum is 0 each weight is 1 / top_k.
            counted: whether the counts are asked for, which several programs add up in memory that a
                launch of its own has to clear.

        Returns:
            ids [num_tokens, top_k] int32, by descending probability; weights [num_tokens, top_k]
            float32; counts [num_experts] int32, the tokens of each expert, or [0] if not ``counted``.
        """
    def gemm_route_topk_softmax(
        self,
        a: Tensor,
        router: Tensor,
        top_k: int,
        norm_topk_prob: bool = True,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """:func:`route_topk_softmax` of a · routerᵀ, in float32 all the way; nothing is counted.

        The logits are nowhere in memory where the launch that routes adds up the product's parts.

        Args:
            a: [num_tokens, k].
            router: [num_experts, k] of a's dtype, up to 1024 experts.
            top_k: experts a token, up to 32.
            norm_topk_prob: divide by the sum over the chosen experts.

        Returns:
            ids [num_tokens, top_k] int32, by descending probability; weights [num_tokens, top_k]
            float32.
        """
    def route_topk_sigmoid_grouped(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        num_groups: int = 1,
        topk_groups: int = 1,
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        counted: bool = True,
        *,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """s = sigmoid(logits); the top_k of s + bias inside the best groups; weights from s alone.

        Experts stand in num_groups groups of consecutive ids. A group counts for the sum of its two
        largest s + bias (of the only one, in groups of one); experts outside the topk_groups best
        groups cannot be chosen. Equal values go to the lower id. A NaN logit counts as -inf; where
        s + bias, or a group's sum, is NaN, it counts as -inf.

        Args:
            logits: [num_tokens, num_experts], up to 1024 experts; rows may be strided.
            bias: [num_experts], any float dtype, used for the choice only; None for zeros.
            top_k: experts a token, up to 32 and to the experts of topk_groups groups.
            num_groups: divides num_experts; 1 for no limit by groups.
            topk_groups: groups a token may use.
            norm_topk_prob: divide by the sum over the chosen experts; 1 / top_k where that is 0.
            routed_scaling_factor: multiplies the weights, last.
            counted: whether the counts are asked for, as of :func:`route_topk_softmax`.

        Returns:
            ids [num_tokens, top_k] int32, by descending s + bias; weights [num_tokens, top_k] float32;
            counts [num_experts] int32, the tokens of each expert, or [0] if not ``counted``.

        Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, sections 2.1.2 and 4.2.
        """
    def quantize_fp8_groups(
        self,
        x: Tensor,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """code = x / scale rounded to the nearest even, scale = max |x| / 448, by groups of 128.

        Both divisions are those of float32, rounded once. A group whose max |x| is below 2^-100 has a
        scale of 1, by which its codes are zeros. One that holds NaN or an infinity has a scale of NaN
        and codes of zeros, so that every product with it is NaN.

        Args:
            x: [m, k]. The last group of a row may have fewer columns than 128.

        Returns:
            codes: float8_e4m3fn [m, k].
            scales: float32 [m, ceil(k / 128)].
        """
    def gemm_moe_id_fp8_128x128(
        self,
        a: Tensor,
        weights: Tensor,
        scales: Tensor,
        ids: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t, s] = gemm_fp8_128x128(a[t, s], weights[e], scales[e]), with e = ids[t, s].

        Args:
            a: [num_tokens, k], a token's row for all its slots; or [num_tokens, top_k, k].
            weights: float8_e4m3fn [num_experts, n, k].
            scales: float32 [num_experts, ceil(n / 128), ceil(k / 128)].
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
                zeros.

        Returns:
            [num_tokens, top_k, n] in a's dtype, rounded once.
        """
    def gemm_moe_id_sum_fp8_128x128(
        self,
        a: Tensor,
        weights: Tensor,
        scales: Tensor,
        ids: Tensor,
        slot_weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t] = Σₛ slot_weights[t, s] · gemm_fp8_128x128(a[t, s], W[e], scales[e]), e = ids[t, s].

        Of few tokens it is one launch, which rounds no product before the sum. Of more it is
        :func:`gemm_moe_id_fp8_128x128`, whose products are rounded to a's dtype, and a sum.

        Args:
            a: [num_tokens, k] or [num_tokens, top_k, k].
            weights: float8_e4m3fn [num_experts, n, k].
            scales: float32 [num_experts, ceil(n / 128), ceil(k / 128)].
            ids: [num_tokens, top_k] int32 or int64. A slot whose id is outside [0, num_experts) adds
                nothing, whatever its weight.
            slot_weights: [num_tokens, top_k], any float dtype.

        Returns:
            [num_tokens, n] in a's dtype; summed in float32, in a fixed order.
        """
    def gemm_moe_id_gate_up_fp8_128x128(
        self,
        a: Tensor,
        gate_weights: Tensor,
        gate_scales: Tensor,
        up_weights: Tensor,
        up_scales: Tensor,
        ids: Tensor,
        activation: str = 'silu',
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[t, s] = act(a[t, s] · Gᵀ) · (a[t, s] · Uᵀ), G and U of the expert ids[t, s].

        Products are those of :func:`gemm_moe_id_fp8_128x128`, in float32 until the one rounding at the
        end.

        Args:
            a: [num_tokens, k] or [num_tokens, top_k, k].
            gate_weights, up_weights: float8_e4m3fn [num_experts, n, k].
            gate_scales, up_scales: float32 [num_experts, ceil(n / 128), ceil(k / 128)].
            ids: [num_tokens, top_k] int32 or int64. An id outside [0, num_experts) gives a row of
                zeros.
            activation: ``"silu"``, or ``"gelu_tanh"`` in its place.

        Returns:
            [num_tokens, top_k, n] in a's dtype.
        """
    def gemm_fp8_128x128(
        self,
        a: Tensor,
        weight: Tensor,
        scales: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[m, n] = Σ_g s[m, g] · scales[n / 128, g] · Σ_{k in g} q[m, k] · weight[n, k].

        q and s are what :func:`quantize_fp8_groups` makes of a, and g runs over groups of 128 columns:
        sums of codes by codes within a group, and then over groups, in float32. Tensor cores of Hopper
        keep 14 bits of the former, for activations of 16 bits. One definition at any number of tokens.

        Args:
            a: [m, k].
            weight: float8_e4m3fn [n, k], stored [out_features, in_features].
            scales: float32 [ceil(n / 128), ceil(k / 128)], by which codes of a block are multiplied:
                ``weight_scale_inv`` of files.

        Returns:
            [m, n] in a's dtype, rounded once.
        """
    def argmax_rows(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[i] = the lowest j with logits[i, j] = max over the row, NaN never chosen.

        Without a mask, a row of nothing but NaN and -inf gives 0. With one, only finite logits in
        columns that the mask allows can be chosen, and a row that has none gives -1.

        Args:
            logits: [num_rows, vocab_size], rows may be strided.
            mask: [mask_size] int8 or uint8, or None: column j may be chosen where mask[j] is not 0;
                columns past its end may not.

        Returns:
            [num_rows] int32.
        """
    def repetition_penalty_inplace(
        self,
        logits: Tensor,
        row_offsets: Tensor,
        token_ids: Tensor,
        penalties: Tensor,
    ) -> None:
        """logits[i, j] ← l / p where l > 0, else l · p, for every j in row i's list; p = penalties[i].

        A token listed more than once counts once. What only the device knows is not trusted: ids
        outside the vocabulary are skipped, offsets outside the list are clamped to it. Offsets ascend.

        Args:
            logits: [num_rows, vocab_size], updated in place, rounded once.
            row_offsets: [num_rows + 1]; row i's list is token_ids[row_offsets[i] : row_offsets[i + 1]].
            token_ids: [num_listed], the lists one after the other.
            penalties: [num_rows], any float dtype; 1 leaves the row as it is.

        Source: Keskar et al., "CTRL", 2019.
        """
    def uniform_rows(
        self,
        seeds: Tensor,
        offsets: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[i] = ⌊w / 2⁸⌋ / 2²⁴, w the first word of Philox4x32-10 under key seeds[i] at offsets[i].

        A pure function: the same seed and offset give the same number on every device, and advancing
        the offset by one gives the next. There is no generator to keep or to capture.

        Args:
            seeds: [num_rows], one a request; all 64 bits count.
            offsets: [num_rows], the position in the request's stream, such as the step.

        Returns:
            [num_rows] float32 in [0, 1), multiples of 2⁻²⁴.

        Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
        """
    def sample_rows(
        self,
        logits: Tensor,
        u: Tensor,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y[i] = the lowest j with Σ w[i, :j+1] > u[i] · Σ w[i], w[i] the weights that filters keep.

        Weights are w = e^((logit - max) / temperature). Order the row by logit, largest first, equal
        ones by column. The filters keep a prefix of that order, the shortest of these: the first top_k;
        of those, the fewest that together reach top_p of their sum; those with w ≥ min_p. At least one
        is kept. Drawing then walks the columns in their own order, so a call is a pure function of its
        arguments, and u uniform in [0, 1) gives every kept column its share.

        NaN and -inf are never chosen, +inf counts as the largest float32; a row of nothing else gives
        0. Values on the device are not checked but defined: u outside [0, 1) chooses the first or last
        column kept.

        Args:
            logits: [num_rows, vocab_size], rows may be strided.
            u: [num_rows], any float dtype, uniform in [0, 1): see :func:`uniform_rows`.
            temperature: [num_rows], or [1] for all; None is 1. 0 and below choose the largest.
            top_k: [num_rows] or [1]; None, 0 and below keep all.
            top_p: [num_rows] or [1]; None, 1 and above keep all.
            min_p: [num_rows] or [1], relative to the likeliest; None and 0 keep all.

        Returns:
            [num_rows] int32.

        Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019 (top-p); Minh et
        al., "Turning Up the Heat", 2024 (min-p).
        """
    def advance_rows(
        self,
        state: Tensor,
        chosen: Tensor,
        history: Tensor | None = None,
    ) -> None:
        """token ← chosen; where pos ≥ 0: history[pos mod num_kept] ← chosen, pos and kv_len += 1.

        A step that ends so can be replayed as it is. The host follows it by the history: row i's token
        after position p stays at history[p mod num_kept, i] until the row has come num_kept further.

        Args:
            state: [3, num_rows], each row's token, position and number of keys, as
                :class:`~ferrum_triton.runtime.graph.DecodeState` has them. Columns may be a part of
                more. A negative position is padding: it keeps its position and its keys.
            chosen: [num_rows], the tokens that the step chose.
            history: [num_kept, num_rows], on the state's device or in pinned memory of the host, which
                a GPU writes itself: no copy then stands between two steps. None keeps nothing.
        """
