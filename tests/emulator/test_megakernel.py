"""The megakernel's own source on a CPU, every thread of it a fiber.

What holds on a GPU holds here, in whatever order threads run.
"""

from __future__ import annotations

import pytest
import torch
from legato_engine.kernels.megakernel.kernel import SOURCE, source_folder
from legato_engine.kernels.megakernel.sizes import ModelSizes

from tests.emulator.module import EmulatedFault, Schedule, sources
from tests.emulator.small import EVEN, SMALL, WIDE, emulated
from tests.megakernel import words
from tests.megakernel.words import Rows, World, bits_are_those_of_captured_steps


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return Schedule()


@pytest.fixture(scope="module")
def world(schedule: Schedule) -> World:
    return World(SMALL, emulated(schedule))


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, pytest.param(16, marks=pytest.mark.slow)])
def test_steps_are_the_models(world: World, num_rows: int) -> None:
    words.steps_are_the_models(world, num_rows, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "num_rows"),
    [*((EVEN, num_rows) for num_rows in (1, 5, 9, 16)), (WIDE, 1), (WIDE, 9), (WIDE, 16)],
    ids=lambda each: str(each) if isinstance(each, int) else f"width {each.dim}",
)
def test_bits_are_those_of_captured_steps(sizes: ModelSizes, num_rows: int) -> None:
    """Whose thread blocks are clusters of two from three rows on."""
    assert (sizes.out_parts > 1) == (sizes is WIDE)
    steps = 3 if sizes is EVEN else 1
    bits_are_those_of_captured_steps(World(sizes, emulated()), num_rows, steps)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 4, 11])
def test_many_steps_are_the_models(world: World, num_rows: int) -> None:
    """Beyond the end of a page for most rows."""
    words.steps_are_the_models(world, num_rows, steps=20)


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_batches_of_all_builds(world: World) -> None:
    words.a_row_has_the_same_bits_in_every_batch(world, (*range(2, 10), 15, 16))


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "build", "repeats"), [(1, 8, 60), (8, 8, 40), (13, 16, 20)])
def test_many_orders_of_threads_change_no_bit(
    world: World, num_rows: int, build: int, repeats: int
) -> None:
    words.repeats_have_the_same_bits(world, num_rows, build, repeats)


@pytest.mark.slow
def test_late_warps_change_nothing(world: World) -> None:
    words.late_warps_change_nothing(world, repeats=10, steps=6)


@pytest.mark.slow
def test_tokens_are_those_of_the_sampling_kernel_by_all_rules(world: World) -> None:
    words.tokens_are_those_of_the_sampling_kernel(world, num_rows=13, steps=2)


@pytest.mark.parametrize("shift", [2.0**20, 1e9], ids=["some", "all"])
def test_equal_scores_are_drawn_by_their_ids(world: World, shift: float) -> None:
    words.tokens_are_those_of_the_sampling_kernel(
        world, 5, 1, [(0.3, 0.7, 3), (2.5, 0.9, 0), (2.5, 1.0, 1), (0.3, 1.0, 0)], shift
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("const int digit = digit_of(0, x, peak, 0)", "const int digit = 0"),
        ("if (last.settled) return best.id;", ""),
    ],
    ids=["one range", "unsettled"],
)
def test_tokens_that_are_looked_at_again_are_the_same(
    schedule: Schedule, text: str, other: str
) -> None:
    """The range of the last kept token has all, or it is looked at though all of it is kept."""
    world = World(SMALL, emulated(schedule, ("draws.cuh", text, other)))
    words.tokens_are_those_of_the_sampling_kernel(world, num_rows=13, steps=2)


def test_a_row_has_the_same_bits_in_every_batch(world: World) -> None:
    words.a_row_has_the_same_bits_in_every_batch(world, (3, 9))


@pytest.mark.parametrize(("num_rows", "build", "repeats"), [(1, 8, 5), (7, 8, 2), (3, 16, 2)])
def test_the_order_of_threads_changes_no_bit(
    world: World, num_rows: int, build: int, repeats: int
) -> None:
    words.repeats_have_the_same_bits(world, num_rows, build, repeats, steps=2)


def test_rows_that_share_pages_have_their_own_bits(world: World) -> None:
    words.rows_that_share_pages_have_their_own_bits(world, 2, words.SHARING[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "text", "other"),
    [
        ("units.cuh", "min(unit.common, with_last)", "unit.common + 1"),
        ("attention.cuh", "if (begins || has_pages) track.store", "track.store"),
        (
            "loader.cuh",
            "shared.pages[index], unit.common, pages_of",
            "shared.pages[index], 0, pages_of",
        ),
    ],
    ids=["common", "tracks", "copies"],
)
def test_faults_of_sharing_are_found(schedule: Schedule, file: str, text: str, other: str) -> None:
    sources(SOURCE, source_folder(), [(file, text, other)])  # the text is there, once
    world = World(SMALL, emulated(schedule, (file, text, other)))
    with pytest.raises((AssertionError, EmulatedFault)):
        words.rows_that_share_pages_have_their_own_bits(world, 1, words.SHARING[:3])


@pytest.mark.slow
def test_many_rows_that_share_pages_have_their_own_bits(world: World) -> None:
    words.rows_that_share_pages_have_their_own_bits(world, 3)


def test_a_seed_is_an_order_of_threads(world: World, schedule: Schedule) -> None:
    """Wherever tensors are in memory; another seed is another order."""
    orders = []
    every_rows = []
    for seed in (3, 3, 3, 4):
        every_rows.append(Rows(world, 3))
        schedule.seed = seed
        every_rows[-1].run(world.kernel(3), 2)
        orders.append(schedule.order)
    assert orders[0] == orders[1] == orders[2] != orders[3]


def test_tokens_are_those_of_the_sampling_kernel(world: World) -> None:
    """Both are emulated."""
    words.tokens_are_those_of_the_sampling_kernel(
        world, num_rows=5, steps=2, rules=[(0.7, 1.0, 0), (1.5, 0.8, 20)]
    )


def test_the_host_ends_a_launch_after_any_step(world: World, schedule: Schedule) -> None:
    """What there is of the steps is what there would have been, and the next launch is whole."""
    rows, kernel = Rows(world, 2), world.kernel(2)
    expected, _ = rows.run(kernel, 4)
    ends = set()
    for turns in (1_000, 900_000, 1_400_000):
        schedule.host, schedule.host_every = kernel.stop, turns
        kernel.run(rows.cache, rows.tokens, rows.positions, 4)
        schedule.host = None
        assert kernel.ended("stopped")
        ends.add(kernel.steps)
        assert torch.equal(kernel.tokens(kernel.steps, 2), expected[: kernel.steps])
        assert torch.equal(rows.run(kernel, 4)[0], expected)
    assert 1 in ends
    assert len(ends) > 1


def test_a_row_that_is_not_finite_ends_the_launch(world: World) -> None:
    words.a_row_that_is_not_finite_ends_the_launch(world)


def test_a_stuck_wait_is_reported_and_ends_the_launch() -> None:
    words.a_stuck_wait_is_reported_and_ends_the_launch(
        World(SMALL, emulated(Schedule(patient=True)))
    )
