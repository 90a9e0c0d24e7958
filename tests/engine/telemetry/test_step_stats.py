"""Statistics of the running engine's decode steps."""

import dataclasses

import msgspec
import pytest
from legato_engine.ipc.messages import PipelineStats
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.telemetry import StepParts, StepStats, step_parts

from tests.engine.telemetry.steps import MS, make_step


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


def test_snapshot_of_speculation():
    """Tokens are counted per row that is no zombie, and accepted per drafted token."""
    report = fed(
        make_step(i, rows=3, zombies=1, drafted=8, accepted=3) for i in range(5)
    ).snapshot()
    assert report.num_tokens == 5 * 5
    assert (report.tokens_per_row, report.proposed_per_row) == (2.5, 4.0)
    assert report.acceptance == 3 / 8
    plain = fed(make_step(i) for i in range(3)).snapshot()
    assert (plain.tokens_per_row, plain.proposed_per_row, plain.acceptance) == (1.0, 0.0, 0.0)


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
