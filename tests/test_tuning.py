"""Launch choices: tables, their nearest rows, and the heuristics behind them."""

import json
import os
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from ferrum_triton.backends.triton_provider import load_kernels
from ferrum_triton.kernels import gpu, tables, tuning
from ferrum_triton.kernels.gpu import SHARED_LIMITS, Gpu, gpu_of, gpu_of_arch, gpu_of_capability
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.parameters import (
    OPTIONS,
    gpu_refusal,
    one_of,
    power_of_two,
    tile_refusal,
)
from ferrum_triton.kernels.resources import TARGETS
from ferrum_triton.kernels.tables import Row, read_rows, table_file, write_rows
from ferrum_triton.kernels.tuning import TUNABLES, Tunable, cached_picks, record_picks

load_kernels("interpret")

GPU = gpu_of_arch("sm_90")
META, CPU, CUDA = torch.device("meta"), torch.device("cpu"), torch.device("cuda", 0)
DIMS = ("kind", "m", "n")


def test_meta_tensors_stand_for_the_gpu_of_the_recording():
    assert gpu_of(META) == Gpu((8, 0), 166_912, 132, "sm_80")
    with record_launches((9, 0)):
        assert gpu_of(META) == Gpu((9, 0), 232_448, 132, "sm_90")
    with record_launches((0, 0)):
        assert (gpu_of(META).arch, gpu_of(META).max_warps) == ("gfx942", 16)


def test_the_interpreter_is_a_gpu_of_its_own():
    assert (gpu_of(CPU).arch, gpu_of(CPU).num_sms) == ("interpreter", 4)


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_a_real_gpu_is_asked_for_its_limits(monkeypatch, hip):
    properties = SimpleNamespace(
        gcnArchName="gfx950:sramecc+:xnack-",
        shared_memory_per_block=163_840 if hip else 49_152,
        shared_memory_per_block_optin=101_376,
    )
    found = (0, 0) if hip else (12, 1)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpu, "capability", lambda device: found)
    monkeypatch.setattr(gpu, "processors", lambda device: 48)
    want = Gpu(found, 163_840, 48, "gfx950") if hip else Gpu(found, 101_376, 48, "sm_121")
    assert gpu._gpu_of.__wrapped__(CUDA) == want


@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_architectures_have_one_name(arch):
    found = gpu_of_arch(arch)
    assert found == gpu_of_capability(found.capability)
    assert found.shared_limit == SHARED_LIMITS[arch]
    if arch in TARGETS:
        target = TARGETS[arch]
        assert (target.shared_limit, target.capability) == (found.shared_limit, found.capability)


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("num_warps", (1, 2, 32), (0, 3, 64, True, None, "4")),
        ("num_stages", (1, 3, 16), (0, 17, 2.0)),
        ("num_ctas", (1, 8), (0, 3, 16)),
        ("maxnreg", (None, 0, 128, 255), (-1, 256, "128")),
        ("enable_fp_fusion", (True, False), (None, 0, 1)),
    ],
)
def test_compiler_options_have_their_ranges(name, taken, refused):
    assert not [value for value in taken if OPTIONS[name].refusal(value)]
    assert all(OPTIONS[name].refusal(value) for value in refused)


@given(
    arch=st.sampled_from([*SHARED_LIMITS]),
    warps=st.sampled_from((None, 1, 2, 4, 8, 16, 32)),
    ctas=st.sampled_from((None, 1, 2, 8)),
    values=st.integers(0, 2**18),
)
def test_a_gpu_takes_the_warps_the_clusters_and_the_tiles_it_has(arch, warps, ctas, values):
    asked = gpu_of_arch(arch)
    options = {"num_warps": warps, "num_ctas": ctas}
    has_clusters = arch in ("sm_90", "sm_100", "sm_120")
    refusal = gpu_refusal(asked, {name: n for name, n in options.items() if n or values % 2})
    if (warps or 1) * asked.warp_size > 1024:
        assert refusal.startswith(f"num_warps is {warps}, and {arch} has {asked.max_warps} ")
    elif (ctas or 1) > 1 and not has_clusters:
        assert refusal == f"num_ctas is {ctas}, and {arch} has no clusters"
    else:
        assert refusal == ""
    per_thread = values // ((warps or 1) * asked.warp_size)
    told = tile_refusal(asked, {"num_warps": warps or 1}, values)
    assert told == (
        "" if per_thread <= 128 else f"{values} values are {per_thread} a thread, more than 128"
    )


