"""Captured steps: replays follow the device state, and nothing stale is ever replayed."""

import functools
import gc
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrum_triton import FerrumError, InputError, get_backend
from ferrum_triton.ops.rope import ROPE
from ferrum_triton.runtime import buffers
from ferrum_triton.runtime.context import Context
from ferrum_triton.runtime.graph import HISTORY, DecodeState, Graph
from ferrum_triton.runtime.kv_cache import KvCache, PagedKvCache
from ferrum_triton.types import KvDtypeKind

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB, HIDDEN = 4, 2, 16, 50, 32


class Decoder:
    """One attention layer over a cache: the part of a decode step that its state changes."""

    def __init__(self, device, capacity=32, seed=0):
        self.backend = get_backend(device)
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return torch.randn(shape, generator=generator).half().to(device)

        self.table = weight(VOCAB, HIDDEN)
        self.qkv = weight((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN) * HIDDEN**-0.5
        angle = torch.arange(64.0)[:, None] / 100 ** (torch.arange(8.0) / 8)
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)
        self.cache = KvCache(
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            capacity=capacity,
            kind=KvDtypeKind.FP16,
            device=device,
        )
        for tensor in self.cache.tensors:
            tensor.zero_()

    def step(self, token, pos, kv_len):
        """[num_heads, head_dim]: all of its arguments lie on the device."""
        x = self.backend.embedding_lookup_dev(self.table, token)
        q = self.backend.split_qkv_norm_rope_into_cache(
            self.backend.gemm(x, self.qkv),
            None,
            None,
            self.cos,
            self.sin,
            self.cache.k[0],
            self.cache.v[0],
            num_heads=NUM_HEADS,
            positions=pos,
            slots=pos,
            qk_mode=ROPE,
        )
        k, v = self.cache.k[0], self.cache.v[0]
        return self.backend.flash_attention(q[None], k[None], v[None], kv_lens=kv_len)

    def graph_step(self, graph):
        return lambda: self.step(graph.state.token, graph.state.pos, graph.state.kv_len)


def run_eagerly(device, tokens):
    decoder, state = Decoder(device), DecodeState(device)
    outputs = []
    for step, token in enumerate(tokens):
        state.set(token, step)
        outputs.append(decoder.step(state.token, state.pos, state.kv_len))
    return outputs


@pytest.mark.parametrize("device", DEVICES)
def test_decode_state(device):
    state = DecodeState(device, batch=3)
    state.set([7, 8, 9], 5)
    assert [t.tolist() for t in (state.token, state.pos, state.kv_len)] == [
        [7, 8, 9],
        [5] * 3,
        [6] * 3,
    ]
    addresses = [t.data_ptr() for t in (state.token, state.pos, state.kv_len)]
    state.set(1, [0, 3, 2])
    assert [t.tolist() for t in (state.token, state.pos, state.kv_len)] == [
        [1] * 3,
        [0, 3, 2],
        [1, 4, 3],
    ]
    assert addresses == [t.data_ptr() for t in (state.token, state.pos, state.kv_len)]
    assert all(t.dtype == torch.int32 for t in (state.token, state.pos, state.kv_len))
    for token, step in ((-1, 0), (0, -2), (0, 2**31 - 1), ([1, 2], 0), (0, [1] * 4)):
        with pytest.raises(InputError):
            state.set(token, step)
        assert state.pos.tolist() == [0, 3, 2]


def read(state):
    return [t.tolist() for t in (state.token, state.pos, state.kv_len)]


