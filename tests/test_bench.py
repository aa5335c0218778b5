"""The benches' own logic: verdicts, result files. Timing itself needs a GPU."""

import inspect
import json
import sys
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench import check, compile_time, fingerprint, peers, precompile, run
from bench.attention_peers import flex_call, sdpa_call
from bench.behind import Timing, behind_norm, stands_behind_norm
from bench.cascade import cascade, sample, whole
from bench.cases import case_of, code_of, declared, launches_of, recorded
from bench.check import age, compare, ops_at, verdict
from bench.compile_time import Compiler
from bench.decode_map import cliffs, draw
from bench.fla_peers import fla_call
from bench.flashinfer_peers import pages
from bench.launches import Recorded
from bench.llama_cpp import Timed, ours, timed_products
from bench.load_speed import gb_per_second, load, write_random
from bench.precompile import different
from bench.results import Row, read_rows, save_rows
from bench.run import scale_of, without_fresh_row
from bench.timing import COLD_BYTES, copies_of
from ferrum_triton import get_backend
from ferrum_triton.kernels.ahead import compile_key
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.sources import hash_source
from ferrum_triton.quant import FORMATS, load_quant
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TWO_PRODUCTS, TensorFactory, assert_close

US = {"id": "a/x", "metric": "us", "floor": 10, "goal": 8}
TFLOPS = {"id": "b/y", "metric": "tflops", "floor": 300, "goal": 400}


@pytest.mark.parametrize(
    ("case", "value", "found"),
    [
        (US, 8.0, "goal"),
        (US, 8.1, "floor"),
        (US, 10.0, "floor"),
        (US, 10.1, "below"),
        (TFLOPS, 400.0, "goal"),
        (TFLOPS, 399.0, "floor"),
        (TFLOPS, 299.0, "below"),
        (TFLOPS, None, "not measured"),
    ],
)
def test_verdicts(case, value, found):
    assert verdict(case, value) == found


def test_units_must_agree():
    with pytest.raises(ValueError, match="tflops"):
        compare([{"id": "b/y", "unit": "us", "value": 3.0}], [TFLOPS])


def test_timings_of_llama_cpp_are_read():
    sizes = "m=4096,n={n},k=14336,bs=[{b},1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1"
    line = f"  MUL_MAT(type_a={{kind}},type_b=f32,{sizes}):  852 runs -   30.12 us/run - 117 MFLOP"
    lines = [
        "Testing 2 devices",
        line.format(kind="q4_K", n=8, b=1),
        line.format(kind="q8_0", n=64, b=1),
        line.format(kind="q4_K", n=512, b=1),
        line.format(kind="q4_K", n=8, b=2),
        line.format(kind="f16", n=8, b=1),
        line.format(kind="iq4_xs", n=8, b=1),
        line.format(kind="mxfp4", n=1, b=1),
        "  MUL_MAT(type_a=q4_K,type_b=f32,m=4096,n=1,k=14336,bs=[1,1]): not supported",
    ]
    found = timed_products(lines)
    assert found[:3] == [
        Timed("q4_k", 8, 4096, 14336, 30.12),
        Timed("q8_0", 64, 4096, 14336, 30.12),
        Timed("q4_k", 512, 4096, 14336, 30.12),
    ]
    assert [(p.type, p.m) for p in found[3:]] == [("f16", 8), ("iq4_xs", 8), ("mxfp4", 1)]
    cases = [ours(product) for product in found]
    assert cases[0].id == "gemm_quant/q4_K/n4096k14336/m8"
    assert cases[3].id == "gemm/f16/n4096k14336/m8"
    assert cases[5].op.name == "gemv_quant" and cases[5].id.endswith("mxfp4/n4096k14336/m1")
    assert ours(Timed("iq2_xxs", 1, 4096, 14336, 1.0)) is None
    for case in cases:
        assert case_of(case.id).case == case.case


def test_every_op_has_a_case_whose_code_is_known():
    for op in OPS.values():
        assert op.bench
    for row in (
        "rms_norm/bf16/h4096/m1",
        "gemm/bf16/n4096k4096/m1",
        "embedding_lookup/bf16/h4096/m1",
    ):
        assert code_of(row).startswith("sm_90/")
    assert code_of("load_quant/q4_K/n28672k4096") is None


