"""Attention from the QKV product on: the numbers of two ops, the launches of one."""

import pytest
import torch

from ferrum_triton import InputError, get_backend
from ferrum_triton.kernels.attention.decode_config import step_config
from ferrum_triton.kernels.jit import record_launches
from ferrum_triton.kernels.tuning import record_picks
from ferrum_triton.models import Llama
from ferrum_triton.models.step import Step
from ferrum_triton.models.weights import load_weights
from ferrum_triton.registry import OPS
from ferrum_triton.testing import TensorFactory, assert_close
from tests.tiny_models import PACKED, PackedSource

OP = OPS["qkv_paged_decode_attention"]
STEP, MERGE = "_paged_step_kernel", "_merge_kernel"
LENGTHS = torch.tensor([1, 0, 31, 32, 33, 129, 300], dtype=torch.int32)


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    return get_backend(request.param)


def draw(device, seed=0, dtype=torch.float32, lengths=LENGTHS, **axes):
    """Arguments of sequences of the lengths given, whose tables have room for the longest."""
    sizes = {"num_kv_heads": 2, "group_size": 3, "head_dim": 32, "block_size": 16} | axes
    make = TensorFactory(dtype, device, seed)
    batch, most = len(lengths), int(lengths.max())
    arguments = OP.make_sample(make, batch=batch, max_len=most, **sizes)
    return arguments | {"kv_lens": lengths.to(device)}


def two_ops(backend, arguments):
    """The pool and the result of a launch that writes and one that reads."""
    of = dict(arguments)
    pool = [of.pop(name).clone() for name in ("k_cache", "v_cache")]
    lens, tables, layout = of["kv_lens"], of["block_tables"], of["layout"]
    head_dim = of["q_weight"].shape[0] if of["q_weight"] is not None else 2 * of["cos"].shape[1]
    kv_heads = pool[0].shape[2 if layout == "nhd" else 1]
    q = backend.split_qkv_norm_rope_into_paged_cache(
        *(of[name] for name in ("qkv", "q_weight", "k_weight", "cos", "sin")),
        *pool,
        of["qkv"].shape[1] // head_dim - 2 * kv_heads,
        block_tables=tables,
        pos_offsets=lens - 1,
        qk_mode=of["qk_mode"],
        layout=layout,
    )
    settings = {name: of[name] for name in ("sinks", "sliding_window", "softcap", "layout")}
    y = backend.paged_decode_attention(q[:, None], *pool, tables, lens, **settings)
    return y[:, 0], *pool


@pytest.mark.parametrize("tickets", [False, True])
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"qk_mode": 3, "layout": "nhd"},
        {"qk_mode": 2, "group_size": 1, "layout": "vllm_x"},
        {"qk_mode": 0, "num_kv_heads": 1, "group_size": 7},
        {"qk_mode": 2, "head_dim": 24},  # fewer dimensions than a tile has
        {"sliding_window": 1},
        {"sliding_window": 40, "with_sinks": True},
        {"softcap": 5.0, "with_sinks": True, "head_dim": 64},
        {"dtype": torch.float16, "group_size": 4, "head_dim": 128},
        {"group_size": 70, "head_dim": 16, "num_kv_heads": 1},  # two blocks of rows
    ],
    ids=str,
)
def test_it_is_what_two_ops_do(backend, axes, tickets):
    """Lengths at the edges of tiles and parts, one without keys, and sequences that are cut."""
    arguments = draw(backend.device, 3, with_tickets=tickets, **axes)
    want, *pool = two_ops(backend, arguments)
    got = backend.qkv_paged_decode_attention(**arguments)
    assert_close(got, want, scale=4 if got.dtype == torch.float16 else 1)
    for name, cache in zip(("k_cache", "v_cache"), pool, strict=True):
        assert_close(arguments[name], cache, name=name)
    assert not got[1].any()
    if tickets:
        assert not arguments["tickets"].any()


def test_parts_that_differ_are_merged_by_their_weight(backend):
    """One long sequence among short ones, whose parts have all but one no say."""
    lengths = torch.tensor([300, 300], dtype=torch.int32)
    arguments = draw(backend.device, 5, lengths=lengths, with_tickets=True, qk_mode=0)
    arguments["k_cache"] *= 8
    want, *_ = two_ops(backend, arguments)
    assert_close(backend.qkv_paged_decode_attention(**arguments), want, scale=4)


def test_a_position_without_a_place_is_not_written(backend):
    """Past the table, in a block that is none, and padding."""
    lengths = torch.tensor([65, 40, 0, 33], dtype=torch.int32)
    arguments = draw(backend.device, 7, lengths=lengths)
    arguments["block_tables"] = arguments["block_tables"][:, :4].contiguous()
    arguments["block_tables"][1, 2] = 10**6
    before = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    want, *_ = two_ops(backend, arguments)
    got = backend.qkv_paged_decode_attention(**arguments)
    block = int(arguments["block_tables"][3, 2])
    for name, old in zip(("k_cache", "v_cache"), before, strict=True):
        changed = (arguments[name] != old).flatten(2).any(dim=2).nonzero()
        assert {int(where[0]) for where in changed} == {block}
    assert_close(got, want)