@pytest.fixture
def tunable():
    """A choice of two paths, whose tiles hold a row."""
    made = Tunable(
        "made_up",
        DIMS,
        lambda gpu, kind, m, n: config(n, 8),
        lambda gpu, kind, m, n: [
            {"path": "wide", "BLOCK": max(n, 32), "num_warps": 4, "use_tma": gpu.arch == "sm_90"},
            *(config(max(n // 2, 1), w) for w in (4, 8)),
        ],
        fits=lambda gpu, config, kind, m, n: "" if config["BLOCK"] * 4 >= n else "a row is longer",
        parameters={
            "path": one_of("plain", "wide"),
            "BLOCK": power_of_two(1, 4096),
            "use_tma": one_of(True, False),
        },
    )
    yield made
    del TUNABLES["made_up"]


def config(block, warps):
    return {"path": "plain", "BLOCK": block, "num_warps": warps}


@pytest.fixture
def places(tmp_path, monkeypatch, tunable):
    """Empty directories of shipped tables and of a user's."""
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tables, "_told", set())
    monkeypatch.setattr(tuning, "gpu_of", lambda device: GPU if device == CUDA else gpu_of(device))
    return tables.SHIPPED, tables.user_directory()


def write(directory, *rows, arch="sm_90", **changes):
    """A table of (shape, warps), or of rows as they are."""
    entries = [
        row
        if not isinstance(row, tuple)
        else {
            "shape": dict(zip(DIMS, row[0], strict=True)),
            "config": config(64, row[1]),
            "us": 3.0,
        }
        for row in rows
    ]
    file = table_file(directory, "made_up", arch)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"op": "made_up", "arch": arch, "rows": entries} | changes))
    return file


def pick(tunable, *shape, device=CUDA):
    """The warps chosen: 8 are the heuristic's."""
    tunable.forget()
    return tunable.pick(device, *shape)["num_warps"]


@pytest.mark.parametrize(
    ("shape", "warps"),
    [
        (("Q4_K", 1, 64), 1),
        (("Q4_K", 2, 64), 1),
        (("Q4_K", 4, 64), 8),
        (("Q4_K", 9, 64), 2),
        (("Q4_K", 32, 64), 2),
        (("Q4_K", 33, 64), 8),
        (("Q4_K", 16, 80), 2),
        (("Q4_K", 16, 96), 4),
        (("Q4_K", 16, 257), 8),
        (("Q6_K", 1, 64), 16),
        (("Q5_K", 1, 64), 8),
    ],
)
def test_the_nearest_row_is_near(tunable, places, shape, warps):
    rows = [(("Q4_K", 1, 64), 1), (("Q4_K", 16, 64), 2), (("Q4_K", 16, 128), 4)]
    write(places[0], *rows, (("Q6_K", 1, 64), 16))
    assert pick(tunable, *shape) == warps


def test_how_near_is_a_choice_s_own(tunable, places):
    write(places[0], (("Q4_K", 16, 64), 2))
    tunable.ratios = [2, 4, 1]
    assert pick(tunable, "Q4_K", 4, 64) == 2
    assert pick(tunable, "Q4_K", 3, 64) == 8
    assert pick(tunable, "Q4_K", 16, 65) == 8


def test_types_of_dimensions_have_to_agree(tunable):
    assert tunable.distance(("Q4_K", 1, 64), ("Q4_K", 1, 64)) == 0
    assert tunable.distance(("Q4_K", True, 64), ("Q4_K", 1, 64)) == float("inf")


def test_a_users_row_wins_for_the_same_shape(tunable, places):
    ours, theirs = places
    write(ours, (("Q4_K", 1, 64), 1), (("Q4_K", 16, 64), 2))
    write(theirs, (("Q4_K", 1, 64), 4))
    assert pick(tunable, "Q4_K", 1, 64) == 4
    assert pick(tunable, "Q4_K", 12, 64) == 2


