"""The waiting queue: positions, limits and ids in use."""

import dataclasses

from legato_engine.errors import InvalidField
from legato_engine.ipc.messages import Delta, Done, Queued, Started
from legato_engine.types import CaptionTask, QueryTask

from tests.engine.engine.core.world import CONFIG, GatedFrontend, World, png


def test_queued_is_sent_once_to_waiting_requests(world):
    """Only requests that find no free row get a queue position, once."""
    names = [f"r{i}" for i in range(7)]
    for name in names:
        world.submit(name, QueryTask(question="hello"))
    world.run(*names)
    assert world.of("r0", Queued) == []
    queued = [world.of(name, Queued) for name in names]
    assert [len(outputs) for outputs in queued[1:]] == [1] * 6
    assert [outputs[0].position for outputs in queued[1:]] == list(range(6))
    for name in names:
        assert isinstance(world.of(name)[-2], Delta | Started)


def test_full_queue(gated):
    """Requests over `max_waiting` are refused; pending requests count."""
    world, frontend = gated
    for i in range(CONFIG.max_waiting):
        world.submit(f"r{i}", CaptionTask(), world.encoded(png()))
    assert world.core.load().waiting == CONFIG.max_waiting
    world.submit("late", QueryTask(question="hello"))
    assert type(world.error("late")).__name__ == "QueueFull"
    assert int(world.error("late").metadata["retry_after_ms"]) > 0
    frontend.gate.set()
    for done in world.run(*(f"r{i}" for i in range(CONFIG.max_waiting))):
        assert isinstance(done, Done)


def test_a_tenants_quota_counts_pending_requests(assembly):
    """A tenant over its quota gets QuotaExceeded before its image is read; other tenants do not."""
    frontend = GatedFrontend(assembly.frontend)
    world = World(dataclasses.replace(assembly, frontend=frontend), max_waiting_per_tenant=1)
    world.submit("a0", CaptionTask(), world.encoded(png()), tenant="a")
    world.submit("a1", CaptionTask(), world.encoded(png()), tenant="a")
    assert type(world.error("a1")).__name__ == "QuotaExceeded"
    world.submit("b0", CaptionTask(), world.encoded(png()), tenant="b")
    frontend.gate.set()
    assert all(isinstance(done, Done) for done in world.run("a0", "b0"))
    world.close()


def test_the_queue_position_follows_the_priority(world):
    """The queue position counts only requests of a higher or equal rank."""
    for name in ("r0", "r1", "r2", "r3", "r4"):
        world.submit(name, QueryTask(question="hello"))
    world.core.step()
    world.submit("low", QueryTask(question="hello"), priority=-1)
    world.submit("high", QueryTask(question="hello"), priority=100)
    world.run("low", "high")
    assert world.of("high", Queued)[0].position == 0
    assert world.of("low", Queued)[0].position > 0


def test_an_id_is_in_use_at_every_stage(gated):
    """A second request of an id in use fails; the pending or running first one goes on."""
    world, frontend = gated
    world.submit("pending", CaptionTask(), world.encoded(png()))
    world.submit("scheduled", QueryTask(question="hello"))
    for name in ("pending", "scheduled"):
        world.submit(name, QueryTask(question="hello"))
        assert isinstance(world.error(name), InvalidField)
        world.outputs.clear()
    frontend.gate.set()
    assert all(isinstance(done, Done) for done in world.run("pending", "scheduled"))
