"""Reading and writing of config.json."""

from __future__ import annotations

import json

import msgspec
import pytest
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.config import (
    Gelu,
    MoEConfig,
    TauConfig,
    Template,
    parse_config,
)
from legato_engine.models.moondream.presets import (
    legato_tiny_config,
    moondream2_config,
    moondream3_1_config,
    moondream3_config,
    tiny_random3_config,
)


def as_json(config):
    """A config.json as training writes it, without unset templates and sampling."""
    data = msgspec.to_builtins(config)
    data["templates"] = {k: v for k, v in data["templates"].items() if v is not None}
    data.pop("sampling")
    return data


def test_a_config_reads_back():
    """What is written is read, and text is greedy by default."""
    config = legato_tiny_config()
    parsed = parse_config(json.dumps(as_json(config)).encode())
    assert parsed == config
    assert parsed.sampling.temperature == 0.0


def test_sampling_may_be_given():
    """The optional key `sampling` sets the defaults of text."""
    data = as_json(legato_tiny_config()) | {"sampling": {"temperature": 0.5}}
    assert parse_config(json.dumps(data).encode()).sampling.temperature == 0.5


def test_sizes_of_moondream2():
    """An image has 729 embeddings after BOS, heads are 64 wide, tiles are 266 pixels apart."""
    config = moondream2_config()
    assert config.prefix_length == 730
    assert config.text.head_dim == 64
    assert config.vision.window == 266


def test_a_config_of_moondream3_reads_back():
    """Tau, experts, heads without an inner layer and all switches survive config.json."""
    config = tiny_random3_config()
    text = msgspec.structs.replace(config.text, tau=TauConfig(gelu=Gelu.EXACT))
    region = msgspec.structs.replace(config.region, coord_reaches_one=True)
    config = msgspec.structs.replace(config, text=text, region=region)
    assert parse_config(msgspec.json.encode(config)) == config


def test_moondream3_differs_as_published():
    """Shared sizes are Moondream 2's; the preview and 3.1 differ only in weights."""
    two, three = moondream2_config(), moondream3_config()
    assert three.vision == two.vision
    assert three.tokens == two.tokens
    shared = ("dim", "ff_dim", "num_layers", "num_heads", "vocab_size", "rotary_dim")
    assert all(getattr(three.text, name) == getattr(two.text, name) for name in shared)
    assert (three.text.max_context, three.text.rope_theta) == (32768, 1_500_000.0)
    assert three.text.moe == MoEConfig(first_layer=4, num_experts=64, num_active=8, inner_dim=1024)
    assert three.text.tau == TauConfig(gelu=Gelu.TANH)
    assert three.region.inner_dim is None
    assert three.region.coord_divisor == 1024
    assert moondream3_1_config() == msgspec.structs.replace(three, name="moondream3.1")


def test_moondream3_opens_an_answer_once():
    """No template doubles the answer token, and there is one for outlines."""
    templates = moondream3_config().templates
    assert templates.query == Template(prefix=(1, 15381, 2), suffix=(3,))
    assert templates.query_reasoning == Template(prefix=(1, 15381, 2), suffix=(4,))
    assert templates.segment == Template(prefix=(1, 17374, 2), suffix=(3,))
    assert templates.detect == moondream2_config().templates.detect
    assert templates.caption == moondream2_config().templates.caption
    assert moondream2_config().templates.segment is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("first_layer", 3), ("first_layer", -1), ("num_active", 0), ("num_active", 7)],
)
def test_experts_that_do_not_fit_are_named(field, value):
    """Experts begin at an existing layer, and no more are active than there are."""
    data = msgspec.to_builtins(tiny_random3_config())
    data["text"]["moe"][field] = value
    with pytest.raises(InvalidField, match=field):
        parse_config(json.dumps(data).encode())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("architecture",), "moondream9", "architecture"),
        (("text", "dim"), "wide", "dim"),
        (("text", "extra"), 1, "extra"),
        (("text", "num_heads"), 7, "num_heads"),
        (("text", "rotary_dim"), 33, "rotary_dim"),
        (("text", "max_context"), 100, "max_context"),
        (("vision", "crop_size"), 337, "crop_size"),
        (("vision", "overlap_margin"), 12, "overlap_margin"),
    ],
)
def test_what_does_not_fit_is_named(path, value, message):
    """A wrong, unknown or contradicting field is an error that names it."""
    data = as_json(legato_tiny_config())
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(InvalidField, match=message):
        parse_config(json.dumps(data).encode())


def test_text_that_is_no_json_is_refused():
    """Broken files are errors, not tracebacks."""
    with pytest.raises(InvalidField, match=r"config\.json"):
        parse_config(b"{")
