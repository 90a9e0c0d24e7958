"""The timeline of a run on a real model, at its end and as it happens."""

import itertools
import json

import pytest
from legato_engine.bench import trace
from legato_engine.bench.workload import Workload
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.scheduler.batch import Launch, LaunchKind, Plan, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes
from legato_engine.scheduler.output import SilentSink
from legato_engine.telemetry import (
    LANES,
    PERIOD,
    SpanMaker,
    StepStats,
    Timeline,
    TimelineStream,
    step_feed,
    trace_events,
)

from tests.engine.telemetry.steps import MS, make_step

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
