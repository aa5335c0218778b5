"""Backends: how they are found, what they refuse, and that both kinds of launch share a process."""

import pickle

import pytest
import torch
import triton
import triton.language as tl

import ferrum_triton
from ferrum_triton import BackendUnavailable, InputError, MissingKernel, UnknownOp, get_backend
from ferrum_triton.backends import cuda, interpret, metal
from ferrum_triton.backends.backend import Backend
from ferrum_triton.errors import FerrumError, FileError
from ferrum_triton.kernels import interpreter
from ferrum_triton.kernels.jit import kernel, record_launches
from ferrum_triton.registry import OPS


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@kernel
def _double_kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, _twice(x), mask=i < n)


@kernel
def _standard_library_kernel(y_ptr, x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    total = tl.sum(x) + tl.max(x) * tl.cdiv(7, 2) + tl.reduce(x, 0, _larger)
    steps = 0
    for _ in range(tl.load(y_ptr).to(tl.int32)):
        steps += 1
    tl.store(y_ptr + i, tl.sigmoid(x) * total + tl.zeros([BLOCK], tl.float32) + steps)


@kernel
def _least_and_most_kernel(least_ptr, most_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(least_ptr + i, tl.minimum(x, y))
    tl.store(most_ptr + i, tl.maximum(x, y))


def test_unknown_names_are_refused_by_name():
    with pytest.raises(BackendUnavailable, match="cuda, cpu, interpret, metal"):
        get_backend("tpu")
    with pytest.raises(UnknownOp, match="rms_nrom"):
        get_backend("cpu").rms_nrom  # noqa: B018
    assert not hasattr(get_backend("cpu"), "rms_nrom")


def test_backends_are_one_object_each():
    assert get_backend("cpu") is get_backend("cpu")
    assert get_backend("auto").name in ("cpu", "cuda", "metal")
    assert "rms_norm" in dir(get_backend("cpu"))
    assert get_backend("cpu").supports("rms_norm")
    assert not get_backend("cpu").supports("rms_nrom")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_absent_devices_say_what_to_do():
    for name in ("cuda", "metal"):
        with pytest.raises(BackendUnavailable, match="get_backend\\('cpu'\\)"):
            get_backend(name)


@pytest.mark.parametrize(
    ("module", "device", "brought"),
    [
        (cuda, "cuda", ["cuda"]),
        (interpret, "cpu", ["interpret"]),
        (metal, "mps", ["shaders", *(f"ferrum_triton.backends.torch_{p}" for p in ("moe", "ops"))]),
    ],
)
def test_a_backend_brings_its_kernels_where_its_device_is(monkeypatch, module, device, brought):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    seen = []
    loaders = {"load_kernels": seen.append, "import_module": seen.append}
    loaders["load_shaders"] = lambda: seen.append("shaders")
    for name, loader in loaders.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, loader)
    assert module.prepare() == device and seen == brought


def test_missing_kernel_is_an_error_not_a_slow_path():
    backend = Backend("bare", device="cpu", providers=("nothing",))
    with pytest.raises(MissingKernel, match="no kernel for rms_norm"):
        backend.rms_norm  # noqa: B018


def test_every_op_has_a_kernel():
    get_backend("interpret")
    missing = [n for n, op in OPS.items() if not {"triton", "blas"} & op.impls.keys()]
    assert missing == []


def test_a_kernel_is_one_of_a_backends_own():
    interpret, cpu = get_backend("interpret"), get_backend("cpu")
    assert interpret.has_kernel("gemm_quant", "Q4_K")
    assert not cpu.has_kernel("gemm_quant", "Q4_K")
    assert cpu.supports("gemm_quant")
    assert not cpu.supports("nothing")


def test_errors_share_a_base_and_survive_pickling():
    error = InputError("rms_norm", "x", "int64", "float32", "Convert it.")
    again = pickle.loads(pickle.dumps(error))
    assert (again.op, again.argument, str(again)) == ("rms_norm", "x", str(error))
    for kind in (InputError, UnknownOp, MissingKernel, BackendUnavailable, FileError):
        assert issubclass(kind, FerrumError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("name", ["cpu", "interpret"])
def test_scalars_of_the_wrong_kind_are_refused(name):
    backend = get_backend(name)
    # Of a shape that no other test has had checked before.
    x, weight = torch.randn(2, 11), torch.randn(11)
    with pytest.raises(InputError, match="eps"):
        backend.rms_norm(x, weight, "small")
    qkv = torch.randn(2, 24)
    with pytest.raises(InputError, match="q_dim"):
        backend.split_qkv(qkv, 8, 7)
    with pytest.raises(InputError, match="kv_dim"):
        backend.split_qkv(qkv, 8, 8.0)


@pytest.mark.parametrize("name", ["cpu", "interpret"])
def test_out_of_the_wrong_kind_is_refused(name):
    backend = get_backend(name)
    x, weight = torch.randn(2, 8), torch.randn(8)
    for out in (torch.empty(2, 7), torch.empty(2, 8, dtype=torch.float16), torch.empty(8, 2).T):
        with pytest.raises(InputError, match="out"):
            backend.rms_norm(x, weight, out=out)
    with pytest.raises(InputError, match="out"):
        backend.rms_norm(x, weight, out=torch.empty(8).expand(2, 8))
    with pytest.raises(InputError, match="3 tensor"):
        backend.split_qkv(torch.randn(2, 24), 8, 8, out=torch.empty(2, 8))


@pytest.mark.parametrize("name", ["cpu", "interpret"])
def test_cache_overflow_writes_nothing(name):
    backend = get_backend(name)
    k_cache, v_cache = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    before = k_cache.clone(), v_cache.clone()
    new = torch.randn(1, 3, 8)
    for cache_len in (2, -1, 4):
        with pytest.raises(InputError, match="cache_len"):
            backend.kv_cache_append_head_major(k_cache, v_cache, new, new, cache_len)
    cos = sin = torch.ones(4, 4)
    with pytest.raises(InputError, match="cache_len"):
        backend.split_qkv_norm_rope_into_cache(
            torch.randn(3, 24), None, None, cos, sin, k_cache, v_cache, 1, 2, qk_mode=2
        )
    with pytest.raises(InputError, match="pos_offset"):
        backend.split_qkv_norm_rope_into_cache(
            torch.randn(3, 24),
            None,
            None,
            cos,
            sin,
            k_cache,
            v_cache,
            1,
            0,
            pos_offset=2,
            qk_mode=2,
        )
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
    backend.kv_cache_append_head_major(k_cache, v_cache, new, new, 1)
    assert torch.equal(k_cache[:, 1:], new)


def test_interpreter_refuses_raw_bfloat16():
    x = torch.randn(8).to(torch.bfloat16)
    for dtype in interpreter.RAW_BITS:
        raw = x.to(dtype)
        with pytest.raises(InputError, match="computes on its bits"):
            interpreter.run_raw(_double_kernel.jit, (1,), (raw, raw, 8), {"BLOCK": 8})


def test_interpreter_would_be_wrong_on_raw_bfloat16():
    """The reason for the refusal: Triton's own interpreter adds the bits."""
    x = torch.full((8,), 1.5, dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    bits = x.view(torch.uint16).to(torch.int32)
    wrapped = ((2 * bits) & 0xFFFF).to(torch.uint16).view(torch.bfloat16)
    _double_kernel.launch((1,), y, x, 8, BLOCK=8)
    assert torch.equal(y, torch.full_like(y, 3.0))
    assert not torch.equal(wrapped, y)


def test_interpreter_rounds_as_torch_does():
    """A float32 stored to bfloat16 is rounded to nearest even; numpy's bits would be cut off."""
    x = torch.tensor([1.01171875 / 2], dtype=torch.float32).repeat(8)
    y = torch.zeros(8, dtype=torch.bfloat16)
    _double_kernel.launch((1,), y, x, 8, BLOCK=8)
    assert torch.equal(y, (x + x).to(torch.bfloat16))
    assert y[0].item() == 1.015625


def test_interpreter_keeps_views_of_one_storage_together():
    storage = torch.arange(16, dtype=torch.bfloat16)
    _double_kernel.launch((1,), storage[8:], storage[:8], 8, BLOCK=8)
    want = torch.arange(8, dtype=torch.bfloat16)
    assert torch.equal(storage, torch.cat((want, 2 * want)))


def test_interpreter_runs_the_standard_library():
    x, y = torch.randn(16), torch.full((16,), 3.0)
    _standard_library_kernel.launch((1,), y, x, BLOCK=16)
    want = torch.sigmoid(x) * (x.sum() + x.max() * 4 + x.max()) + 3
    torch.testing.assert_close(y, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_of_a_number_and_a_nan_the_number_is_less_and_more(device):
    """Interpreted as on a GPU."""
    x = torch.tensor([1.0, torch.nan, -torch.inf, torch.nan], device=device)
    y = torch.tensor([torch.nan, -2.0, torch.nan, torch.nan], device=device)
    least, most = torch.zeros_like(x), torch.zeros_like(x)
    _least_and_most_kernel.launch((1,), least, most, x, y, BLOCK=4)
    want = torch.tensor([1.0, -2.0, -torch.inf, torch.nan], device=device)
    for got in (least, most):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_interpreting_leaves_the_compiler_intact():
    """Interpret, compile, interpret again in one process: neither disturbs the other."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    x, y = torch.randn(8), torch.zeros(8)
    before = {n: getattr(tl, n) for n in ("load", "sum", "cdiv", "arange", "reduce", "range")}
    _double_kernel.launch((1,), y, x, 8, BLOCK=8)
    assert {n: getattr(tl, n) for n in before} == before
    signature = {"y_ptr": "*fp32", "x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(_double_kernel.jit, signature, {(3,): 8})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    _double_kernel.launch((1,), y, y, 8, BLOCK=8)
    assert torch.equal(y, 4 * x)


def test_launches_on_meta_are_recorded_or_refused():
    x = torch.empty(8, device="meta")
    with pytest.raises(FerrumError, match="record_launches"):
        _double_kernel.launch((1,), x, x, 8, BLOCK=8)
    with record_launches() as launches:
        _double_kernel.launch((1,), x, x, 8, BLOCK=8)
    assert [launch.grid for launch in launches] == [(1,)]


@pytest.mark.gpu
def test_interpreter_checks_the_compiled_kernel_in_one_process():
    x = torch.randn(3, 100)
    weight = torch.randn(100)
    compiled = get_backend("cuda").rms_norm(x.cuda(), weight.cuda())
    interpreted = get_backend("interpret").rms_norm(x, weight)
    torch.testing.assert_close(compiled.cpu(), interpreted, rtol=1e-6, atol=1e-6)
    again = get_backend("cuda").rms_norm(x.cuda(), weight.cuda())
    assert torch.equal(again, compiled)


@pytest.mark.gpu
def test_alignment_is_part_of_the_launch_key():
    """A kernel compiled for 16-byte loads must not serve a tensor that starts off the grid."""
    backend = get_backend("cuda")
    flat = torch.randn(4 * 256 + 1, device="cuda", dtype=torch.float16)
    weight = torch.randn(256, device="cuda")
    for start in (0, 1, 0, 1):
        x = flat[start : start + 1024].view(4, 256)
        got = backend.rms_norm(x, weight)
        want = OPS["rms_norm"].reference(x.double(), weight.double())
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_scalar_types_are_part_of_the_launch_key():
    """An int where a float came before, and a length past 2^31, must not share a binary."""
    backend = get_backend("cuda")
    x, weight = torch.randn(2, 48, device="cuda"), torch.randn(48, device="cuda")
    want = backend.rms_norm(x, weight, 0.0)
    torch.testing.assert_close(backend.rms_norm(x, weight, 0), want)
    torch.testing.assert_close(backend.rms_norm(x, weight, 0.0), want)
    for scale in (2, 0.5, 2):
        y = x.clone()
        backend.scaled_add_inplace(y, x, scale)
        torch.testing.assert_close(y, x * (1 + scale))


@pytest.mark.gpu
def test_capture_refuses_what_a_replay_would_get_wrong():
    backend = get_backend("cuda")
    table = torch.randn(10, 64, device="cuda")
    x, weight = torch.randn(7, 321, device="cuda", dtype=torch.float16), torch.ones(321).cuda()
    for call, message in (
        (lambda: backend.embedding_lookup(table, [1, 2]), "embedding_lookup_dev"),
        (lambda: backend.rms_norm(x, weight), "before capturing"),
    ):
        with pytest.raises(FerrumError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
        torch.cuda.synchronize()


def test_version_is_stated():
    assert ferrum_triton.__version__.count(".") == 2


@pytest.mark.gpu
def test_profilers_still_see_launches():
    from triton import knobs

    seen = []
    backend = get_backend("cuda")
    x, weight = torch.randn(2, 64, device="cuda"), torch.randn(64, device="cuda")
    backend.rms_norm(x, weight)

    def note(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(note)
    try:
        backend.rms_norm(x, weight)
    finally:
        knobs.runtime.launch_enter_hook.remove(note)
    backend.rms_norm(x, weight)
    assert seen == ["_rms_norm_kernel"]


@pytest.mark.parametrize("name", ["x", "weight"])
def test_none_is_no_tensor(name):
    arguments = {"x": torch.randn(2, 4), "weight": torch.ones(4)} | {name: None}
    with pytest.raises(InputError, match=rf"{name}.*None"):
        get_backend("cpu").rms_norm(**arguments)
