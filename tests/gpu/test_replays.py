"""On a GPU: steps that follow each other at once have the bits of a step alone.

A kernel then begins while the one before it ends, and its stages of weights are overwritten while
others are read.
"""

from __future__ import annotations

import pytest
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.models.base import StepInputs
from legato_engine.models.moondream.decode_step import MoondreamStep

from tests.gpu.test_kernels import DEVICE, World, make_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REPLAYS = 50
"""In a row, so that a step begins while the one before it ends."""
TIMES = 20


@pytest.fixture(scope="module", params=["moondream2", "moondream3", "moondream3-e4m3"])
def world(request: pytest.FixtureRequest) -> World:
    """A model's widths in few layers."""
    return make_world(request.param)


@pytest.mark.parametrize("batch", [1, 4, 8, 9, 16, 24, 32])
def test_steps_at_once_have_the_bits_of_one_alone(world, batch):
    """Hidden state and logits, in any of a thousand replays."""
    inputs = world.inputs().part(slice(0, batch))
    expected = world.forward(inputs)
    torch.cuda.synchronize()
    assert different_replays(world.kernels, inputs, expected) == [0, 0]


def different_replays(
    kernels: MoondreamStep, inputs: StepInputs, expected: tuple[torch.Tensor, torch.Tensor]
) -> list[int]:
    """Return how many of a thousand replays have another hidden state, and other logits."""
    out = tuple(torch.full_like(tensor, torch.nan) for tensor in expected)
    wrong = torch.zeros(len(out), dtype=torch.int64, device=DEVICE)

    def step() -> None:
        for tensor in out:
            tensor.fill_(torch.nan)
        kernels.forward(inputs, *out)
        for i, (ours, theirs) in enumerate(zip(out, expected, strict=True)):
            wrong[i] += (ours != theirs).any()

    replay = CudaDevice(0).capture(step)
    for _ in range(TIMES):
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    return wrong.tolist()
