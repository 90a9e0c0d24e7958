"""The vision encoder at full width on a GPU: shared tile counters, and graphs of any size.

Shape legend: N crops, T tokens, P values of a patch, D vision width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.models.moondream.presets import moondream2_config
from legato_engine.models.moondream.vision import Vision
from legato_engine.models.moondream.weights import random_weights

CUDA = torch.device("cuda", 0)
CROPS, LAYERS = 9, 3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="made for Hopper",
    ),
]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def tower() -> tuple[Vision, torch.Tensor]:
    """An encoder of few layers, and patches [N, T, P] of nine crops without padding."""
    config = moondream2_config()
    sizes = msgspec.structs.replace(config.vision, num_layers=LAYERS)
    few = msgspec.structs.replace(config.text, num_layers=1)
    small = msgspec.structs.replace(config, vision=sizes, text=few)
    vision = random_weights(small, 0, CUDA, torch.bfloat16).vision
    vision.patch_emb.widen(8)
    shape = (CROPS, sizes.num_tokens, vision.patch_emb.in_features)
    return vision, torch.randn(shape, device=CUDA).bfloat16()


def test_shared_counters_change_no_bit():
    """With shared counters the encoder keeps its bits for new crops, eager and replayed.

    It agrees with float32 within rounding.
    """
    vision, patches_NTP = tower()
    counted, exact = copy.deepcopy(vision), copy.deepcopy(vision).float()
    counted.count_apart()
    device = CudaDevice(0)
    features_NTD = torch.empty_like(vision.encode_patches(patches_NTP))

    def encode() -> None:
        features_NTD.copy_(counted.encode_patches(patches_NTP))

    replay = device.capture(encode)
    for _ in range(3):
        patches_NTP.copy_(torch.randn(patches_NTP.shape))
        features_NTD.fill_(torch.nan)
        torch.cuda.synchronize()
        device.compute.submit(replay)
        torch.cuda.synchronize()
        assert torch.equal(features_NTD, vision.encode_patches(patches_NTP))
        assert torch.equal(features_NTD, counted.encode_patches(patches_NTP))
        truth_NTD = exact.encode_patches(patches_NTP.float())
        assert (features_NTD.float() - truth_NTD).norm() < 0.02 * truth_NTD.norm()
    device.close()


@pytest.mark.parametrize("count", range(1, CROPS))
def test_a_crop_has_the_same_bits_in_any_batch(count):
    """A crop's bits do not depend on the number of crops, although kernels, tiles and graphs do."""
    vision, patches_NTP = tower()
    vision.count_apart()
    device = CudaDevice(0)
    out_NTD = torch.zeros_like(vision.encode_patches(patches_NTP))

    def encode(first: int, stop: int) -> None:
        out_NTD[first:stop].copy_(vision.encode_patches(patches_NTP[first:stop]))

    whole = device.capture(partial(encode, 0, CROPS))
    device.compute.submit(whole)
    torch.cuda.synchronize()
    whole_NTD = out_NTD.clone()
    for first in (0, CROPS - count):
        some = device.capture(partial(encode, first, first + count))
        out_NTD.fill_(torch.nan)
        device.compute.submit(some)
        torch.cuda.synchronize()
        part = slice(first, first + count)
        assert torch.equal(out_NTD[part], whole_NTD[part])
    device.close()
