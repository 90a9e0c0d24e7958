"""The resident kernel's own source, every thread of it a fiber: its steps are the model's, in
whatever order its threads run.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.resident_model import forward
from tests.emulator.worlds import Rows, World


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13])
def test_steps_are_the_models(world: World, num_rows: int) -> None:
    """Logits of every step are those of float32 within bf16's rounding, and its token is the
    highest of them.
    """
    rows, steps = Rows(world, num_rows), 3
    expected_cache = rows.cache.clone()
    tokens, logits = rows.run(world.kernel(num_rows), steps)
    fed = rows.tokens
    for step in range(steps):
        expected, _ = forward(world.model, expected_cache, fed, rows.positions + step)
        error = (logits[step].double() - expected).norm() / expected.double().norm()
        assert error < 1e-2
        assert torch.equal(tokens[step], logits[step].argmax(-1))
        fed = tokens[step]


@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_order_of_threads_changes_no_bit(world: World, num_rows: int) -> None:
    rows, kernel, told = Rows(world, num_rows), world.kernel(num_rows), []
    for seed in range(5):
        world.schedule.seed = seed
        told.append(rows.run(kernel, 2))
    for tokens, logits in told[1:]:
        assert torch.equal(tokens, told[0][0])
        assert torch.equal(logits, told[0][1])
