"""What bench.host_cost measures; the measuring itself needs a GPU."""

from bench import host_cost
from ferrum_triton.registry import OPS


def test_every_op_is_measured_once_and_named_cases_beside():
    found = {name: (op.name, case.id) for name, op, case in host_cost.cases(list(OPS))}
    assert found.keys() == OPS.keys() | host_cost.CASES.keys()
    assert all(found[name] == (name, op.bench[0].id) for name, op in OPS.items())
    for name, size in host_cost.CASES.items():
        op, case = found[name]
        assert op == name.split("/")[0] and size in case.split("/")


def test_an_op_that_fails_costs_one_line(monkeypatch, capsys):
    def measure(op, case):
        if op.name == "gelu":
            raise RuntimeError("no room\nfor this")
        return 16.0

    monkeypatch.setattr(host_cost, "measure", measure)
    monkeypatch.setattr(host_cost, "bare_calls", lambda: [("bare_triton", None)])
    monkeypatch.setattr(host_cost, "host_us", lambda call: 8.0)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("sys.argv", ["host_cost", "rms_norm", "gelu", "silu_mul"])
    host_cost.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "host/bare_triton",
        "host/rms_norm",
        "host/gelu",
        "host/silu_mul",
    ]
    assert "2.00 x bare" in lines[1] and lines[2] == "host/gelu failed: no room"
