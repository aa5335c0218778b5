"""Products with weights in planes: the values, the PTX that unpacks them, and what is compiled."""

import re

import pytest
import torch

from ferrum_triton.kernels.gpu import gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.quant.activations import Order, arrange
from ferrum_triton.kernels.quant.fragments import unpacking_of
from ferrum_triton.kernels.quant.gemv_fused import gemv_quant_gate_up_silu, gemv_quant_qkv
from ferrum_triton.kernels.quant.mma import mma_products, order_of
from ferrum_triton.kernels.quant.mma_config import (
    MmaConfig,
    mma_heuristic,
)
from ferrum_triton.kernels.quant.plane_rows import decode_planes, product_by_torch
from ferrum_triton.kernels.quant.products import MANY, mma, product, products
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.ops.elementwise import gelu_tanh
from ferrum_triton.quant import FORMATS, dequantize_blocks, quantize_blocks, to_planes
from ferrum_triton.quant.layout import E4m3, Run
from ferrum_triton.quant.planes import PLANE_FORMATS, views
from tests.compiling import compiled, in_turns
from tests.test_quant_formats import assert_same_bits, random_blocks

NAMES = [form.file.name for form in PLANE_FORMATS.values()]
KINDS = pytest.mark.parametrize("kind", NAMES)
SMALL = MmaConfig(rows=32, tokens=16)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def packed(kind, n, k, seed=0):
    weights = torch.randn(n, k, generator=seeded(seed)) * k**-0.5
    return quantize_blocks(weights, FORMATS[kind])


def form_of(kind):
    return PLANE_FORMATS[f"{kind}:planes"]


def planes_of(blocks, kind):
    """Planes whose rows end in what is no number, where anything may lie between them."""
    planes = to_planes(blocks, kind)
    num_blocks = blocks.shape[-1] // FORMATS[kind].block_bytes
    for name, plane in views(planes, kind).items():
        plane[..., form_of(kind).used_bytes(name, num_blocks) :] = 0xFF
    return planes


def multiply(a, planes, kind, config, **added):
    with products.forced(mma(config)):
        return product(a, planes, f"{kind}:planes", **added)


def error(got, a, blocks, kind):
    """Squared error over the squares of the float64 product."""
    want = a.double() @ dequantize_blocks(blocks, FORMATS[kind]).double().T
    return ((got.double() - want).square().sum() / want.square().sum()).item()


def check(kind, m, n, k, config=SMALL, dtype=torch.float16, seed=0):
    a = torch.randn(m, k, generator=seeded(seed + 1)).to(dtype)
    blocks = packed(kind, n, k, seed)
    got = multiply(a, planes_of(blocks, kind), kind, config)
    assert got.dtype == dtype and got.shape == (m, n)
    # The result's own rounding, and that of weights and of the mins' sums to float16.
    limit = {torch.float16: 1e-6, torch.bfloat16: 6e-6}[dtype]
    assert error(got, a, blocks, kind) < limit


@pytest.mark.parametrize(
    ("kind", "scale_after"),
    [(kind, late) for kind in NAMES for late in (True, False) if late or FORMATS[kind].scale_code],
)
@pytest.mark.parametrize("use_tma", [False, True])
def test_products_agree_with_float64(kind, scale_after, use_tma):
    check(kind, 3, 37, 512, SMALL._replace(scale_after=scale_after, use_tma=use_tma))


@pytest.mark.parametrize(
    ("kind", "m"), [(kind, m) for kind in ("Q4_K", "Q6_K", "Q3_K", "Q5_0") for m in (1, 9, 17)]
)
def test_any_number_of_tokens_and_odd_rows(kind, m):
    check(kind, m, 33, 256, SMALL._replace(words=16), torch.bfloat16, seed=m)
    config = SMALL._replace(words=16, scale_after=False, use_tma=True)
    check(kind, m, 33, 256, config, torch.bfloat16, seed=m)


