"""The vocabulary around the ops: dtypes, KV kinds, quantisation kinds, attention settings, routing.

Each is a frozen dataclass or an enum over things of torch; none holds behaviour of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ferrum_triton.errors import InputError


class Dtype(Enum):
    """Element types of buffers; ``Dtype(torch.int32)`` finds the member of a torch dtype."""

    F32 = torch.float32
    F16 = torch.float16
    BF16 = torch.bfloat16
    FP8 = torch.float8_e4m3fn
    I64 = torch.int64
    I32 = torch.int32
    # An alias: kernels read block tables, lengths and offsets as signed, and none needs bit 31.
    U32 = I32
    I8 = torch.int8
    U8 = torch.uint8

    @property
    def bytes_per_elem(self) -> int:
        return self.value.itemsize


class SrcDtype(Enum):
    """Element types of dense weights on disk, little-endian."""

    F32 = torch.float32
    F16 = torch.float16
    BF16 = torch.bfloat16

    @property
    def bytes_per_elem(self) -> int:
        return self.value.itemsize


class KvDtypeKind(StrEnum):
    """How a KV cache stores its elements; the quantised kinds have a scale per token and head."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"  # E4M3 without infinities
    INT8 = "int8"

    @property
    def dtype(self) -> torch.dtype:
        return _KV_DTYPES[self]

    @property
    def bytes_per_elem(self) -> int:
        return self.dtype.itemsize

    @property
    def quantised(self) -> bool:
        return self in (KvDtypeKind.FP8, KvDtypeKind.INT8)


_KV_DTYPES = {
    KvDtypeKind.FP32: torch.float32,
    KvDtypeKind.FP16: torch.float16,
    KvDtypeKind.BF16: torch.bfloat16,
    KvDtypeKind.FP8: torch.float8_e4m3fn,
    KvDtypeKind.INT8: torch.int8,
}


class ReduceOp(StrEnum):
    """How ranks combine their elements."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class GgufQuantType(StrEnum):
    """GGUF block formats, by the names that ops take as ``kind``."""

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    IQ4_NL = "IQ4_NL"
    IQ4_XS = "IQ4_XS"
    MXFP4 = "MXFP4"


@dataclass(frozen=True)
class Gptq:
    """GPTQ: integers of ``bits`` bits, a scale and zero per group of inputs.

    ``group_size`` -1 means one group; ``desc_act`` that inputs were ordered by activation.
    """

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False


@dataclass(frozen=True)
class Awq:
    """AWQ: as :class:`Gptq`, packed along the outputs, without activation order."""

    bits: int = 4
    group_size: int = 128


@dataclass(frozen=True)
class Gguf:
    """Blocks of a GGUF file."""

    quant_type: GgufQuantType


QuantKind: TypeAlias = Gptq | Awq | Gguf
"""How a weight is quantised; ``isinstance(kind, QuantKind)`` holds for each."""


@dataclass(frozen=True)
class AttnConfig:
    """What attention is told beside its tensors.

    Attributes:
        num_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        causal: whether a query sees only keys up to its own position.
        softmax_scale: factor on the scores; None means 1 / sqrt(head_dim).
        sliding_window: keys a causal query sees, itself included; 0 means all.

    Raises:
        InputError: the heads do not divide, or a number is out of range.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    softmax_scale: float | None = None
    sliding_window: int = 0

    def __post_init__(self) -> None:
        for name, low in (("num_kv_heads", 1), ("head_dim", 1), ("sliding_window", 0)):
            if getattr(self, name) < low:
                _reject("AttnConfig", name, str(getattr(self, name)), f"{low} or more")
        if self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            allowed = f"a multiple of num_kv_heads = {self.num_kv_heads}"
            _reject("AttnConfig", "num_heads", str(self.num_heads), allowed)

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def keywords(self) -> dict[str, Any]:
        """For an attention op: ``backend.flash_attention(q, k, v, **config.keywords)``."""
        return {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "sliding_window": self.sliding_window,
        }


@dataclass(frozen=True, eq=False)
class MoeRouting:
    """Which rows each block of a grouped product works on, all on one device.

    Attributes:
        sorted_token_ids: [num_padded] int32, rows by expert, each expert's padded to whole blocks.
        expert_ids: [num_padded / block_size] int32, the expert of each block.
        num_tokens_past_padded: [1] int32, how many entries of ``sorted_token_ids`` count.

    Raises:
        InputError: a shape or dtype is another, or ``sorted_token_ids`` is not whole blocks.
    """

    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_past_padded: Tensor

    def __post_init__(self) -> None:
        for name in ("sorted_token_ids", "expert_ids", "num_tokens_past_padded"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.dim() != 1:
                got = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
                _reject("MoeRouting", name, got, "int32 of one dimension")
        if self.num_tokens_past_padded.numel() != 1:
            got = f"of {self.num_tokens_past_padded.numel()} elements"
            _reject("MoeRouting", "num_tokens_past_padded", got, "one element")
        rows, blocks = self.sorted_token_ids.numel(), self.expert_ids.numel()
        if rows and (not blocks or rows % blocks):
            _reject("MoeRouting", "sorted_token_ids", f"{rows} entries", f"{blocks} whole blocks")

    @property
    def block_size(self) -> int:
        """Rows of a block; 0 where there are none."""
        return self.sorted_token_ids.numel() // max(self.expert_ids.numel(), 1)

    @classmethod
    def upload(
        cls,
        sorted_token_ids: Sequence[int],
        expert_ids: Sequence[int],
        num_tokens_past_padded: int,
        device: torch.device | str = "cpu",
    ) -> MoeRouting:
        """Routing planned on the host. It cannot be captured in a graph; the routing ops can."""
        parts = (sorted_token_ids, expert_ids, [num_tokens_past_padded])
        return cls(*(torch.tensor(part, dtype=torch.int32, device=device) for part in parts))


def _reject(what: str, argument: str, got: str, allowed: str) -> None:
    raise InputError(what, argument, got, allowed, f"See {what}'s docstring.")