@pytest.mark.parametrize(
    "row",
    [
        "moe_layer/q4_K/e128k8h2048i768/t8",
        "moe_layer/bf16/e128k8h2048i768/t64",
        "cascade/h32k8d128/b16/prefix8192/suffix256",
        "decode_layer/qwen3-8b/q4_K/b8/ctx1024",
        "decode/smollm2-135m/q4_1/b8/ctx1024",
        "gemm_quant/q2_K/n4096k14336/m3",
        "compile_time/sm_90/rms_norm/bf16/h4096/m1",
    ],
)
def test_rows_of_other_benches_have_code(row):
    code = code_of(row)
    assert code is not None and code != code_of(row, "sm_80")


def test_a_fingerprint_follows_the_launch_and_the_source(monkeypatch):
    row = "rms_norm/bf16/h4096/m1"
    before = code_of(row)
    assert code_of(row, "sm_80") != before
    assert code_of("rms_norm/bf16/h4096/m64") != before
    (launch,) = recorded(row).launches
    kernel = launch.kernel.jit
    old = fingerprint.source_hash(kernel)
    source = inspect.getsource

    def edited(text, replacement):
        fingerprint.source_hash.cache_clear()
        changed = lambda f: source(f).replace(text, replacement)  # noqa: E731
        monkeypatch.setattr(fingerprint.inspect, "getsource", changed)
        return fingerprint.source_hash(kernel)

    assert edited("\n    ", "\n    # a comment\n    ") == old
    assert edited("tl.load", "tl.store") != old
    fingerprint.source_hash.cache_clear()


def test_a_kernels_helpers_and_constants_are_in_its_fingerprint(monkeypatch):
    (launch,) = recorded("gemv_quant/q4_K/n4096k4096/m1").launches
    old = fingerprint.source_hash(launch.kernel.jit)
    source, seen = inspect.getsource, []

    def noted(function):
        seen.append(function.__module__)
        return source(function)

    fingerprint.source_hash.cache_clear()
    monkeypatch.setattr(fingerprint.inspect, "getsource", noted)
    assert fingerprint.source_hash(launch.kernel.jit) == old
    assert len(set(seen)) > 2, "kernels in several files"


def test_ages_of_rows(monkeypatch):
    name = "rms_norm/bf16/h4096/m1"
    row = {"id": name, "commit": "no such commit"}
    assert age(row) == "unknown age"
    assert age(row | {"code": code_of(name)}) == "fresh"
    assert age(row | {"code": "sm_90/000000000000", "dirty": True}) == "stale, dirty"
    monkeypatch.setattr(check, "ops_at", lambda commit: frozenset({"layer_norm"}))
    assert age(row) == "unknown age, lacks op"
    assert age(row | {"id": "layer_norm_q8/bf16/m1"}) == "unknown age"
    monkeypatch.setattr(check, "ops_at", lambda commit: frozenset({"layer_norm_q8"}))
    assert age(row | {"id": "layer_norm_q8/bf16/m1"}) == "unknown age, op is gone"
    monkeypatch.setattr(check, "ops_at", lambda commit: frozenset({"paged_decode_attention"}))
    variant = row | {"id": "int8_paged_decode_attention/h32k8d128/block16/b8/ctx16384"}
    assert age(variant) == "unknown age"
    assert age(row | {"id": "load_quant/q4_K/n28672k4096"}) == "unknown age"


def test_git_tells_the_ops_of_a_commit():
    head = ops_at("HEAD")
    if head is None:
        pytest.skip("no git here")
    assert "rms_norm" in head and "no_such_op" not in head
    assert ops_at("0" * 40) is None


def test_cases_without_a_fresh_row_come_in_order():
    names = [f"rms_norm/bf16/h4096/m{m}" for m in (1, 64, 4096, 32768)]
    cases = [declared()[name] for name in names]
    rows = [
        {"id": names[0]},
        {"id": names[1], "code": "sm_90/000000000000"},
        {"id": names[2], "code": code_of(names[2])},
    ]
    chosen = without_fresh_row(cases, rows, "sm_90")
    assert [case.id for case in chosen] == [names[3], names[1], names[0]]