@KINDS
def test_the_same_planes_serve_few_and_many_tokens(kind):
    planes = planes_of(packed(kind, 9, 256), kind)
    a = torch.randn(2, 256, generator=seeded(2)).half()
    few = product(a, planes, f"{kind}:planes").double()
    many = multiply(a, planes, kind, SMALL).double()
    assert ((few - many).square().sum() / few.square().sum()).item() < 2e-6


@pytest.mark.parametrize("kind", ("Q4_K", "Q5_1"))
def test_many_tokens(kind):
    check(kind, 65, 70, 256, SMALL._replace(rows=64, parts=2), torch.bfloat16)


@pytest.mark.parametrize("kind", [kind for kind in NAMES if FORMATS[kind].block_size == 32])
@pytest.mark.parametrize("k", (32, 288))
def test_k_that_is_no_multiple_of_a_step(kind, k):
    for use_tma in (False, True):
        check(kind, 2, 5, k, SMALL._replace(use_tma=use_tma))
        check(kind, 2, 5, k, SMALL._replace(words=16, parts=2, use_tma=use_tma))


def test_tickets_are_zeros_again_for_the_next_product():
    """Of the same activations: Q and K, then V."""
    a = torch.randn(9, 1280, generator=seeded(1)).half()
    planes = planes_of(packed("Q4_K", 70, 1280), "Q4_K")
    config = SMALL._replace(splits=4)
    arranged = arrange(a, order_of("Q4_K", config))
    y = torch.empty(9, 70, dtype=torch.float16)
    results = []
    for _ in range(2):
        assert not arranged.tickets.any()
        mma_products(y.zero_(), arranged, [planes], "Q4_K:planes", config, 1280)
        results.append(y.clone())
    assert_same_bits(*results)
    assert not arranged.tickets.any() and results[0].any()


@pytest.mark.parametrize("use_tma", (False, True))
@pytest.mark.parametrize("m", (3, 9, 33))
def test_what_lies_behind_the_last_token_is_not_in_a_result(m, use_tma):
    """Tiles are read whole: rows of no token are in memory, and any numbers."""
    a = torch.randn(m, 512, generator=seeded(m)).half()
    planes = planes_of(packed("Q4_K", 70, 512), "Q4_K")
    config = SMALL._replace(use_tma=use_tma)
    arranged, results = arrange(a, order_of("Q4_K", config)), []
    assert len(arranged.x) == {3: 4, 9: 16, 33: 64}[m]
    for fill in (0.0, torch.nan):
        for part in arranged[:3]:
            part[m:] = fill
        y = torch.empty(m, 70, dtype=torch.float16)
        results.append(mma_products(y, arranged, [planes], "Q4_K:planes", config, 512))
    assert_same_bits(*results)
    assert results[0].isfinite().all()


def test_more_tiles_than_tickets_are_not_split():
    a = torch.randn(3, 256, generator=seeded(1)).half()
    planes = planes_of(packed("Q4_0", 24 * 342, 256), "Q4_0")
    with record_launches(gpu_of_capability((9, 0)).capability) as launches:
        meta = planes.to("meta")
        multiply(a.to("meta"), meta, "Q4_0", SMALL._replace(rows=16, splits=2))
        multiply(a.to("meta"), meta[: 16 * 512], "Q4_0", SMALL._replace(rows=16, splits=2))
    grids = [launch.grid for launch in launches if len(launch.grid) == 2]
    assert grids == [(513, 1), (512, 2)]


@pytest.mark.parametrize("kind", ("Q4_K", "Q6_K", "Q3_K", "Q8_0"))
@pytest.mark.parametrize("splits", (2, 3, 8))
def test_split_k_is_summed_in_order(kind, splits):
    for use_tma in (False, True):
        check(kind, 3, 20, 1280, SMALL._replace(splits=splits, use_tma=use_tma))


