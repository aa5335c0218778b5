"""Collectives: the identity alone, and two processes over gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ferrum_triton import InputError
from ferrum_triton.runtime.collective import Collective
from ferrum_triton.types import ReduceOp

WORLD = 2
FOLDS = {ReduceOp.SUM: torch.add, ReduceOp.MAX: torch.maximum, ReduceOp.MIN: torch.minimum}


def values(rank, dtype):
    generator = torch.Generator().manual_seed(17 + rank)
    return (torch.randn(3, 5, generator=generator) * 10).to(dtype)


def check_rank(rank, backend, rendezvous):
    """Everything one of the ranks does and sees."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", world_size=WORLD, rank=rank
    )
    collective = Collective()
    assert (collective.world_size, collective.rank) == (WORLD, rank)

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32):
        each = [values(r, dtype).to(device) for r in range(WORLD)]
        for op, fold in FOLDS.items():
            x = each[rank].clone()
            assert collective.all_reduce(x, op) is None
            assert torch.equal(x, fold(*each)), (dtype, op)
        local = each[rank].clone()
        assert torch.equal(collective.all_gather(local), torch.cat(each))
        out = torch.empty(2 * 3, 5, dtype=dtype, device=device)
        assert collective.all_gather(local, out=out) is out
        assert torch.equal(out, torch.cat(each)) and torch.equal(local, each[rank])
        assert torch.equal(
            collective.all_to_all(torch.cat(each)), torch.cat([each[rank], each[rank]])
        )
        # Row by row: of rank r's three rows the first r + 1 go to rank 0, the others to rank 1.
        send, receive = ([rank + 1, 2 - rank], [(1, 2), (2, 1)][rank])
        parts = [each[0][:1], each[1][:2]] if rank == 0 else [each[0][1:], each[1][2:]]
        assert torch.equal(collective.all_to_all(local, send, receive), torch.cat(parts))
        none = collective.all_to_all(local, [3 * (1 - rank), 3 * rank], [3 * (1 - rank), 3 * rank])
        assert torch.equal(none, local)  # nothing for the other
        for src in range(WORLD):
            x = each[rank].clone()
            collective.broadcast(x, src)
            assert torch.equal(x, each[src])
    default = values(rank, torch.float32).to(device)
    collective.all_reduce(default)
    assert torch.equal(default, sum(values(r, torch.float32).to(device) for r in range(WORLD)))

    # Ranks of a group count within it; who does not belong to it has none.
    last = dist.new_group([1])
    if rank == 1:
        alone = Collective(last)
        assert (alone.world_size, alone.rank) == (1, 0)
        x = default.clone()
        alone.broadcast(x, 0)
        alone.all_reduce(x)
        assert torch.equal(x, default)
    else:
        with pytest.raises(InputError, match="belongs to"):
            Collective(last)
    with pytest.raises(InputError, match="src is 2"):
        collective.broadcast(default, 2)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    mp.spawn(check_rank, ("gloo", tmp_path / "rendezvous"), nprocs=WORLD)


@pytest.mark.gpu
def test_two_gpus(tmp_path):
    if torch.cuda.device_count() < WORLD:
        pytest.skip("needs two GPUs")
    mp.spawn(check_rank, ("nccl", tmp_path / "rendezvous"), nprocs=WORLD)


@pytest.mark.parametrize("op", ReduceOp)
def test_a_single_rank_is_the_identity(op):
    collective = Collective()
    assert (collective.world_size, collective.rank) == (1, 0)
    want = torch.randn(4, 3)
    x = want.clone()
    collective.all_reduce(x, op)
    collective.broadcast(x, 0)
    gathered = collective.all_gather(x)
    assert torch.equal(collective.all_to_all(x, [4], [4]), want)
    assert torch.equal(collective.all_to_all(x), want)
    out = torch.full_like(x, 9.0)
    collective.all_gather(x, out=out)
    assert torch.equal(x, want) and torch.equal(gathered, want) and torch.equal(out, want)
    gathered.zero_()
    assert torch.equal(x, want)


def test_what_collectives_refuse():
    collective, x = Collective(), torch.randn(4, 3)
    for call in (
        lambda: collective.all_reduce(x.t()),
        lambda: collective.all_reduce(x, "product"),
        lambda: collective.broadcast(x, 1),
        lambda: collective.broadcast(x, -1),
        lambda: collective.broadcast(x.t(), 0),
        lambda: collective.all_to_all(x.t()),
        lambda: collective.all_to_all(x[0, 0]),
        lambda: collective.all_to_all(x, [4]),
        lambda: collective.all_to_all(x, None, [4]),
        lambda: collective.all_to_all(x, [3], [3]),
        lambda: collective.all_to_all(x, [4], [3]),
        lambda: collective.all_to_all(x, [4, 0], [4, 0]),
        lambda: collective.all_to_all(x, [-4], [-4]),
        lambda: collective.all_to_all(x, [], []),
        lambda: collective.all_gather(x.t()),
        lambda: collective.all_gather(x[0, 0]),
        lambda: collective.all_gather(x, out=torch.empty(4, 4)),
        lambda: collective.all_gather(x, out=torch.empty(4, 3, dtype=torch.float64)),
        lambda: collective.all_gather(x, out=torch.empty(3, 4).t()),
    ):
        with pytest.raises(InputError):
            call()