@pytest.mark.parametrize("device", DEVICES)
@given(
    steps=st.lists(st.integers(-1, 9), min_size=1, max_size=5),
    chosen=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=4),
)
def test_advancing_is_setting_the_next_step(device, steps, chosen):
    """Of the first rows only, and padding stays padding."""
    batch = len(steps)
    state, want = (DecodeState(device, batch) for _ in range(2))
    tokens = [1] * batch
    state.set(tokens, steps)
    for new in chosen:
        new = new[:batch]
        state.advance(torch.tensor(new, dtype=torch.int32, device=device))
        tokens[: len(new)] = new
        steps = [s + (i < len(new) and s >= 0) for i, s in enumerate(steps)]
        want.set(tokens, steps)
        assert read(state) == read(want)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_stay_in_the_history_for_its_steps(device):
    """Each row's by its own position; of padding nothing is noted."""
    state = DecodeState(device, 3)
    state.history.fill_(-7)
    starts, chosen = [4, -1, 7], [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    state.set(0, starts)
    for step, tokens in enumerate(chosen):
        state.advance(torch.tensor(tokens, dtype=torch.int32, device=device))
        if device == "cuda":
            torch.cuda.synchronize()
        for back in range(min(HISTORY, step + 1)):
            for row in (0, 2):
                place = (starts[row] + step - back) % HISTORY
                assert state.history[place, row] == chosen[step - back][row]
        assert (state.history[:, 1] == -7).all()


@pytest.mark.gpu
def test_a_history_in_the_hosts_memory_is_pinned():
    backend = get_backend("cuda")
    zeros = functools.partial(torch.zeros, dtype=torch.int32)
    state, chosen = zeros(3, 4, device="cuda"), torch.arange(4, dtype=torch.int32).cuda()
    history = zeros(2, 4, pin_memory=True)
    for step in range(4):  # checked, rehearsed and replayed
        backend.advance_rows(state, chosen, history)
        torch.cuda.synchronize()
        assert history[step % 2].tolist() == [0, 1, 2, 3]
        with pytest.raises(InputError, match="history is on cpu"):
            backend.advance_rows(state, chosen, zeros(2, 4))
        history.zero_()
    assert state[1].tolist() == [4] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_steps_that_advance_need_no_host(device):
    """A chain of replays chooses what steps do whose state the host sets."""
    told, own, graph = Decoder(device), Decoder(device), Graph(device)

    def choose(decoder, state):
        y = decoder.step(state.token, state.pos, state.kv_len).reshape(1, -1)
        return decoder.backend.argmax_rows(y[:, :VOCAB])

    want, state = [3], DecodeState(device)
    for step in range(12):
        state.set(want[-1], step)
        want.append(int(choose(told, state)))

    def advancing():
        chosen = choose(own, graph.state)
        graph.state.advance(chosen)
        return chosen

    graph.set_decode_state(want[0], 0)
    graph.capture("decode", advancing, owners=own.cache.tensors)
    got = [graph.state.token.clone()]
    for _ in range(11):
        assert graph.replay("decode")
        got.append(graph.state.token.clone())
    assert torch.cat(got).tolist() == want[1:] and len(set(want)) > 3
    assert [graph.state.pos.tolist(), graph.state.kv_len.tolist()] == [[12], [13]]


@pytest.mark.parametrize("name", ["cpu", "interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_padding_rows_write_nothing_and_see_nothing(name):
    """Rows in a captured step are what they are without the padding between them."""
    backend = get_backend(name)
    device, rows = backend.device, 4
    sizes = {"num_layers": 1, "num_blocks": 6, "block_size": 4, "max_blocks_per_seq": 2}
    cache = PagedKvCache(
        **sizes, num_seqs=rows, num_kv_heads=2, head_dim=16, kind=KvDtypeKind.FP32, device=device
    )
    for tensor in (*cache.k, *cache.v):
        tensor.normal_()
    cache.reserve(dict.fromkeys(range(3), 8))  # the last row has no blocks
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv = torch.randn(rows, width, device=device)
    angle = torch.rand(8, 8, device=device)
    graph = Graph(device, rows)

    def attend(x, tables, positions, kv_lens, k, v):
        q = backend.split_qkv_norm_rope_into_paged_cache(
            x,
            None,
            None,
            angle.cos(),
            angle.sin(),
            k,
            v,
            num_heads=NUM_HEADS,
            block_tables=tables,
            pos_offsets=positions,
            qk_mode=ROPE,
        )
        return backend.paged_decode_attention(q[:, None], k, v, tables, kv_lens)

    def step():
        state, pools = graph.state, (cache.k[0], cache.v[0])
        y = attend(qkv, cache.block_tables, state.pos, state.kv_len, *pools)
        state.advance(state.token + 1)
        return y

    graph.set_decode_state(0, -1)
    before = [t.clone() for t in (*cache.k, *cache.v)]
    output = graph.capture("decode", step, owners=cache.tensors)
    assert not output.any()
    assert all(map(torch.equal, before, (*cache.k, *cache.v)))
    for steps in ([5, -1, 2, -1], [-1, 0, -1, -1], [3, 1, 6, -1]):
        graph.set_decode_state(0, steps)
        pools = [cache.k[0].clone(), cache.v[0].clone()]
        assert graph.replay("decode")
        found = [row for row, at in enumerate(steps) if at >= 0]
        where = torch.tensor([steps[row] for row in found], dtype=torch.int32, device=device)
        want = attend(qkv[found], cache.block_tables[found], where, where + 1, *pools)
        torch.testing.assert_close(output[found], want)
        assert not output[[row for row, at in enumerate(steps) if at < 0]].any()
        # The pools hold what the real rows alone write, and else what they held.
        torch.testing.assert_close([cache.k[0], cache.v[0]], pools)
        assert graph.state.pos.tolist() == [at + (at >= 0) for at in steps]


@pytest.mark.parametrize("device", DEVICES)
def test_replays_follow_token_position_and_length(device):
    tokens = [3, 41, 7, 7, 0, 19, 49, 2]
    want = run_eagerly(device, tokens)
    decoder, graph = Decoder(device), Graph(device)

    graph.set_decode_state(tokens[0], 0)
    output = graph.capture("decode", decoder.graph_step(graph), owners=decoder.cache.tensors)
    assert torch.equal(output, want[0])
    for step in range(1, len(tokens)):
        graph.set_decode_state(tokens[step], step)
        assert graph.replay("decode") is True
        assert torch.equal(output, want[step])
        assert not torch.equal(output, want[step - 1])
    assert graph.outputs("decode") is output


@pytest.mark.parametrize("device", DEVICES)
def test_keys_are_captured_apart(device):
    graph = Graph(device)
    a, b = torch.zeros(4, device=device), torch.zeros(4, device=device)
    double = graph.capture(("double", 1), lambda: a * 2)
    graph.capture("count", lambda: b.add_(1))
    assert ("double", 1) in graph and len(graph) == 2
    a.fill_(3.0)
    assert graph.replay("count") and graph.replay("count") and graph.replay(("double", 1))
    assert double.tolist() == [6.0] * 4
    assert b.tolist() == [3.0] * 4
    assert graph.replay("other") is False

    graph.reset("count")
    graph.reset("count")
    assert graph.replay("count") is False and graph.outputs("count") is None
    assert graph.replay(("double", 1)) is True
    triple = graph.capture(("double", 1), lambda: (a * 3, a + 1))
    a.fill_(5.0)
    graph.replay(("double", 1))
    assert [t.tolist() for t in triple] == [[15.0] * 4, [6.0] * 4]
    assert double.tolist() == [6.0] * 4
    graph.reset_all()
    assert len(graph) == 0 and graph.replay(("double", 1)) is False


@pytest.mark.parametrize("device", DEVICES)
def test_the_step_reads_device_state_in_a_capture(device):
    graph = Graph(device)
    seen = []
    graph.capture("step", lambda: seen.append(graph.device_state_mode))
    assert set(seen) == {True} and graph.device_state_mode is False
    graph.replay("step")
    assert set(seen) == {True} and graph.device_state_mode is False
    with pytest.raises(KeyError):
        graph.capture("bad", lambda: {}["missing"])
    assert graph.device_state_mode is False and "bad" not in graph


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("end", ["free", "grow", "collect"])
def test_captures_end_with_the_cache_they_use(device, end):
    decoder, graph = Decoder(device, capacity=4), Graph(device)
    graph.set_decode_state(3, 0)
    if end == "collect" and device == "cpu":
        step = None  # a run again needs the step, which would keep the cache alive
    else:
        step = decoder.graph_step(graph)
    graph.capture("decode", step or (lambda: None), owners=decoder.cache.tensors)
    graph.capture("unowned", lambda: None)
    decoder.cache.ensure_contig_capacity(4)
    assert graph.replay("decode") is True
    if end == "free":
        decoder.cache.free()
    elif end == "grow":
        decoder.cache.ensure_contig_capacity(5)
    else:
        del decoder, step
        gc.collect()
    assert graph.replay("decode") is False
    assert graph.replay("unowned") is True


def test_paged_captures_outlive_sequences():
    sizes = {"num_layers": 1, "num_blocks": 4, "block_size": 4, "num_seqs": 2}
    cache = PagedKvCache(**sizes, max_blocks_per_seq=2, num_kv_heads=1, head_dim=8)
    graph = Graph()
    graph.capture("decode", lambda: cache.kv_lens * 2, owners=cache.tensors)
    cache.reserve({0: 8, 1: 3})
    cache.set_lens({0: 8, 1: 3})
    assert graph.replay("decode") and graph.outputs("decode").tolist() == [16, 6]
    cache.free(0)
    assert graph.replay("decode") and graph.outputs("decode").tolist() == [0, 6]


def test_a_new_capture_does_not_end_with_the_old_ones_cache():
    graph = Graph()
    old, new = (KvCache(num_kv_heads=1, head_dim=8, capacity=4) for _ in range(2))
    graph.capture("decode", lambda: None, owners=old.tensors)
    graph.capture("decode", lambda: None, owners=new.tensors)
    old.free()
    assert graph.replay("decode") is True
    new.free()
    assert graph.replay("decode") is False


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_host_does_is_refused(device):
    graph = Graph(device)
    x = torch.randn(8, device=device)
    for step in (
        lambda: buffers.from_slice([1.0], torch.float32, device),
        lambda: buffers.write_typed(x, [1.0]),
        lambda: buffers.to_vec(x),
        lambda: Context(device).sync(),
        lambda: graph.set_decode_state(1, 2),
    ):
        with pytest.raises(FerrumError, match="cannot be captured in a graph"):
            graph.capture("step", step)
        assert len(graph) == 0 and not graph.capture_in_flight
    doubled = graph.capture("step", lambda: x * 2)
    graph.replay("step")
    assert torch.equal(doubled, x * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_captures_do_not_nest(device):
    graph, other = Graph(device), Graph(device)
    other.capture("inner", lambda: None)
    for step in (
        lambda: other.replay("inner") and None,
        lambda: other.capture("again", lambda: None),
    ):
        with pytest.raises(FerrumError, match="do not nest"):
            graph.capture("outer", step)
        assert "outer" not in graph


@pytest.mark.gpu
def test_ops_that_take_host_ids_are_refused():
    backend, graph = get_backend("cuda"), Graph("cuda")
    table = torch.randn(10, 16, device="cuda")
    with pytest.raises(FerrumError, match="embedding_lookup_dev"):
        graph.capture("step", lambda: backend.embedding_lookup(table, [1, 2]))
    with pytest.raises(FerrumError, match="wait for the device"):
        graph.capture("step", lambda: table.sum().item() and None)
    rows = graph.capture("step", lambda: backend.embedding_lookup_dev(table, graph.state.token))
    graph.set_decode_state(7, 0)
    graph.replay("step")
    assert torch.equal(rows[0], table[7])


@pytest.mark.gpu
def test_a_failed_capture_leaves_the_stream_and_the_allocator_usable():
    graph = Graph("cuda")
    x = torch.randn(1 << 20, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(FerrumError):
        graph.capture("step", lambda: (x * 2).cpu())
    assert torch.cuda.current_stream() == before
    torch.cuda.synchronize()
    total = graph.capture("step", lambda: x.double().sum())
    x.fill_(0.5)
    graph.replay("step")
    assert total.item() == 0.5 * (1 << 20)


@pytest.mark.gpu
def test_replaying_costs_far_less_than_launching():
    """A chain of 100 ops on one row, whose kernels take about two microseconds each."""
    backend, graph = get_backend("cuda"), Graph("cuda")
    x, weight = torch.randn(1, 1024, device="cuda"), torch.ones(1024, device="cuda")

    def chain():
        y = x
        for _ in range(100):
            y = backend.rms_norm(y, weight)
        return y

    graph.capture("chain", chain)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay("chain")
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    assert min(times) < 100 * 2.5e-6  # of those in which no other process took the processor