@pytest.mark.parametrize("kind", ("Q4_K", "Q6_K", "Q5_1"))
def test_activations_of_any_magnitude(kind):
    """float16 fragments take bfloat16 rows far beyond float16's range, and far below."""
    blocks = packed(kind, 16, 256)
    planes = planes_of(blocks, kind)
    a = torch.randn(5, 256, generator=seeded(4))
    a = (a * torch.tensor([1e-36, 1e-9, 1.0, 1e9, 1e30])[:, None]).bfloat16()
    got = multiply(a, planes, kind, SMALL)
    for i in range(5):
        assert error(got[i : i + 1], a[i : i + 1], blocks, kind) < 1e-5
    assert not multiply(torch.zeros_like(a), planes, kind, SMALL).any()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_rows_of_one_activation_fit_float16_with_their_sums(dtype):
    """The largest of a row lies from 2^11 up to 2^12, so that eight of them can be added."""
    exponents = torch.arange(-14.0, 15.0 if dtype == torch.float16 else 100.0)
    below_two = 2 - torch.finfo(dtype).eps
    a = (torch.stack([exponents.exp2(), exponents.exp2() * below_two]).flatten()).to(dtype)
    a = a[:, None].repeat(1, 256)
    x, sums, factor = (part[: len(a)] for part in arrange(a, Order(16))[:3])
    assert torch.equal(x.double() * factor[:, None], a.double())
    assert x.min() >= 2**11 and x.max() < 2**12
    assert torch.equal(sums.double(), (8 * x[:, :32].double()).half().double())


def test_a_lost_number_stays_lost():
    blocks = packed("Q4_K", 16, 256)
    a = torch.randn(3, 256).bfloat16()
    a[0, 7], a[1, 9] = torch.nan, torch.inf
    got = multiply(a, planes_of(blocks, "Q4_K"), "Q4_K", SMALL)
    assert not got[:2].isfinite().any() and got[2].isfinite().all()


@pytest.mark.parametrize("kind", ("Q4_K", "Q5_K", "Q2_K", "Q3_K"))
def test_any_codes_and_scales_are_exact_before_d(kind):
    """With one activation at a time, d = 1 and no m, whole numbers up to 2048 come out as such."""
    fmt = FORMATS[kind]
    blocks = random_blocks(fmt, 16, 1, seed=3)
    for scale, bits in ((fmt.d, 0x3C00), (fmt.m, 0)):
        if scale is not None:
            blocks[:, scale.at], blocks[:, scale.at + 1] = bits & 255, bits >> 8
    a = torch.eye(256, dtype=torch.float16)[::5]
    got = multiply(a, planes_of(blocks, kind), kind, SMALL)
    assert torch.equal(got.double(), a.double() @ dequantize_blocks(blocks, fmt).double().T)


@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize("ends", ("bias", "residual", "both"))
def test_bias_and_residual_are_added_before_the_one_rounding(splits, ends):
    blocks = packed("Q4_K", 37, 768)
    a = torch.randn(5, 768, generator=seeded(1)).bfloat16()
    bias = torch.randn(37, generator=seeded(2)) if ends != "residual" else None
    residual = torch.randn(5, 40, generator=seeded(3))[:, :37] if ends != "bias" else None
    config = SMALL._replace(splits=splits, use_tma=splits == 1)
    got = multiply(a, planes_of(blocks, "Q4_K"), "Q4_K", config, bias=bias, residual=residual)
    want = a.double() @ dequantize_blocks(blocks, FORMATS["Q4_K"]).double().T
    want += (0 if bias is None else bias) + (0 if residual is None else residual)
    torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=2e-3)


def test_so_many_tokens_that_weights_are_decoded_are_rounded_once_too():
    blocks = packed("Q4_K", 5, 256)
    a = torch.randn(MANY, 256, generator=seeded(1)).bfloat16()
    residual = torch.randn(MANY, 5, generator=seeded(3)).bfloat16()
    got = product(a, planes_of(blocks, "Q4_K"), "Q4_K:planes", residual=residual)
    want = a.double() @ dequantize_blocks(blocks, FORMATS["Q4_K"]).double().T + residual.double()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=4e-3, atol=1e-2)