def test_recordings_and_the_interpreter_read_no_users_table(tunable, places):
    ours, theirs = places
    write(theirs, (("Q4_K", 1, 64), 4))
    write(ours, (("Q4_K", 1, 64), 2), arch="sm_100")
    assert pick(tunable, "Q4_K", 1, 64, device=CPU) == 8
    for capability, warps in (((9, 0), 8), ((10, 0), 2), ((0, 0), 8)):
        with record_launches(capability):
            assert pick(tunable, "Q4_K", 1, 64, device=META) == warps
            assert tunable.pick(META, "Q4_K", 1, 64)["num_warps"] == warps


def test_recordings_of_several_gpus_do_not_mix(tunable, places):
    tunable.heuristic = lambda gpu, kind, m, n: {"num_warps": gpu.capability[0]}
    for capability in ((8, 0), (9, 0), (8, 0)):
        with record_launches(capability):
            assert tunable.pick(META, "Q4_K", 16, 64) == {"num_warps": capability[0]}


def test_a_row_that_does_not_fit_the_shape_leaves_it_to_the_next(tunable, places):
    write(places[0], (("Q4_K", 1, 256), 1), (("Q4_K", 1, 250), 2))
    assert pick(tunable, "Q4_K", 1, 256) == 1
    assert pick(tunable, "Q4_K", 1, 257) == 8


def test_forced_configurations_come_before_tables(tunable, places):
    write(places[0], (("Q4_K", 1, 64), 1))
    with tunable.forced({"num_warps": 16}):
        assert tunable.pick(CUDA, "Q4_K", 1, 64) == {"num_warps": 16}
    assert tunable.pick(CUDA, "Q4_K", 1, 64)["num_warps"] == 1


def test_picks_are_recorded_with_their_rows(tunable, places):
    write(places[0], (("Q4_K", 1, 64), 1))
    tunable.pick(CUDA, "Q4_K", 1, 64)
    with record_picks() as picks:
        for _ in range(2):
            tunable.pick(CUDA, "Q4_K", 2, 64)
            tunable.pick(CUDA, "Q4_K", 9, 64)
    assert [pick.shape[1] for pick in picks] == [2, 9]
    assert [pick.row and pick.row.shape[1] for pick in picks] == [1, None]
    assert picks[0].config == config(64, 1)


def test_what_is_made_of_picks_is_forgotten_with_them(tunable, places, monkeypatch):
    monkeypatch.setattr(tuning, "_made_of_picks", [])

    @cached_picks
    def plan(m):
        return [tunable.pick(CUDA, "Q4_K", m, 64)["num_warps"]]

    assert plan(1) == [8]
    assert plan(1) is plan(1)
    with tunable.forced({"num_warps": 16}):
        assert plan(1) == [16]
    with record_picks() as picks:
        assert plan(1) == [8]
    assert [pick.shape for pick in picks] == [("Q4_K", 1, 64)]
    write(places[0], (("Q4_K", 1, 64), 2))
    tunable.forget()
    assert plan(1) == [2]


def test_candidates_serve_tritons_autotuner(tunable):
    configs = tunable.triton_configs(GPU, "Q4_K", 16, 64)
    found = [(c.kwargs["BLOCK"], c.num_warps) for c in configs]
    assert found == [(64, 4), (32, 4), (32, 8)]


def test_tables_are_read_as_written(tmp_path):
    file = table_file(tmp_path, "made_up", "sm_90")
    rows = [
        Row(("Q6_K", 1, 64), config(64, 2), 2.5, None),
        Row(("Q4_K", 16, 64), config(64, 4), 3.0, 4.0, {"commit": "abc"}),
        Row(("Q4_K", 9, 64), config(64, 4), 3.0, 4.0, {"commit": "abc"}),
    ]
    assert read_rows(file, "made_up", "sm_90", DIMS) == ([], [])
    write_rows(file, "made_up", "sm_90", DIMS, rows)
    found, reasons = read_rows(file, "made_up", "sm_90", DIMS)
    assert (found, reasons) == (list(enumerate(rows[::-1], 1)), [])
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_writing_keeps_a_link_and_the_old_table_of_a_failure(tmp_path):
    real, file = tmp_path / "real.json", tmp_path / "made_up" / "sm_90.json"
    file.parent.mkdir()
    file.symlink_to(real)
    write_rows(file, "made_up", "sm_90", DIMS, [Row(("Q4_K", 1, 64), config(64, 2), 2.5)])
    before = real.read_text()
    assert file.is_symlink()
    with pytest.raises(TypeError):
        write_rows(file, "made_up", "sm_90", DIMS, [Row(("Q4_K", 1, 64), {"x": object()}, 2.5)])
    assert real.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made_up", "real.json"]


