"""Requests that their callers or their deadlines end, at any time."""

import time

import pytest
from legato_engine.core import (
    CaptionTask,
    DetectResult,
    DetectTask,
    FinishReason,
    QueryResult,
    QueryTask,
    RequestKey,
)
from legato_engine.ipc.messages import Done, Failed, Queued, Started

from tests.engine.engine.core.world import World, png


def test_deadline_while_preparing(gated):
    """A request whose deadline passes while its picture is prepared fails at that time."""
    world, frontend = gated
    world.submit("r", CaptionTask(), world.encoded(png()), deadline=time.monotonic() + 0.01)
    frontend.entered.wait(10)
    assert world.core.next_deadline() < time.monotonic() + 1
    while not world.of("r", Failed):
        world.core.step()
    assert type(world.error("r")).__name__ == "DeadlineExceeded"
    frontend.gate.set()
    assert world.core.load().waiting == 0


def test_abort_while_preparing(gated):
    """A request aborted while its picture is prepared never starts."""
    world, frontend = gated
    world.submit("r", CaptionTask(), world.encoded(png()))
    frontend.entered.wait(10)
    world.core.abort(RequestKey("r"))
    assert world.core.load().waiting == 0
    frontend.gate.set()
    world.woken.wait(10)
    world.core.step()
    assert world.of("r") == []


def test_stop_while_preparing(gated):
    """A request stopped while its picture is prepared tells its start and an empty result."""
    world, frontend = gated
    world.submit("r", DetectTask(object="cat"), world.encoded(png()))
    frontend.entered.wait(10)
    world.core.stop(RequestKey("r"))
    world.core.stop(RequestKey("r"))
    begun, done = world.of("r")
    assert isinstance(begun, Started)
    assert isinstance(done, Done)
    assert (done.result, done.finish_reason) == (DetectResult(), FinishReason.CANCELLED)
    assert world.core.load().waiting == 0
    frontend.gate.set()
    world.woken.wait(10)
    world.core.step()
    assert len(world.of("r")) == 2


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_stop_after_any_step(assembly, num_steps, depth):
    """Stopped at any step, a request ends with what it had said until then, and holds nothing."""
    world = World(assembly, pipeline_depth=depth)
    world.submit("other", QueryTask(question="hello"))
    world.submit("r", QueryTask(question="hello"))
    for _ in range(num_steps):
        world.core.step()
    world.core.stop(RequestKey("r"))
    world.core.stop(RequestKey("r"))
    reports = [report for report in world.of("r") if not isinstance(report, Queued)]
    begun, *deltas, done = reports
    assert isinstance(begun, Started)
    assert isinstance(done, Done)
    assert done.finish_reason is FinishReason.CANCELLED
    said = "".join(event.text for report in deltas for event in report.events)
    assert isinstance(done.result, QueryResult)
    assert done.result.answer.startswith(said)
    assert 0 <= done.timings.first_token <= done.timings.total
    world.run("other")
    assert world.of("r")[-1] is done
    world.close()


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_after_any_step(assembly, num_steps, depth):
    """Abort at any step ends the reports and gives everything back; others are untouched."""
    world = World(assembly, pipeline_depth=depth)
    world.submit("other", QueryTask(question="hello"))
    world.submit("r", QueryTask(question="hello"))
    for _ in range(num_steps):
        world.core.step()
    world.core.abort(RequestKey("r"))
    world.core.abort(RequestKey("r"))
    seen = len(world.of("r"))
    world.run("other")
    assert len(world.of("r")) == seen
    world.close()


def test_abort_of_unknown_and_ended(world):
    """Aborting what is not there does nothing."""
    world.core.abort(RequestKey("never"))
    world.submit("r", QueryTask(question="hello"))
    world.run("r")
    world.core.abort(RequestKey("r"))
    assert isinstance(world.of("r")[-1], Done)
