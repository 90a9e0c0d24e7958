"""The vision encoder by the CPU's kernels beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from legato_engine.kernels.cpu.library import library
from legato_engine.models import registry


def encoder(kernels):
    bundle: Any = registry.resolve("random-tiny")
    model: Any = bundle.load(torch.device("cpu"), torch.float32, cpu_kernels=kernels)
    return model._network.vision, bundle.config.vision


@pytest.mark.skipif(library("auto") is None, reason="no C++ compiler or no AVX2 here")
def test_images_have_the_embeddings_of_torch():
    """Of one crop and of several."""
    ours, config = encoder("auto")
    theirs, _ = encoder("torch")
    assert ours.runs_by_library
    assert not theirs.runs_by_library
    size = config.crop_size
    generator = torch.Generator().manual_seed(0)
    for tiling in ((1, 1), (1, 2)):
        count = 1 if tiling == (1, 1) else 1 + tiling[0] * tiling[1]
        pixels = torch.randint(0, 256, (count, size, size, 3), generator=generator).byte()
        with torch.inference_mode():
            found, expected = ours(pixels, tiling), theirs(pixels, tiling)
        assert (found - expected).norm() / expected.norm() < 1e-5
