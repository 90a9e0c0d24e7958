"""Plans and scheduled sequences."""

import dataclasses

from legato_engine.scheduler.batch import LaunchKind, Plan, ScheduledSequence

from tests.engine.scheduler.planning import PAGE, decodes_of, running


def test_new_pages_are_those_that_no_earlier_launch_could_reach() -> None:
    """They begin between its farthest start and its end; there may be several."""
    sequence = running(0, launched=2, max_tokens=60)
    rows = [
        ScheduledSequence(sequence, 5, num_drafts=k, slack=s)
        for k, s in ((0, 0), (2, 0), (8, 2), (8, 4))
    ]
    assert [list(row.new_pages(PAGE)) for row in rows] == [[], [], [2, 3], [3, 4]]
    assert list(ScheduledSequence(sequence, 8).new_pages(PAGE)) == [2]


def test_a_shared_launch_waits_for_the_constraints_of_its_decodes() -> None:
    """A prompt's constraint is known when it is planned."""
    free, boxes = running(0, launched=1), running(1, launched=1)
    boxes.task.constrained = True
    prompt = ScheduledSequence(boxes, 0, 3)
    for decodes, waits in ((decodes_of(free), False), (decodes_of(free, boxes), True)):
        plan = Plan(LaunchKind.PREFILL, (*decodes, prompt), len(decodes))
        assert plan.constrained is waits


def test_a_loop_behind_tokens_that_the_device_follows_waits_for_no_constraints() -> None:
    boxes = running(0, launched=1)
    boxes.task.constrained = True
    plan = Plan(LaunchKind.DECODE, decodes_of(boxes), num_steps=4)
    assert plan.constrained
    assert not dataclasses.replace(plan, after=(0,)).constrained
