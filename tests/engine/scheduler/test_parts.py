"""Prompts in parts, a launch each, while others decode."""

from __future__ import annotations

import dataclasses
import random

import pytest
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import BatchLimits, Plan
from legato_engine.scheduler.prefill import PrefillPlanner
from legato_engine.sequence import Sequence

from tests.engine.scheduler.planning import PAGE, decodes_of, make_planner, planned, running, sized
from tests.engine.scheduler.test_loops import Looping
from tests.fakes import FakeTask, make_sequence

LIMITS = BatchLimits(4, tokens=24, sampled=8, pass_tokens=8, chunk_above=64)
DECODES = decodes_of(*(running(seq_id, launched=1) for seq_id in range(7, 15)))


def planner_of(*sequences: Sequence, limits: BatchLimits = LIMITS) -> PrefillPlanner:
    planner = make_planner(KVCacheManager(65, PAGE, 5), limits=limits)
    for sequence in sequences:
        planner.add(sequence)
    return planner


def plan_of(planner: PrefillPlanner, num_decodes: int = 3) -> Plan:
    plan = planner.plan(decodes=DECODES[:num_decodes])
    assert plan is not None
    return plan


def spans(plan: Plan) -> list[tuple[int, int]]:
    return [(row.position, row.num_tokens) for row in plan.prefills]


def test_a_lone_prompt_is_cut_where_that_adds_few_passes() -> None:
    """A part leaves the pass its decodes; BOS, which it computes too, is no token of the prompt."""
    planner = planner_of(sized(0, 10))
    first = plan_of(planner)
    assert (spans(first), first.has_partial_prefill, planned(first)) == (
        [(1, 4)],
        True,
        [7, 8, 9, 0],
    )
    assert first.counted_rows == first.decodes == DECODES[:3]
    assert first.prefills[0].work.compute_pages
    last = plan_of(planner)
    assert (spans(last), last.has_partial_prefill, planned(last)) == ([(5, 5)], False, [7, 8, 9, 0])
    assert last.counted_rows == last.rows
    assert not last.prefills[0].work.compute_pages
    assert not planner.has_work


@pytest.mark.parametrize(
    ("positions", "num_decodes", "why"),
    [
        (5, 3, "it fits one pass"),
        (12, 3, "three parts instead of two passes"),
        (10, 0, "no decode waits"),
    ],
)
def test_a_prompt_is_whole_where_parts_win_nothing(
    positions: int, num_decodes: int, why: str
) -> None:
    plan = plan_of(planner_of(sized(0, positions)), num_decodes)
    assert not plan.has_partial_prefill, why
    assert spans(plan) == [(1, positions - 1)]


def test_other_prompts_are_not_kept_waiting_by_parts() -> None:
    """They share a launch of several passes, as do those that come between two parts."""
    both = plan_of(planner_of(sized(0, 10), sized(1, 4)))
    assert (planned(both), both.has_partial_prefill) == ([7, 8, 9, 0, 1], False)
    planner = planner_of(sized(0, 15))
    assert plan_of(planner, num_decodes=2).has_partial_prefill
    planner.add(sized(1, 4))
    rest = plan_of(planner)
    assert (spans(rest), rest.has_partial_prefill) == ([(6, 9), (1, 3)], False)


def with_image(num_prompt: int) -> Sequence:
    task = FakeTask(num_prompt=num_prompt, max_tokens=1)
    return make_sequence(0, task, prefix_key="k", prefix_length=9, num_crops=3)


