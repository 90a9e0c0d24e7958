"""Adapters of the reference follow their description."""

import numpy as np
import pytest

from tests.reference.cases import CONFIG, embeddings, weights
from tests.reference.moondream3.adapters import adapter_shapes, random_adapter
from tests.reference.moondream3.config import full
from tests.reference.moondream3.text import recompute

RANK = 2 * CONFIG.text.experts_per_token


def merged(adapter, all_weights):
    """Weights with B A of each adapted map added."""
    changed = dict(all_weights)
    for layer in range(CONFIG.text.layers):
        behind = layer - CONFIG.text.dense_layers
        name = f"dense.{layer}" if behind < 0 else f"moe.{behind}"
        for part, own in (("up", "fc1"), ("down", "fc2")):
            a, b = (adapter[f"{name}.{part}_{side}"].astype(np.float64) for side in "ab")
            changed[f"text.blocks.{layer}.mlp.{own}.weight"] = (
                all_weights[f"text.blocks.{layer}.mlp.{own}.weight"] + b @ a
            )
    return changed


@pytest.mark.parametrize("seed", [0, 1])
def test_an_adapter_is_its_product_in_the_weights(seed):
    """An adapter gives the states of weights with its products added."""
    adapter, x_TD = random_adapter(CONFIG, RANK, seed), embeddings(9)
    ours = recompute(x_TD, 4, CONFIG, {**weights(), **adapter})
    np.testing.assert_allclose(ours, recompute(x_TD, 4, CONFIG, merged(adapter, weights())))
    assert np.abs(ours - recompute(x_TD, 4, CONFIG, weights())).max() > 0.1


def test_layers_may_be_left_out():
    """An adapter of some layers changes only these."""
    adapter = random_adapter(CONFIG, RANK, 0)
    some = {name: array for name, array in adapter.items() if name.startswith("moe.0.")}
    rest = {name: np.zeros_like(array) for name, array in adapter.items() if name not in some}
    ours = recompute(embeddings(5), 0, CONFIG, {**weights(), **some})
    np.testing.assert_array_equal(
        ours, recompute(embeddings(5), 0, CONFIG, {**weights(), **some, **rest})
    )


def test_the_published_shapes():
    """Of rank 16 at full size: an eighth of it in each expert, both halves of its gate."""
    shapes = adapter_shapes(full(), 16)
    assert shapes["dense.3.up_b"] == (8192, 16)
    assert [shapes[f"moe.19.{part}"] for part in ("up_a", "up_b", "down_a", "down_b")] == [
        (64, 2, 2048),
        (64, 2048, 2),
        (64, 2, 1024),
        (64, 2048, 2),
    ]
    assert len(shapes) == 4 * 24