GOOD = {"shape": {"kind": "Q4_K", "m": 1, "n": 64}, "config": config(64, 2), "us": 3.0}
WIDE = {"path": "wide", "BLOCK": 64, "num_warps": 4, "use_tma": True}


def changed(**changes):
    """A good row with other values of its configuration; None takes one away."""
    values = GOOD["config"] | changes
    return GOOD | {"config": {k: v for k, v in values.items() if v is not None}}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (7, "not an object"),
        (GOOD | {"shape": {"kind": "Q4_K", "m": 1}}, "dimensions kind, m, n"),
        (GOOD | {"shape": {"kind": "Q4_K", "m": 1, "n": 64, "k": 1}}, "dimensions"),
        (GOOD | {"shape": {"kind": "Q4_K", "m": 1.0, "n": 64}}, "m is 1.0"),
        (GOOD | {"shape": {"kind": "Q4_K", "m": -1, "n": 64}}, "m is out of range"),
        (GOOD | {"shape": {"kind": "Q4_K", "m": 10**40, "n": 64}}, "m is out of range"),
        (GOOD | {"shape": {"kind": ["Q4_K"], "m": 1, "n": 64}}, "kind is"),
        (GOOD | {"config": {}}, "no config"),
        (GOOD | {"config": None}, "no config"),
        (changed(BLOCK=[64]), "BLOCK' is"),
        (changed(BLOCK=64.0), "BLOCK' is 64.0"),
        (changed(BLOCK="64"), "BLOCK is '64', not a power of two"),
        (changed(BLOCK=True), "BLOCK is True, not a power of two"),
        (changed(BLOCK=48), "BLOCK is 48, not a power of two from 1 to 4096"),
        (changed(BLOCK=0), "BLOCK is 0"),
        (changed(BLOCK=8192), "BLOCK is 8192"),
        (changed(BLOCK=8), "a row is longer"),
        (changed(num_warps=64), "num_warps is 64, not a power of two from 1 to 32"),
        (changed(num_warps=3), "num_warps is 3"),
        (changed(num_warps=-4), "num_warps is -4"),
        (changed(num_warps=10**30), "num_warps is 1000"),
        (changed(path="gone"), "path is 'gone', which made_up has not"),
        (changed(path=None), "path is None"),
        (changed(path=1), "path is 1"),
        (changed(num_warps=None), "another version: 'num_warps'"),
        (changed(STAGES=2), "another version: 'STAGES'"),
        (changed(path="wide"), "another version: 'use_tma'"),
        (GOOD | {"config": WIDE | {"use_tma": 1}}, "use_tma is 1"),
        (GOOD | {"us": float("nan")}, "us is nan"),
        (GOOD | {"us": float("inf")}, "us is inf"),
        (GOOD | {"us": -1.0}, "us is -1.0"),
        (GOOD | {"us": True}, "us is True"),
        (GOOD | {"us": 10**400}, "us is 1000"),
        (GOOD | {"us": None}, "us is None"),
        (GOOD | {"default_us": float("nan")}, "default_us is nan"),
        (GOOD | {"measured": ["today"]}, "measured is not"),
        (GOOD | {"measured": {"commit": 7}}, "measured is not"),
        (GOOD | {"config": {"\u202e" * 200 + "\n\x1b[2J": 1}}, "path is None"),
    ],
)
def test_a_row_that_is_wrong_is_ignored(tunable, places, caplog, row, reason):
    other = GOOD | {"shape": GOOD["shape"] | {"m": 16}}
    file = write(places[1], row, other)
    assert pick(tunable, "Q4_K", 1, 64) == 8
    assert pick(tunable, "Q4_K", 16, 64) == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{file}: 1 of 2 rows ignored; the first, row 1: ")
    assert reason in line
    assert line.isprintable() and len(line) < len(str(file)) + 250


