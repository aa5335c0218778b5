"""Launch choices of experts' products: per pair or sorted by expert, and the tiles of the latter.

The functions are pure: they take a GPU's facts and a product's sizes, and ask no device.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ferrum_triton.kernels.gpu import Gpu
from ferrum_triton.kernels.quant.mma_config import (
    OTHER_TILES,
    MmaConfig,
    fitted,
    has_hopper_tiles,
    least_tokens,
    mma_fits,
)
from ferrum_triton.kernels.quant.packed_config import (
    experts_candidates,
    experts_refusal,
    packed,
    packed_tile,
)
from ferrum_triton.kernels.rows import cdiv
from ferrum_triton.kernels.tuning import Config, Tunable
from ferrum_triton.ops.moe.pairs import MAX_EXPERTS
from ferrum_triton.quant.formats import FORMATS
from ferrum_triton.quant.kinds import file_kind
from ferrum_triton.quant.planes import PLANE_FORMATS


class Mix(NamedTuple):
    """Tiles of one product: of one size, or what is left of an expert's pairs in smaller ones.

    Attributes:
        config: tiles of pairs; neither ``splits`` nor ``prefetch_lines`` count.
        spared: the most pairs of an expert, left by whole tiles, that take smaller ones.
        rest: the smaller tiles, with as many words.
        steps: the most steps of a program's loop; 0 for those of :data:`STEPS`.
    """

    config: MmaConfig
    spared: int = 0
    rest: MmaConfig | None = None
    steps: int = 0

    def flat(self) -> Config:
        """This mix as a table holds it: the smaller tiles' entries begin with ``rest_``."""
        rest = {} if self.rest is None else self.rest._asdict()
        smaller = {f"rest_{name}": value for name, value in rest.items()}
        return {**self.config._asdict(), "spared": self.spared, "steps": self.steps, **smaller}

    @classmethod
    def of(cls, flat: Config) -> Mix:
        """The mix of what a table holds."""
        config = MmaConfig(**{name: flat[name] for name in MmaConfig._fields})
        rest = None
        if "rest_rows" in flat:
            rest = MmaConfig(**{name: flat[f"rest_{name}"] for name in MmaConfig._fields})
        return cls(config, flat["spared"], rest, flat["steps"])


