"""A decoder of random weights for timing: the shape of a model, its weights, one step of a batch.

Two formats. ``q4_K`` is what llama.cpp calls Q4_K_M, in planes: every matrix in Q4_K but V and down
of half of the layers, and the head, which are in Q6_K. ``bf16`` is dense, its products go through
``gemm``. A step takes a token of every sequence through the layers and a greedy choice, over a
residual stream in float32; its ops are the backend's, the fused ones where there are such for the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.backends import Backend
from ferrum_triton.ops.quant_fused import MAX_ROWS
from ferrum_triton.quant.planes import PLANE_FORMATS, views
from ferrum_triton.testing import TensorFactory

FORMATS = ("q4_K", "bf16")
LAYER_PARTS = (
    "attn_norm",
    "qkv",
    "rope_cache",
    "attention",
    "out",
    "mlp_norm",
    "gate_up",
    "down",
)
Q4_K, Q6_K = "Q4_K:planes", "Q6_K:planes"
EPS = 1e-6
BLOCK_SIZE = 16

# Root mean square of a random weight whose block scale is 1; Q4_K's minimum is 7.5 scales there,
# the middle of its integers.
SPREAD = {Q4_K: 310.0, Q6_K: 1370.0}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    num_layers: int
    vocab: int

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


QWEN3_8B = Shape(4096, 32, 8, 128, 12288, 36, 151936)


class Matrix(NamedTuple):
    """W [n, k].

    Attributes:
        data: planes uint8 [n, row_bytes], or [n, k] in the activations' dtype.
        kind: the planes' kind; ``""`` for a dense matrix.
    """

    data: Tensor
    kind: str


@dataclass(frozen=True)
class LayerWeights:
    """One layer.

    Attributes:
        qkv: one matrix, or Q and K in one and V, of another kind, in a second.
        gate_up: gate and up, or both in one matrix if they are dense.
    """

    attn_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    mlp_norm: Tensor
    qkv: tuple[Matrix, ...]
    out: Matrix
    gate_up: tuple[Matrix, ...]
    down: Matrix


@dataclass(frozen=True)
class Weights:
    """A whole model, with rotary tables for ``context`` positions."""

    shape: Shape
    dtype: torch.dtype
    layers: tuple[LayerWeights, ...]
    embedding: Matrix
    final_norm: Tensor
    head: Matrix
    cos: Tensor
    sin: Tensor


def uses_more_bits(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M has V and down of a layer in Q6_K: the first and last eighth, and every third
    between (llama.cpp's ``use_more_bits``).
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def random_planes(kind: str, n: int, k: int, device: torch.device | str, seed: int = 0) -> Tensor:
    """Random bytes as planes of W [n, k]; products with it are about as large as activations."""
    make = TensorFactory(torch.float16, device, seed)
    form = PLANE_FORMATS[kind]
    planes = make.bytes(n, form.row_bytes(k))
    if planes.device.type == "meta":
        return planes
    parts = views(planes, form.file.name)
    scale = parts["d"].view(torch.float16)
    scale.uniform_(0.5, 1.5).mul_(k**-0.5 / SPREAD[kind])
    if form.file.m is not None:
        pairs = scale.unflatten(-1, (-1, 2))
        pairs[..., 1] = 7.5 * pairs[..., 0]
        parts["s"].bitwise_and_(63)  # scales and minimums of six bits
    return planes


def make_weights(
    shape: Shape,
    form: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    context: int = 1024,
) -> Weights:
    """Random weights of a format, on a device."""
    make = TensorFactory(dtype, device)
    seeds = iter(range(1 << 20))

    def matrix(n: int, k: int, kind: str = Q4_K) -> Matrix:
        if form == "bf16":
            return Matrix(TensorFactory(dtype, device, next(seeds)).randn(n, k, scale=k**-0.5), "")
        return Matrix(random_planes(kind, n, k, device, next(seeds)), kind)

    def layer(index: int) -> LayerWeights:
        more = Q6_K if uses_more_bits(index, shape.num_layers) else Q4_K
        qk, hidden = shape.q_dim + shape.kv_dim, shape.hidden
        if form == "bf16" or more == Q4_K:
            qkv: tuple[Matrix, ...] = (matrix(qk + shape.kv_dim, hidden),)
        else:
            qkv = (matrix(qk, hidden), matrix(shape.kv_dim, hidden, more))
        if form == "bf16":
            gate_up: tuple[Matrix, ...] = (matrix(2 * shape.intermediate, hidden),)
        else:
            gate_up = (matrix(shape.intermediate, hidden), matrix(shape.intermediate, hidden))
        return LayerWeights(
            attn_norm=make.weight(hidden),
            q_norm=make.weight(shape.head_dim),
            k_norm=make.weight(shape.head_dim),
            mlp_norm=make.weight(hidden),
            qkv=qkv,
            out=matrix(hidden, shape.q_dim),
            gate_up=gate_up,
            down=matrix(hidden, shape.intermediate, more),
        )

    return Weights(
        shape=shape,
        dtype=dtype,
        layers=tuple(layer(i) for i in range(shape.num_layers)),
        embedding=matrix(shape.vocab, shape.hidden),
        final_norm=make.weight(shape.hidden),
        head=matrix(shape.vocab, shape.hidden, Q6_K),
        **make.rope(context, shape.head_dim),
    )


class Decoder:
    """One decode step of ``batch`` sequences, each of ``context`` keys, its new one included.

    Every layer has weights and a paged cache of its own. A part of the step may be left out: what
    follows then reads what that part gave in an earlier step, so that the difference of two times
    is what the part costs where it stands.
    """

    def __init__(self, backend: Backend, weights: Weights, batch: int, context: int) -> None:
        self.backend, self.weights, self.batch = backend, weights, batch
        shape, device = weights.shape, backend.device
        make = TensorFactory(weights.dtype, device)
        pages = -(-context // BLOCK_SIZE)
        pool = (batch * pages, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        self.ids = make.ints(0, shape.vocab, batch)
        self.tables = make.distinct_ints(0, batch * pages, batch * pages).view(batch, pages)
        self.lengths = make.ints(context, context + 1, batch)
        self.positions = self.lengths - 1
        self.caches = [(make.randn(*pool), make.randn(*pool)) for _ in weights.layers]
        self._given: dict[str, Tensor] = {}
        self._left_out = ""

    @property
    def logits(self) -> Tensor:
        """The logits of the first step, [batch, vocab]."""
        return self._given["head"]

    def step(self, left_out: str = "", with_layers: bool = True) -> Tensor:
        """The likeliest next token of each sequence, int32 [batch].

        Args:
            left_out: the part to leave out, after a whole step.
            with_layers: whether the layers run; without them the embedding goes to the head.
        """
        self._left_out = left_out
        x = self._part("embedding", self._embed)
        residual = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if with_layers:
            for i in range(len(self.weights.layers)):
                x = self.layer(i, residual, x)
        h = self._norm("final_norm", residual, x, self.weights.final_norm)
        logits = self._part("head", lambda: self._product(h, self.weights.head))
        return self._part("argmax", lambda: self.backend.argmax_rows(logits))

    @property
    def layer_parts(self) -> tuple[str, ...]:
        """The parts of a layer; norms are parts where they are not one op with the product."""
        parts = LAYER_PARTS
        return tuple(p for p in parts if not p.endswith("norm")) if self._norms_fused else parts

    @property
    def _norms_fused(self) -> bool:
        return bool(self.weights.layers[0].out.kind) and self.batch <= MAX_ROWS

    def layer(self, index: int, residual: Tensor, x: Tensor) -> Tensor:
        """What is to be added to the residual stream after a layer, [batch, hidden].

        Args:
            index: the layer.
            residual: the residual stream, float32 [batch, hidden]; x and what attention gives are
                added to it in place.
            x: what the layer before left to be added.
        """
        w, part = self.weights.layers[index], self._part
        if self._norms_fused:
            qkv = part("qkv", lambda: self._norm_qkv(residual, x, w))
        else:
            h = self._norm("attn_norm", residual, x, w.attn_norm)
            qkv = part("qkv", lambda: self._side_by_side(h, w.qkv))
        q = part("rope_cache", lambda: self._write_cache(index, qkv))
        attended = part("attention", lambda: self._attend(index, q))
        x = part("out", lambda: self._product(attended, w.out))
        if self._norms_fused:
            inner = part("gate_up", lambda: self._norm_gate_up(residual, x, w))
        else:
            h = self._norm("mlp_norm", residual, x, w.mlp_norm)
            inner = part("gate_up", lambda: self._gate_up(h, w.gate_up))
        return part("down", lambda: self._product(inner, w.down))

    def _part(self, name: str, call: Callable[[], Tensor]) -> Tensor:
        if name == self._left_out:
            return self._given[name]
        result = call()
        if name not in self._given:  # of the first step, which no graph records
            self._given[name] = result
        return result

    def _embed(self) -> Tensor:
        table = self.weights.embedding
        if table.kind:
            dtype = self.weights.dtype
            return self.backend.embedding_lookup_quant(table.data, self.ids, table.kind, dtype)
        return self.backend.embedding_lookup_dev(table.data, self.ids)

    def _norm(self, name: str, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._part(name, lambda: self.backend.fused_add_rms_norm(residual, x, weight, EPS))

    def _product(self, a: Tensor, w: Matrix, out: Tensor | None = None) -> Tensor:
        if w.kind:
            return self.backend.gemm_quant(a, w.data, w.kind, out=out)
        return self.backend.gemm(a, w.data, out=out)

    def _side_by_side(self, a: Tensor, matrices: tuple[Matrix, ...]) -> Tensor:
        """Products with several matrices, each in its columns of one result."""
        if len(matrices) == 1:
            return self._product(a, matrices[0])
        sizes = [w.data.shape[0] for w in matrices]
        y = a.new_empty(a.shape[0], sum(sizes))
        for w, columns in zip(matrices, y.split(sizes, dim=1), strict=True):
            self._product(a, w, out=columns)
        return y

    def _norm_qkv(self, residual: Tensor, x: Tensor, w: LayerWeights) -> Tensor:
        """The norm's product with Q, K and V."""
        missing = 3 - len(w.qkv)
        blocks = [*(m.data for m in w.qkv), *[None] * missing]
        kinds = [*(m.kind for m in w.qkv), *[""] * missing]
        call = self.backend.add_rms_norm_quant_qkv
        return call(residual, x, w.attn_norm, EPS, *blocks, *kinds)

    def _write_cache(self, index: int, qkv: Tensor) -> Tensor:
        """Q [batch, 1, num_heads, head_dim], normed and rotated; K and V go to the cache."""
        w, (k_cache, v_cache) = self.weights.layers[index], self.caches[index]
        q = self.backend.split_qkv_norm_rope_into_paged_cache(
            qkv,
            w.q_norm,
            w.k_norm,
            self.weights.cos,
            self.weights.sin,
            k_cache,
            v_cache,
            num_heads=self.weights.shape.num_heads,
            block_tables=self.tables,
            pos_offsets=self.positions,
            eps=EPS,
        )
        return q[:, None]

    def _attend(self, index: int, q: Tensor) -> Tensor:
        k_cache, v_cache = self.caches[index]
        attend = self.backend.paged_decode_attention
        return attend(q, k_cache, v_cache, self.tables, self.lengths).view(self.batch, -1)

    def _gate_up(self, h: Tensor, matrices: tuple[Matrix, ...]) -> Tensor:
        """silu(gate) · up"""
        return self.backend.fused_silu_mul_split(self._side_by_side(h, matrices))

    def _norm_gate_up(self, residual: Tensor, x: Tensor, w: LayerWeights) -> Tensor:
        """silu(gate) · up of the norm."""
        (gate, up), call = w.gate_up, self.backend.add_rms_norm_quant_gate_up_silu
        return call(residual, x, w.mlp_norm, EPS, gate.data, up.data, gate.kind, up.kind)
