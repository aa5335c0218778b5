"""Shaders on the CPU: their values, their memory, their barriers, and how they are launched."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings

from ferrum_triton.backends import PROVIDERS, metal
from ferrum_triton.backends.backend import Backend
from ferrum_triton.backends.metal import attention, quant, shader
from ferrum_triton.backends.metal.shader import Shader, source
from ferrum_triton.errors import FerrumError
from ferrum_triton.quant.kinds import quantize_rows
from ferrum_triton.registry import OPS
from tests.harness import (
    assert_call_matches,
    check_edge_values,
    check_matches_reference,
    draw_axes,
    expected,
    sample,
    typical_axes,
)
from tests.metal_shaders import emulator
from tests.metal_shaders.calls import SHADED, kinds_of, with_shader
from tests.metal_shaders.emulator import (
    MOST_TOLD_APART,
    emulated,
    needs_clang,
    recorded,
    run_alone,
    run_backwards,
)

pytestmark = needs_clang

# Axes of the launches that sanitizers see, where an op's own reach no barrier a second time.
WIDER = {"compute_ids_tpe": {"routed_tokens": 40}, "route_topk_softmax": {"num_experts": 128}}
# Those of more launches: what the sources choose among by a type or a parameter.
ALSO = {
    "flash_attention": [
        {"q_len": 18, "kv_len": 70, "head_dim": 80, "value_dim": 80, "sliding_window": 0},
        {"q_len": 18, "kv_len": 70, "causal": True, "sliding_window": 20},
    ],
    "paged_varlen_attention": [{"q_lens": (9, 0, 3), "cache_dtype": torch.int8}],
    "paged_decode_attention": [
        {"max_len": 1100, "sliding_window": 0, "layout": "nhd"},
        {"layout": "vllm_x", "cache_dtype": torch.int8},
    ],
    "split_qkv_norm_rope_into_paged_cache": [
        {"placement": "slots", "layout": "vllm_x", "qk_mode": 1, "cache_dtype": torch.int8},
        {"placement": "decode", "layout": "nhd", "qk_mode": 2},
        {"placement": "single", "qk_mode": 0, "cache_dtype": torch.int8},
    ],
}
HEADS = {"num_kv_heads": 2, "group_size": 3, "head_dim": 16}
BARRIER = re.compile(r"threadgroup_barrier\([^;]*\);")


@pytest.fixture(scope="module")
def backend():
    """The Metal backend on the CPU."""
    with emulated():
        yield Backend("metal", "cpu", PROVIDERS["metal"])


@pytest.mark.parametrize("op", SHADED)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_matches_reference(op, backend, data, seed):
    check_matches_reference(backend, op, data, seed, **with_shader(op))


@pytest.mark.parametrize("op", SHADED)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_edge_values(op, backend, data, seed):
    check_edge_values(backend, op, data, seed, **kinds_of(op))


@functools.cache
def launches_of(op, backend):
    """What calls launch, of each kind and with what else there is to choose.

    Rows take several simdgroups, and at most 128 threads: ThreadSanitizer tells no more than 255
    apart, and forgets what the others did.
    """
    axes = typical_axes(op)
    for name in ("hidden_size", "vocab_size", "intermediate_size", "n", "top_k"):
        if name in axes:
            axes[name] = max(value for value in op.axes[name] if value <= 128)
    axes |= WIDER.get(op.name, {})
    kinds = kinds_of(op)
    also = [dict.fromkeys(kinds, kind) for kind in quant.KINDS] if kinds else ALSO.get(op.name, [])
    calls = [axes | chosen for chosen in (also if kinds else [{}, *also])]
    with recorded() as launches:
        for chosen in calls:
            getattr(backend, op.name)(**sample(op, op.dtypes[-1], "cpu", 0, **chosen))
    assert len(launches) >= len(calls)
    return launches


def check_sanitized(launch, sanitizer):
    status, printed, after = run_alone(launch, sanitizer)
    assert status == 0, printed
    assert after == launch.after


@pytest.mark.parametrize("sanitizer", emulator.SANITIZERS)
@pytest.mark.parametrize("op", SHADED)
def test_sanitized(op, sanitizer, backend):
    """Nothing is read or written outside a buffer, nor by two threads at once; the same result."""
    for launch in launches_of(op, backend):
        check_sanitized(launch, sanitizer)


@pytest.mark.parametrize("sanitizer", emulator.SANITIZERS)
@pytest.mark.parametrize("op", SHADED)
@settings(  # each example may have to be compiled
    max_examples=settings.default.max_examples // 10, phases=[Phase.explicit, Phase.generate]
)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_sanitized_at_any_shape(op, sanitizer, backend, data, seed):
    with recorded() as launches:
        check_matches_reference(backend, op, data, seed, **with_shader(op))
    for launch in launches:
        if sanitizer != "thread" or launch.threads <= MOST_TOLD_APART:
            check_sanitized(launch, sanitizer)


@pytest.mark.parametrize("op", SHADED)
def test_threadgroups_run_in_any_order(op, backend):
    """No one reads what another writes, and no two write one place."""
    for launch in launches_of(op, backend):
        assert run_backwards(launch) == launch.after


@pytest.mark.parametrize(
    ("name", "narrowed"),
    [
        ("flash_attention", {"kv_len": (33, 70), "q_len": (1, 5)}),
        ("paged_decode_attention", {"cache_dtype": (torch.int8, None)}),
    ],
)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_keys_cut_into_parts(name, narrowed, backend, data, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT_KEYS", 16)
        check_matches_reference(backend, OPS[name], data, seed, **narrowed)


@pytest.mark.parametrize("name", ("paged_decode_attention", "paged_varlen_attention"))
def test_float8_pools_are_attended_to_by_definition(name, backend):
    op = OPS[name]
    axes = {**typical_axes(op), "cache_dtype": torch.float8_e4m3fn, "scales": "tensor"}
    call = sample(op, torch.float32, "cpu", 0, **axes)
    want, left = expected(op, call)
    with recorded() as launches:
        got = getattr(backend, name)(**call)
    assert not launches
    assert_call_matches(op, (got,), call, want, left)


def test_sequences_that_are_not_there_touch_nothing(backend):
    """Starts before the first token, and ends far past the last."""
    call = sample(OPS["paged_varlen_attention"], torch.float32, "cpu", 0, q_lens=(9, 3), **HEADS)
    call["cu_seqlens_q"] = torch.tensor([-3, 5, 2**31 - 1], dtype=torch.int32)
    with recorded() as launches:
        backend.paged_varlen_attention(**call)
    check_sanitized(launches[0], "address")


@pytest.mark.parametrize("layout", ("hnd", "nhd", "vllm_x"))
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_heads_are_quantised_into_a_pool(layout, backend, data, seed):
    """Of float32, few of whose values lie half-way between two codes."""
    op = OPS["split_qkv_norm_rope_into_paged_cache"]
    narrowed = {"layout": (layout,), "cache_dtype": (torch.int8,), "head_dim": (16, 64)}
    scales = {"scales_dtype": (torch.float16, torch.float32)}
    axes = data.draw(draw_axes(op, **narrowed, **scales), label="axes")
    call = sample(op, torch.float32, "cpu", seed, **axes)
    want, left = expected(op, call)
    got = backend.split_qkv_norm_rope_into_paged_cache(**call)
    assert_call_matches(op, (got,), call, want, left)


def test_halves_are_quantised_to_the_even_code(backend):
    """Values that lie just between two codes, as 127 makes a code of each integer."""
    op = OPS["split_qkv_norm_rope_into_paged_cache"]
    narrowed = {"layout": "hnd", "cache_dtype": torch.int8, "scales_dtype": torch.float32}
    axes = {**typical_axes(op), **narrowed, **HEADS, "placement": "slots", "qk_mode": 0}
    call = sample(op, torch.float32, "cpu", 0, **axes)
    values = call["qkv"].unflatten(-1, (-1, HEADS["head_dim"]))[:, -HEADS["num_kv_heads"] :]
    values.copy_(torch.arange(values.numel()).view_as(values) % 250 - 124.5)
    values[..., 0] = 127
    _, left = expected(op, call)
    with recorded() as launches:
        backend.split_qkv_norm_rope_into_paged_cache(**call)
    assert launches
    assert torch.equal(call["v_cache"], left["v_cache"])


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("kind", (None, *quant.KINDS))
def test_ids_of_no_row_give_zeros(kind, dtype, backend):
    """Rows before and behind the table are there, and are another's."""
    ids = torch.tensor([-1, 0, 5, 4, 6, 2**31 - 1, -(2**31)], dtype=dtype)
    known = ((ids >= 0) & (ids < 5))[:, None]
    weights = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    with recorded() as launches:
        if kind is None:
            table = weights
            got = backend.embedding_lookup_dev(table[2:7], ids)
        else:
            packed = quantize_rows(weights, kind)
            table = backend.dequantize(packed, kind, torch.float32)
            got = backend.embedding_lookup_quant(packed[2:7], ids, kind, torch.float32)
    assert launches
    assert torch.equal(got, torch.where(known, table[2:7][ids.long().clamp(0, 4)], 0.0))


