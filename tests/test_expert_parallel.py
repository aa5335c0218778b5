"""Experts over ranks: two processes over gloo or NCCL compute what one with all experts does."""

import contextlib
import datetime
import faulthandler
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ferrum_triton import FerrumError, InputError, get_backend
from ferrum_triton.models import load_model
from ferrum_triton.models.experts import DenseExperts, Experts, Fp8Experts, PackedExperts, mixture
from ferrum_triton.models.gpt_oss import DenseBiasedExperts, PackedBiasedExperts
from ferrum_triton.quant import FORMATS, Fp8Blocks, QuantizedTensor, quantize_blocks
from ferrum_triton.runtime.collective import Collective
from ferrum_triton.runtime.expert_parallel import ExpertParallel
from ferrum_triton.runtime.graph import Graph
from ferrum_triton.testing import assert_close
from tests.tiny_models import write_gguf

WORLD = 2
LONGEST = 240  # seconds of a rank, most of which go into compiling
NUM_EXPERTS, TOP_K, HIDDEN, INNER = 6, 3, 64, 32
SHAPES = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
SHARES = [(3, 3), (1, 5), (0, 6), (6, 0)]


def ranges(counts):
    first = range(counts[0])
    return first, range(counts[0], sum(counts))


def check_rank(rank, library, rendezvous, check):
    """What one of the ranks does and sees; one that hangs ends, and says where."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    torch.set_num_threads(1)  # ranks share the processors
    if library == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        library,
        init_method=f"file://{rendezvous}",
        world_size=WORLD,
        rank=rank,
        timeout=datetime.timedelta(seconds=600),  # a rank that waits in vain fails
    )
    backend, collective = get_backend("cuda" if library == "nccl" else "cpu"), Collective()
    with torch.inference_mode():
        check(backend, collective)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def check_all(backend, collective):
    for check in (check_routings, check_formats, check_graph, check_errors):
        check(backend, collective)


def layers(backend, generator):
    """Experts of each format, the same on every rank."""

    def drawn(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator).to(backend.device) * scale

    router, stacks = drawn(NUM_EXPERTS, HIDDEN), [drawn(NUM_EXPERTS, *s) / 6 for s in SHAPES]
    common = {"router": router, "top_k": TOP_K}
    biases = {"router_bias": drawn(NUM_EXPERTS), "down_bias": drawn(NUM_EXPERTS, HIDDEN)}
    biases |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    gate_bias, up_bias = drawn(NUM_EXPERTS, INNER), drawn(NUM_EXPERTS, INNER)
    names = ("gate", "up", "down")

    def packed(kind):
        blocks = [quantize_blocks(stack.cpu(), FORMATS[kind]) for stack in stacks]
        parts = [QuantizedTensor(b, kind).to(backend.device) for b in blocks]
        if backend.name == "cuda":
            parts = [part.in_planes() for part in parts]
        return dict(zip(names, parts, strict=True))

    codes = [stack.to(torch.float8_e4m3fn) for stack in stacks]
    scales = [drawn(NUM_EXPERTS, 1, 1).abs() for _ in stacks]
    fp8 = {n: Fp8Blocks(*part) for n, *part in zip(names, codes, scales, strict=True)}
    dense = {"gate_up": torch.cat(stacks[:2], 1), "down": stacks[2]}
    both = {"gate_bias": gate_bias, "up_bias": up_bias}
    yield torch.float32, DenseExperts(**common, **dense)
    common["router"], dense = router.bfloat16(), {n: w.bfloat16() for n, w in dense.items()}
    gate_up_bias = torch.cat((gate_bias, up_bias), 1)
    yield torch.bfloat16, DenseBiasedExperts(**common, **biases, **dense, gate_up_bias=gate_up_bias)
    yield torch.bfloat16, PackedBiasedExperts(**common, **biases, **packed("MXFP4"), **both)
    yield torch.bfloat16, PackedExperts(**common, **packed("Q8_0"))
    yield torch.bfloat16, Fp8Experts(**common, **fp8)


def routings(rank, dtype, device):
    """(tokens of this rank, the experts of each): an id may be none's."""
    generator = torch.Generator().manual_seed(29 + rank)

    def tokens(count):
        return torch.randn(count, HIDDEN, generator=generator).to(device, dtype)

    def ids(count, low=-2, high=NUM_EXPERTS + 2):
        shape = (count, TOP_K)
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(device)

    for count in ((9, 4)[rank], (0, 5)[rank], (1, 0)[rank], 0, 1):
        yield tokens(count), ids(count)
    scores = torch.rand(40, NUM_EXPERTS, generator=generator)
    yield tokens(40), scores.topk(TOP_K).indices.to(device, torch.int32)
    for one in (0, NUM_EXPERTS - 1, NUM_EXPERTS, -1, 2**31 - 1, -(2**31)):
        yield tokens(7), torch.full_like(ids(7), one)


