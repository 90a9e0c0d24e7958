"""The reference's coordinates, sizes and weights' names."""

import math

import numpy as np
import pytest
import torch

from tests.reference.cases import CONFIG, embeddings, weights
from tests.reference.moondream3 import (
    check_weights,
    full,
    random_weights,
    region,
    text,
    weight_shapes,
)
from tests.reference.moondream3.numerics import round_bfloat16

WEIGHTS = weights()


def test_cosines_come_before_sines():
    """The phase of a coordinate is 2 pi x F; all cosines come before all sines."""
    features = np.array([[1.0, 0.25, -0.5]])
    ours = region.fourier(np.array([0.5]), features, CONFIG)
    np.testing.assert_allclose(ours, [-1, math.sqrt(0.5), 0, 0, math.sqrt(0.5), -1], atol=1e-15)


def test_a_size_mixes_width_and_height():
    """The phase of a size is 2 pi (w F0 + h F1), and the encoder is a biased product."""
    w, h = 0.3, 0.7
    features = WEIGHTS["region.size_features"]
    phases = [2 * math.pi * (w * f0 + h * f1) for f0, f1 in features.T]
    row = np.array([math.cos(p) for p in phases] + [math.sin(p) for p in phases])
    matrix, bias = (WEIGHTS[f"region.size_encoder.{part}"] for part in ("weight", "bias"))
    ours = region.encode_size(w, h, CONFIG, WEIGHTS)
    np.testing.assert_allclose(ours, matrix @ row + bias, atol=1e-12)
    assert np.abs(ours - region.encode_size(h, w, CONFIG, WEIGHTS)).max() > 1e-2


def test_phases_in_bfloat16_are_torchs():
    """With the switch value, turns, phase, cosine and sine are each rounded as torch rounds."""
    features = round_bfloat16(np.random.default_rng(11).standard_normal((1, 256)) * 3)
    switched = CONFIG.switched(fourier="bfloat16")
    for value in np.linspace(0, 1, 99):
        turns = 2 * math.pi * torch.tensor(value, dtype=torch.bfloat16)
        phases = turns * torch.from_numpy(features[0]).to(torch.bfloat16)
        exact = phases.double()  # torch's cosine in bfloat16 differs from machine to machine
        expected = torch.cat([exact.cos(), exact.sin()]).to(torch.bfloat16).double().numpy()
        ours = region.fourier(np.array([value]), features, switched)
        np.testing.assert_array_equal(ours, expected)


def test_bins_have_their_values():
    """A coordinate's bin is n / 1024, or n / 1023 by the switch; sizes go from 2^-10 to 1."""
    config = full()
    assert [region.coord_value(n, config) for n in (0, 512, 1023)] == [0, 0.5, 1023 / 1024]
    other = config.switched(coord_divisor="bins_minus_one")
    assert [region.coord_value(n, other) for n in (0, 512, 1023)] == [0, 512 / 1023, 1]
    assert [region.size_value(n, config) for n in (0, 1023)] == [1 / 1024, 1]
    assert region.size_value(341, config) == pytest.approx(2 ** (341 / 1023 * 10 - 10))
    rounded = config.switched(round_values=True)
    assert region.coord_value(1021, rounded) == float(torch.tensor(1021 / 1024).bfloat16())
    assert region.size_value(1000, rounded) == float(
        torch.tensor(region.size_value(1000, config)).bfloat16()
    )


def test_a_size_lies_at_its_bin():
    """The inverse returns every bin's value to it, and values below 2^-10 to bin 0."""
    config = full()
    for index in range(config.region.size_bins):
        assert region.size_position(region.size_value(index, config), config) == pytest.approx(
            index
        )
    assert region.size_position(0.0, config) == 0


def test_bins_are_read_before_the_last_norm():
    """post_ln affects only token logits; region.ln affects the bins."""
    hidden = embeddings(1)[0]
    post_ln = {"text.post_ln.weight": WEIGHTS["text.post_ln.weight"] + 1}
    own = {"region.ln.weight": WEIGHTS["region.ln.weight"] + 1}

    def decoded(weights):
        return (
            text.logits(hidden, weights),
            region.coord_logits(hidden, CONFIG, weights),
            region.size_logits(hidden, CONFIG, weights),
        )

    def same(changes):
        pairs = zip(decoded(WEIGHTS), decoded(WEIGHTS | changes), strict=True)
        return [np.array_equal(before, after) for before, after in pairs]

    assert same(post_ln) == [False, True, True]
    assert same(own) == [True, False, False]


