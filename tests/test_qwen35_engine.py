"""States of sequences that join, leave and are sent away; what has no state to go on from."""

import dataclasses
import random

import pytest
import torch

from bench.random_models import CONFIGS
from ferrum_triton import FileError, InputError, get_backend
from ferrum_triton.models import load_model
from ferrum_triton.models.engine import Engine
from ferrum_triton.models.generation import generate
from ferrum_triton.models.qwen35 import Qwen35Loader
from ferrum_triton.models.qwen35_config import Qwen35Config
from ferrum_triton.models.roof import bytes_of_step
from ferrum_triton.quant import Fp8Blocks
from tests.test_engine import SETTINGS, answers, assert_nothing_held, check_schedules, schedule
from tests.test_qwen35 import LAYERS, configured, make

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One of two layers, whose last is of linear attention, by backend."""
    directory = tmp_path_factory.mktemp("tiny")
    make("qwen3_5", layer_types=LAYERS[1:3], num_hidden_layers=2).save_pretrained(directory)
    return lambda name: load_model(directory, get_backend(name))


@pytest.mark.parametrize("name", CPU_AND_GPU)
def test_schedules_leave_every_sequence_what_it_is_alone(models, name):
    """Schedules of joining, leaving and preempting; prompts that begin alike share nothing."""
    check_schedules(models(name), (0, 1, 27, 106), rounding=1e-3)


@pytest.mark.parametrize("name", CPU_AND_GPU)
def test_batch_invariant_results_are_equal_by_the_bit(models, name):
    """Several tokens of a sequence go through its state one after the other."""
    model, one = models(name), {"capacity": 96, "max_seqs": 4, "batch_invariant": True}
    requests = schedule(random.Random(23), 4, SETTINGS)
    engine = Engine(model, num_blocks=6, **one)
    for request, got in zip(requests, answers(engine, requests), strict=True):
        assert got == answers(Engine(model, **one), [request])[0]
    assert engine.num_preempted > 0
    assert_nothing_held(engine)


def test_a_prompt_is_read_from_its_start(models):
    """Though the keys of its beginning are there."""
    engine = Engine(models("cpu"), max_seqs=2, capacity=64)
    prompt = list(range(40))
    first = generate(engine.model, prompt, max_tokens=3, engine=engine).ids
    key = engine.add(prompt, max_tokens=3)
    engine._admit()
    assert engine.progress(key) == 0
    again = [new.token for _ in range(3) for new in engine.step()]
    assert again == first


def test_interpreted_kernels_answer_as_the_cpu(models):
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    got, want = (
        [a.ids for a in generate(models(name), prompts, max_tokens=3)]
        for name in ("interpret", "cpu")
    )
    assert got == want


@pytest.mark.gpu
def test_graphs_answer_as_eager_steps(models):
    """Slots are read from device memory, also in steps whose last rows are padding."""
    model = models("cuda")
    prompts = [[i, 7, i + 3, 2] for i in range(5)]
    engine = Engine(model, max_seqs=8, capacity=64)
    engine.runner.warm_up()
    answered = [a.ids for a in generate(model, prompts, max_tokens=20, engine=engine)]
    for prompt, ids in zip(prompts, answered, strict=True):
        cache, new = model.new_cache(64), prompt
        for token in ids:
            logits = model.forward(new, cache)[0]
            assert logits.max() - logits[token] < 1e-3
            new = [token]


def test_states_neither_go_back_nor_are_shared(models):
    model = models("cpu")
    cache = model.new_cache(64, num_seqs=2)
    want = model.forward([1, 2, 3], cache, 1)
    with pytest.raises(InputError, match="states do not go back"):
        cache.set_lens({1: 2})
    with pytest.raises(InputError, match="share"):
        cache.share(0, cache.blocks[1])
    for call in (
        lambda: cache.share(1, []),  # which is not empty
        lambda: cache.share(2, []),
        lambda: cache.set_lens({2: 1}),
        lambda: cache.set_lens({-1: 4}),
    ):
        with pytest.raises(InputError):
            call()
    assert cache.lengths == [0, 3]
    cache.free(1)
    assert torch.equal(model.forward([1, 2, 3], cache, 1), want)
    assert len(cache.k) == 1 and [len(kind) for kind in cache.states] == [1, 1]
    assert {id(t) for kind in cache.states for t in kind} <= {id(t) for t in cache.tensors}


def test_bytes_of_a_step(models):
    """Keys and values of one layer, and of the other a state that is read and written."""
    model = models("cpu")
    config, cache = model.config, model.new_cache(32)
    state = sum(t.nbytes for kind in cache.states for t in kind)
    weights = bytes_of_step(model, 0, 0)
    for batch, context in ((1, 0), (3, 50)):
        keys = 4 * batch * context * 2 * config.kv_dim
        assert bytes_of_step(model, batch, context) == weights + keys + 2 * batch * state


PATH = "config.json"
PUBLISHED = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}


def test_the_shape_of_benches_is_what_was_published():
    config = Qwen35Config.from_hf(PUBLISHED, PATH)
    bench = CONFIGS["qwen3.5-9b"]
    assert config == dataclasses.replace(bench, max_positions=config.max_positions)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "no layer of full attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention.*known: linear_attention"),
        ({"layer_types": LAYERS[:2]}, "no list of 4 types"),
        ({"attention_bias": True}, "biases"),
        ({"attn_output_gate": False}, "without gates"),
        ({"hidden_act": "gelu"}, "gelu.*known: silu"),
        ({"linear_num_key_heads": 4}, "6 value heads over 4 key heads"),
        ({"linear_value_head_dim": 300}, "over 256"),
        ({"linear_conv_kernel_dim": 1}, "convolution of 1 tokens"),
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes.*known: gptq"),
        ({"text_config": 3}, "text_config is 3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope.*known: default"),
    ],
)
def test_what_is_not_run_is_refused_by_name(changed, message):
    values = configured("qwen3_next").to_dict()
    assert Qwen35Config.from_hf(values, PATH).rope.dim == 8
    with pytest.raises(FileError, match=message):
        Qwen35Config.from_hf(values | changed, PATH)


def test_rows_of_fp8_blocks_move_with_their_scales():
    """By whole blocks; what takes one apart is refused."""

    class Loader(Qwen35Loader):
        def __init__(self, matrix):
            self._matrix, self.source = matrix, Source()

        def matrix(self, name, shape):
            assert self._matrix.shape == shape
            return self._matrix

    class Source:
        path = "model.safetensors"

        def spelled(self, name):
            return name

    codes = torch.randn(384, 128).to(torch.float8_e4m3fn)
    matrix = Fp8Blocks(codes, torch.rand(3, 1) + 1)
    order = torch.arange(384).view(3, 128)[[2, 0, 1]].flatten()
    loader = Loader(matrix)
    got = loader.rows("w", 128, order)
    assert isinstance(got, Fp8Blocks)
    assert torch.equal(got.dequantize(), matrix.dequantize()[order])
    for wrong in (order.flip(0), order.roll(64)):
        with pytest.raises(FileError, match="'w' is in FP8 by blocks of 128 rows"):
            loader.rows("w", 128, wrong)