@pytest.fixture
def timed_here(monkeypatch):
    """Cases are checked and "timed" on the CPU backend, all in 2 us, in a chain in 1."""
    cpu = get_backend("cpu")
    monkeypatch.setattr(run, "get_backend", lambda name: cpu)
    monkeypatch.setattr(run, "copies_of", lambda arguments, nbytes: [arguments])
    monkeypatch.setattr(run, "time_call", lambda *args, **kwargs: Timing(2.0, 1.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return cpu


def test_a_run_fills_gaps_and_goes_on_after_a_failure(tmp_path, monkeypatch, capsys, timed_here):
    file = tmp_path / "rows.json"
    fresh = "rms_norm/bf16/h4096/m1"
    save_rows(str(file), [Row(fresh, 9.0, "us", code=code_of(fresh))], "c1")

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["run", *options, "--json", str(file), "--commit", "c2"])
        return run.main(), capsys.readouterr().out

    with monkeypatch.context() as broken:
        wrong = lambda x, weight, eps: torch.zeros_like(x)  # noqa: E731
        broken.setitem(timed_here.__dict__, "rms_norm_to", wrong)
        status, printed = call("rms_norm", "rms_norm_to", "--case", "/m1", "--missing")
    assert status == 1 and printed.count("failed: ") == 1 and "1 cases failed" in printed
    assert [row["commit"] for row in read_rows(file)] == ["c1"]

    status, printed = call("rms_norm", "--case", "/m64", "--missing", "--dirty")
    assert status == 0 and "1 cases, after" in printed
    rows = {row["id"]: row for row in read_rows(file)}
    new = rows["rms_norm/bf16/h4096/m64"]
    assert (new["value"], new["chained"], new["commit"], new["dirty"]) == (2.0, 1.0, "c2", True)
    assert new["code"] == code_of("rms_norm/bf16/h4096/m64") and rows[fresh]["commit"] == "c1"

    status, printed = call("rms_norm", "--case", "/m1", "--seconds", "0")
    assert status == 0 and "1 cases left when 0 s had passed" in printed
    status, printed = call("rms_norm", "--case", "/m64", "--missing")
    assert status == 0 and "0 cases, after" in printed


def test_what_shares_machine_code_is_compiled_once():
    rows = [f"copy_slice/bf16/n{n}" for n in (4096, 16777216)]
    jobs = different([partial(launches_of, row) for row in (*rows, "rms_norm/bf16/h4096/m1")])
    assert [job().kernel.name for job in jobs] == ["_copy_kernel", "_rms_norm_kernel"]
    assert different([partial(launches_of, "rms_norm/bf16/h4096/m1", "no arch")]) == []


def test_a_launch_finds_what_was_compiled_for_it_ahead(monkeypatch):
    """Triton's cache is asked by the hash of a kernel's source, which depends on what was hashed
    before.
    """
    (launch,) = launches_of("rms_norm/bf16/h4096/m1")
    function = launch.kernel.jit
    hash_source(function)
    monkeypatch.setattr(type(function), "warmup", lambda self, *_, **__: hashes.append(self.hash))
    hashes, asked = [], function.hash
    monkeypatch.setattr(function, "hash", None)
    assert precompile._compile(lambda: launch) == ""
    assert hashes == [asked]


def test_launches_differ_by_the_types_in_their_tuples():
    (launch,) = launches_of("rms_norm/bf16/h4096/m1")
    x = torch.empty(3, device="meta")
    given = [(x, 16, None), (x, 32, None), (x.half(), 16, None), (x, 1, None), (x, 16, 2)]
    keys = [compile_key(replace(launch, args=(args,))) for args in given]
    assert keys[0] == keys[1] and len(set(keys)) == 4
    texts = [
        fingerprint.fingerprint(Recorded([replace(launch, args=(a,))]), "sm_90") for a in given
    ]
    assert len(set(texts)) == 5


def test_compile_times_are_shared_by_cases_of_one_launch(monkeypatch):
    compiled = []
    monkeypatch.setattr(compile_time, "compile_launch", lambda *args: compiled.append(args))
    compiler = Compiler(TARGETS["sm_90"])
    (launch,) = launches_of("copy_slice/bf16/n4096")
    (same,) = launches_of("copy_slice/bf16/n16777216")
    assert compiler.took(launch, "first") == compiler.took(same, "second") >= 0
    assert len(compiled) == 1
    assert [name for _, name in compiler.slowest(5)] == ["_copy_kernel of first"]


@pytest.mark.parametrize(
    ("row", "behind"),
    [
        ("gemv_quant/q4_K/n4096k4096/m1", True),
        ("gemm_quant/q4_K/n28672k4096/m8", True),
        ("gemm_quant/q4_K/n28672k4096/m16", False),
        ("gemv_quant_gate_up_silu/q4_K_q4_K/n14336k4096/m4", True),
        ("gemv_quant_qkv/q4_K_q6_K/n6144k4096/m1", True),
        ("linear_quant/q4_K/n4096k4096/m4", True),
        ("gemv_quant_moe_id/q4_k:planes/e128k8n768k2048/m4", True),
        ("gemm/bf16/n6144k4096/m8", True),
        ("rms_norm/bf16/h4096/m1", False),
    ],
)
def test_products_of_few_tokens_stand_behind_a_norm(row, behind):
    op, case = declared()[row]
    arguments = op.make_sample(TensorFactory(case.dtype, "meta"), **case.axes)
    assert stands_behind_norm(op, arguments) == behind


def test_the_norm_writes_what_the_product_reads():
    op, backend = OPS["gemm"], get_backend("cpu")
    sets = [op.make_sample(TensorFactory(torch.float32, seed=i), m=2, n=5, k=8) for i in range(3)]
    products, norms = behind_norm(op, backend.gemm, sets, backend)
    for arguments, product, norm in zip(sets, products, norms, strict=True):
        before = arguments["a"].clone()
        norm()
        assert not torch.equal(arguments["a"], before)
        assert_close(arguments["a"].square().mean(-1), torch.ones(2), scale=100)
        assert_close(product(), arguments["a"] @ arguments["b"].T)


def test_check_counts_and_fails_below_the_floor(tmp_path, monkeypatch, capsys):
    targets, results = tmp_path / "targets.json", tmp_path / "out" / "results.json"
    targets.write_text(json.dumps({"cases": [US, TFLOPS]}))
    monkeypatch.setattr(sys, "argv", ["check", str(results), str(targets)])
    for value, status in ((9.0, 0), (11.0, 1)):
        rows = [Row("a/x", value, "us", roof=0.5), Row("rms_norm/x", 1.0, "us")]
        save_rows(str(results), rows, "abc", dirty=True)
        assert check.main() == status
        printed = capsys.readouterr().out
        assert "1 not measured" in printed and "2 unknown age" in printed
        assert "(unknown age, dirty)" in printed
        assert "1 more rows of rms_norm: unknown age, dirty" in printed


def test_rows_replace_their_older_selves(tmp_path):
    file = tmp_path / "rows.json"
    save_rows(str(file), [Row("b", 1.0, "us"), Row("a", 0.0, "us")], "c1")
    save_rows(str(file), [Row("b", 2.0, "us", peers={"torch": 3.0})], "c2")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["id"], row["value"]) for row in rows] == [("a", 0.0), ("b", 2.0)]
    assert [row["commit"] for row in rows] == ["c1", "c2"]
    assert [row["dirty"] for row in rows] == [False, False]
    assert rows[1]["peers"] == {"torch": 3.0}
    save_rows(str(file), [Row("b", 2.0, "us", chained=1.5, code="sm_90/1")], "c2", dirty=True)
    assert read_rows(file)[1]["dirty"] and read_rows(file)[1]["chained"] == 1.5
    assert rows[1]["torch"] == torch.__version__


