"""Limits of files: what they are, the last value that is taken and the first that is not."""

import dataclasses
import math
import re
from importlib import import_module
from pathlib import Path

import pytest

from ferrum_triton import FileError
from ferrum_triton.models import config
from tests.tiny_models import PACKED

ROPE = dataclasses.replace(PACKED.rope, kind="llama3", factor=8.0)
ABOVE_0, BELOW_1 = math.nextafter(0, 1), math.nextafter(1, 0)


LIMIT = re.compile(r"^\| `([\w.]+)\.(MAX_\w+)` \| ([\d,]+)( MiB)? \|", re.MULTILINE)
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"


@pytest.mark.parametrize(("module", "name", "number", "unit"), LIMIT.findall(PAGE.read_text()))
def test_limits_are_those_of_the_page(module, name, number, unit):
    limit = getattr(import_module(f"ferrum_triton.{module}"), name)
    assert limit == int(number.replace(",", "")) * (1 << 20 if unit else 1)


def wide(head_dim, rotary_dim):
    """Heads of a size, some of whose dimensions are rotated."""
    rope = dataclasses.replace(ROPE, dim=rotary_dim)
    return dataclasses.replace(PACKED, head_dim=head_dim, rope=rope)


def rope(**changes):
    return dataclasses.replace(PACKED, rope=dataclasses.replace(ROPE, **changes))


def with_(**changes):
    return dataclasses.replace(PACKED, **changes)


def mixture(num_experts, experts_per_token):
    return dataclasses.replace(PACKED, num_experts=num_experts, experts_per_token=experts_per_token)


@pytest.mark.parametrize(
    ("taken", "refused", "message"),
    [
        (with_(num_heads=4), with_(num_heads=5), "no multiple of KV heads"),
        (wide(config.MAX_HEAD_DIM, 16), wide(config.MAX_HEAD_DIM + 2, 16), "head size"),
        (with_(num_layers=config.MAX_LAYERS), with_(num_layers=config.MAX_LAYERS + 1), "layers"),
        (
            with_(max_positions=config.MAX_POSITIONS),
            with_(max_positions=config.MAX_POSITIONS + 1),
            "positions are over",
        ),
        (mixture(8, 8), mixture(8, 9), "9 of 8 experts"),
        (mixture(8, 1), mixture(8, 0), "0 of 8 experts"),
        (
            mixture(config.MAX_EXPERTS, config.MAX_EXPERTS_PER_TOKEN),
            mixture(config.MAX_EXPERTS, config.MAX_EXPERTS_PER_TOKEN + 1),
            "experts a token",
        ),
        (mixture(config.MAX_EXPERTS, 1), mixture(config.MAX_EXPERTS + 1, 1), "experts a token"),
        (with_(rms_norm_eps=ABOVE_0), with_(rms_norm_eps=0.0), "norm epsilon"),
        (with_(rms_norm_eps=BELOW_1), with_(rms_norm_eps=1.0), "norm epsilon"),
        (wide(64, 64), wide(64, 66), "66 rotary dimensions"),
        (wide(64, 62), wide(64, 63), "63 rotary dimensions"),
        (rope(theta=ABOVE_0), rope(theta=0.0), "rope theta"),
        (rope(theta=math.nextafter(1e12, 0)), rope(theta=1e12), "rope theta"),
        (rope(factor=ABOVE_0), rope(factor=0.0), "scaling factor"),
        (rope(factor=math.nextafter(1e6, 0)), rope(factor=1e6), "scaling factor"),
        (rope(low_freq_factor=ABOVE_0), rope(low_freq_factor=0.0), "ramp"),
        (
            rope(low_freq_factor=math.nextafter(4.0, 0), high_freq_factor=4.0),
            rope(low_freq_factor=4.0, high_freq_factor=4.0),
            "ramp",
        ),
    ],
)
def test_the_last_value_is_taken_and_the_next_refused(taken, refused, message):
    path = Path("model")
    assert taken.checked(path) is taken
    with pytest.raises(FileError, match=message):
        refused.checked(path)