def test_bins_are_a_norm_and_a_product():
    """Coordinates have one row of bins, sizes two, of which the width's is the first."""
    hidden = torch.from_numpy(embeddings(1)[0])
    w = {key: torch.from_numpy(WEIGHTS[key]) for key in WEIGHTS if key.startswith("region.")}
    normed = torch.nn.functional.layer_norm(
        hidden, hidden.shape, w["region.ln.weight"], w["region.ln.bias"]
    )
    for kind, shape in (("coord", (CONFIG.region.coord_bins,)), ("size", (2, 32))):
        decoder = f"region.{kind}_decoder"
        expected = w[f"{decoder}.weight"] @ normed + w[f"{decoder}.bias"]
        decode = region.coord_logits if kind == "coord" else region.size_logits
        ours = decode(hidden.numpy(), CONFIG, WEIGHTS)
        np.testing.assert_allclose(ours, expected.reshape(shape).numpy(), atol=1e-12)


def test_the_region_switches_are_different():
    """Without its norm, or after post_ln, a coordinate is read from another state."""
    hidden = embeddings(1)[0]
    default = region.coord_logits(hidden, CONFIG, WEIGHTS)
    for switches in ({"region_norm": False}, {"region_hidden": "post_ln"}):
        other = region.coord_logits(hidden, CONFIG.switched(**switches), WEIGHTS)
        assert np.abs(other - default).max() > 1e-2


def test_the_published_names():
    """The full sizes have the preview's 662 tensors, and about 9.27 thousand million weights."""
    shapes = weight_shapes(full())
    assert len(shapes) == 662
    count = {part: sum(name.startswith(part) for name in shapes) for part in ("region", "vision")}
    assert count == {"region": 12, "vision": 329 + 4}
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(9.27e9, rel=2e-3)
    some = {
        "vision.patch_emb.weight": (1152, 588),
        "vision.proj_mlp.fc1.weight": (8192, 2304),
        "text.wte": (51200, 2048),
        "text.blocks.3.mlp.fc1.weight": (8192, 2048),
        "text.blocks.4.mlp.fc1.weight": (64, 2048, 2048),
        "text.blocks.23.mlp.fc2.weight": (64, 2048, 1024),
        "text.blocks.0.attn.tau.wq": (32, 6144),
        "region.size_features": (2, 256),
        "region.size_decoder.weight": (2048, 2048),
    }
    assert some.items() <= shapes.items()


def test_weights_are_checked_both_ways():
    """Missing, extra and mis-shaped weights are named; region.ln follows its switch."""
    check_weights(CONFIG, WEIGHTS)
    fewer = {key: value for key, value in WEIGHTS.items() if not key.startswith("region.ln.")}
    with pytest.raises(ValueError, match=r"region\.ln\.bias"):
        check_weights(CONFIG, fewer)
    check_weights(CONFIG.switched(region_norm=False), fewer)
    with pytest.raises(ValueError, match="surplus"):
        check_weights(CONFIG, WEIGHTS | {"surplus": np.zeros(1)})
    with pytest.raises(ValueError, match=r"text\.wte"):
        check_weights(CONFIG, WEIGHTS | {"text.wte": WEIGHTS["text.wte"].T})


def test_random_weights_are_held_exactly():
    """A seed gives the same weights, exact in the given precision."""
    again = random_weights(CONFIG, 0, "float64")
    assert all(np.array_equal(again[key], WEIGHTS[key]) for key in WEIGHTS)
    assert not np.array_equal(random_weights(CONFIG, 1, "float64")["text.wte"], WEIGHTS["text.wte"])
    for value in random_weights(CONFIG, 0, "bfloat16").values():
        tensor = torch.from_numpy(value)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16().float(), tensor)
