"""Small models and images."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.moondream.presets import tiny_random3_config, tiny_random_config
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.models.moondream.weights import random_weights
from legato_engine.types import ImageProperties
from PIL import Image

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def tiny_config():
    """Every skill, up to four tiles."""
    return tiny_random_config()


@pytest.fixture(scope="session")
def tiny3_config():
    """The same with Moondream 3's parts."""
    return tiny_random3_config()


@pytest.fixture(scope="session")
def mid_config(tiny_config):
    """Three layers, six patches a side, up to twelve tiles, a vocabulary beyond bytes."""
    replace = msgspec.structs.replace
    vision = replace(
        tiny_config.vision, dim=96, num_layers=3, num_heads=4, crop_size=84, max_crops=12
    )
    text = replace(tiny_config.text, dim=128, ff_dim=320, num_layers=3, num_heads=4, vocab_size=700)
    return replace(tiny_config, vision=vision, text=text)


@pytest.fixture(scope="session")
def make_model():
    """A model and its weights by name."""

    def make(config, seed=0):
        network = random_weights(config, seed, CPU, torch.float32)
        return MoondreamModel(config, network), network.state_dict()

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_config, make_model):
    """The model of `tiny_config`."""
    return make_model(tiny_config)[0]


@pytest.fixture(scope="session")
def tiny3_model(tiny3_config, make_model):
    """The model of `tiny3_config`."""
    return make_model(tiny3_config)[0]


@pytest.fixture(scope="session")
def narrow3_model(tiny3_config):
    """The model of `tiny3_config` with e4m3 keys and values, some of them saturated."""
    network = random_weights(tiny3_config, 0, CPU, torch.float32)
    network.text.use_fp8_kv()
    state = network.state_dict()
    for layer in range(tiny3_config.text.num_layers):
        state[f"text.blocks.{layer}.attn.k_scale"].fill_(0.002 + 0.001 * layer)
        state[f"text.blocks.{layer}.attn.v_scale"].fill_(0.004 - 0.001 * layer)
    return MoondreamModel(tiny3_config, network)


@pytest.fixture(scope="session", params=["tiny_model", "tiny3_model", "narrow3_model"])
def either_model(request):
    """One model of each kind, and one with e4m3 keys and values."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def frontend(tiny_config):
    """The frontend of `tiny_config` over bytes as tokens."""
    return MoondreamFrontend(tiny_config, StandInTokenizer())


@pytest.fixture(scope="session")
def noise_image():
    """A random image by width and height."""

    def make(width, height, seed=0):
        noise = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
        return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)

    return make


@pytest.fixture(scope="session")
def prepare(noise_image):
    """Prepare a random image by frontend, width and height."""

    def make(frontend, width, height, seed=0):
        info = ImageProperties(image_id="img", width=width, height=height, cache_hit=False)
        key = f"{width}x{height}:{seed}"
        return frontend.prepare_image(noise_image(width, height, seed), key, info)

    return make