def _barriers():
    for path in sorted(shader.SOURCES.glob("*.metal")):
        for i, found in enumerate(BARRIER.finditer(path.read_text())):
            yield pytest.param(path.stem, found.span(), id=f"{path.stem}-{i}")


def uses_threadgroup_memory(text, kernel):
    body = text[text.index(f"kernel void {kernel}(") :]
    return re.search(r"^    threadgroup ", body[: body.index("\n}")], re.MULTILINE)


@pytest.mark.parametrize(("part", "span"), list(_barriers()))
def test_every_barrier_is_needed(part, span, backend):
    """Without it ThreadSanitizer reports a race in one of the launches."""
    text = (shader.SOURCES / f"{part}.metal").read_text()
    barrier = text[slice(*span)]
    without = text[: span[0]] + " " * len(barrier) + text[span[1] :]
    for param in SHADED:
        launches = reversed(launches_of(param.values[0], backend))
        first = {launch.name: launch for launch in launches}  # of each kernel
        for launch in first.values():
            changed = launch.text.replace(text, without)
            if changed != launch.text and uses_threadgroup_memory(launch.text, launch.name):
                status, printed, _ = run_alone(launch, "thread", changed)
                if "data race" in printed:
                    assert status
                    return
    pytest.fail(f"nothing notices that {barrier} at {span} is gone")


