"""Totals over all launches."""

import pytest
from legato_engine.ipc.messages import SECONDS_BOUNDS
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.telemetry import StepCounter

from tests.engine.telemetry.steps import make_step


def totals_of(*steps):
    """Return the totals after these steps."""
    counter = StepCounter()
    for step in steps:
        counter.add(step)
    return counter.totals()


def test_decodes_after_decodes_are_timed():
    """Steps of 10 ms with 3 ms of idle device each add up."""
    totals = totals_of(*(make_step(i) for i in range(5)))
    assert totals.launches == {"decode": 5}
    assert totals.tokens == 10
    assert sum(totals.step_times.counts) == 4
    assert totals.step_times.total == pytest.approx(0.04)
    assert totals.decode_seconds == pytest.approx(0.04)
    assert totals.idle_seconds == pytest.approx(0.012)


def test_a_token_gap_spans_the_prefill_of_another_request():
    """Two decodes with a prefill between them are 20 ms apart for each of their rows."""
    prefill = make_step(1, kind=LaunchKind.PREFILL, rows=1)
    totals = totals_of(make_step(0), prefill, make_step(2))
    assert sum(totals.token_gaps.counts) == 2
    assert totals.token_gaps.total == pytest.approx(2 * 0.02)


def test_a_pause_of_the_engine_is_no_token_gap():
    """After a pause the first gap begins with the prefill, and no step time spans the pause."""
    late = make_step(100, kind=LaunchKind.PREFILL, rows=1)
    totals = totals_of(make_step(0), late, make_step(101, rows=1))
    assert sum(totals.token_gaps.counts) == 1
    assert totals.token_gaps.total == pytest.approx(0.01)
    assert sum(totals.step_times.counts) == 0


def test_tokens_of_one_block_share_its_time():
    """Two rows that commit 2 tokens each in 10 ms have gaps of 5 ms."""
    steps = [make_step(i, drafted=4, accepted=2) for i in range(2)]
    totals = totals_of(*steps)
    assert sum(totals.token_gaps.counts) == 4
    assert totals.token_gaps.total == pytest.approx(4 * 0.005)
    assert (totals.drafted, totals.accepted) == (8, 4)


def test_a_duration_above_all_bounds_has_a_bin():
    """Nothing is lost above the last bound."""
    slow = [make_step(0), make_step(1)]
    slow[1].record.commit_end += int(60e9)
    totals = totals_of(*slow)
    assert totals.step_times.counts[-1] == 1
    assert len(totals.step_times.counts) == len(SECONDS_BOUNDS) + 1


def test_blocks_count_by_the_size_that_the_device_chose():
    """Each row and step of a loop counts; rows that drafted nothing do not."""
    step = make_step(0, drafted=13, accepted=2)
    step.record.blocks += [4, 0, 4, 5]
    assert totals_of(step).blocks == {4: 2, 5: 1}
