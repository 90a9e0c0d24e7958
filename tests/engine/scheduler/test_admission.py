"""Admission control."""

import pytest
from legato_engine.errors import DeadlineUnreachable, InvalidField, PromptTooLong, QueueFull

from tests.engine.scheduler.tasks import long_task
from tests.engine.scheduler.world import World
from tests.fakes import FakeTask


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    """The error names the limit and the actual length."""
    world = World(num_pages=5)
    with pytest.raises(PromptTooLong) as caught:
        world.submit(FakeTask(num_prompt=10, max_tokens=7))
    assert caught.value.metadata == {"limit": "16", "actual": "17"}
    assert world.scheduler.idle


def test_a_full_queue_refuses() -> None:
    """The error says when to retry."""
    world = World(max_waiting=2)
    world.submit(long_task())
    world.submit(long_task())
    with pytest.raises(QueueFull) as caught:
        world.submit(long_task())
    assert caught.value.metadata == {"limit": "2", "retry_after_ms": "1"}
    world.steps(1)
    world.submit(long_task())
    world.scheduler.drain()
    world.check_rest()


def test_a_request_id_is_live_once() -> None:
    """An id cannot be submitted again while its request is live."""
    world = World()
    sequence = world.submit(long_task())
    with pytest.raises(InvalidField):
        world.scheduler.submit(sequence)


def test_the_wait_is_estimated_from_completions() -> None:
    """A deadline is refused only after a service time is known, and if it cannot be met."""
    world = World(num_rows=1)
    world.submit(long_task(max_tokens=2), deadline=world.clock.now() + 60.0)
    world.scheduler.step()
    assert world.scheduler.estimated_wait() == 0.0
    world.clock.advance(4.0)
    world.scheduler.drain()
    assert world.scheduler.estimated_wait() == 0.0  # the row is free
    world.submit(long_task())  # will take the row
    assert world.scheduler.estimated_wait() == pytest.approx(4.0)
    with pytest.raises(DeadlineUnreachable) as caught:
        world.submit(long_task(), deadline=world.clock.now() + 3.9)
    assert caught.value.metadata == {"estimated_wait_ms": "4000"}
    world.submit(long_task(), deadline=world.clock.now() + 4.1)
    world.scheduler.drain()
    world.check_rest()