def test_a_position_past_the_rotary_tables_is_not_rotated(backend):
    arguments = draw(backend.device, 9, lengths=torch.tensor([40, 12], dtype=torch.int32))
    for name in ("cos", "sin"):
        arguments[name] = arguments[name][:20].contiguous()
    want, *_ = two_ops(backend, arguments)
    assert_close(backend.qkv_paged_decode_attention(**arguments), want)


def test_tables_without_columns_rotate_nothing(backend):
    arguments = draw(backend.device, 13, lengths=torch.tensor([9, 40], dtype=torch.int32))
    arguments |= {name: arguments[name][:, :0].contiguous() for name in ("cos", "sin")}
    want, *_ = two_ops(backend, arguments)
    assert_close(backend.qkv_paged_decode_attention(**arguments), want)


def launches(batch, context, capability=(9, 0), **axes):
    sizes = {"num_kv_heads": 8, "group_size": 4, "head_dim": 128, "max_len": context}
    make = TensorFactory(torch.bfloat16, "meta")
    arguments = OP.make_sample(make, batch=batch, **sizes, **axes)
    with record_launches(capability) as recorded:
        OP.impls["triton"](**arguments)
    return [launch.kernel.name for launch in recorded]


@pytest.mark.parametrize(
    ("batch", "context", "tickets", "capability", "names"),
    [
        (1, 1024, True, (9, 0), [STEP, MERGE]),  # so little is merged sooner by many programs
        (8, 1024, True, (9, 0), [STEP]),
        (8, 1024, True, (8, 0), [STEP]),
        (8, 1024, True, (0, 0), [STEP, MERGE]),  # an AMD GPU
        (8, 1024, False, (9, 0), [STEP, MERGE]),
        (32, 128, True, (9, 0), [STEP]),
    ],
)
def test_launches(batch, context, tickets, capability, names):
    assert launches(batch, context, capability, with_tickets=tickets) == names


def test_either_merge_is_a_choice(backend):
    arguments = draw(backend.device, 11, with_tickets=True)
    want, *_ = two_ops(backend, arguments)
    (shape,) = shapes_of(backend, arguments)
    for merges in (0, 1):
        config = dict(step_config.pick(backend.device, *shape)) | {"MERGES": merges}
        with step_config.forced(config):
            assert_close(backend.qkv_paged_decode_attention(**arguments), want)


def shapes_of(backend, arguments):
    with record_picks() as picks:
        OP.impls["triton"](**arguments)
    return {pick.shape for pick in picks if pick.tunable is step_config}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tickets": torch.zeros(3, dtype=torch.int32)}, "tickets is of 3 elements"),
        ({"qkv": torch.zeros(7, 4 * 32)}, "more than 2 * 2 heads of 32"),
        ({"qkv": torch.zeros(7, 7 * 32)}, "multiple of the 2 KV heads"),
        ({"k_cache": torch.int8}, "the dtype of qkv"),
        ({"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = draw("cpu")
    if change.get("k_cache") is torch.int8:
        change = {n: arguments[n].to(torch.int8) for n in ("k_cache", "v_cache")}
    with pytest.raises(InputError) as caught:
        get_backend("interpret").qkv_paged_decode_attention(**arguments | change)
    assert message in str(caught.value)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths():
    """Tickets are zeros again after each replay, however the programs came in."""
    backend = get_backend("cuda")
    lengths = torch.full((8,), 1000, dtype=torch.int32)
    axes = {"group_size": 4, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    arguments = draw("cuda", 1, lengths=lengths, with_tickets=True, **axes)
    backend.qkv_paged_decode_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            got = backend.qkv_paged_decode_attention(**arguments)
    for seed in range(50):
        drawn = torch.randint(1, 1001, (8,), generator=torch.Generator().manual_seed(seed))
        arguments["kv_lens"].copy_(drawn)
        graph.replay()
        want, *_ = two_ops(backend, arguments)
        assert_close(got, want, scale=4)
        assert not arguments["tickets"].any()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_models_take_it_where_no_sequence_has_two_tokens(monkeypatch, batch_invariant):
    """Three tokens of one sequence, each a sequence of its own: what one writes others see."""
    backend, calls = get_backend("interpret"), []
    weights = load_weights(PackedSource(), PACKED, backend, torch.float32)
    model = Llama(PACKED, weights, backend, torch.float32)
    cache, ids = model.new_cache(8, num_seqs=3), torch.tensor([3, 1, 4], dtype=torch.int32)
    want = model.forward(ids, model.new_cache(8), all_logits=True)
    cache.reserve({0: 3})
    tables = cache.block_tables[:1].expand(3, -1).contiguous()
    positions = torch.arange(3, dtype=torch.int32)
    ours = backend.qkv_paged_decode_attention

    def counted(*args, **kwargs):
        calls.append(kwargs["tickets"])
        return ours(*args, **kwargs)

    monkeypatch.setattr(backend, "qkv_paged_decode_attention", counted, raising=False)
    step = Step(ids, tables, positions, positions + 1, batch_invariant=batch_invariant)
    got = model.run(step, cache)
    assert len(calls) == (0 if batch_invariant else PACKED.num_layers)
    assert all(tickets is cache.tickets for tickets in calls)
    if batch_invariant:
        assert_close(got, want, scale=8)
