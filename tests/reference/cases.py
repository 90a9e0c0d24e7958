"""A small model, an image and a prompt for all tests of the reference, and torch's gelu."""

from functools import cache

import numpy as np
import torch

from tests.reference.moondream3 import encode_image, random_weights, small

CONFIG = small()
NAME = [50, 51]  # an object's name, or a question, as ids


@cache
def weights(seed=0):
    """Weights of CONFIG; the arrays are shared, so a test replaces them and writes into none."""
    return random_weights(CONFIG, seed, "float64")


def noise(height, width, seed=1):
    """An image of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@cache
def image(seed=0):
    """An image's embeddings; it is cut into several tiles."""
    return encode_image(noise(40, 60), CONFIG, weights(seed))


def embeddings(length, seed=2):
    """Random positions [length, width]."""
    return np.random.default_rng(seed).standard_normal((length, CONFIG.text.width))


def torch_gelu(x, approximate="tanh"):
    """Of an array, as torch has it."""
    gelu = torch.nn.functional.gelu(torch.from_numpy(x), approximate=approximate)
    return gelu.numpy()


def leaning(all_weights, biases):
    """The same weights with other head biases of some token ids."""
    bias = all_weights["text.lm_head.bias"].copy()
    for token_id, value in biases.items():
        bias[token_id] = value
    return all_weights | {"text.lm_head.bias": bias}
