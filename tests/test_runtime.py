"""Contexts, timers, buffers, KV caches and the types around the ops."""

import mmap
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton import FerrumError, InputError, get_backend
from ferrum_triton.quant import FORMATS, quantize_blocks
from ferrum_triton.quant.formats import GGUF_FORMATS
from ferrum_triton.runtime import buffers
from ferrum_triton.runtime.context import Context, capture_in_flight, device_scope, recording
from ferrum_triton.runtime.timer import Timer
from ferrum_triton.types import (
    AttnConfig,
    Awq,
    Dtype,
    Gguf,
    GgufQuantType,
    Gptq,
    KvDtypeKind,
    MoeRouting,
    QuantKind,
    SrcDtype,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = list(KvDtypeKind)


@pytest.fixture
def capturing():
    token = recording.set(True)
    yield
    recording.reset(token)


def test_dtypes_are_found_by_torch_dtype():
    assert Dtype(torch.bfloat16) is Dtype.BF16
    assert Dtype.U32 is Dtype.I32
    assert [kind.bytes_per_elem for kind in SrcDtype] == [4, 2, 2]
    kinds = {
        KvDtypeKind.FP32: torch.float32,
        KvDtypeKind.FP16: torch.float16,
        KvDtypeKind.BF16: torch.bfloat16,
        KvDtypeKind.FP8: torch.float8_e4m3fn,
        KvDtypeKind.INT8: torch.int8,
    }
    assert {kind: kind.dtype for kind in KvDtypeKind} == kinds
    assert [kind.bytes_per_elem for kind in KINDS] == [4, 2, 2, 1, 1]
    assert [kind.quantised for kind in KINDS] == [False] * 3 + [True] * 2


def test_every_block_format_has_a_name_that_ops_take():
    assert {fmt.name for fmt in GGUF_FORMATS.values()} <= set(GgufQuantType)
    fmt = FORMATS["Q8_0"]
    weights = torch.randn(3, 2 * fmt.block_size)
    decode = get_backend("cpu").dequantize
    packed = quantize_blocks(weights, fmt)
    got = decode(packed, GgufQuantType.Q8_0, torch.float32)
    assert torch.equal(got, decode(packed, "Q8_0", torch.float32))


def test_quant_kinds_are_one_type():
    kinds = [Gptq(desc_act=True), Awq(group_size=64), Gguf(GgufQuantType.Q4_K)]
    assert all(isinstance(kind, QuantKind) for kind in kinds)
    assert len(set(kinds)) == 3


def test_attn_config_is_what_attention_takes():
    backend = get_backend("cpu")
    config = AttnConfig(6, 2, 16, softmax_scale=0.7, sliding_window=3)
    q, k, v = torch.randn(2, 6, 5, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    got = backend.flash_attention(q, k, v, **config.keywords)
    want = backend.flash_attention(q, k, v, softmax_scale=0.7, sliding_window=3)
    assert torch.equal(got, want)
    assert not torch.allclose(got, backend.flash_attention(q, k, v), atol=1e-3)
    assert config.group_size == 3


@pytest.mark.parametrize(
    "heads", [(5, 2, 16), (0, 1, 16), (4, 0, 16), (4, 2, 0), (4, 2, 16, True, None, -1)]
)
def test_attn_config_refuses_impossible_heads(heads):
    with pytest.raises(InputError):
        AttnConfig(*heads)


def test_moe_routing_is_whole_blocks():
    routing = MoeRouting.upload([3, 1, 0, 8, 2, 8, 8, 8], [0, 5], 8)
    assert routing.block_size == 4
    assert routing.sorted_token_ids.dtype == torch.int32
    with pytest.raises(InputError, match="whole blocks"):
        MoeRouting.upload([3, 1, 0], [0, 5], 3)
    for bad in range(3):
        parts = [torch.zeros(4, dtype=torch.int32), *torch.zeros(2, 1, dtype=torch.int32)]
        MoeRouting(*parts)
        for wrong in (parts[bad].long(), parts[bad][None]):
            with pytest.raises(InputError, match="int32 of one dimension"):
                MoeRouting(*parts[:bad], wrong, *parts[bad + 1 :])
    with pytest.raises(InputError, match="one element"):
        MoeRouting(*(torch.zeros(4, dtype=torch.int32) for _ in range(3)))


@pytest.mark.parametrize("device", DEVICES)
def test_context_runs_on_its_stream_and_waits_for_it(device):
    stream = torch.cuda.Stream() if device == "cuda" else None
    context = Context(device, stream)
    x = torch.randn(1000, device=device)
    Context(device).sync()
    with context.scope(), context.scope():
        if stream is not None:
            assert torch.cuda.current_stream() == stream
        y = x.cumsum(0)
    if stream is not None:
        assert torch.cuda.current_stream() != stream
    context.sync_before_host_readback()
    assert torch.allclose(y.cpu(), x.cpu().cumsum(0), atol=1e-3)
    assert not context.graph_capture_in_flight


def test_a_metal_context_waits_for_its_command_stream(monkeypatch):
    """torch commits what is enqueued there when it is waited for, or read."""
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(True))
    context = Context("mps")
    with context.scope():
        assert not waited
    context.sync()
    context.sync_before_host_readback()
    assert len(waited) == 2


def test_sync_is_refused_in_a_capture(capturing):
    assert capture_in_flight(torch.device("cpu"))
    assert Context().graph_capture_in_flight
    with pytest.raises(FerrumError, match="cannot be captured"):
        Context().sync()


class FakeDevices:
    """Stands in for ``torch.cuda.device`` and records what is selected."""

    def __init__(self):
        self.current = 0

    def __call__(self, ordinal):
        devices = self

        class Scope:
            def __enter__(self):
                self.before, devices.current = devices.current, ordinal

            def __exit__(self, *_):
                devices.current = self.before

        return Scope()


def test_device_scopes_nest_and_restore(monkeypatch):
    devices = FakeDevices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", devices)
    with device_scope(2):
        assert devices.current == 2
        with pytest.raises(KeyError), device_scope(1):
            assert devices.current == 1
            raise KeyError
        with device_scope(None):
            assert devices.current == 2
    assert devices.current == 0
    with pytest.raises(InputError, match="0 to 2"), device_scope(3):
        pass


def test_device_scope_without_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with device_scope(0), device_scope(7), device_scope(None):
        pass
    with pytest.raises(InputError), device_scope(-1):
        pass


@pytest.mark.gpu
def test_device_scope_selects_the_device():
    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    with device_scope(last), device_scope(0):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == before


@pytest.mark.parametrize("device", DEVICES)
def test_timer(device):
    timer = Timer(Context(device))
    x = torch.randn(400, 400, device=device)
    assert timer.elapsed_ms() == 0.0
    timer.record_end()
    assert timer.elapsed_ms() == 0.0
    timer.record_start()
    assert timer.elapsed_ms() == 0.0
    for _ in range(20):
        x @ x
    timer.record_end()
    once = timer.elapsed_ms()
    assert 0.0 < once < 10_000.0
    assert timer.elapsed_ms() == once
    timer.record_start()
    assert timer.elapsed_ms() == 0.0


def test_timer_counts_milliseconds(monkeypatch):
    clock = iter([5.0, 5.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = Timer(Context())
    timer.record_start()
    timer.record_end()
    assert timer.elapsed_ms() == 250.0


def test_timer_of_a_stream_waits_for_its_end(monkeypatch):
    """Events mark both points on the context's stream; only reading the time waits."""
    seen = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            seen.append(("record", stream))

        def synchronize(self):
            seen.append(("wait for", self))

        def elapsed_time(self, end):
            return 2.5 if seen[-1] == ("wait for", end) else 0.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    context = Context()
    monkeypatch.setattr(context, "stream", "a stream")
    timer = Timer(context)
    timer.record_start()
    timer.record_end()
    assert seen == [("record", "a stream")] * 2
    assert timer.elapsed_ms() == 2.5
    assert len(seen) == 3


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.lists(st.floats(-60000, 60000, width=32), max_size=20), bits=st.sampled_from("hfb"))
def test_floats_go_up_and_come_back_rounded_once(device, data, bits):
    dtype = {"h": torch.float16, "f": torch.float32, "b": torch.bfloat16}[bits]
    buffer = buffers.from_slice(data, dtype, device)
    assert buffer.dtype == dtype and buffer.device.type == device
    assert buffers.to_vec(buffer) == torch.tensor(data, dtype=torch.float32).to(dtype).tolist()
    assert buffers.to_vec(buffer, len(data) // 2) == buffers.to_vec(buffer)[: len(data) // 2]


@pytest.mark.parametrize("dtype", [Dtype.I64, Dtype.I32, Dtype.I8, Dtype.U8])
def test_integers_stay_exact(dtype):
    limits = torch.iinfo(dtype.value)
    data = [limits.min, 0, 1, limits.max]
    assert buffers.to_vec(buffers.from_slice_typed(data, dtype)) == data
    if dtype is not Dtype.I64:
        with pytest.raises(InputError, match="integers in"):
            buffers.from_slice_typed([limits.max + 1], dtype)
    with pytest.raises(InputError, match="integers in"):
        buffers.from_slice_typed([0.5], dtype)


@pytest.mark.parametrize(
    "dtype, data",
    [
        (torch.float16, [1.0, 65505.0]),
        (torch.bfloat16, [1e39]),
        (torch.float32, [-1e300]),
        (torch.float8_e4m3fn, [449.0]),
        (torch.int32, [2**70]),
        (torch.int32, ["1"]),
        (torch.int32, [[1], [2]]),
        (torch.int32, [[1], [2, 3]]),
        (torch.int32, 3),
    ],
)
def test_values_a_buffer_cannot_hold(dtype, data):
    with pytest.raises(InputError):
        buffers.from_slice_typed(data, dtype)


def test_infinities_are_values_and_tensors_are_data():
    data = [float("inf"), -float("inf"), 2.0]
    assert buffers.to_vec(buffers.from_slice(data, torch.float16)) == data
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert torch.equal(buffers.from_slice(tensor), tensor.float())
    assert buffers.to_vec(buffers.from_slice_typed(np.array([7, 9], np.uint32), Dtype.U32)) == [
        7,
        9,
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_writing_touches_the_beginning_only(device):
    buffer = buffers.alloc_typed(Dtype.I32, 6, device)
    buffers.write_typed(buffer, [9, 8, 7, 6, 5, 4])
    buffers.write_typed(buffer, [1, 2])
    assert buffers.to_vec(buffer) == [1, 2, 7, 6, 5, 4]
    buffers.zero_buffer(buffer, 3)
    assert buffers.to_vec(buffer) == [0, 0, 0, 6, 5, 4]
    for bad in ([1] * 7, [2**31], [0.5]):
        with pytest.raises(InputError):
            buffers.write_typed(buffer, bad)
    assert buffers.to_vec(buffer) == [0, 0, 0, 6, 5, 4]
    buffers.zero_buffer(buffer)
    assert not buffer.any()


def test_writing_activations():
    buffer = buffers.alloc(4, torch.bfloat16)
    buffers.write_f32_to_activation(buffer, [1.0, 1.0 + 2**-9, -3.0, 4.0])
    assert buffers.to_vec(buffer) == [1.0, 1.0, -3.0, 4.0]
    with pytest.raises(InputError, match="float32, float16, bfloat16"):
        buffers.write_f32_to_activation(buffers.alloc_typed(Dtype.I32, 2), [1.0])


def test_buffers_refuse_what_they_are_not():
    for call in (
        lambda: buffers.alloc(-1),
        lambda: buffers.alloc(1, torch.int32),
        lambda: buffers.alloc_typed(torch.complex64, 1),
        lambda: buffers.from_slice([1.0], torch.float64),
        lambda: buffers.to_vec(torch.randn(4, 4).t()),
        lambda: buffers.to_vec(torch.randn(4), 5),
        lambda: buffers.zero_buffer(torch.randn(4), -1),
        lambda: buffers.from_weight_bytes([1, 2], SrcDtype.F16),
    ):
        with pytest.raises(InputError):
            call()


def test_host_data_is_refused_in_a_capture(capturing):
    buffer = torch.randn(3)
    for call in (
        lambda: buffers.from_slice([1.0]),
        lambda: buffers.from_slice_typed([1], Dtype.I32),
        lambda: buffers.write_typed(buffer, [1.0]),
        lambda: buffers.to_vec(buffer),
    ):
        with pytest.raises(FerrumError, match="cannot be captured"):
            call()
    buffers.zero_buffer(buffer)
    assert not buffer.any()


@pytest.mark.parametrize("src", SrcDtype)
@pytest.mark.parametrize("device", DEVICES)
def test_weight_bytes_are_little_endian_and_keep_their_range(src, device):
    values = [1.0, -2.5, 0.0, 3e38 if src is not SrcDtype.F16 else 65504.0]
    if src is SrcDtype.BF16:
        raw = b"".join(struct.pack("<f", value)[2:] for value in values)
    else:
        raw = struct.pack("<4f" if src is SrcDtype.F32 else "<4e", *values)
    weights = buffers.from_weight_bytes(raw, src, device)
    assert weights.dtype == src.value and weights.device.type == device
    assert weights.cpu().float().numpy() == pytest.approx(values, rel=2**-8)
    with pytest.raises(InputError, match="multiple"):
        buffers.from_weight_bytes(raw[:-1], src)
    assert buffers.from_weight_bytes(b"", src).numel() == 0


def test_weight_bytes_are_not_copied(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(np.arange(12, dtype="<f4").tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    weights = buffers.from_weight_bytes(memoryview(mapped)[8:], SrcDtype.F32)
    assert weights.tolist() == list(range(2, 12))
    mapped[8:12] = struct.pack("<f", 42.0)
    assert weights[0] == 42.0
