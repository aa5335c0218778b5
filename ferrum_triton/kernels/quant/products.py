"""Products with packed weights: which kernel takes how many activations.

Blocks as a file has them go to ``gemv`` and ``gemm``. By planes:

* One or two tokens take as long as W is read: ``gemv_repacked``, plain or persistent. So do up to
  eight float32 ones, and what small-m mma does not take.
* Three to eight go to tensor cores that are fed as weights are read, ``small_m``; up to 16 where
  that gains on Hopper.
* More fill them, W as their tall operand, by ``mma``, whose tile grows with them. Where that takes
  less by a measured row or by count (:mod:`.packed_costs`), on Hopper in Gluon: ``packed``
  (:mod:`ferrum_triton.kernels.hopper.packed`).
* From MANY on, decoding W costs less than what cuBLAS gains over it, ``plane_rows``. float32
  activations, which are never rounded, go there from nine on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.parameters import Config, integer, one_of, power_of_two
from ferrum_triton.kernels.quant import packed_config
from ferrum_triton.kernels.quant.activations import Tokens, arrange
from ferrum_triton.kernels.quant.gemm import gemm_blocks
from ferrum_triton.kernels.quant.gemv import gemv_blocks
from ferrum_triton.kernels.quant.gemv_config import (
    FEW,
    LONG_GROUPS,
    gemv_candidates,
    gemv_heuristic,
    persistent_heuristic,
    persistent_refusal,
)
from ferrum_triton.kernels.quant.gemv_plan import Squares
from ferrum_triton.kernels.quant.gemv_repacked import launch_gemv
from ferrum_triton.kernels.quant.integer_activations import int16_activations
from ferrum_triton.kernels.quant.mma import mma_products, order_of
from ferrum_triton.kernels.quant.mma_config import (
    MAX_TOKENS,
    MmaConfig,
    least_tile,
    mma_candidates,
    mma_fits,
    mma_heuristic,
    wave_refusal,
)
from ferrum_triton.kernels.quant.packed_config import (
    packed,
    packed_candidates,
    packed_fits,
    packed_tile,
)
from ferrum_triton.kernels.quant.packed_costs import (
    count_refusal,
    mma_refusal,
    packed_heuristic,
)
from ferrum_triton.kernels.quant.partials import add_partials
from ferrum_triton.kernels.quant.plane_rows import product_by_torch
from ferrum_triton.kernels.quant.small_m import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    order_for,
    small_m_product,
)
from ferrum_triton.kernels.quant.small_m_config import (
    GROUP,
    SmallM,
    of_sixteen,
    small_m_candidates,
    small_m_heuristic,
    small_m_refusal,
)
from ferrum_triton.kernels.tuning import Tunable
from ferrum_triton.ops import quant as ops
from ferrum_triton.ops.quant import MAX_GEMV_ROWS
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import PLANE_FORMATS

# Tokens from which on W is decoded for cuBLAS.
MANY = 512
# Paths whose tiles of W tensor cores fill.
TILED = ("mma", "packed")


def heuristic(
    gpu: Gpu, kind: str, bucket: str, num_tokens: int, num_rows: int, num_groups: int
) -> Config:
    """What to launch for 16-bit activations where nothing was measured; see :data:`products`."""
    shape = (kind, bucket, num_tokens, num_rows, num_groups)
    if bucket == "few":
        if small_m_takes(gpu, num_tokens, num_rows, num_groups):
            return small_m(small_m_heuristic(gpu, kind, num_rows, num_groups // 8))
        return gemv_heuristic(kind, num_tokens, num_rows, num_groups)
    if num_tokens <= FEW:
        config = persistent_heuristic(kind, num_tokens, num_rows)
        is_short = num_groups <= LONG_GROUPS // 2 and gpu.capability[0] == 9
        if config is not None and is_short and not fits(gpu, config, *shape):
            return config
        return gemv_heuristic(kind, num_tokens, num_rows, num_groups)
    if (launch := _small_m_of_many(gpu, kind, num_tokens, num_rows, num_groups)) is not None:
        return small_m(launch)
    weights = 32 * num_groups
    plain = None
    if num_tokens < MANY:
        plain = mma_heuristic(gpu, kind, num_tokens, num_rows, weights)
    tile = packed_heuristic(gpu, kind, num_tokens, num_rows, weights, plain)
    if tile is not None:
        return packed(tile)
    return {"path": "decode"} if plain is None else mma(plain)


def candidates(
    gpu: Gpu, kind: str, bucket: str, num_tokens: int, num_rows: int, num_groups: int
) -> list[Config]:
    """Launches worth timing."""
    if num_tokens > FEW:
        shape = (kind, num_tokens, num_rows, 32 * num_groups)
        found = list(map(small_m, small_m_candidates(kind, num_tokens)))
        found += map(packed, packed_candidates(gpu, *shape))
        if bucket == "many":
            found += [*map(mma, mma_candidates(gpu, *shape)), {"path": "decode"}]
        return found
    found = gemv_candidates(num_tokens, num_rows, num_groups)
    shape = (kind, bucket, num_tokens, num_rows, num_groups)
    return [config for config in found if not fits(gpu, config, *shape)]


def small_m(config: SmallM) -> Config:
    """A launch of tensor cores that tokens fill."""
    return {"path": "small_m", **config._asdict()}


def small_m_of(config: Config) -> SmallM:
    """The launch of a choice of path ``"small_m"``; by two warps where another path was chosen."""
    if config["path"] != "small_m":
        return SmallM(2)
    return SmallM(**{name: config[name] for name in SmallM._fields})


def mma(config: MmaConfig) -> Config:
    """A launch of tensor cores that W fills, rows first."""
    return {"path": "mma", **config._asdict()}


def mma_config(config: Config) -> MmaConfig:
    """The tile of a launch choice of path ``"mma"``."""
    return MmaConfig(**{name: config[name] for name in MmaConfig._fields})


def small_m_takes(gpu: Gpu, num_tokens: int, num_rows: int, num_groups: int) -> bool:
    """Whether a product can be one of ``small_m``, whatever its launch."""
    takes = FEWEST_TOKENS <= num_tokens <= MOST_TOKENS and num_groups % 8 == 0
    return gpu.capability >= (8, 0) and takes and num_rows >= 16


def _small_m_of_many(
    gpu: Gpu, kind: str, num_tokens: int, num_rows: int, num_groups: int
) -> SmallM | None:
    """The launch of small_m that more than eight tokens have in place of a tile; or None."""
    if num_tokens <= GROUP or not small_m_takes(gpu, num_tokens, num_rows, num_groups):
        return None
    return of_sixteen(gpu, kind, num_rows, num_groups // 8)


def fits(
    gpu: Gpu,
    config: Config,
    kind: str,
    bucket: str,
    num_tokens: int,
    num_rows: int,
    num_groups: int,
) -> str:
    """Why a launch cannot take a shape; "" if it can."""
    path, ptx = config.get("path"), gpu.capability >= (8, 0)
    if path == "gemv":
        return "" if num_tokens <= MAX_GEMV_ROWS else f"gemv takes {MAX_GEMV_ROWS} tokens at most"
    if path == "persistent":
        if not ptx or num_tokens > FEW:
            return "persistent programs take one or two tokens on an NVIDIA GPU"
        return persistent_refusal(kind, num_tokens, num_groups)
    if path == "small_m":
        if not small_m_takes(gpu, num_tokens, num_rows, num_groups):
            return "small_m takes 3 to 16 tokens by blocks"
        return small_m_refusal(gpu, small_m_of(config), num_rows, num_groups // 8)
    if path == "mma":
        tile, least = mma_config(config), least_tile(gpu, kind, num_tokens)
        # The nearest row to 17 tokens is that of 16, whose tile would take them in two. Where 16
        # have none, it is that of 32: 4096x4096 of Q4_K takes 11.7 us by it, 9.7 by a tile of 16
        # (``device_us`` of ``gemm_quant`` as it was and under ``products.forced``, b80b7d9).
        if tile.tokens < least:
            return f"{num_tokens} tokens unpack all weights twice in tiles of {tile.tokens}"
        if least < MAX_TOKENS and tile.tokens > least:
            return f"tiles of {tile.tokens} are for more than {num_tokens} tokens"
        sizes = num_tokens, num_rows, 32 * num_groups
        return (
            mma_fits(gpu, tile, kind)
            or wave_refusal(gpu, tile, kind, num_tokens, num_rows)
            or mma_refusal(gpu, tile, kind, *sizes)
        )
    if path == "packed":
        if bucket_of(num_tokens) != bucket:
            return f"{num_tokens} tokens are not {bucket}"
        if _small_m_of_many(gpu, kind, num_tokens, num_rows, num_groups) is not None:
            return f"small_m takes less time by {num_tokens} tokens"
        tile, sizes = packed_tile(config), (num_tokens, num_rows, 32 * num_groups)
        return packed_fits(gpu, tile, kind, *sizes) or count_refusal(gpu, tile, kind, *sizes)
    return "" if path == "decode" else f"there is no path {path!r}"


def bucket_of(num_tokens: int) -> str:
    """Numbers of tokens that one measured row may serve."""
    return str(num_tokens) if num_tokens <= FEW else "few" if num_tokens <= GROUP else "many"


FLAG = one_of(False, True)
PARAMETERS = {
    "path": one_of("gemv", "persistent", "small_m", "mma", "packed", "decode"),
    "rows": power_of_two(1, 256),
    "warps": power_of_two(1, 16),
    "prefetch": FLAG,
    "late_trigger": FLAG,
    "unrolled": FLAG,
    "late_tokens": FLAG,
    "steps_ahead": one_of(1, 2),
    "prepared": FLAG,
    "ctas_per_sm": integer(1, 16),
    "deferred": FLAG,
    "ordered": FLAG,
    "tokens": power_of_two(8, 256),
    "words": one_of(16, 32),
    "parts": one_of(1, 2),
    "scale_after": FLAG,
    "splits": integer(1, 64),
    "stages": integer(2, 8),
    "prefetch_lines": integer(0, 16),
    "use_tma": FLAG,
    "prefetch_distance": integer(0, 8),
    "warpgroups": one_of(1, 2),
    "streamed": FLAG,
    "x_stages": integer(0, 16),
    "span": one_of(1, 2, 4),
    "overlapped": FLAG,
    "sums_offsets": FLAG,
    "pingpong": FLAG,
}

products = Tunable(
    "gemm_quant",
    ("kind", "bucket", "num_tokens", "num_rows", "num_groups"),
    heuristic,
    candidates,
    fits=fits,
    within={
        "num_rows": 1.9,
        "num_groups": 1.2,
    },  # another length of rows fills threads in another way
    parameters=PARAMETERS,
)


def pick(a: Tensor, kind: str, num_rows: int) -> Config:
    """The launch of a product of ``a`` with so many rows of a repacked kind."""
    num_tokens, num_weights = a.shape
    name, groups = file_kind(kind), num_weights // 32
    if a.dtype == torch.float32:
        if num_tokens > MAX_GEMV_ROWS:
            return {"path": "decode"}
        return gemv_heuristic(name, num_tokens, num_rows, groups, is_wide=True)
    return products.pick(a.device, name, bucket_of(num_tokens), num_tokens, num_rows, groups)


def tiled_products(
    y: Tensor,
    tokens: Tokens,
    matrices: Sequence[Tensor],
    kind: str,
    config: Config,
    *,
    activation: str = "",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A launch of path ``"mma"`` or ``"packed"``; see :func:`~.mma.mma_products`."""
    k = tokens.like.shape[1]
    if config["path"] == "mma":
        tile = mma_config(config)
        x = tokens.arranged(order_of(kind, tile))
        return mma_products(
            y, x, matrices, kind, tile, k, activation=activation, bias=bias, residual=residual
        )
    # Gluon moves between versions of Triton: it is imported where it may be used.
    from ferrum_triton.kernels.hopper.packed_products import packed_products

    tile = packed_tile(config)
    x = tokens.arranged(packed_config.order_of(tile))
    return packed_products(
        y, x, matrices, kind, tile, k, activation=activation, bias=bias, residual=residual
    )


