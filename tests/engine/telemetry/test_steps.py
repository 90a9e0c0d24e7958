"""Statistics, totals and the cost model of steps."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.ipc.messages import SECONDS_BOUNDS, PipelineStats
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.telemetry import (
    StepCounter,
    StepParts,
    StepStats,
    predicted_speedup,
    row_share,
    step_parts,
    zombie_tax,
)

from tests.engine.telemetry.steps import MS, make_step

# ---------------------------------------------------------------- step stats
# Statistics of the running engine's decode steps.


def fed(steps, window=256):
    """Return statistics of these steps."""
    stats = StepStats(window)
    for step in steps:
        stats.add(step)
    return stats


def test_parts():
    """Every part comes from its own pair of times, the period from a pair of steps."""
    parts = step_parts(make_step(0), make_step(1))
    # Of the period the host is blocked from 1 to 8.5 ms; enqueueing the sampling is hidden.
    blocking = 6 * MS + 3 * MS // 2 + 10 * MS - 15 * MS // 2 - MS // 8
    assert parts == StepParts(
        period=10 * MS,
        forward=6 * MS,
        sampling=3 * MS // 2,
        bookkeeping=MS,
        wait=8 * MS,
        idle=3 * MS,
        blocking=blocking,
    )


@pytest.mark.parametrize("late", [0, 3 * MS])
def test_a_finished_copy_blocks_no_host(late):
    """A host that arrives after the copy was busy for the whole period, however late it arrives."""
    step = make_step(1)
    record = dataclasses.replace(step.record, wait_start=step.times.copy_end + late)
    record = dataclasses.replace(record, wait_end=record.wait_start)
    parts = step_parts(make_step(0), dataclasses.replace(step, record=record))
    assert parts.blocking == parts.forward + parts.sampling + parts.period - MS // 8


def test_snapshot_of_steady_steps():
    """Medians are in milliseconds; the prediction compares the blocking step with the period."""
    report = fed(make_step(i, zombies=i % 2) for i in range(5)).snapshot()
    assert report.num_steps == 4
    assert report.num_tokens == 5 * 2 - 2
    assert (report.rows, report.step_ms, report.forward_ms) == (2, 10.0, 6.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=PipelineStats) == report
    assert (report.sampling_ms, report.bookkeeping_ms, report.idle_ms) == (1.5, 1.0, 3.0)
    assert report.blocking_ms == pytest.approx(9.875)
    assert report.zombie_ratio == 2 / 8
    # Rows of one number do not tell what a row costs.
    assert report.predicted_gain == pytest.approx(0.9875 - 1)


def test_a_step_of_zombies_alone_costs_a_step_and_a_row_beside_others_a_row():
    """A batch loses less by an answer's end than a lone stream, which loses a whole step."""
    alone = fed(make_step(i, rows=1, zombies=int(i % 4 == 0)) for i in range(1, 10)).snapshot()
    assert alone.zombie_ratio == 1 / 4
    assert alone.predicted_gain == pytest.approx(0.9875 * 0.75 - 1)
    assert alone.observed_gain == pytest.approx(0.9875 * 0.75 - 1)
    batch = []
    for index in range(1, 10):  # forwards of 5 ms, and 0.125 ms for each row
        rows = 7 + index % 2
        step = make_step(index, rows=rows, zombies=2)
        forward_end = step.times.forward_start + 5 * MS + rows * MS // 8
        times = dataclasses.replace(step.times, forward_end=forward_end)
        batch.append(dataclasses.replace(step, times=times))
    report = fed(batch).snapshot()
    assert report.zombie_ratio == pytest.approx(2 / 7.5)
    blocking = report.blocking_ms * (1 - 0.25 / 10)
    assert report.predicted_gain == pytest.approx(blocking / 10 - 1)


def test_snapshot_counts_tokens_of_speculation():
    """Tokens that zombies do not have, and those of accepted drafts, are in the total."""
    report = fed(
        make_step(i, rows=3, zombies=1, drafted=8, accepted=3) for i in range(5)
    ).snapshot()
    assert report.num_tokens == 5 * 5


