"""The end of a sequence: by its task, its client, its deadline or an error."""

import pytest
from legato_engine.errors import DeadlineExceeded, InternalError, NumericError
from legato_engine.types import FinishReason, RequestKey

from tests.engine.scheduler.tasks import LONG_SEED, long_task, stopping_task
from tests.engine.scheduler.world import World
from tests.fakes import FakeTask

R0, R1 = RequestKey("r0"), RequestKey("r1")

# ---------------------------------------------------------------- by its task


@pytest.mark.parametrize("constrained", [False, True])
def test_a_stop_token_leaves_one_zombie(constrained: bool) -> None:
    """The launch after the stop token names a zombie, which is ignored, then released."""
    world = World()
    sequence = world.submit(stopping_task(3, constrained=constrained))
    while not sequence.finalized:
        world.steps(1)
    assert world.sink.ended == {R0: FinishReason.STOP}
    assert sequence.finalized
    assert sequence.inflight_refs
    assert sequence.row >= 0
    world.steps(1)
    assert (sequence.inflight_refs, sequence.row, sequence.num_committed) == (0, -1, 3)
    assert [record.zombies for record in world.records] == [0, 0, 0, 1]
    world.check_rest()


def test_a_zombie_is_sampled_free() -> None:
    """A sequence that ended before its row was sampled gets constraint 0."""
    world = World()
    world.submit(stopping_task(3, constrained=True))
    world.scheduler.drain()
    assert world.runner.constraints[3] == [0]


def test_the_length_cap_leaves_no_zombie() -> None:
    """A sequence is launched at most `max_tokens` times, because that end is known in advance."""
    world = World()
    sequence = world.submit(long_task(max_tokens=5))
    world.scheduler.drain()
    assert world.sink.ended == {R0: FinishReason.LENGTH}
    assert len(world.tokens(sequence)) == len(world.records) == 5
    assert sum(record.zombies for record in world.records) == 0


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    """The task's reason takes precedence over the length cap."""
    world = World()
    stopping = stopping_task(4, constrained=False)
    stopping.max_tokens = 4
    world.submit(stopping)
    world.scheduler.drain()
    assert world.sink.ended == {R0: FinishReason.STOP}


# ---------------------------------------------------------------- by its client


def test_aborting_a_waiting_request_removes_it_at_once() -> None:
    """It never starts and holds no resources."""
    world = World(num_rows=1)
    world.submit(long_task())
    waiting = world.submit(long_task())
    world.steps(2)
    world.abort(waiting)
    assert world.scheduler.load().waiting == 0
    world.scheduler.drain()
    assert world.sink.started_ids == [R0]
    world.check_rest()


def test_aborting_a_request_in_flight_releases_it_after_its_last_launch() -> None:
    """It is finalized now, and released when no launch names it."""
    world = World()
    sequence = world.submit(long_task())
    world.steps(3)
    world.abort(sequence)
    assert sequence.finalized
    assert sequence.inflight_refs
    assert world.scheduler.load().running == 0
    assert world.scheduler.load().rows_used == 1
    world.steps(1)
    world.check_rest()


def test_aborting_between_blocking_steps_releases_at_once() -> None:
    """Without a launch in flight there is no zombie."""
    world = World(depth=1)
    sequence = world.submit(long_task())
    world.steps(3)
    world.abort(sequence)
    world.check_rest()


def test_unknown_and_ended_requests_can_be_aborted() -> None:
    """Such an abort does nothing."""
    world = World()
    sequence = world.submit(long_task(max_tokens=2))
    world.scheduler.drain()
    world.abort(sequence)
    world.scheduler.abort(RequestKey("never seen"))
    world.check_rest()


def test_an_aborted_id_may_come_again_while_its_zombie_is_in_flight() -> None:
    """The zombie and the new sequence share only the id."""
    world = World()
    sequence = world.submit(long_task())
    world.steps(2)
    world.scheduler.abort(R0)
    assert sequence.finalized
    assert sequence.inflight_refs
    world.sequences.clear()
    world.sink.texts.clear()
    again = world.submit(long_task())
    assert again.request.request_id == R0
    world.scheduler.drain()
    assert world.tokens(again) == long_task().expected_tokens(2)
    assert sequence.row == -1


def test_a_request_may_be_aborted_by_its_own_delta() -> None:
    """The sink may abort a request in `delta`."""
    world = World()
    world.sink.on_delta = world.abort
    world.submit(long_task())
    world.scheduler.drain()
    world.check_rest()
    assert world.sink.ended == {}