def product(
    a: Tensor,
    planes: Tensor,
    kind: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    opened: Squares | None = None,
) -> Tensor:
    """y[m, n] = Σₖ a[m, k] · W[n, k] + bias + residual for W's rows in planes, rounded once.

    Args:
        opened: what a norm of ``a``, of up to FEW rows, is yet to be divided by.
    """
    y = a.new_empty((a.shape[0], planes.shape[0])) if out is None else out
    if y.numel() == 0:
        return y
    config = pick(a, kind, planes.shape[0])
    if config["path"] == "small_m":
        parts, launch = [(planes, kind)], small_m_of(config)
        x = arrange(a, order_for(a, parts, launch))
        return small_m_product(x, parts, launch, y, bias=bias, residual=residual)
    if config["path"] in ("gemv", "persistent"):
        x = int16_activations(a) if config.get("prepared") else a
        return launch_gemv(x, planes, kind, config, y, bias=bias, residual=residual, opened=opened)
    if config["path"] == "decode":
        if bias is None and residual is None:
            return product_by_torch(a, planes, kind, out=y)
        sums = torch.empty(y.shape, dtype=torch.float32, device=a.device)
        product_by_torch(a, planes, kind, out=sums)
        return add_partials(y, sums[None], bias, residual)
    return tiled_products(y, Tokens(a), [planes], kind, config, bias=bias, residual=residual)


