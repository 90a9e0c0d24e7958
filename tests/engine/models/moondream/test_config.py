"""config.json in and out."""

from __future__ import annotations

import json

import msgspec
import pytest
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.config import parse_config
from legato_engine.models.moondream.presets import legato_tiny_config, moondream2_config


def as_json(config):
    """A config.json as a training run writes it: unset templates and sampling left out."""
    data = msgspec.to_builtins(config)
    data["templates"] = {k: v for k, v in data["templates"].items() if v is not None}
    data.pop("sampling")
    return data


def test_a_config_reads_back():
    """What is written is what is read, and text is greedy unless the file says otherwise."""
    config = legato_tiny_config()
    parsed = parse_config(json.dumps(as_json(config)).encode())
    assert parsed == config
    assert parsed.sampling.temperature == 0.0


def test_sampling_may_be_given():
    """The optional key `sampling` sets the defaults of text."""
    data = as_json(legato_tiny_config()) | {"sampling": {"temperature": 0.5}}
    assert parse_config(json.dumps(data).encode()).sampling.temperature == 0.5


def test_sizes_of_moondream2():
    """A picture is 729 embeddings behind BOS, heads are 64 wide, tiles are 266 pixels apart."""
    config = moondream2_config()
    assert config.prefix_length == 730
    assert config.text.head_dim == 64
    assert config.vision.window == 266


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
