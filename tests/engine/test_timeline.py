"""The timeline of a run on a real model."""

import itertools
import json

import pytest
from legato_engine import trace
from legato_engine.assembly import SilentSink, assemble
from legato_engine.config import EngineConfig
from legato_engine.timeline import LANES, Timeline, trace_events
from legato_engine.workload import Workload

CONFIG = EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=2)


@pytest.fixture(scope="module")
def assembly():
    """One model for all tests."""
    made = assemble(CONFIG)
    yield made
    made.device.close()


def traced(assembly, depth, kind="query", capacity=1000):
    """The timeline of three requests on two rows."""
    timeline = Timeline(assembly.runner.times, capacity)
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=depth, observer=timeline)
    for sequence in Workload(assembly, kind=kind, count=3, length=20).sequences():
        scheduler.submit(sequence)
    scheduler.drain()
    return timeline


@pytest.mark.parametrize("kind", ["query", "caption"])
@pytest.mark.parametrize("depth", [1, 2])
def test_lanes_never_overlap_themselves(assembly, depth, kind):
    """On every lane one span ends before the next begins."""
    events = trace_events(traced(assembly, depth, kind).steps)
    for lane, name in enumerate(LANES):
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == lane
        )
        assert spans or (depth == 1 and name == "slot 1")
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start, name


def test_forward_runs_ahead_of_the_commit(assembly):
    """At depth 2 a forward begins before the last launch's commit ends, at depth 1 never."""
    for depth in (1, 2):
        steps = traced(assembly, depth).steps
        ahead = [
            later.times.forward_start < earlier.record.commit_end
            for earlier, later in itertools.pairwise(steps)
        ]
        assert any(ahead) == (depth == 2)


def test_ring_keeps_the_last(assembly):
    """A full ring forgets the oldest launches."""
    timeline = traced(assembly, 2, capacity=5)
    ids = [step.record.launch.launch_id for step in timeline.steps]
    assert ids == list(range(ids[0], ids[0] + 5))
    assert ids[0] > 0


def test_command_writes_a_trace(tmp_path, capsys):
    """The command writes JSON with named lanes, spans and one arrow per launch."""
    path = tmp_path / "trace.json"
    arguments = ["--model", "random-tiny", "--device", "cpu", "--threads", "1"]
    assert trace.main([*arguments, "--length", "8", "--output", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == set(LANES)
    launches = {e["args"]["launch"] for e in events if e["ph"] == "X"}
    for phase in "stf":
        assert {e["id"] for e in events if e["ph"] == phase} == launches