def test_copies_walk_through_more_than_a_cache():
    x = torch.randn(1 << 20)
    sets = copies_of({"x": x, "eps": 1e-6}, x.numel() * 4)
    assert len(sets) * x.numel() * 4 >= COLD_BYTES
    assert len({s["x"].data_ptr() for s in sets}) == len(sets)
    assert all(torch.equal(s["x"], x) for s in sets)


def test_cliffs_are_drops_beside_no_more_work():
    cells = {(1, 128): 0.1, (2, 128): 0.2, (4, 128): 0.1, (1, 256): 0.2, (2, 256): 0.4}
    assert cliffs(cells) == [((4, 128), (2, 128)), ((4, 128), (2, 256))]


def test_heat_maps_are_well_formed():
    root = ElementTree.fromstring(draw({(1, 128): 0.5, (8, 4096): 4.0, (8, 128): 2.0}))
    figures = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert figures[1:] == ["128", "4096", "1", "0.50", "8", "2.00", "4.00"]
    assert sum(node.tag.endswith("rect") for node in root.iter()) == 3


@pytest.mark.parametrize("sliding_window", [0, 5])
def test_attention_peers_compute_what_they_are_timed_for(sliding_window):
    op = OPS["flash_attention"]
    axes = {"batch": 2, "num_kv_heads": 2, "group_size": 3, "head_dim": 16, "q_len": 20}
    arguments = op.make_sample(
        TensorFactory(torch.float32), kv_len=20, sliding_window=sliding_window, **axes
    )
    want = op.reference(**arguments)
    assert_close(flex_call(arguments, compiled=False)(**arguments), want)
    call = sdpa_call(SDPBackend.MATH, arguments)
    assert (call is None) == (sliding_window > 0)
    if call is not None:
        assert_close(call(**arguments), want)