def test_stopping_a_waiting_request_emits_its_start_and_its_empty_result() -> None:
    """The sink receives `started` and `done`, as for every other request."""
    world = World(num_rows=1)
    world.submit(long_task())
    waiting = world.submit(long_task())
    world.steps(2)
    world.scheduler.stop(waiting.request.request_id)
    assert world.scheduler.load().waiting == 0
    assert world.sink.started_ids == [R0, R1]
    assert world.sink.ended == {R1: FinishReason.CANCELLED}
    assert world.tokens(waiting) == []
    world.scheduler.drain()
    world.check_rest()


@pytest.mark.parametrize("num_steps", range(1, 8))
@pytest.mark.parametrize("depth", [1, 2])
def test_stopping_after_any_step_ends_with_what_was_committed(num_steps: int, depth: int) -> None:
    """The result comes at once; row and pages are released after the last launch in flight."""
    world = World(depth=depth)
    sequence, other = world.submit(long_task()), world.submit(long_task())
    world.steps(num_steps)
    committed = list(world.tokens(sequence))
    world.scheduler.stop(sequence.request.request_id)
    world.scheduler.stop(sequence.request.request_id)
    assert world.sink.ended == {R0: FinishReason.CANCELLED}
    world.scheduler.drain()
    assert world.tokens(sequence) == committed
    assert world.tokens(other) == long_task().expected_tokens(2)
    world.check_rest()


def test_a_request_may_be_stopped_by_its_own_delta() -> None:
    """The sink may stop a request in `delta`."""
    world = World()
    world.sink.on_delta = lambda sequence: world.scheduler.stop(sequence.request.request_id)
    world.submit(long_task())
    world.scheduler.drain()
    world.check_rest()
    assert world.sink.ended == {R0: FinishReason.CANCELLED}


def test_unknown_and_ended_requests_can_be_stopped() -> None:
    """Such a stop does nothing."""
    world = World()
    world.submit(long_task(max_tokens=2))
    world.scheduler.drain()
    ended = dict(world.sink.ended)
    world.scheduler.stop(R0)
    world.scheduler.stop(RequestKey("never seen"))
    assert world.sink.ended == ended
    world.check_rest()


# ---------------------------------------------------------------- by an error or a deadline


def test_non_finite_logits_fail_their_own_request_only() -> None:
    """Another request in the batch is not affected."""
    world = World(not_finite=frozenset({(0, 5)}))
    bad, good = world.submit(long_task()), world.submit(long_task())
    world.scheduler.drain()
    error = world.failure(bad)
    assert isinstance(error, NumericError)
    assert world.tokens(bad) == long_task().expected_tokens(2)[:3]
    assert world.tokens(good) == long_task().expected_tokens(2)
    world.check_rest()


@pytest.mark.parametrize(("position", "cached_tokens"), [(9, 0), (10, 8)])
def test_a_prefix_is_invalidated_when_its_prefill_gave_non_finite_logits(
    position: int, cached_tokens: int
) -> None:
    """After such a prefill the next request computes the prefix; after a decode it does not."""
    world = World(not_finite=frozenset({(0, position)}))
    bad = world.submit(long_task(), prefix_key="image", prefix_length=8)
    world.scheduler.drain()
    assert isinstance(world.failure(bad), InternalError)
    following = [world.submit(long_task(), prefix_key="image", prefix_length=8) for _ in range(2)]
    world.scheduler.drain()
    assert [sequence.pages.cached_tokens for sequence in following] == [cached_tokens, 8]
    world.check_rest()


def test_a_task_that_raises_fails_its_own_request_only() -> None:
    """Another request in the batch is not affected."""
    world = World()
    bad = world.submit(FakeTask(seed=LONG_SEED, max_tokens=14, fails_at=2))
    good = world.submit(long_task())
    world.scheduler.drain()
    assert isinstance(world.failure(bad), InternalError)
    assert world.tokens(good) == long_task().expected_tokens(2)
    world.check_rest()


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_deadline_ends_waiting_and_running_requests(num_steps: int) -> None:
    """After its deadline a request fails in the next step; others continue."""
    world = World()
    late = world.submit(long_task(), deadline=world.clock.now() + 1.0)
    other = world.submit(long_task(), deadline=world.clock.now() + 9.0)
    world.steps(num_steps)
    world.clock.advance(1.0)
    world.scheduler.drain()
    assert type(world.failure(late)) is DeadlineExceeded
    assert world.sink.ended[other.request.request_id] is FinishReason.LENGTH
    world.check_rest()


def test_a_later_deadline_is_checked_after_an_earlier_one() -> None:
    """Each of several deadlines ends its own request."""
    world = World(num_rows=1)
    world.submit(long_task(), deadline=world.clock.now() + 5.0)
    world.submit(long_task(), deadline=world.clock.now() + 2.0)
    world.steps(1)
    world.clock.advance(2.0)
    world.steps(1)
    assert list(world.sink.ended) == [R1]
    world.clock.advance(3.0)
    world.steps(1)
    assert list(world.sink.ended) == [R1, R0]