def test_only_a_decode_after_a_decode_is_measured():
    """Prefills and the steps after them count only by their tokens."""
    prefill = make_step(0, kind=LaunchKind.PREFILL, rows=1)
    stats = fed([prefill, make_step(1)])
    assert stats.snapshot() is None
    stats.add(make_step(2))
    stats.add(make_step(3, kind=LaunchKind.PREFILL))
    stats.add(make_step(4))
    assert stats.snapshot().num_steps == 1
    assert stats.snapshot().num_tokens == 1 + 4 * 2


def test_a_shared_launch_is_no_decode_step():
    """A mixed launch and the step after it count only by their tokens."""
    stats = fed([make_step(0), make_step(1)])
    assert stats.snapshot().num_steps == 1
    stats.add(make_step(2, kind=LaunchKind.PREFILL, rows=3, riding=2))
    stats.add(make_step(3))
    assert stats.snapshot().num_steps == 1
    assert stats.snapshot().num_tokens == 3 * 2 + 3


def test_the_window_slides():
    """Old steps leave the window; their tokens stay counted."""
    slow = [make_step(2 * i) for i in range(5)]
    fast = [make_step(9 + i) for i in range(5)]
    stats = fed([*slow, *fast], window=4)
    report = stats.snapshot()
    assert (report.num_steps, report.step_ms) == (4, 10.0)
    assert report.num_tokens == 20
    assert fed(slow, window=4).snapshot().step_ms == 20.0


def test_snapshots_are_rare_unless_fresh():
    """A busy engine renews its snapshot at most twice a second, an idle one at once."""
    stats = fed([make_step(0)])
    assert stats.latest(0.0, fresh=True) is None
    stats.add(make_step(1))
    first = stats.latest(100.0, fresh=False)
    assert first.num_steps == 1
    stats.add(make_step(2))
    assert stats.latest(100.4, fresh=False) is first
    assert stats.latest(100.4, fresh=True).num_steps == 2
    stats.add(make_step(3))
    assert stats.latest(100.8, fresh=False).num_steps == 2
    last = stats.latest(101.0, fresh=False)
    assert last.num_steps == 3
    assert stats.latest(999.0, fresh=True) is last


def test_figures_are_of_one_depth():
    """Steps before a change of the depth count no more, except by their tokens."""
    steps = [make_step(i) for i in range(8)]
    for step in steps[5:]:
        step.record.launch.depth = 1
    stats = fed(steps[:5])
    assert stats.snapshot().num_steps == 4
    stats.add(steps[5])
    assert stats.snapshot() is None
    for step in steps[6:]:
        stats.add(step)
    assert (stats.snapshot().num_steps, stats.snapshot().num_tokens) == (2, 16)


# ---------------------------------------------------------------- step totals


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


# ---------------------------------------------------------------- cost model

PUBLISHED = [  # streams, forward, forward of one stream, blocking, pipelined, L, predicted
    (1, 4.87, 4.87, 5.44, 5.10, 104, 0.057),
    (8, 6.66, 4.87, 7.52, 6.97, 113, 0.076),
    (32, 10.24, 4.87, 11.74, 10.52, 113, 0.111),
    (1, 2.45, 2.45, 3.11, 2.63, 115, 0.172),
    (8, 3.12, 2.45, 4.04, 3.30, 115, 0.222),
    (32, 3.80, 2.45, 5.55, 3.98, 104, 0.391),
]


@pytest.mark.parametrize(
    ("streams", "forward", "single", "blocking", "pipelined", "length", "expected"), PUBLISHED
)
def test_published_predictions(streams, forward, single, blocking, pipelined, length, expected):
    """The model gives the published predictions from the published parts."""
    tax = zombie_tax(length, row_share(forward, single, streams))
    assert predicted_speedup(blocking, pipelined, tax) - 1 == pytest.approx(expected, abs=0.002)


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(1, 64), st.floats(1, 1000))
def test_tax_is_a_share(forward, single, streams, length):
    """The tax is between zero and one step in L, whatever the noise of the parts."""
    tax = zombie_tax(length, row_share(forward, single, streams))
    assert 0 <= tax <= 1 / length
    assert predicted_speedup(2.0, 1.0, tax) <= 2.0
