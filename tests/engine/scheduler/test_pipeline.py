"""The pipeline: slots, order and references."""

import pytest
from legato_engine.scheduler.batch import LaunchKind, Phase, Plan, ScheduledSequence
from legato_engine.scheduler.scheduler import Pipeline
from legato_engine.sequence import Sequence

from tests.fakes import make_sequence


def plan(*sequences: Sequence) -> Plan:
    """A decode batch."""
    return Plan(
        LaunchKind.DECODE, tuple(ScheduledSequence(sequence, position=2) for sequence in sequences)
    )


def test_launches_alternate_between_two_slots() -> None:
    """A slot is taken again only after its launch was committed."""
    pipeline, sequence = Pipeline(2), make_sequence(0)
    first = pipeline.launch(plan(sequence))
    pipeline.mark_sampled(first)
    second = pipeline.launch(plan(sequence))
    pipeline.mark_sampled(second)
    assert not pipeline.can_launch()
    assert {first.slot, second.slot} == {0, 1}
    pipeline.commit(first)
    assert pipeline.launch(plan(sequence)).slot == first.slot


def test_depth_one_has_one_launch_in_flight() -> None:
    """At depth 1 a launch waits for the commit before it."""
    pipeline, sequence = Pipeline(1), make_sequence(0)
    launch = pipeline.launch(plan(sequence))
    pipeline.mark_sampled(launch)
    assert not pipeline.can_launch()
    pipeline.commit(launch)
    assert pipeline.can_launch()


def test_only_one_launch_waits_for_sampling() -> None:
    """No launch follows an unsampled launch."""
    pipeline = Pipeline(2)
    launch = pipeline.launch(plan(make_sequence(0)))
    assert pipeline.unsampled() is launch
    assert not pipeline.can_launch()
    with pytest.raises(AssertionError, match="unsampled"):
        pipeline.launch(plan(make_sequence(1)))
    pipeline.mark_sampled(launch)
    assert pipeline.unsampled() is None
    assert pipeline.can_launch()


def test_a_launch_is_sampled_once() -> None:
    """Sampling is marked on the one launch that waits for it."""
    pipeline = Pipeline(2)
    launch = pipeline.launch(plan(make_sequence(0)))
    pipeline.mark_sampled(launch)
    with pytest.raises(AssertionError, match="not the unsampled one"):
        pipeline.mark_sampled(launch)


def test_the_oldest_commits_first() -> None:
    """Commits come in launch order."""
    pipeline = Pipeline(2)
    first = pipeline.launch(plan(make_sequence(0)))
    pipeline.mark_sampled(first)
    second = pipeline.launch(plan(make_sequence(1)))
    pipeline.mark_sampled(second)
    assert pipeline.oldest() is first
    with pytest.raises(AssertionError, match="not the oldest"):
        pipeline.commit(second)
    pipeline.commit(first)
    assert first.phase is Phase.COMMITTED
    assert pipeline.oldest() is second


def test_an_unsampled_launch_cannot_commit() -> None:
    """A launch is sampled before its commit."""
    pipeline = Pipeline(2)
    launch = pipeline.launch(plan(make_sequence(0)))
    with pytest.raises(AssertionError, match="unsampled"):
        pipeline.commit(launch)


def test_references_count_the_launches_in_flight() -> None:
    """A sequence in two launches is releasable after the second commit, if it ended."""
    pipeline, ended, alive = Pipeline(2), make_sequence(0), make_sequence(1)
    first = pipeline.launch(plan(ended, alive))
    pipeline.mark_sampled(first)
    second = pipeline.launch(plan(ended, alive))
    pipeline.mark_sampled(second)
    assert (ended.inflight_refs, alive.inflight_refs) == (2, 2)
    ended.finalized = True
    assert pipeline.commit(first) == []
    assert ended.finalized
    assert ended.inflight_refs
    assert pipeline.commit(second) == [ended]
    assert (ended.inflight_refs, alive.inflight_refs) == (0, 0)
    assert len(pipeline) == 0


def test_a_finalized_sequence_is_not_launched() -> None:
    """A zombie gets no further launch."""
    sequence = make_sequence(0)
    sequence.finalized = True
    with pytest.raises(AssertionError, match="launched when finalized"):
        Pipeline(2).launch(plan(sequence))


@pytest.mark.parametrize("depth", [0, 3])
def test_there_are_two_depths(depth: int) -> None:
    """Two slots serve depth 1 and depth 2."""
    with pytest.raises(AssertionError, match="depth"):
        Pipeline(depth)
