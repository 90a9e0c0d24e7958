"""Steps and the timeline of a model are recorded and told."""

import dataclasses
import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.bench import trace
from legato_engine.bench.workload import Workload
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.ipc.messages import SECONDS_BOUNDS, PipelineStats
from legato_engine.scheduler.batch import Launch, LaunchKind, Plan, ScheduledSequence, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes, Step
from legato_engine.scheduler.output import SilentSink
from legato_engine.telemetry import (
    LANES,
    PERIOD,
    SpanMaker,
    StepCounter,
    StepParts,
    StepStats,
    Timeline,
    TimelineStream,
    predicted_speedup,
    row_share,
    step_feed,
    step_parts,
    trace_events,
    zombie_tax,
)

from tests.fakes import make_sequence

MS = 1_000_000


def make_step(index, *, rows=2, kind=LaunchKind.DECODE, zombies=0, drafted=0, accepted=0, riding=0):
    """Return a step of 10 ms: forward 0-6, sampling 7-8, copy until 8.5, host work of 1 ms."""
    at = index * 10 * MS
    plan = Plan(kind, tuple(ScheduledSequence(make_sequence(i), 1) for i in range(rows)), riding)
    record = StepRecord(
        launch=Launch(index, index % 2, plan),
        plan_start=at - MS,
        plan_end=at - MS // 2,
        launch_end=at - MS // 4,
        sample_start=at,
        sample_end=at + MS // 8,
        wait_start=at + MS,
        wait_end=at + 9 * MS,
        commit_end=at + 9 * MS + MS // 8,
        zombies=zombies,
        tokens=rows - zombies + accepted,
        drafted=drafted,
        accepted=accepted,
    )
    times = LaunchTimes(
        forward_start=at,
        forward_end=at + 6 * MS,
        sample_start=at + 7 * MS,
        sample_end=at + 8 * MS,
        copy_end=at + 8 * MS + MS // 2,
    )
    return Step(record, times)


# ---------------------------------------------------------------- steps
# Statistics, totals and the cost model of steps.


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


# ---------------------------------------------------------------- timeline
# The timeline of a run on a real model, at its end and as it happens.


CONFIG = EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=2)


@pytest.fixture(scope="module")
def assembly():
    """One model for all tests."""
    made = assemble(CONFIG)
    yield made
    made.device.close()


def traced(assembly, depth, kind="query", capacity=1000):
    """Return the timeline of three requests on two rows."""
    timeline = Timeline(capacity)
    feed = step_feed(assembly.runner.times, (timeline.add,))
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=depth, observer=feed)
    for sequence in Workload(assembly, kind=kind, count=3, length=20).sequences():
        scheduler.submit(sequence)
    scheduler.drain()
    return timeline


@pytest.mark.parametrize("kind", ["query", "caption"])
@pytest.mark.parametrize("depth", [1, 2])
def test_lanes_never_overlap_themselves(assembly, depth, kind):
    """On every lane a span ends before the next begins."""
    events = trace_events(traced(assembly, depth, kind).steps)
    for lane, name in enumerate(LANES):
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == lane
        )
        assert spans or (depth == 1 and name == "slot 1")
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start, name


def test_forward_runs_ahead_of_the_commit(assembly):
    """Only at depth 2 a forward begins before the commit of the launch before it."""
    for depth in (1, 2):
        steps = traced(assembly, depth).steps
        ahead = [
            later.times.forward_start < earlier.record.commit_end
            for earlier, later in itertools.pairwise(steps)
        ]
        assert any(ahead) == (depth == 2)


def test_ring_keeps_the_last(assembly):
    """A full timeline drops the oldest launches."""
    timeline = traced(assembly, 2, capacity=5)
    ids = [step.record.launch.launch_id for step in timeline.steps]
    assert ids == list(range(ids[0], ids[0] + 5))
    assert ids[0] > 0


def test_every_listener_gets_every_step_and_times_are_read_once():
    """All listeners get the same steps in order; device times are read once per launch."""
    asked = []

    def times(launch):
        asked.append(launch.launch_id)
        return LaunchTimes(0, 1, 2, 3, 4)

    first, second = Timeline(capacity=9), Timeline(capacity=9)
    feed = step_feed(times, (first.add, second.add))
    for launch_id in range(3):
        launch = Launch(launch_id, launch_id % 2, Plan(LaunchKind.DECODE, ()))
        feed(StepRecord(launch, plan_start=0, plan_end=0))
    assert asked == [0, 1, 2]
    assert [step.record.launch.launch_id for step in first.steps] == [0, 1, 2]
    assert all(a is b for a, b in zip(first.steps, second.steps, strict=True))