def test_attention_peers_leave_out_what_they_lack():
    op = OPS["flash_attention"]
    axes = {"batch": 1, "num_kv_heads": 1, "group_size": 1, "head_dim": 16, "q_len": 20}
    square = op.make_sample(TensorFactory(torch.float32), kv_len=20, **axes)
    longer = op.make_sample(TensorFactory(torch.float32), kv_len=30, **axes)
    for arguments in (longer, square | {"softcap": 5.0}, square | {"causal": False}):
        assert sdpa_call(SDPBackend.MATH, arguments) is None
        assert flex_call(arguments, compiled=False) is None


def test_flashinfer_is_told_the_pages_in_use():
    tables = torch.tensor([[7, 3, -1], [-1, -1, -1], [5, 2, 9], [4, 6, 1]])
    indptr, indices, last = pages(tables, torch.tensor([17, 0, 32, 48]), page_size=16)
    assert indptr.tolist() == [0, 2, 2, 4, 7]
    assert indices.tolist() == [7, 3, 5, 2, 4, 6, 1]
    assert last.tolist() == [1, 0, 16, 16]


def test_linear_attention_peers_leave_out_what_they_lack():
    axes = {"num_k_heads": 1, "group_size": 2, "head_k_dim": 16, "head_v_dim": 16}
    prefill, decode = OPS["gdn_prefill"], OPS["gdn_decode"]
    lengths = prefill.make_sample(TensorFactory(torch.float32), seq_lens=(3, 4), **axes)
    kept = decode.make_sample(TensorFactory(torch.float32), batch=2, with_kept=True, **axes)
    tiled = decode.make_sample(TensorFactory(torch.float32), batch=2, tiled_values=True, **axes)
    assert fla_call("gdn_prefill", lengths) is None
    assert fla_call("gdn_decode", kept) is None
    assert fla_call("gdn_decode", tiled) is None
    assert fla_call("rms_norm", {}) is None


def test_absent_peers_have_no_calls(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.absent(["torch", "liger", "flashinfer", "fla"]) == ["liger", "flashinfer", "fla"]
    assert peers.peer_call("flashinfer", OPS["paged_decode_attention"], {}) is None


@pytest.mark.parametrize("backend", ["cpu", "interpret"])
def test_a_prefix_read_once_changes_nothing(backend):
    call = sample("cpu", 3, 48, 20, seed=0, dtype=torch.float32)
    backend = get_backend(backend)
    assert_close(cascade(backend, **call), whole(backend, **call))


def test_what_is_timed_to_load_is_the_file_in_planes(tmp_path):
    file = tmp_path / "weights"
    write_random(file, 6 * FORMATS["Q4_K"].row_bytes(512))
    loaded = load(file, "Q4_K", 6, 512, "cpu")
    assert loaded.kind == "Q4_K:planes"
    stored = load_quant("Q4_K", file.read_bytes(), 6, 512)
    assert torch.equal(loaded.as_in_file().blocks, stored.blocks)
    assert gb_per_second(file, "Q4_K", 6, 512, "cpu", times=1) > 0


def test_gate_and_up_are_allowed_the_errors_of_both_where_weights_are_decoded_alone():
    few, many, wide = (
        torch.empty(511, 8).half(),
        torch.empty(512, 8).half(),
        torch.empty(512, 2, 8).half(),
    )
    assert [scale_of(OPS["gemv_quant_gate_up_silu"], x) for x in (few, many)] == [1.0, TWO_PRODUCTS]
    for name in ("gemm_quant", "gemv_quant_qkv"):
        assert scale_of(OPS[name], many) == 1.0
    assert scale_of(OPS["gemm_quant_moe_id_gate_up_silu"], wide) == 1.0