@pytest.mark.parametrize("kind", ("Q4_K", "Q3_K", "Q5_0"))
@pytest.mark.parametrize("activation", ("silu", "gelu_tanh"))
@pytest.mark.parametrize("splits", (1, 2))
@pytest.mark.parametrize("use_tma", (False, True))
def test_gate_and_up_in_one_launch(kind, activation, splits, use_tma):
    gate, up = packed(kind, 37, 512), packed(kind, 37, 512, seed=7)
    a = torch.randn(9, 512, generator=seeded(1)).half()
    planes = planes_of(gate, kind), planes_of(up, kind)
    config = SMALL._replace(splits=splits, use_tma=use_tma)
    with products.forced(mma(config)):
        got = gemv_quant_gate_up_silu(a, *planes, *[f"{kind}:planes"] * 2, activation)
    sums = [a.double() @ dequantize_blocks(w, FORMATS[kind]).double().T for w in (gate, up)]
    function = torch.nn.functional.silu if activation == "silu" else gelu_tanh
    want = function(sums[0]) * sums[1]
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kinds", (("Q4_K",) * 3, ("Q4_K", "Q6_K"), ("Q5_K", "Q5_K", "Q6_K")))
@pytest.mark.parametrize("splits", (1, 2))
@pytest.mark.parametrize("use_tma", (False, True))
def test_matrices_side_by_side(kinds, splits, use_tma):
    """In one launch if all are of one kind; tiles of rows end with their matrix."""
    blocks = [packed(kind, n, 512, seed=n) for kind, n in zip(kinds, (70, 33, 5), strict=False)]
    planes = [planes_of(w, kind) for w, kind in zip(blocks, kinds, strict=True)]
    a = torch.randn(9, 512, generator=seeded(1)).half()
    config = SMALL._replace(splits=splits, use_tma=use_tma)
    q, *key, value = planes
    q_kind, *k_kind, v_kind = [f"{kind}:planes" for kind in kinds]
    some = q, *(key or [None]), value, q_kind, *(k_kind or [""]), v_kind
    with products.forced(mma(config)):
        got = gemv_quant_qkv(a, *some)
    want = torch.cat(
        [
            a.double() @ dequantize_blocks(w, FORMATS[kind]).double().T
            for w, kind in zip(blocks, kinds, strict=True)
        ],
        dim=1,
    )
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "num_tokens"), in_turns(("Q4_K", "Q6_K", "Q5_K", "Q3_K"), [(16,), (32,), (64,)])
)
def test_several_matrices_compiled_for_hopper(kind, num_tokens):
    """No spills in the tiles that one matrix takes."""
    kind, k = f"{kind}:planes", 4096
    a = torch.empty(num_tokens, k, dtype=torch.bfloat16, device="meta")
    row_bytes = PLANE_FORMATS[kind].row_bytes(k)
    q, key, value = (
        torch.empty(n, row_bytes, dtype=torch.uint8, device="meta") for n in (4096, 1024, 1024)
    )
    gpu = gpu_of_capability((9, 0))
    config = mma_heuristic(gpu, kind, num_tokens, 6144, k)
    with record_launches(capability=(9, 0)) as launches:
        with products.forced(mma(config)):
            gemv_quant_qkv(a, q, key, value, kind, kind, kind)
        with products.forced(mma(config._replace(splits=1))):
            gemv_quant_gate_up_silu(a, q, q, kind, kind)
    for launch in launches:
        compiled(launch)


# What the interpreter cannot run: the PTX, by a model of the few instructions it has, against the
# definition of the layout.


def halves_of_word(word):
    return (
        torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
        .to(torch.int16)
        .view(torch.float16)
    )