class Quads(NamedTuple):
    """Tiles of eight pairs that tensor cores take as weights are read (``moe/quad_tiles.py``).

    Attributes:
        warps: warps of a program, a power of two, each with rows of its own.
        ctas_per_sm: programs for each SM, which all run at once.
        unrolled: two steps are one turn of the loop, so that no register is copied at its end.
        late_tokens: a step's activations are loaded in it, not in the one before.
    """

    warps: int
    ctas_per_sm: int
    unrolled: bool = False
    late_tokens: bool = False

    @property
    def registers(self) -> int:
        """Registers of a thread at most, so that an SM runs all of its programs at once."""
        return min(65536 // (32 * self.warps * self.ctas_per_sm) // 8 * 8, 255)

    def flat(self) -> Config:
        """This choice as a table holds it."""
        return {"path": "quads", **self._asdict()}

    @classmethod
    def of(cls, flat: Config) -> Quads:
        """The choice of what a table holds."""
        return cls(**{name: flat[name] for name in cls._fields})


def _full(rows: int, tokens: int, **changes: int) -> MmaConfig:
    """Tiles of many pairs: weights are scaled once for all of them."""
    config = MmaConfig(rows, tokens, words=16, scale_after=False, stages=3, use_tma=True)
    return config._replace(**changes)


# By the most pairs an expert has on average. Of few the products of dense tiles, with shorter
# pipelines; more come by TMA, sorted by expert. Chosen for the experts of bench.moe_layer.
MIXES = {
    4: Mix(MmaConfig(64, 8, stages=3)),
    8: Mix(MmaConfig(64, 16, stages=3, maxnreg=128, use_tma=True)),
    32: Mix(MmaConfig(64, 32, stages=3, use_tma=True)),
    128: Mix(_full(64, 128), 64, _full(64, 64, maxnreg=168)),
    256: Mix(_full(128, 256, warps=8), 64, MmaConfig(64, 32, words=16, stages=4, use_tma=True)),
}
# Of gate and up, whose tiles have half as many rows of each.
_GATED_MIXES = {4: Mix(MmaConfig(128, 8, stages=3, maxnreg=168))}
# Mixes that only ``bench.tune`` asks for: programs of fewer steps, and tiles of twice the rows.
_SHORT_MIXES = [
    Mix(MmaConfig(rows, 8, stages=stages), steps=steps)
    for rows, stages, steps in ((64, 3, 16), (128, 2, 8), (128, 3, 16), (128, 3, 32))
]
_SHORT_MIXES += [Mix(MmaConfig(128, 32, stages=3, use_tma=True), steps=16)]
# Of kinds that would spill.
_MIXES_OF = {
    "Q3_K": {8: Mix(MmaConfig(64, 16, stages=3, maxnreg=168, use_tma=True))},
    "MXFP4": {4: MIXES[4], 256: MIXES[128]},
}
# Pairs up to which programs are few, whatever the number of experts.
FEW_PAIRS = 16
# Pairs of an expert on average up to which :class:`Quads` take less time.
MOST_BY_QUADS = 7
# The most steps of a program's loop, by the pairs of a tile, for mixes that do not say. A tile that
# has more steps is a program of its own.
STEPS = {8: 32, 16: 16, 32: 16, 64: 32}


def path_heuristic(gpu: Gpu, num_pairs: int, num_experts: int, in_planes: bool) -> Config:
    """Whether each pair reads its expert's rows by itself, or sorted by expert with others.

    By itself, while an expert is read about once. Sorted by expert, a product has two launches more
    and its tiles are part empty. For the 128 experts of bench.moe_layer, 8 of them a token, the two
    take as long at about 16 tokens.
    """
    few = num_pairs <= max(num_experts, FEW_PAIRS)
    per_pair = few or not in_planes or num_experts > MAX_EXPERTS
    return {"path": "per_pair" if per_pair else "sorted"}


def path_candidates(gpu: Gpu, num_pairs: int, num_experts: int, in_planes: bool) -> list[Config]:
    """Both ways, where rows in planes can be sorted."""
    is_sortable = in_planes and num_experts <= MAX_EXPERTS
    return [{"path": path} for path in ("per_pair", "sorted")] if is_sortable else []


def mix_heuristic(
    gpu: Gpu, num_pairs: int, num_experts: int, kind: str, *, is_gated: bool
) -> Config:
    """A mix for what an expert has on average.

    Args:
        kind: W's kind, such as ``"Q4_K:planes"``.
        is_gated: rows of a tile are half of gate and half of up.
    """
    kind = file_kind(kind)
    average = cdiv(num_pairs, num_experts)
    if not has_hopper_tiles(gpu):
        least = max(average, least_tokens(kind))
        fitting = (tokens for tokens in OTHER_TILES if least <= tokens)
        return Mix(fitted(kind, OTHER_TILES[next(fitting, max(OTHER_TILES))])).flat()
    if gpu.capability >= (10, 0):  # some of the others spill there
        mixes = {pairs: Mix(MIXES[pairs].config) for pairs in (4, 128)}
    else:
        mixes = MIXES | (_GATED_MIXES if is_gated else {}) | _MIXES_OF.get(kind, {})
    fitting_mixes = (
        mix
        for pairs, mix in mixes.items()
        if average <= pairs and mix.config.tokens >= least_tokens(kind)
    )
    return _fitted_mix(kind, next(fitting_mixes, mixes[max(mixes)])).flat()


def quads_heuristic(
    gpu: Gpu, num_pairs: int, num_experts: int, kind: str, *, is_gated: bool
) -> Quads | None:
    """Tiles of eight pairs where an expert has few, or None where mixes are the way.

    On Hopper they take less time up to seven pairs an expert on average. The layer of
    bench.moe_layer by 64 tokens, all in it: int4 103.6 us for 111.3, Q4_K 111.6 for 122.8, Q6_K 158
    for 180, Q8_0 168 for 198, Q3_K 131 for 181, Q5_K 149 for 150; by 96 tokens Q4_K 131 for 144, by
    128 151 for 140 (``bench.timing.Replay`` of its calls under ``TILES.forced`` and
    ``GATE_UP_TILES.forced`` of each, H200, what became 47e016c). By 112 Q4_K takes 143.6 us for
    144.9 and int4 121.7 for 129.0 (``bench.moe_layer``, 86fca41, as it was and with seven).

    Formats without integer scales have registers for more warps: with gate and up on 20 warps of an
    SM int4 takes 105.1 us, and 105.8 with them on 16 (the same, one run).
    """
    many = cdiv(num_pairs, num_experts) > MOST_BY_QUADS
    if gpu.capability[0] != 9 or kind not in PLANE_FORMATS or many:
        return None
    fmt = FORMATS[file_kind(kind)]
    if fmt.scale_code or fmt.bits > 4:
        return Quads(8, 2) if is_gated else Quads(4, 4, unrolled=True, late_tokens=True)
    return Quads(4, 5, unrolled=True) if is_gated else Quads(4, 5, late_tokens=True)


def tiles_heuristic(
    gpu: Gpu, num_pairs: int, num_experts: int, kind: str, *, is_gated: bool
) -> Config:
    """Tiles for what an expert has on average."""
    shape = num_pairs, num_experts, kind
    quads = quads_heuristic(gpu, *shape, is_gated=is_gated)
    return quads.flat() if quads else mix_heuristic(gpu, *shape, is_gated=is_gated)


def mix_candidates(gpu: Gpu, num_pairs: int, num_experts: int, kind: str) -> list[Config]:
    """Mixes worth timing, each also without its smaller tiles; and Hopper's kernel in Gluon."""
    if kind not in PLANE_FORMATS:
        return []
    mixes = [Mix(config) for config in OTHER_TILES.values()]
    mixes += [*MIXES.values(), *_GATED_MIXES.values()]
    mixes += [Mix(mix.config) for mix in MIXES.values() if mix.rest]
    mixes += _SHORT_MIXES
    found = [_fitted_mix(file_kind(kind), mix).flat() for mix in mixes]
    found += map(packed, experts_candidates(gpu, kind, cdiv(num_pairs, num_experts)))
    if cdiv(num_pairs, num_experts) <= 2 * MOST_BY_QUADS:
        found += [quads.flat() for quads in _quads_candidates(kind)]
    return [mix for mix in found if not mix_fits(gpu, mix, num_pairs, num_experts, kind)]


def mix_fits(gpu: Gpu, config: Config, num_pairs: int, num_experts: int, kind: str) -> str:
    """The reason why a mix or a tile cannot be launched, "" if it can."""
    if config.get("path") == "packed":
        return experts_refusal(gpu, packed_tile(config), kind)
    if config.get("path") == "quads":
        return "" if kind in PLANE_FORMATS else "tiles of eight pairs are of rows in planes"
    mix = Mix.of(config)
    if mix.rest is not None and mix.rest.words != mix.config.words:
        return "smaller tiles of other steps"
    reasons = [mma_fits(gpu, tiles, kind) for tiles in (mix.config, mix.rest) if tiles]
    return next(filter(None, reasons), "")


def _quads_candidates(kind: str) -> list[Quads]:
    """Tiles of eight pairs worth timing."""
    found = [Quads(8, 2), Quads(4, 4), Quads(4, 4, unrolled=True)]
    found += [Quads(4, 4, unrolled=True, late_tokens=True)]
    if not FORMATS[file_kind(kind)].scale_code:
        found += [Quads(4, 5, unrolled=True), Quads(4, 5, late_tokens=True)]
    return found


def _fitted_mix(kind: str, mix: Mix) -> Mix:
    rest = mix.rest and fitted(kind, mix.rest)
    return mix._replace(config=fitted(kind, mix.config), rest=rest)


def steps_of(mix: Mix) -> int:
    """The most steps of a program's loop over a mix's tiles."""
    return mix.steps or STEPS.get(mix.config.tokens, 16)


def tiles_each(tiles: int, steps: int, most: int) -> int:
    """Tiles of rows that a program takes: the most that divide all tiles and keep its steps few.

    Args:
        tiles: tiles of rows that there are.
        steps: steps of a tile.
        most: the most steps of a program that takes several tiles.
    """
    few = range(1, max(min(tiles, most // steps), 1) + 1)
    return max(each for each in few if tiles % each == 0)


def _path_tunable(op: str) -> Tunable:
    return Tunable(
        op,
        ("num_pairs", "num_experts", "in_planes"),
        path_heuristic,
        path_candidates,
    )


def _tiles_tunable(op: str, is_gated: bool) -> Tunable:
    return Tunable(
        op,
        ("num_pairs", "num_experts", "kind"),
        partial(tiles_heuristic, is_gated=is_gated),
        mix_candidates,
        mix_fits,
    )


# Which kernel takes pairs that name their experts; one choice for gate and up, and one for down.
PATH = _path_tunable("gemv_quant_moe_id")
GATE_UP_PATH = _path_tunable("gemv_quant_moe_id_gate_up_silu")
# Tiles of pairs in buckets.
TILES = _tiles_tunable("gemm_quant_moe_id", False)
GATE_UP_TILES = _tiles_tunable("gemm_quant_moe_id_gate_up_silu", True)