def test_every_source_and_kernel_is_launched():
    declared = Shader.declared.values()
    used = {part for each in declared for part in each.sources.split()}
    assert used == {path.stem for path in shader.SOURCES.glob("*.metal")} - {"common"}
    for sources in {each.sources for each in declared}:
        there = {each.name for each in declared if each.sources == sources}
        assert set(emulator.kernels(source(sources, ()))) == there


def test_every_op_with_a_shader_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "metal.md").read_text()
    rows = "".join(line for line in page.splitlines() if line.startswith("| "))
    assert set(re.findall(r"`(\w+)`", rows)) == {param.id for param in SHADED}


@pytest.mark.parametrize("name", Shader.declared)
def test_signature_is_what_is_launched(name):
    """Buffers and fields of the parameters are called, and ordered, as the launch has them."""
    declared = Shader.declared[name]
    check_signature(declared, source(declared.sources, ()))


def check_signature(declared, text):
    found = emulator.kernels(text)[declared.name]
    buffers = [p for p in found if p.attribute == "buffer"]
    assert [p.index for p in buffers] == list(range(len(buffers)))
    assert tuple(p.name for p in buffers[:-1]) == declared.buffers
    struct = re.match(r"constant (\w+)&", buffers[-1].type)[1]
    fields = re.search(rf"^struct {struct} {{(.*?)^}};", text, re.DOTALL | re.MULTILINE)[1]
    assert tuple(re.findall(r"^ +long (\w+);", fields, re.MULTILINE)) == declared.params
    assert len(re.findall(";", fields)) == len(declared.params), "a field that is no long"


