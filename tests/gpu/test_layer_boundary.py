"""On a GPU: kernels whose thread blocks wait for each other have the bits of kernels that do not.

Shape legend: B tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from legato_engine.kernels.cuda import module
from legato_engine.kernels.cuda.decoder import MOST_TOKENS, LayerBoundary
from legato_engine.models.base import StepInputs
from legato_engine.models.moondream.decode_step import MoondreamStep

from tests.gpu.test_kernels import DEVICE, World, indexable, make_world
from tests.gpu.test_replays import different_replays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ONE_ROW = [(1, count) for count in range(1, MOST_TOKENS + 1)]
SEVERAL = [(2, 1), (2, 3), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1)]


@pytest.fixture(scope="module")
def world() -> World:
    """Moondream 2's widths in few layers."""
    return make_world("moondream2")


@pytest.fixture(scope="module", params=["as they are", "late at random"])
def kernels(request: pytest.FixtureRequest, world: World) -> Iterator[MoondreamStep]:
    """The kernels, and those whose warps come to where others wait for them at any time."""
    texts = dict(module.sources())
    if request.param == "late at random":
        texts["common.cuh"] = "#define DELAYS\n" + texts["common.cuh"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sources", lambda: texts)
        network = world.network
        yield MoondreamStep(world.config, network.text, network.region, world.kv)


@pytest.mark.parametrize(("rows", "count"), [*ONE_ROW, *SEVERAL])
def test_the_kernel_between_layers_changes_no_bits(world, kernels, monkeypatch, rows, count):
    """Neither of logits nor of keys and values, in any of a thousand replays."""
    inputs = verification(world, rows, count)
    taken: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(LayerBoundary, "takes", lambda self, batch: False)
        expected = world.forward(inputs)
    wanted = world.snapshot()
    run = LayerBoundary.run

    def counted(*given: Any) -> None:
        taken.append(given)
        run(*given)

    monkeypatch.setattr(LayerBoundary, "run", counted)
    assert different_replays(kernels, inputs, expected) == [0, 0]
    assert taken
    for cache, single in zip(indexable(world.kv), indexable(wanted), strict=True):
        assert torch.equal(cache, single)


def verification(world: World, rows: int, count: int) -> StepInputs:
    """`count` successive tokens of each of `rows`, deep in their contexts."""
    some = world.inputs().part(slice(0, rows * count))
    at_B = torch.arange(rows * count, device=DEVICE)
    row_B = some.row_B[at_B // count].contiguous()
    fresh_B = 600 + 13 * (at_B // count)
    return replace(
        some,
        source_B=row_B,
        row_B=row_B,
        position_B=fresh_B + at_B % count,
        fresh_B=fresh_B,
        num_groups=rows,
    )