def word_of(halves):
    low, high = (int(v) & 0xFFFF for v in halves.view(torch.int16))
    return low | high << 16


def run_ptx(text, outputs, operands):
    """Outputs of the PTX of an inline assembly on integers, 32 bits each."""
    registers = {f"${outputs + i}": value for i, value in enumerate(operands)}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    def prmt(a, b, selector):
        table = (a | b << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(table[selector >> 4 * i & 7] for i in range(4)), "little")

    def lop3(a, b, c, table):
        return sum(
            (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i
            for i in range(32)
        )

    def float16(f):
        return lambda *args: word_of(f(*(halves_of_word(x).double() for x in args)).half())

    instructions = {
        "mov.b32": lambda a: a,
        "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
        "shr.u32": lambda a, n: a >> n,
        "xor.b32": lambda a, b: a ^ b,
        "prmt.b32": prmt,
        "lop3.b32": lop3,
        "sub.rn.f16x2": float16(lambda a, b: a - b),
        "mul.rn.f16x2": float16(lambda a, b: a * b),
        "fma.rn.f16x2": float16(lambda a, b, c: a * b + c),
    }
    for line in re.findall(r"^(?!\.reg)([a-z].*);$", text, re.MULTILINE):
        name, rest = line.split(" ", 1)
        to, *args = (arg.strip() for arg in rest.split(","))
        registers[to] = instructions[name](*map(value, args))
    return [halves_of_word(registers[f"${i}"]) for i in range(outputs)]


@KINDS
def test_ptx_unpacks_what_the_layout_says(kind):
    fmt = FORMATS[kind]
    for seed in range(4):
        blocks = random_blocks(fmt, 1, 1, seed=seed)
        planes = planes_of(blocks, kind)
        q = fmt.q.read(blocks).to(torch.float64).flatten()
        rows = views(planes, kind)
        q_words, *h_words = (rows[x].view(torch.int32)[0] for x in "qh" if x in rows)
        words = (q_words.long() & 0xFFFFFFFF).tolist()
        more = (h_words[0].long() & 0xFFFFFFFF).tolist() if h_words else None
        for pair in range(fmt.block_size // 16):
            if fmt.bits == 8:
                operands = [words[4 * pair + i] for i in (0, 2, 1, 3)]
            elif fmt.bits >= 4:
                operands = words[2 * pair : 2 * pair + 2]
            else:
                operands = [words[pair]] * 2
            if fmt.bits == 6:
                operands += [more[pair]] * 2
            elif fmt.bits in (5, 3):
                operands += [more[pair // 2] >> 4 * (pair % 2)] * 2
            if fmt.values:
                q = torch.tensor(fmt.values, dtype=torch.float64)[
                    fmt.q.read(blocks).int()
                ].flatten()
            scale = 1
            if fmt.scale_code == "power":
                scale = 2.0 ** (pair - seed)
                operands += [word_of(torch.tensor([scale, scale]).half())]
            elif fmt.scale_code == "e4m3":
                stored = (seed * 61 + pair * 37) % 256
                operands += [stored | 0x5A00] * 2
                block = torch.full((1,), stored, dtype=torch.uint8)
                scale = float(E4m3((Run(0, 8, lanes=1),)).read(block)) * 2.0**-7
            elif fmt.scale_code:
                scale = (seed * 37 + pair * 11) % 63
                if fmt.scale_code == "nibbles":
                    scale %= 16
                is_byte = fmt.scale_code in ("byte", "byte32")
                stored = scale - 32 & 0xFF if is_byte else scale
                operands += [stored | 0x5A00] * 2  # what lies above the byte is not read
                if is_byte or fmt.scale_code == "packed":
                    scale -= 32
            got = run_ptx(unpacking_of(fmt), 8, operands)
            for i in range(8):
                h, n, o = i >> 2, i >> 1 & 1, i & 1
                first = 16 * pair + 8 * h + 4 * n + o
                want = (scale * q[[first, first + 2]]).half()
                assert torch.equal(got[i], want), (pair, i)


# A small tile; a larger one by TMA; and by TMA with words asked for ahead, of most registers.
TILES = [
    (MmaConfig(64, 16),),
    (MmaConfig(64, 32, stages=3, use_tma=True),),
    (MmaConfig(128, 64, scale_after=False, warps=8, stages=2, prefetch_distance=1, use_tma=True),),
]


@pytest.mark.parametrize(
    ("kind", "config"),
    in_turns(NAMES, TILES)
    + [
        (kind, MmaConfig(128, 64, words=16, scale_after=False, warps=8))
        for kind in ("Q4_K", "Q6_K", "Q3_K", "Q5_0")
    ]
    + [("Q4_K", MmaConfig(64, 8)), ("Q6_K", MmaConfig(64, 8)), ("Q5_K", MmaConfig(64, 8))],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)
def test_compiled_for_hopper(kind, config):
    """No spills, no conversions of integers, and pairs that are neighbours of K in a thread."""
    n, k = 128, 1024
    blocks = torch.zeros(n, FORMATS[kind].row_bytes(k), dtype=torch.uint8)
    planes = to_planes(blocks, kind).to("meta")
    with record_launches(capability=(9, 0)) as launches:
        multiply(torch.empty(64, k, dtype=torch.bfloat16, device="meta"), planes, kind, config)
    asm = compiled(launches[-1]).asm
    # Nothing is written to shared memory but what is loaded: weights stay in their registers.
    assert not re.search(r"ttg.local_alloc %", asm["ttgir"])
    assert "cvt.rn.f16.s" not in asm["ptx"] and "cvt.rn.f16.u" not in asm["ptx"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", asm["ttgir"], re.MULTILINE))
    unpacking = re.findall(
        r"elementwise_inline_asm .*packed_element = 2.*? : tensor<\w+, ([^<>]*(?:<\{[^}]*\}>)?)>",
        asm["ttgir"],
    )
    assert unpacking
    for layout in unpacking:
        text = layouts.get(layout, layout)
        assert re.search(r"register = \[\[0, 1\]|kWidth = [24]", text), text


@KINDS
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_planes_decode_to_the_formats_bits(kind, dtype):
    fmt = FORMATS[kind]
    blocks = random_blocks(fmt, 5, 3, seed=6)
    k = fmt.row_weights(blocks.shape[1])
    want = dequantize_blocks(blocks, fmt).to(dtype)
    got = torch.empty(5, k, dtype=dtype)
    decode_planes(got, planes_of(blocks, kind), None, f"{kind}:planes")
    assert_same_bits(got, want)


def test_a_product_by_torch_some_rows_at_a_time():
    blocks = packed("Q5_K", 21, 256)
    a = torch.randn(6, 256).bfloat16()
    got = product_by_torch(a, planes_of(blocks, "Q5_K"), "Q5_K:planes", rows=8)
    assert error(got, a, blocks, "Q5_K") < 1e-5


@pytest.mark.parametrize(
    ("kind", "target"), in_turns(("Q4_K", "Q3_K", "Q5_0", "Q8_0"), [("sm_80",), ("gfx942",)])
)
def test_compiled_elsewhere(kind, target):
    blocks = torch.zeros(64, FORMATS[kind].row_bytes(512), dtype=torch.uint8)
    planes = to_planes(blocks, kind).to("meta")
    with record_launches(capability=TARGETS[target].capability) as launches:
        a = torch.empty(16, 512, dtype=torch.bfloat16, device="meta")
        multiply(a, planes, kind, MmaConfig(64, 16, stages=2, splits=2))
        decode_planes(torch.empty(64, 512, device="meta"), planes, None, f"{kind}:planes")
    for launch in launches:
        compiled(launch, target)