@pytest.mark.parametrize("wrong", [("[[buffer(0)]]", "[[buffer(1)]]"), ("y [[", "z [["),
                                   ("long eps", "float eps")])  # fmt: skip
def test_a_wrong_signature_is_noticed(wrong):
    text = source("norm", ()).replace(*wrong)
    with pytest.raises(AssertionError):
        check_signature(Shader.declared["rms_norm"], text)


@pytest.mark.parametrize("name", Shader.declared)
def test_threadgroup_memory_is_within_its_limit(name):
    """32 KiB, by the sources' own constants."""
    text = source(Shader.declared[name].sources, ())
    sizes = dict(re.findall(r"constexpr uint (\w+) = (\d+);", text))
    total = 0
    for kind, count in re.findall(r"threadgroup (\w+) \w+\[(\w+)\]", text):
        total += {"float": 4, "uint": 4, "long": 8}[kind] * int(sizes.get(count, count))
    assert total <= 32 * 1024


@pytest.mark.parametrize("stands_for", ("half", "bfloat"))
def test_sixteen_bits_are_torchs(stands_for):
    """The shim's types hold and round as torch's: every value, and floats between two."""
    text = source("elementwise", [("SCALAR", stands_for)])
    text += """
    struct None { long count; };
    kernel void convert(
        device SCALAR* y [[buffer(0)]],
        device const float* x [[buffer(1)]],
        device float* back [[buffer(2)]],
        constant None& p [[buffer(3)]],
        uint i [[thread_position_in_grid]]) {
        y[i] = SCALAR(x[i]);
        back[i] = float(y[i]);
    }
    """.replace("\n    ", "\n")
    dtype = {"half": torch.float16, "bfloat": torch.bfloat16}[stands_for]
    every = torch.arange(2**16).to(torch.int16).view(dtype).float()
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    x = torch.cat([every, bits.to(torch.int32).view(torch.float32), every * 1.0002, every / 3])
    y, back = torch.empty(len(x), dtype=dtype), torch.empty(len(x))
    emulator.Library(text).convert(y, x, back, [0], threads=len(x), group_size=32)
    want = x.to(dtype)
    number = ~x.isnan()
    assert torch.equal(y[number].view(torch.int16), want[number].view(torch.int16))
    assert torch.equal(back[number], want[number].float()) and back[~number].isnan().all()


def test_normal_tail_is_torchs():
    text = source("elementwise", [("SCALAR", "float")])
    text += """
struct None { long count; };
kernel void tails(
    device float* y [[buffer(0)]],
    device const float* s [[buffer(1)]],
    constant None& p [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
    y[i] = normal_tail(s[i]);
}
"""
    s = torch.cat([torch.linspace(0, 13, 2**14 - 32), torch.logspace(-38, -1, 29)])
    s = torch.cat([s, torch.tensor([0.0, 20.0, torch.inf])])
    y = torch.empty_like(s)
    emulator.Library(text).tails(y, s, [0], threads=len(s), group_size=32)
    y, none = y[:-2], y[-2:]
    share = torch.erfc(s[:-2].double() * 0.5**0.5) / 2
    assert (y / share - 1).abs().max() < 1e-6
    assert (none == 0).all()


