"""Launch choices as text: what heuristics pick, what a tuner tries, what a GPU refuses.

A shape of which one size is a star stands above the ranges of that size: each line has the first
size of a range and what is picked from there on. Entries that are 0 or False are left out.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ferrum_triton.kernels.elementwise_choices import FLAT, SPLITS
from ferrum_triton.kernels.gpu import SHARED_LIMITS, Gpu, gpu_of, gpu_of_arch
from ferrum_triton.kernels.quant.products import bucket_of
from ferrum_triton.kernels.tuning import TUNABLES, Tunable

STAR = "*"
GPUS = [*map(gpu_of_arch, SHARED_LIMITS), gpu_of(torch.device("cpu"))]
# Sizes that are asked for; between two that differ, every size at which the answer changes is
# looked for.
SIZES = [1, 2, 3, *(n for k in range(1, 18) for n in (2 << k, 3 << k))]

ROWS = [(STAR, (64, 4096)), ((1, 5000, 1 << 17), STAR)]
BLOCKS = [(STAR, 1000), (STAR, 14336), (1, STAR)]
BOOL = (False, True)
# Kinds that a choice knows by name, and one of the others.
KINDS = ("Q4_K", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4")
PLANES = tuple(f"{kind}:planes" for kind in KINDS)
PAIRS = [(STAR, 8, BOOL), (STAR, 128, BOOL), (300, STAR, True)]
CONVOLVED = [(BOOL, STAR, 8, 8192), (False, 4096, STAR, 8192), (False, 4096, 1, STAR)]
DELTA = [(STAR, 128, 128), (32, STAR, 128), (32, 128, STAR)]
TILES = [(STAR, 128, PLANES), (2000, STAR, "Q4_K:planes")]

# What each op's heuristic is asked: a value for each dimension, several of which each is asked, or
# a star for every size.
ASKED: dict[str, list[tuple]] = {
    **dict.fromkeys(
        (
            "rms_norm",
            "fused_add_rms_norm",
            "layer_norm",
            "gated_rms_norm",
            "softmax_rows",
            "rms_norm_to",
            "rms_norm_add_inplace",
        ),
        ROWS,
    ),
    **dict.fromkeys((*SPLITS, *FLAT, "clamped_swiglu_moe_id", "sigmoid_gate"), BLOCKS),
    "embedding_lookup_dev": [(STAR, 4096), (1, STAR), (4096, STAR)],
    "gemm": [
        (BOOL, STAR, 4096, 4096),
        (BOOL, (1, 8), STAR, 4096),
        (True, (32, 64), STAR, 4096),
        (True, 32, 2048, STAR),
    ],
    "gemm_fp8_128x128": [
        (BOOL, STAR, 28672, 4096),
        (True, (1, 64), STAR, 4096),
        (True, 16, 4096, STAR),
    ],
    "quantize_fp8_groups": [(STAR, 4096), ((1, 4096), STAR)],
    "gemm_quant": [
        (KINDS, STAR, STAR, 4096, 128),
        ("Q4_K", STAR, STAR, 28672, 128),
        ("Q4_K", STAR, STAR, 4096, 448),
        (KINDS, STAR, (1, 2), STAR, 128),
        ("Q4_K", STAR, (5, 16, 64, 200, 300), STAR, 128),
        ("Q4_K", STAR, (1, 2, 5, 64), 4096, STAR),
    ],
    "flash_attention": [
        (STAR, (64, 128, 192, 256), 128, BOOL, BOOL, BOOL, 32, "others"),
        ((16, 64, 4096), STAR, 128, False, True, False, 32, "others"),
        (STAR, (64, 192), (64, 128), False, True, False, 32, ("triangle", "square")),
        ((300, 1000), (64, 192), (64, 128), False, True, False, STAR, ("triangle", "square")),
        ((1000, 3000), (128, 256), (128, 256), False, True, False, STAR, ("triangle", "square")),
    ],
    "merge_attention_states": [
        (STAR, (2, 32), 128, False),
        (1, STAR, 128, BOOL),
        (5000, STAR, 128, False),
        ((1, 5000), 8, STAR, False),
    ],
    "mla_attention": [(STAR, (0, 16, 64), ("float32", "16 bits", "8 bits"), BOOL)],
    "paged_decode_attention": [
        (STAR, 8, 4096, 512, 4, BOOL, False, BOOL),
        (STAR, 8, 4096, (256, 512), 4, True, True, True),
        (1, STAR, 4096, 512, 4, False, False, True),
        ((1, 32, 256), 8, STAR, 512, 4, False, False, True),
        ((1, 32, 256), 8, 4096, STAR, 4, BOOL, False, True),
        ((1, 32, 256), 8, 4096, 512, STAR, BOOL, False, True),
    ],
    "qkv_paged_decode_attention": [
        (STAR, 8, 4096, 512, 4, BOOL),
        ((1, 8, 32), 8, STAR, 512, 4, True),
        ((1, 32, 256), 8, 4096, STAR, 4, True),
        ((1, 32, 256), 8, 4096, 512, STAR, True),
    ],
    "paged_varlen_attention": [
        (STAR, BOOL, BOOL, ""),
        (STAR, False, False, ("e4m3", "int8")),
    ],
    **dict.fromkeys(("causal_conv1d", "gdn_prepare"), CONVOLVED),
    **dict.fromkeys(("gdn_decode", "gdn_prefill"), DELTA),
    "gemv_quant_moe_id": PAIRS,
    "gemv_quant_moe_id_gate_up_silu": PAIRS,
    "gemm_moe_id_fp8_128x128": [(BOOL, STAR, 128, 2048, 768), (True, (8, 2048), STAR, 2048, 768)],
    "gemm_moe_id_gate_up_fp8_128x128": [
        (BOOL, STAR, 128, 768, 2048),
        (True, (8, 2048), STAR, 768, 2048),
    ],
    "gemm_moe_id": [(STAR, 128, 2048, 768, (2, 4)), ((8, 2048), STAR, 2048, 768, 2)],
    "gemm_moe_id_gate_up": [(STAR, 128, 768, 2048, (2, 4)), ((8, 2048), STAR, 768, 2048, 2)],
    "gemm_moe_id_sum": [(STAR, 8, 2048, 768, (2, 4)), (1, STAR, 2048, 768, (2, 4))],
    "gemm_moe_id_sum_fp8_128x128": [
        (BOOL, STAR, 8, 2048, 768),
        (BOOL, 1, STAR, 2048, 768),
    ],
    "gemm_quant_moe_id": TILES,
    "gemm_quant_moe_id_gate_up_silu": TILES,
    "argmax_rows": [(STAR, (1000, 32000, 152064)), ((1, 64), STAR)],
}

# Shapes that a tuner is asked for candidates of, and for which every candidate is held to fit.
TRIED: dict[str, list[tuple]] = {
    **{op: [((1, 4, 4096), (64, 4096, 16384))] for op, asked in ASKED.items() if asked is ROWS},
    **{op: [(1, 4096)] for op, asked in ASKED.items() if asked is BLOCKS},
    "embedding_lookup_dev": [(1, (256, 4096))],
    "gemm": [(BOOL, (1, 2, 8, 9), 4096, 4096)],
    "gemm_fp8_128x128": [(BOOL, (1, 64, 4096), 4096, 4096)],
    "quantize_fp8_groups": [(1, 4096)],
    "gemm_quant": [
        (KINDS, STAR, (1, 2), 4096, (128, 384)),
        ("Q4_K", STAR, (1, 2), 16384, 128),
        ("Q4_K", STAR, 16, 8192, 128),
        ("Q4_K", STAR, (5, 16, 64, 300), 4096, 128),
        (("Q3_K", "Q8_0"), STAR, (9, 300), 4096, 128),
        (("Q4_0", "Q5_K", "Q6_K"), STAR, (5, 16, 64), 4096, 128),
    ],
    "flash_attention": [
        ((4, 16, 64, 4096), 128, 128, False, False, False, 32, "others"),
        (4096, 192, 128, False, True, False, 32, "triangle"),
        (4096, (64, 256), (64, 256), False, True, False, 32, "triangle"),
    ],
    "merge_attention_states": [(1, 4, (64, 128, 512), False)],
    "mla_attention": [((16, 128), (0, 16, 64), "16 bits", BOOL)],
    "paged_decode_attention": [(1, 8, 4096, (512, 4096), 4, False, False, True)],
    "qkv_paged_decode_attention": [(1, 8, 4096, (512, 1024), 4, True)],
    "paged_varlen_attention": [(128, False, True, ""), (128, False, False, "e4m3")],
    **{op: [(BOOL, 4096, 8, 8192)] for op, asked in ASKED.items() if asked is CONVOLVED},
    **{op: [(32, 128, 128)] for op, asked in ASKED.items() if asked is DELTA},
    "gemv_quant_moe_id": [(8, (128, 2048), BOOL)],
    "gemv_quant_moe_id_gate_up_silu": [(8, (128, 2048), BOOL)],
    "gemm_moe_id_fp8_128x128": [(BOOL, (8, 2048), 128, 2048, 768)],
    "gemm_moe_id_gate_up_fp8_128x128": [(BOOL, (8, 2048), 128, 768, 2048)],
    "gemm_moe_id": [((8, 2048), 128, 2048, 768, (2, 4))],
    "gemm_moe_id_gate_up": [((8, 2048), 128, 768, 2048, 2)],
    "gemm_moe_id_sum": [((1, 32), 8, 2048, 768, (2, 4))],
    "gemm_moe_id_sum_fp8_128x128": [(BOOL, (1, 32), 8, 2048, 768)],
    "gemm_quant_moe_id": [(512, 128, ("Q4_K:planes", "Q3_K:planes", "Q8_0:planes", "Q4_K"))],
    "gemm_quant_moe_id_gate_up_silu": [(512, 128, "Q4_K:planes")],
    "argmax_rows": [((1, 64), (1000, 152064))],
}


def expanded(question: tuple) -> list[tuple]:
    """A question that asks for several values, as questions for one each."""
    return list(itertools.product(*(q if isinstance(q, tuple) else (q,) for q in question)))


def filled(tunable: Tunable, question: tuple, size: int | None) -> tuple:
    """The shape in which the starred dimension has a size; a bucket follows from the tokens."""
    shape = dict(zip(tunable.dims, question, strict=True))
    for name, value in shape.items():
        if value == STAR and name != "bucket":
            shape[name] = size
    if "bucket" in shape:
        shape["bucket"] = bucket_of(shape["num_tokens"])
    return tuple(shape.values())


def ranges(answer: Callable[[int], str]) -> tuple[tuple[int, str], ...]:
    """The first size of each range of sizes that have one answer, and the answer."""

    def changes(low: int, high: int) -> Iterator[tuple[int, str]]:
        if answer(low) == answer(high):
            return
        if high == low + 1:
            yield high, answer(high)
            return
        middle = (low + high) // 2
        yield from changes(low, middle)
        yield from changes(middle, high)

    found = [(SIZES[0], answer(SIZES[0]))]
    for low, high in itertools.pairwise(SIZES):
        found += changes(low, high)
    return tuple(found)


def told(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items() if value)


def named(tunable: Tunable, question: tuple) -> str:
    shape = zip(tunable.dims, question, strict=True)
    return " ".join(f"{name}={value}" for name, value in shape if name != "bucket")


def grouped(answers: Iterator[tuple[str, Gpu, Any]]) -> Iterator[str]:
    """Lines of (shape, GPU, lines that answer): what many have in common stands once."""
    groups: dict[Any, dict[str, list[str]]] = {}
    for shape, gpu, answer in answers:
        groups.setdefault(answer, {}).setdefault(shape, []).append(gpu.arch)
    for answer, shapes in groups.items():
        for shape, archs in shapes.items():
            yield f"{shape} [{' '.join(archs)}]"
        yield from (f"    {line}" for line in answer or ("nothing",))


def picked(tunable: Tunable, questions: list[tuple]) -> Iterator[tuple[str, Gpu, Any]]:
    for question in itertools.chain.from_iterable(map(expanded, questions)):
        for gpu in GPUS:

            @functools.cache
            def answer(size: int, gpu: Gpu = gpu, question: tuple = question) -> str:
                return told(tunable.heuristic(gpu, *filled(tunable, question, size)))

            lines = tuple(f"{size}: {config}" for size, config in ranges(answer))
            yield named(tunable, question), gpu, lines


def tried(tunable: Tunable, shapes: list[tuple]) -> Iterator[tuple[str, Gpu, Any]]:
    """Each candidate, and who asked gets it."""
    asking: dict[str, list[tuple[str, Gpu]]] = {}
    for shape, gpu in itertools.product(shapes, GPUS):
        for config in tunable.candidates(gpu, *filled(tunable, shape, None)):
            asking.setdefault(told(config), []).append((named(tunable, shape), gpu))
    together: dict[tuple, list[str]] = {}
    for config, who in asking.items():
        together.setdefault(tuple(who), []).append(config)
    for who, configs in together.items():
        yield from ((shape, gpu, tuple(configs)) for shape, gpu in who)


def refused(tunable: Tunable, shapes: list[tuple]) -> Iterator[tuple[str, Gpu, Any]]:
    """Why candidates for one shape or GPU cannot be launched for another, and how many."""
    asked = [filled(tunable, shape, None) for shape in shapes]
    candidates = [c for gpu in GPUS for shape in asked for c in tunable.candidates(gpu, *shape)]
    pool = {told(config): config for config in candidates}.values()
    for question, shape in zip(shapes, asked, strict=True):
        for gpu in GPUS:
            reasons = [tunable.refusal(gpu, config, *shape) for config in pool]
            counted = Counter(reason for reason in reasons if reason)
            lines = tuple(f"{count} candidates: {reason}" for reason, count in counted.items())
            if lines:
                yield named(tunable, question), gpu, lines


def choices() -> dict[str, str]:
    """Tables of the ops' choices, each by the name of the first op that has it."""
    same: dict[str, list[str]] = {}
    for op, tunable in TUNABLES.items():
        shapes = list(itertools.chain.from_iterable(map(expanded, TRIED[op])))
        lines = ["Picked:", *grouped(picked(tunable, ASKED[op]))]
        lines += ["", "Tried by a tuner:", *grouped(tried(tunable, shapes))]
        lines += ["", "Refused:", *grouped(refused(tunable, shapes))]
        lines += ["", "A row of a table serves sizes within, and may have:"]
        lines += [f"{dim} {most:g}" for dim, most in zip(tunable.dims, tunable.ratios, strict=True)]
        lines += [f"{name} {values}" for name, values in tunable.parameters.items()]
        same.setdefault("\n".join(lines), []).append(op)
    return {ops[0]: f"{' '.join(ops)}\n\n{table}\n" for table, ops in same.items()}
