"""The timeline of a run on a real model."""

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
from legato_engine.telemetry import LANES, StepFeed, Timeline, trace_events

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
    feed = StepFeed(assembly.runner.times, (timeline.add,))
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=depth, observer=feed.committed)
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
    feed = StepFeed(times, (first.add, second.add))
    for launch_id in range(3):
        launch = Launch(launch_id, launch_id % 2, Plan(LaunchKind.DECODE, ()))
        feed.committed(StepRecord(launch, plan_start=0, plan_end=0))
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
