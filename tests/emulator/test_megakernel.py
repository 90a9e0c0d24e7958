"""The megakernel's own source on a CPU, every thread of it a fiber.

What holds on a GPU holds here, in whatever order threads run.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from legato_engine.kernels.megakernel.kernel import SOURCE, source_folder
from legato_engine.kernels.megakernel.sizes import MOONDREAM2, ModelSizes

from benchmarks.megakernel.drafts import DraftingRows
from tests.emulator.module import (
    EVEN,
    NARROW,
    SMALL,
    WIDE,
    EmulatedFault,
    Schedule,
    emulated,
    sources,
)
from tests.megakernel import both, drafts, values, words
from tests.megakernel.both import values_beside_drafts_change_no_bit
from tests.megakernel.drafts import Scene
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


@pytest.mark.parametrize(("num_rows", "build", "repeats"), [(1, 8, 3), (7, 8, 2), (3, 16, 2)])
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


@pytest.fixture(scope="module")
def value_world() -> values.World:
    return values.World(SMALL, emulated())


@pytest.mark.parametrize(
    "num_rows", [1, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (13, 16))]
)
def test_values_are_fed_back_as_the_model_does(value_world: values.World, num_rows: int) -> None:
    values.values_are_fed_back_as_the_model_does(value_world, num_rows, steps=3)


@pytest.mark.slow
def test_many_orders_of_threads_change_no_value(value_world: values.World) -> None:
    for num_rows in (1, 8, 13):
        values.repeats_have_the_same_bits(value_world, num_rows, repeats=20)


def test_bins_are_those_of_the_decoders(value_world: values.World) -> None:
    values.bins_are_those_of_the_decoders(value_world, num_rows=8)


@pytest.mark.parametrize(
    ("num_rows", "parts"),
    [(5, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((13, 1), (1, 4), (13, 4)))],
)
def test_bits_of_values_are_those_of_captured_steps(num_rows: int, parts: int) -> None:
    """With bins that are sums of as many parts of the inner activations."""
    inner_dim = 4096 if parts > 1 else 4 * SMALL.dim
    value_world = values.World(dataclasses.replace(SMALL, num_layers=1), emulated(), inner_dim)
    assert value_world.values.sizes.parts == parts
    values.bits_are_those_of_captured_steps(value_world, num_rows)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 5, 13, 16])
def test_steps_are_captured_ones(num_rows: int) -> None:
    values.steps_are_captured_ones(values.World(EVEN, emulated()), num_rows, steps=3)


@pytest.mark.slow
def test_steps_of_moondream_2s_width_are_captured_ones() -> None:
    """One layer and fewer words: all else is as large as on a GPU."""
    sizes = dataclasses.replace(MOONDREAM2, num_layers=1, vocab_size=MOONDREAM2.dim)
    value_world = values.World(sizes, emulated())
    assert min(sizes.out_parts, value_world.values.sizes.parts) > 1
    values.steps_are_captured_ones(value_world, num_rows=9, steps=2)


def test_a_row_with_values_has_the_same_bits_in_every_batch(value_world: values.World) -> None:
    values.a_row_has_the_same_bits_in_every_batch(value_world, (4,), steps=2)


def test_words_have_the_same_bits_by_both_builds(value_world: values.World) -> None:
    values.words_have_the_same_bits_by_both_builds(value_world, (5,))


def test_the_order_of_threads_changes_no_value(value_world: values.World) -> None:
    values.repeats_have_the_same_bits(value_world, num_rows=6, repeats=2, steps=2)


# ---------------------------------------------------------------- drafts
# Draft tokens inside the megakernel, on the emulated machine.
#
# What the kernel settles and places is compared with `ReferenceDrafts`.

# A warp's second page of a row begins at position 512.
SCENE = Scene(places=(557, 31), tokens=14, most=3, back=20)
LONG_BLOCKS = Scene(places=(44,), tokens=30, most=11, back=40)


@pytest.fixture(scope="module")
def draft_world(schedule: Schedule) -> drafts.World:
    return drafts.World(NARROW, SCENE, emulated(schedule))


@pytest.mark.parametrize(
    ("name", "count"), [("fixed", 1), pytest.param("budget", 2, marks=pytest.mark.slow)]
)
def test_drafts_change_no_bit(draft_world: drafts.World, name: str, count: int) -> None:
    drafts.drafts_change_no_bit(draft_world, name, count, (0.0, 0.6, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("fixed", 2), ("seed", 2), ("budget", 1), ("budget", 2)]
)
def test_long_drafts_change_no_bit(name: str, count: int) -> None:
    """Up to 16 tokens a step, of rows with several pages."""
    scene = Scene(places=(200, 64), tokens=24, most=7, back=40)
    draft_world = drafts.World(NARROW, scene, emulated())
    drafts.drafts_change_no_bit(draft_world, name, count)


@pytest.mark.slow
def test_many_orders_of_threads_change_no_draft(draft_world: drafts.World) -> None:
    for count in (1, 2):
        drafts.repeats_have_the_same_bits(draft_world, count, repeats=20)


@pytest.mark.slow
def test_more_tokens_than_attention_takes_at_once_change_no_bit() -> None:
    """A row with 12 tokens in a step is two units of attention."""
    drafts.drafts_change_no_bit(
        drafts.World(NARROW, LONG_BLOCKS, emulated()), "fixed", 1, (0.7, 1.0)
    )


def test_pages_and_last_tokens_end_a_launch(draft_world: drafts.World) -> None:
    drafts.pages_and_last_tokens_end_a_launch(draft_world, 2, (0, 5), (7,))


def test_rows_that_have_ended_feed_nothing(draft_world: drafts.World) -> None:
    drafts.rows_that_have_ended_feed_nothing(draft_world, 2)


def test_the_host_ends_a_launch_with_drafts_after_any_step(
    draft_world: drafts.World, schedule: Schedule
) -> None:
    def stop_later(rows: DraftingRows, chance: random.Random) -> None:
        left = chance.randrange(400)

        def host() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                rows.ring.stop()

        schedule.host, schedule.host_every = host, 5000

    lengths = drafts.the_host_ends_a_launch_after_any_step(
        draft_world, 2, 5, stop_later, start_first=False
    )
    schedule.host = None
    assert len(lengths) > 2


# ---------------------------------------------------------------- beside rows with values

NEAR_SCENE = Scene(places=(44, 31), tokens=14, most=3, back=20)


def test_values_beside_drafts_change_no_bit() -> None:
    values_beside_drafts_change_no_bit(both.World(NARROW, NEAR_SCENE, emulated()), "fixed", seeds=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "seed", "budget"])
def test_values_beside_drafts_of_more_rows_change_no_bit(name: str) -> None:
    """Up to 16 tokens a step, of rows with several pages."""
    scene = Scene(places=(200, 65, 63, 64), tokens=24, most=3, back=40)
    values_beside_drafts_change_no_bit(both.World(SMALL, scene, emulated()), name)