@ops.gemv_quant.impl("triton")
def gemv_quant(a: Tensor, blocks: Tensor, kind: str, *, out: Tensor | None = None) -> Tensor:
    return gemm_quant(a, blocks, kind, out=out)


@ops.gemm_quant.impl("triton")
def gemm_quant(
    a: Tensor, blocks: Tensor, kind: str, wide: bool = False, *, out: Tensor | None = None
) -> Tensor:
    if out is None and wide:
        out = a.new_empty((a.shape[0], blocks.shape[0]), dtype=torch.float32)
    if kind in PLANE_FORMATS:
        return product(a, blocks, kind, out=out)
    y = a.new_empty((a.shape[0], blocks.shape[0])) if out is None else out
    if y.numel() == 0:
        return y
    launch = gemv_blocks if a.shape[0] <= MAX_GEMV_ROWS else gemm_blocks
    return launch(a, blocks, kind, y)


@ops.linear_quant.impl("triton")
def linear_quant(
    a: Tensor,
    blocks: Tensor,
    kind: str,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    if bias is None and residual is None:
        return gemm_quant(a, blocks, kind, out=out)
    bias = None if bias is None else bias.contiguous()
    if kind in PLANE_FORMATS:
        return product(a, blocks, kind, bias, residual, out)
    y = a.new_empty((a.shape[0], blocks.shape[0])) if out is None else out
    # Multiplied in float32 first, which a second launch finishes.
    sums = torch.empty(y.shape, dtype=torch.float32, device=a.device)
    gemm_quant(a, blocks, kind, out=sums)
    return add_partials(y, sums[None], bias, residual)