@pytest.mark.parametrize("task", ["query", "detect"])
def test_command_writes_a_trace(tmp_path, capsys, task):
    """The file is a Chrome trace with named lanes, ordered spans and an arrow per launch."""
    path = tmp_path / "trace.json"
    arguments = ["--model", "random-tiny", "--device", "cpu", "--threads", "1", "--task", task]
    assert trace.main([*arguments, "--length", "8", "--output", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["displayTimeUnit"] == "ms"
    events = written["traceEvents"]
    assert {e["ph"] for e in events} == set("MXstf")
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert list(lanes.values()) == list(LANES)
    for lane, name in lanes.items():
        spans = [e for e in events if e["ph"] == "X" and e["tid"] == lane]
        assert spans, f"nothing on {name}"
        assert all(span["dur"] >= 0 for span in spans)
        for before, after in itertools.pairwise(spans):
            # Times are floating-point microseconds on a clock of many seconds.
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01, name
    launches = {e["args"]["launch"] for e in events if e["ph"] == "X"}
    assert launches == set(range(len(launches)))
    for phase in "stf":
        assert {e["id"] for e in events if e["ph"] == phase} == launches


# ---------------------------------------------------------------- timeline stream


class FakeWatchers:
    """Keeps the batches."""

    def __init__(self, watched):
        self.watched = watched
        self.batches = []

    def send_timeline(self, batch):
        self.batches.append(batch)


def streamed(watchers, count):
    """Return a stream, and the steps that it got."""
    stats = StepStats()
    stream = TimelineStream(watchers, stats)
    steps = [make_step(i) for i in range(count)]
    for step in steps:
        stats.add(step)
        stream.add(step)
    return stream, steps


def test_batches_hold_a_period_of_launches_and_lose_none():
    """Steps of 10 ms come in batches of one period; the rest comes with a flush."""
    watchers = FakeWatchers(watched=True)
    stream, steps = streamed(watchers, 24)
    sent = len(watchers.batches)
    assert 24 * 10 / (PERIOD * 1000) - 2 <= sent <= 24 * 10 / (PERIOD * 1000) + 2
    stream.flush()
    spans = [span for batch in watchers.batches for span in batch.spans]
    assert [s.launch for s in spans if s.name == "forward"] == list(range(24))
    assert {span.lane for span in spans} == set(LANES)
    forwards = [(s.start, s.duration) for s in spans if s.name == "forward"]
    assert forwards == [(step.times.forward_start, 6 * MS) for step in steps]
    assert watchers.batches[-1].decode_steps.num_steps == 23
    assert {span.tokens for span in spans} == {2}
    assert {batch.pipeline_depth for batch in watchers.batches} == {2}
    assert len({batch.started for batch in watchers.batches}) == 1


def test_nothing_is_made_while_nothing_watches():
    """Without a watcher no span is kept, also not for a later flush."""
    watchers = FakeWatchers(watched=False)
    stream, _ = streamed(watchers, 24)
    stream.flush()
    assert watchers.batches == []


def test_idle_spans_are_the_gaps_of_the_device():
    """Between launches of a busy engine the idle lane has what the device waited."""
    watchers = FakeWatchers(watched=True)
    stream, _ = streamed(watchers, 3)
    stream.flush()
    idle = [s for batch in watchers.batches for s in batch.spans if s.lane == "device idle"]
    assert [s.duration for s in idle if s.launch == 1] == [2 * MS, MS]
    assert [s.duration for s in idle if s.launch == 0] == [MS]


def test_a_blocking_loop_leaves_the_device_idle_between_decodes():
    """A decode has work from the commit before on; a prefill may have come after a pause."""
    for kind, gaps in ((LaunchKind.DECODE, [2, 1]), (LaunchKind.PREFILL, [1])):
        maker = SpanMaker()
        for index in range(2):
            step = make_step(index, kind=kind)
            step.record.commit_end = step.record.plan_start  # before the next one is planned
            spans = maker.spans(step)
        assert [s.duration // MS for s in spans if s.lane == "device idle"] == gaps


def test_nothing_is_known_of_launches_that_were_not_watched():
    """After a break the device was not idle for as long."""
    maker = SpanMaker()
    maker.spans(make_step(0))
    idle = [s.duration for s in maker.spans(make_step(500)) if s.lane == "device idle"]
    assert idle == [MS]