@pytest.mark.parametrize(
    ("positions", "num_decodes", "expected"),
    [
        (24, 3, [(1, 12), (13, 11)]),  # four passes instead of three; parts of one would be five
        (33, 2, [(1, 5), (6, 6), (12, 6), (18, 6), (24, 6), (30, 3)]),  # six passes instead of five
        (33, 7, [(1, 16), (17, 9), (26, 7)]),  # no parts add so few, then the rest fits a launch
        (33, 8, [(1, 23), (24, 9)]),  # no room for it beside them
        (20, 8, [(1, 19)]),  # nor does it share a launch with them
        (65, 3, [(1, 64)]),  # its passes are of another kind
    ],
)
def test_parts_are_the_smallest_that_add_few_passes(
    positions: int, num_decodes: int, expected: list[tuple[int, int]]
) -> None:
    """All but the last are parts, and decodes go on in each, or between them if they are many."""
    planner = planner_of(sized(0, positions))
    plans = [plan_of(planner, num_decodes) for _ in expected]
    assert [spans(plan) for plan in plans] == [[span] for span in expected]
    assert [plan.has_partial_prefill for plan in plans] == [True] * (len(plans) - 1) + [False]
    is_cut = len(plans) > 1
    beside = num_decodes if is_cut and num_decodes < LIMITS.sampled else 0
    assert {len(plan.decodes) for plan in plans} == {beside}
    assert not planner.has_work


def test_a_long_prompt_is_cut_though_others_wait() -> None:
    """They share the launch of its last part. An image is computed with the first."""
    planner = planner_of(with_image(33), sized(1, 4))
    first = plan_of(planner, 7)
    assert (spans(first), first.has_partial_prefill) == ([(9, 17)], True)
    assert first.prefills[0].encodes
    rest = plan_of(planner, num_decodes=4)
    assert (spans(rest), rest.has_partial_prefill) == ([(26, 16), (1, 3)], False)
    assert not rest.prefills[0].encodes


def test_parts_of_a_long_prompt_are_its_own_passes() -> None:
    """They are whole passes with BOS, which no decode and no other prompt joins, even the last."""
    limits = dataclasses.replace(LIMITS, chunk_above=24, long_chunk_tokens=12)
    planner = planner_of(sized(0, 30), sized(1, 4), limits=limits)
    plans = [plan_of(planner) for _ in range(3)]
    assert [spans(plan) for plan in plans] == [[(1, 11)], [(12, 12)], [(24, 6)]]
    assert [plan.has_partial_prefill for plan in plans] == [True, True, False]
    assert [planned(plan) for plan in plans] == [[0], [0], [0]]
    assert planned(plan_of(planner)) == [7, 8, 9, 1]
    alone = plan_of(planner_of(sized(0, 30), limits=limits), num_decodes=0)
    assert (spans(alone), alone.has_partial_prefill) == ([(1, 29)], False)


def test_what_is_not_cut() -> None:
    """A prompt that could share its launch with an image stays whole.

    So does any without limits of a pass.
    """
    assert not plan_of(planner_of(with_image(10))).has_partial_prefill
    unlimited = BatchLimits(4, tokens=24, sampled=8)
    assert not plan_of(planner_of(sized(0, 10), limits=unlimited)).has_partial_prefill


def test_the_rest_is_one_part_when_no_decode_is_left() -> None:
    planner = planner_of(sized(0, 10))
    assert plan_of(planner).has_partial_prefill
    rest = plan_of(planner, num_decodes=0)
    assert (spans(rest), rest.has_partial_prefill) == ([(5, 5)], False)


def test_a_request_ends_between_two_parts() -> None:
    """Then nothing is left to plan."""
    sequence = sized(0, 10)
    planner = planner_of(sequence)
    plan_of(planner)
    planner.remove(sequence)
    assert not planner.has_work
    assert planner.plan(decodes=DECODES) is None


@pytest.mark.parametrize("aborted", [False, True])
def test_decodes_go_on_in_each_part(aborted: bool) -> None:
    """Every answer is what it is alone; a request that is aborted between parts leaves nothing."""
    world = Looping(
        random.Random(0), limits=BatchLimits(3, 40, 6, pass_tokens=6, chunk_above=40), loops=False
    )
    first, second = world.submit(12), world.submit(12)
    world.until(second, 2)
    late = world.submit(3, num_prompt=8)
    have = len(first.tokens)
    while not world.runner.plans[-1].has_partial_prefill:
        world.scheduler.step()
    if aborted:
        world.scheduler.abort(world.sequences.pop().request.request_id)
    else:
        world.until(late, 1)
        assert len(first.tokens) >= have + 2
        parts = [plan for plan in world.runner.plans if plan.has_partial_prefill]
        assert [len(plan.decodes) for plan in parts] == [2]
    world.drain()
