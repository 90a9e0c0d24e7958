"""Aborts, stops and deadlines at every stage of a request."""

import time

import pytest
from legato_engine.ipc.messages import Done, Failed, Queued, Started
from legato_engine.types import (
    CaptionTask,
    DetectResult,
    DetectTask,
    FinishReason,
    QueryResult,
    QueryTask,
    RequestKey,
)

from tests.engine.engine.core.world import LONG, World, png


def test_deadline_while_preparing(gated):
    """A pending request fails at its deadline."""
    world, frontend = gated
    world.submit("r", CaptionTask(), world.encoded(png()), deadline=time.monotonic() + 0.01)
    frontend.entered.wait(10)
    assert world.core.next_deadline() < time.monotonic() + 1
    while not world.of("r", Failed):
        world.core.step()
    assert type(world.error("r")).__name__ == "DeadlineExceeded"
    frontend.gate.set()
    assert world.core.load().waiting == 0


@pytest.mark.parametrize("has_image", [True, False])
def test_abort_while_preparing(gated, has_image):
    """A request that is aborted while its image or its long text is prepared never starts."""
    world, frontend = gated
    if has_image:
        world.submit("r", CaptionTask(), world.encoded(png()))
    else:
        world.submit("r", QueryTask(question=LONG))
    frontend.entered.wait(10)
    world.core.abort(RequestKey("r"))
    assert world.core.load().waiting == 0
    frontend.gate.set()
    world.woken.wait(10)
    world.core.step()
    assert world.of("r") == []


def test_stop_while_preparing(gated):
    """A pending request that is stopped sends `Started` and an empty result."""
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
    """A request stopped after any step ends with the text it had sent, and frees everything."""
    world = World(assembly, pipeline_depth=depth)
    world.submit("other", QueryTask(question="hello"))
    world.submit("r", QueryTask(question="hello"))
    for _ in range(num_steps):
        world.core.step()
    world.core.stop(RequestKey("r"))
    world.core.stop(RequestKey("r"))
    outputs = [output for output in world.of("r") if not isinstance(output, Queued)]
    begun, *deltas, done = outputs
    assert isinstance(begun, Started)
    assert isinstance(done, Done)
    assert done.finish_reason is FinishReason.CANCELLED
    said = "".join(event.text for output in deltas for event in output.events)
    assert isinstance(done.result, QueryResult)
    assert done.result.answer.startswith(said)
    assert 0 <= done.timings.first_token <= done.timings.total
    world.run("other")
    assert world.of("r")[-1] is done
    world.close()


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_after_any_step(assembly, num_steps, depth):
    """An abort after any step ends the outputs and frees everything; other requests go on."""
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
    """Aborting an unknown or finished request does nothing."""
    world.core.abort(RequestKey("never"))
    world.submit("r", QueryTask(question="hello"))
    world.run("r")
    world.core.abort(RequestKey("r"))
    assert isinstance(world.of("r")[-1], Done)
