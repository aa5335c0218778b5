"""The benches' own logic: verdicts, result files. Timing itself needs a GPU."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench import peers
from bench.attention_peers import flex_call, sdpa_call
from bench.cascade import cascade, sample, whole
from bench.check import compare, verdict
from bench.decode_map import cliffs, draw
from bench.flashinfer_peers import pages
from bench.llama_cpp import Timed, timed_products
from bench.load_speed import gb_per_second, load, write_random
from bench.results import Row, save_rows
from bench.timing import COLD_BYTES, copies_of
from ferrum_triton import get_backend
from ferrum_triton.quant import FORMATS, load_quant
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close

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
        "  MUL_MAT(type_a=q4_K,type_b=f32,m=4096,n=1,k=14336,bs=[1,1]): not supported",
    ]
    assert timed_products(lines) == [
        Timed("Q4_K:planes", 8, 4096, 14336, 30.12),
        Timed("Q8_0:planes", 64, 4096, 14336, 30.12),
    ]


def test_check_counts_and_fails_below_the_floor(tmp_path):
    targets, results = tmp_path / "targets.json", tmp_path / "out" / "results.json"
    targets.write_text(json.dumps({"cases": [US, TFLOPS]}))
    for value, status in ((9.0, 0), (11.0, 1)):
        save_rows(str(results), [Row("a/x", value, "us", roof=0.5)], "abc")
        command = [sys.executable, "-m", "bench.check", str(results), str(targets)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert "1 not measured" in done.stdout


def test_rows_replace_their_older_selves(tmp_path):
    file = tmp_path / "rows.json"
    save_rows(str(file), [Row("b", 1.0, "us"), Row("a", 0.0, "us")], "c1")
    save_rows(str(file), [Row("b", 2.0, "us", peers={"torch": 3.0})], "c2")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["id"], row["value"]) for row in rows] == [("a", 0.0), ("b", 2.0)]
    assert [row["commit"] for row in rows] == ["c1", "c2"]
    assert rows[1]["peers"] == {"torch": 3.0}
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


def test_absent_peers_have_no_calls(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert peers.absent(["torch", "liger", "flashinfer"]) == ["liger", "flashinfer"]
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
