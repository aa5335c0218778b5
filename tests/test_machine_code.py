"""Machine code that ptxas got wrong is refused, once for each kernel that is compiled."""

from types import SimpleNamespace

import pytest
import torch

from ferrum_triton import OPS, FerrumError, get_backend
from ferrum_triton.kernels import machine_code
from ferrum_triton.kernels.linear_attention import prefill
from ferrum_triton.kernels.sass import parse
from tests.harness import sample
from tests.test_overwritten_operands import listing

RIGHT = ("UMOV UR4, 0x400", "LDS R2, [UR4]")
WRONG = ("LDS R2, [UR4]", "UMOV UR4, 0x400")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What makes a kernel of some machine code, which is noted when it is read."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code, "READS", True)
    read = []

    def instructions(cubin):
        read.append(cubin)
        return parse(listing(*cubin))

    monkeypatch.setattr(machine_code, "instructions", instructions)

    def make(code, ptx="wgmma.mma_async", name="00"):
        return SimpleNamespace(asm={"ptx": ptx, "cubin": code}, hash=name)

    make.read = read
    return make


def test_wrong_code_is_refused_every_time(compiled):
    for _ in range(2):
        with pytest.raises(FerrumError, match=r"_kernel: ptxas .* LDS R2, \[UR4\]"):
            machine_code.refuse_wrong_code(compiled(WRONG), "_kernel")


def test_right_code_is_read_once(compiled):
    for name in ("01", "01", "02"):
        machine_code.refuse_wrong_code(compiled(RIGHT, name=name), "_kernel")
    assert len(compiled.read) == 2


def test_without_a_disassembler_or_a_place_to_write_to(compiled, monkeypatch, tmp_path):
    def put(content, name):
        (tmp_path / "missing" / name).write_bytes(content)

    cache = SimpleNamespace(get_file=lambda name: None, put=put)
    monkeypatch.setattr(machine_code, "get_cache_manager", lambda key: cache)
    for _ in range(2):
        machine_code.refuse_wrong_code(compiled(RIGHT), "_kernel")
    assert len(compiled.read) == 2
    with pytest.raises(FerrumError):
        machine_code.refuse_wrong_code(compiled(WRONG), "_kernel")

    def missing(cubin):
        raise FileNotFoundError("cuobjdump")

    monkeypatch.setattr(machine_code, "instructions", missing)
    machine_code.refuse_wrong_code(compiled(WRONG), "_kernel")


def test_what_is_not_read(compiled, monkeypatch):
    """Kernels without such products, of AMD's GPUs, and those of other Tritons."""
    machine_code.refuse_wrong_code(compiled(WRONG, ptx="mma.sync"), "_kernel")
    machine_code.refuse_wrong_code(SimpleNamespace(asm={"hsaco": WRONG}, hash="03"), "_kernel")
    monkeypatch.setattr(machine_code, "READS", False)
    machine_code.refuse_wrong_code(compiled(WRONG), "_kernel")
    assert not compiled.read


@pytest.mark.gpu
def test_code_that_ptxas_gets_wrong(monkeypatch):
    """By chunks, heads of 24 whose values are one: what only whole units keep from it."""
    if torch.cuda.get_device_capability()[0] != 9 or not machine_code.READS:
        pytest.skip("needs a GPU of Hopper's kind, and the Triton whose ptxas has the fault")
    monkeypatch.setattr(prefill, "in_units", lambda q, k: True)
    axes = {"num_k_heads": 1, "group_size": 1, "head_k_dim": 24, "head_v_dim": 1}
    axes |= {"state_dtype": torch.float32, "query_scale": None, "tiled_values": False}
    axes |= {"hostile": False, "with_states": False, "with_offsets": False, "seq_lens": (2, 70)}
    backend = get_backend("cuda")
    call = sample(OPS["gdn_prefill"], torch.float16, "cuda", 0, **axes)
    for _ in range(2):
        with pytest.raises(FerrumError, match="_gdn_scan_kernel: ptxas"):
            backend.gdn_prefill(**call)