def made(backend, collective, dtype, counts=None):
    return ExpertParallel(
        backend,
        collective,
        NUM_EXPERTS,
        ranges(counts)[collective.rank] if counts else None,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        dtype=dtype,
    )


def scaled(num_experts, start):
    """In the place of products: each token times a number of the expert's own, in any order."""

    def outputs(h, ids):
        known = (ids >= 0) & (ids < num_experts)
        factor = (ids + start).to(h.dtype) + 1.5
        return torch.where(known[..., None], h[:, None] * factor[..., None], 0.0)

    return outputs


def check_routings(backend, collective):
    """Every row is that of its token and expert, bit for bit, however they are spread."""
    rank = collective.rank
    for dtype, counts in itertools.product((torch.float32, torch.bfloat16), SHARES):
        parallel = made(backend, collective, dtype, counts)
        here = scaled(len(parallel.experts), parallel.experts.start)
        for h, ids in routings(rank, dtype, backend.device):
            want = scaled(NUM_EXPERTS, 0)(h, ids)
            for padding in (None, 40):
                with parallel.padded_to(padding) if padding else contextlib.nullcontext():
                    got = parallel.outputs(h, ids, here)
                assert got.dtype == dtype and torch.equal(got, want)


def check_formats(backend, collective):
    """Layers of each format. Products of other numbers of pairs may differ by the dtype's bound."""
    rank = collective.rank
    for dtype, whole in layers(backend, torch.Generator().manual_seed(3)):
        parallel = made(backend, collective, dtype)
        part: Experts = whole.spread(parallel)
        sizes = [m.shape[0] for m in part.matrices]
        assert sizes == [NUM_EXPERTS // WORLD] * len(sizes)
        generator = torch.Generator().manual_seed(29 + rank)
        for count in ((7, 3)[rank], (0, 1)[rank]):
            h = torch.randn(count, HIDDEN, generator=generator).to(backend.device, dtype)
            ids = torch.rand(count, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
            ids = ids.to(backend.device, torch.int32)
            want, name = whole.outputs(backend, h, ids), type(whole).__name__
            assert_close(part.slots(backend, h, ids), want, scale=16, name=name)
            with parallel.padded_to(8):
                assert_close(part.slots(backend, h, ids), want, scale=16, name=name)
            if not isinstance(part, DenseBiasedExperts | PackedBiasedExperts):
                want = mixture(backend, h, whole)
                assert_close(mixture(backend, h, part), want, scale=64, name=name)


def check_errors(backend, collective):
    rank = collective.rank
    right = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN}
    right |= {"dtype": torch.float32, "experts": ranges((2, 4))[rank]}

    def made_of(**changes):
        return ExpertParallel(backend, collective, **right | changes)

    for changes, message in (
        ({"hidden_size": (64, 32)[rank]}, r"hidden_size is \[64, 32\] by rank"),
        ({"top_k": (3, 2)[rank]}, r"top_k is \[3, 2\] by rank"),
        ({"top_k": 0}, r"top_k is \[0, 0\] by rank"),
        ({"num_experts": (6, 8)[rank]}, r"num_experts is \[6, 8\] by rank"),
        ({"num_experts": 0, "experts": None}, r"num_experts is \[0, 0\] by rank"),
        (
            {"dtype": (torch.float16, torch.bfloat16)[rank]},
            r"dtype is \['float16', 'bfloat16'\] by rank",
        ),
        ({"dtype": (torch.float16, torch.int8)[rank]}, "'no float dtype'"),
        ({"dtype": torch.int8}, "'no float dtype'"),
        ({"experts": ranges((2, 3))[rank]}, "ranges one after another, 0 to 6"),
        ({"experts": (range(3), range(2, 6))[rank]}, "'0 to 3', '2 to 6'"),
        ({"experts": (range(2), range(2, 6, 2))[rank]}, "'-1 to 6'"),
        ({"experts": (range(2, 6), range(2))[rank]}, "'2 to 6', '0 to 2'"),
    ):
        with pytest.raises(InputError, match=message):
            made_of(**changes)

    parallel = made_of()
    for capacity in ((4, 8)[rank], 0, -1):
        with pytest.raises(InputError, match="capacity is"), parallel.padded_to(capacity):
            raise AssertionError("entered")
    with parallel.padded_to(1):
        assert parallel.capacity == 1
    assert parallel.capacity is None

    h = torch.randn(5, HIDDEN, device=backend.device)
    ids = torch.randint(0, NUM_EXPERTS, (5, TOP_K)).to(backend.device, torch.int32)

    local = scaled(len(parallel.experts), parallel.experts.start)
    want = scaled(NUM_EXPERTS, 0)(h, ids)
    wrong = (
        (h.bfloat16(), ids, "h is bfloat16"),
        (h[:, :9], ids, r"h is float32 \[5, 9\]"),
        (h[0], ids[0], r"h is float32 \[64\]"),
        (h, ids.long(), "ids is int64"),
        (h, ids[:4], r"ids is int32 \[4, 3\]"),
        (h, ids[:, :2], r"ids is int32 \[5, 2\]"),
    )
    # Whoever is called wrongly raises. The others raise too, where the host knows of it.
    for *arguments, message in wrong:
        told = message if rank == 1 else r"refused on ranks \[1\]"
        with pytest.raises(InputError, match=told):
            parallel.outputs(*(arguments if rank == 1 else (h, ids)), local)
        assert torch.equal(parallel.outputs(h, ids, local), want)
    with parallel.padded_to(5):
        more = torch.cat((h, h)), torch.cat((ids, ids)), "h is of 10 tokens; allowed: 5"
        for *arguments, message in (*wrong, more):
            if rank == 1:
                with pytest.raises(InputError, match=message):
                    parallel.outputs(*arguments, local)
            else:
                assert torch.equal(parallel.outputs(h, ids, local), want)
    assert torch.equal(parallel.outputs(h, ids, local), want)

    graph = Graph(backend.device)
    with pytest.raises(FerrumError, match="padded_to"):
        graph.capture("step", lambda: parallel.outputs(h, ids, local))


def check_graph(backend, collective):
    """A decode step captured once is right for other tokens and experts."""
    rank = collective.rank
    generator = torch.Generator().manual_seed(4)
    for dtype, whole in layers(backend, torch.Generator().manual_seed(3)):
        part = whole.spread(made(backend, collective, dtype))
        count = (4, 2)[rank]
        h = torch.zeros(count, HIDDEN, dtype=dtype, device=backend.device)
        ids = torch.zeros(count, TOP_K, dtype=torch.int32, device=backend.device)
        graph = Graph(backend.device)
        with part.parallel.padded_to(4):
            graph.capture("step", lambda h=h, ids=ids, part=part: part.slots(backend, h, ids))
        for _ in range(3):
            h.copy_(torch.randn(4, HIDDEN, generator=generator)[:count])
            drawn = torch.randint(-1, NUM_EXPERTS, (4, TOP_K), generator=generator)
            ids.copy_(drawn[:count])
            graph.replay("step")
            assert_close(graph.outputs("step"), whole.outputs(backend, h, ids), scale=16)
        assert part.parallel.capacity is None
        graph.reset_all()  # NCCL's communicators go after the graphs that use them


def test_two_processes(tmp_path):
    mp.spawn(check_rank, ("gloo", tmp_path / "rendezvous", check_all), nprocs=WORLD)


@pytest.mark.gpu
def test_two_gpus(tmp_path):
    if torch.cuda.device_count() < WORLD:
        pytest.skip("needs two GPUs")
    mp.spawn(check_rank, ("nccl", tmp_path / "rendezvous", check_all), nprocs=WORLD)


def saved_models(folder):
    """Files of each family that has experts: FP8, plain, packed, and plain with biases."""
    transformers = pytest.importorskip("transformers", reason="transformers writes the files")
    from tests.test_fp8 import tiny
    from tests.test_gpt_oss import METADATA, make

    names = ("qwen3_moe", "mixtral", "gpt_oss")
    qwen3_moe, mixtral, gpt_oss = (folder / name for name in names)
    for directory in (qwen3_moe, gpt_oss):
        directory.mkdir()
    tiny(qwen3_moe, "qwen3_moe")
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.MixtralConfig(**sizes, num_local_experts=5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(mixtral)
    made = make(2)
    made.save(gpt_oss)
    plain = {
        name: held.dequantize() if isinstance(held, QuantizedTensor) else held
        for name, held in made.gguf.items()
    }
    write_gguf(folder / "gpt_oss.gguf", "gpt-oss", METADATA | {"block_count": 2}, plain)
    config = transformers.LlamaConfig(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    return [qwen3_moe, mixtral, gpt_oss, folder / "gpt_oss.gguf"]


def run(model, *chunks):
    """All logits of a sequence fed in chunks."""
    cache = model.new_cache(20)
    return torch.cat([model.forward(c, cache, all_logits=True) for c in chunks])


def check_models(backend, collective, paths):
    """Each rank has tokens of its own, and as many steps as the others."""
    rank = collective.rank
    for path in paths:
        whole = load_model(path, backend)
        part = load_model(path, backend, experts_over=collective)
        for all_of, some in zip(whole.weights.layers, part.weights.layers, strict=True):
            parallel = some.mlp.parallel
            assert {m.shape[0] for m in all_of.mlp.matrices} == {parallel.num_experts}
            assert {m.shape[0] for m in some.mlp.matrices} == {len(parallel.experts)}
        ids = torch.randint(0, 96, (12,), generator=torch.Generator().manual_seed(rank))
        for cuts in ([(9, 5)[rank], (3, 7)[rank]], [(11, 1)[rank], 1]):
            chunks = ids[: sum(cuts)].split(cuts)
            got, want = run(part, *chunks), run(whole, *chunks)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        # Answers of one length are as many steps on every rank, which are captured.
        settings = {"max_tokens": 6, "end_ids": ()}
        with part.parallel.padded_to(16):
            got = part.generate(ids.tolist(), **settings)
        assert got.ids == whole.generate(ids.tolist(), **settings).ids
    with pytest.raises(InputError, match=r"num_experts is \[4, 5\] by rank"):
        load_model(paths[rank], backend, experts_over=collective)
    with pytest.raises(InputError, match="num_experts is"):
        load_model(paths[0].parent / "llama", backend, experts_over=collective)


def test_models_over_two_processes(tmp_path):
    check = functools.partial(check_models, paths=saved_models(tmp_path))
    mp.spawn(check_rank, ("gloo", tmp_path / "rendezvous", check), nprocs=WORLD)