def test_good_rows_of_both_paths_are_used(tunable, places, caplog):
    write(places[1], GOOD, GOOD | {"config": WIDE, "shape": GOOD["shape"] | {"m": 16}})
    assert pick(tunable, "Q4_K", 1, 64) == 2
    assert pick(tunable, "Q4_K", 16, 64) == 4
    assert not caplog.records


def test_rows_for_shapes_an_op_has_not_are_ignored(tunable, places, caplog):
    def heuristic(gpu, kind, m, n):
        return {"Q4_K": config(n, 8)}[kind]

    tunable.heuristic = heuristic
    write(places[1], GOOD | {"shape": {"kind": "Q9", "m": 1, "n": 64}})
    assert pick(tunable, "Q4_K", 1, 64) == 8
    assert "its shape is not one of made_up's" in caplog.text


def test_undeclared_parameters_take_what_candidates_give_them(tunable, places, caplog):
    tunable.parameters = dict(OPTIONS)
    bad = [changed(BLOCK=128), changed(BLOCK=-64), changed(BLOCK=True), changed(path="gone")]
    bad += [GOOD | {"config": WIDE | {"use_tma": 1}}, changed(num_warps=64)]
    write(places[1], *bad)
    assert pick(tunable, "Q4_K", 1, 64) == 8
    assert "6 of 6 rows ignored; the first, row 1: BLOCK is 128, not one of (64, 32)" in caplog.text
    write(places[1], GOOD, GOOD | {"config": WIDE, "shape": GOOD["shape"] | {"m": 16}})
    assert pick(tunable, "Q4_K", 1, 64) == 2
    assert pick(tunable, "Q4_K", 16, 64) == 4


def replace(file, kind):
    """Put something else in a table's place."""
    file.unlink()
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "nothing":
        file.symlink_to(file.with_name("absent"))
    elif kind == "huge":
        file.write_text(" " * (tables.MAX_BYTES + 1))
    elif kind == "file for its directory":
        file.parent.rmdir()
        file.parent.write_text("")
    else:
        file.write_bytes(kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"rows": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "its op is None"),
        (b'{"op": "made_up", "arch": "sm_80", "rows": []}', "its arch is 'sm_80', not 'sm_90'"),
        (b'{"op": "rms_norm", "arch": "sm_90", "rows": []}', "its op is 'rms_norm'"),
        (b'{"op": "made_up", "arch": "sm_90", "rows": {}}', "no list of rows"),
        (b'{"op": "made_up", "arch": "sm_90"}', "no list of rows"),
        ("directory", "not a regular file"),
        ("pipe", "not a regular file"),
        ("device", "not a regular file"),
        ("loop", "cannot be opened"),
        ("nothing", "a link to nothing"),
        ("huge", "larger than 4 MiB"),
        ("file for its directory", "cannot be opened"),
    ],
)
def test_a_file_that_is_no_table_is_ignored(tunable, places, caplog, kind, reason):
    ours, theirs = places
    write(ours, (("Q4_K", 1, 64), 4))
    file = write(theirs, GOOD)
    replace(file, kind)
    for _ in range(2):
        assert pick(tunable, "Q4_K", 1, 64) == 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{file}: ignored, ")
    assert reason in line


def test_a_link_to_a_table_is_a_table(tunable, places, tmp_path):
    file = write(places[1], (("Q4_K", 1, 64), 4))
    file.rename(tmp_path / "dotfiles.json")
    file.symlink_to(tmp_path / "dotfiles.json")
    assert pick(tunable, "Q4_K", 1, 64) == 4


def test_where_a_users_tables_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", base)
        assert tables.user_directory() == tmp_path / ".config" / "ferrum_triton" / "tuned"
    monkeypatch.setattr(tables.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert tables.user_directory() is None