WRONG = """#include <metal_stdlib>
using namespace metal;
struct None { long count; };
kernel void apart(
    device float* y [[buffer(0)]],
    constant None& p [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
    if (i < 7) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    y[i] = 1.0f;
}
kernel void after(
    device float* y [[buffer(0)]],
    constant None& p [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
    y[i] = y[i < 32 ? i : i - 32] + 1.0f;
}
"""


def test_threads_that_do_not_meet_are_noticed():
    with pytest.raises(AssertionError, match="do not come"):
        emulator.Library(WRONG).apart(torch.empty(64), [0], threads=64, group_size=64)


def test_threadgroups_that_need_others_are_noticed():
    with recorded() as launches:
        emulator.Library(WRONG).after(torch.zeros(64), [0], threads=64, group_size=32)
    assert run_backwards(launches[0]) != launches[0].after


def test_nothing_compiles_before_a_launch(monkeypatch):
    def refuse(text):
        raise AssertionError("compiled")

    monkeypatch.setattr(shader, "compile_source", refuse)
    shader._library.cache_clear()
    metal.load_shaders()
    y = Backend("metal", "cpu", ("metal", "reference")).rms_norm(torch.empty(0, 8), torch.ones(8))
    assert y.shape == (0, 8)
    with pytest.raises(AssertionError, match="compiled"):
        Backend("metal", "cpu", ("metal",)).rms_norm(torch.ones(1, 8), torch.ones(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffers": [torch.zeros(4)]}, "takes .*'y', 'x'"),
        ({"buffers": [torch.zeros(4)] * 3}, "takes .*'y', 'x'"),
        ({"params": (4,)}, "takes .*'rows', 'eps'"),
        ({"params": (4, 1.0, 1)}, "takes .*'rows', 'eps'"),
        ({"params": {"rows": 4}}, "{'eps'}"),
        ({"params": {"rows": 4, "eps": 1.0, "epsilon": 1.0}}, "{'epsilon'}"),
        ({"buffers": [torch.zeros(8)[::2], torch.zeros(4)]}, "no strides of y"),
        ({"threads": 33}, "2 groups of 33"),
        ({"threads": shader.MAX_THREADS + 32}, "2 groups of 1056"),
        ({"groups": shader.MAX_GRID // 32 + 1}, "no grid"),
    ],
)
def test_launches_that_make_no_sense_are_refused(monkeypatch, change, message):
    monkeypatch.setattr(Shader, "declared", {})
    made = Shader("norm", "made_up", "y x", "rows eps", strided="x")
    launched = []
    library = SimpleNamespace(made_up=lambda *_, **grid: launched.append(grid))
    monkeypatch.setattr(shader, "_library", lambda *_: library)
    good = {
        "types": {},
        "buffers": [torch.zeros(4), torch.zeros(8)[::2]],
        "params": {"eps": 0.5, "rows": 4},
        "groups": 2,
        "threads": 32,
    }
    made.launch(**good)
    assert launched == [{"threads": 64, "group_size": 32}]
    with pytest.raises(FerrumError, match=message):
        made.launch(**good | change)
    assert len(launched) == 1


def test_shaders_have_no_more_buffers_than_metal(monkeypatch):
    monkeypatch.setattr(Shader, "declared", {})
    names = " ".join(f"b{i}" for i in range(shader.MAX_BUFFERS))
    Shader("norm", "most", names.rpartition(" ")[0], "rows")
    with pytest.raises(FerrumError, match="more than 31"):
        Shader("norm", "too_many", names, "rows")


def test_more_keys_than_a_grid_has_threads_are_refused(backend, monkeypatch):
    q, cache = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 9, 64)
    monkeypatch.setattr(attention, "MAX_GRID", 9)
    backend.flash_attention(q, cache, cache, kv_len=9)
    monkeypatch.setattr(attention, "MAX_GRID", 8)
    with pytest.raises(FerrumError, match="up to 8 keys, not 9"):
        backend.flash_attention(q, cache, cache, kv_len=9)
