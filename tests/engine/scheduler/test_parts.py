"""Prompts in parts, each in one pass with the decodes."""

from __future__ import annotations

import random

import pytest
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.launch import BatchLimits, Plan
from legato_engine.scheduler.prefill_planner import PrefillPlanner
from legato_engine.sequence import Sequence

from tests.engine.scheduler.planning import PAGE, decodes_of, make_planner, planned, running, sized
from tests.engine.scheduler.test_loops import Looping
from tests.fakes import make_sequence

LIMITS = BatchLimits(4, tokens=99, sampled=8, pass_tokens=8)
DECODES = decodes_of(*(running(seq_id, launched=1) for seq_id in (7, 8, 9)))


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


def test_a_lone_prompt_is_cut_where_that_adds_no_pass() -> None:
    """A part leaves the pass its decodes; BOS, which it computes too, is no token of the prompt."""
    planner = planner_of(sized(0, 10))
    first = plan_of(planner)
    assert (spans(first), first.has_part, planned(first)) == ([(1, 4)], True, [7, 8, 9, 0])
    assert first.counted_rows == first.decodes == DECODES
    assert first.prefills[0].work.compute_pages
    last = plan_of(planner)
    assert (spans(last), last.has_part, planned(last)) == ([(5, 5)], False, [7, 8, 9, 0])
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
    assert not plan.has_part, why
    assert spans(plan) == [(1, positions - 1)]


def test_other_prompts_are_not_kept_waiting_by_parts() -> None:
    """They share a launch of several passes, as do those that come between two parts."""
    both = plan_of(planner_of(sized(0, 10), sized(1, 4)))
    assert (planned(both), both.has_part) == ([7, 8, 9, 0, 1], False)
    planner = planner_of(sized(0, 15))
    assert plan_of(planner, num_decodes=2).has_part
    planner.add(sized(1, 4))
    rest = plan_of(planner)
    assert (spans(rest), rest.has_part) == ([(6, 9), (1, 3)], False)


def test_what_is_not_cut() -> None:
    """A prompt with an image to compute, or any without limits of a pass."""
    image = make_sequence(0, sized(0, 10).task, prefix_key="k", prefix_length=9, num_crops=3)
    assert not plan_of(planner_of(image)).has_part
    unlimited = BatchLimits(4, tokens=99, sampled=8)
    assert not plan_of(planner_of(sized(0, 10), limits=unlimited)).has_part


def test_the_rest_is_one_part_when_no_decode_is_left() -> None:
    planner = planner_of(sized(0, 10))
    assert plan_of(planner).has_part
    rest = plan_of(planner, num_decodes=0)
    assert (spans(rest), rest.has_part) == ([(5, 5)], False)


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
    world = Looping(random.Random(0), limits=BatchLimits(3, 40, 6, pass_tokens=6), loops=False)
    first, second = world.submit(12), world.submit(12)
    world.until(second, 2)
    late = world.submit(3, num_prompt=8)
    have = len(first.tokens)
    while not world.runner.plans[-1].has_part:
        world.scheduler.step()
    if aborted:
        world.scheduler.abort(world.sequences.pop().request.request_id)
    else:
        world.until(late, 1)
        assert len(first.tokens) >= have + 2
        parts = [plan for plan in world.runner.plans if plan.has_part]
        assert [len(plan.decodes) for plan in parts] == [2]
    world.drain()
