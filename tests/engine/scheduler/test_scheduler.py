"""The tick, the end of a sequence, and who is let in."""

import pytest
from legato_engine.core import FinishReason
from legato_engine.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    InternalError,
    InvalidField,
    LegatoError,
    PromptTooLong,
    QueueFull,
)
from legato_engine.scheduler.launch import LaunchKind
from legato_engine.sequence import Sequence, SequenceStatus

from tests.engine.scheduler.world import World
from tests.fakes import FakeTask

LONG_SEED = 1  # both kinds of task read at least 14 tokens with it, prefix 1 and prompt 1


def long_task(*, constrained: bool = False, max_tokens: int = 14) -> FakeTask:
    """A task that runs to `max_tokens`."""
    task = FakeTask(seed=LONG_SEED, max_tokens=max_tokens, constrained=constrained)
    assert len(task.expected_tokens(2)) == max_tokens
    return task


def stopping_task(length: int, *, constrained: bool) -> FakeTask:
    """A task that stops by itself at its token number `length`."""
    for seed in range(10_000):
        task = FakeTask(seed=seed, max_tokens=length + 5, constrained=constrained)
        if len(task.expected_tokens(2)) == length:
            return task
    raise AssertionError("no seed stops there")


def steps(world: World, count: int) -> None:
    """Some ticks, checked."""
    for _ in range(count):
        world.scheduler.step()
        world.check()


def failure(world: World, sequence: Sequence) -> LegatoError:
    """The error a request ended with."""
    error = world.sink.ended[sequence.request.request_id]
    assert isinstance(error, LegatoError)
    return error


# ---------------------------------------------------------------- order


def test_constrained_sampling_waits_for_the_commit_before_it() -> None:
    """Forward t+1, commit t, sample t+1: commit before finalize."""
    world = World()
    world.submit(long_task(constrained=True))
    steps(world, 4)
    assert world.runner.calls == [
        ("forward", 0),
        ("sample", 0),
        ("forward", 1),
        ("collect", 0),
        ("sample", 1),
        ("forward", 2),
        ("collect", 1),
        ("sample", 2),
        ("forward", 3),
        ("collect", 2),
        ("sample", 3),
    ]


def test_free_sampling_runs_a_step_ahead() -> None:
    """Sampling of an unconstrained launch is enqueued right behind its forward."""
    world = World()
    world.submit(long_task())
    steps(world, 3)
    assert world.runner.calls == [
        ("forward", 0),
        ("sample", 0),
        ("forward", 1),
        ("sample", 1),
        ("collect", 0),
        ("forward", 2),
        ("sample", 2),
        ("collect", 1),
    ]


def test_one_constrained_row_holds_back_the_batch() -> None:
    """A decode launch is sampled as a whole, so one constrained row makes it wait."""
    world = World()
    world.submit(long_task())
    world.submit(long_task(constrained=True))
    steps(world, 6)
    batches = [r.launch for r in world.records if len(r.launch.plan.rows) == 2]
    assert batches
    for launch in batches:
        order = [call for call, number in world.runner.calls]
        sample = world.runner.calls.index(("sample", launch.launch_id))
        assert order[sample - 1] == "collect"


@pytest.mark.parametrize("constrained", [False, True])
def test_depth_one_blocks(constrained: bool) -> None:
    """At depth 1 every launch is sampled and committed in its own tick."""
    world = World(depth=1)
    world.submit(long_task(constrained=constrained))
    steps(world, 3)
    assert world.runner.calls == [
        (call, number) for number in range(3) for call in ("forward", "sample", "collect")
    ]


def test_prefill_and_decode_alternate() -> None:
    """No two prefills in a row while something can decode."""
    world = World(num_rows=4)
    for seed in range(4):
        world.submit(FakeTask(seed=seed, max_tokens=14))
    world.scheduler.drain()
    kinds = [record.launch.plan.kind for record in world.records]
    assert kinds[:7:2] == [LaunchKind.PREFILL] * 4
    assert set(kinds[1:6:2]) == {LaunchKind.DECODE}


def test_prefills_follow_each_other_when_nothing_decodes() -> None:
    """One-token requests are a stream of prefills, two in flight."""
    world = World()
    for seed in range(4):
        world.submit(FakeTask(seed=seed, max_tokens=1))
    steps(world, 2)
    assert world.runner.calls[:4] == [("forward", 0), ("sample", 0), ("forward", 1), ("sample", 1)]
    world.scheduler.drain()
    assert [record.launch.plan.kind for record in world.records] == [LaunchKind.PREFILL] * 4


def test_a_request_launched_next_hits_the_prefix_of_the_one_before() -> None:
    """The second of two equal images shares a prefix that is still being computed."""
    world = World()
    first = world.submit(long_task(), prefix_key="a", prefix_length=9)
    second = world.submit(long_task(), prefix_key="a", prefix_length=9)
    steps(world, 3)
    assert (first.cached_tokens, second.cached_tokens) == (0, 9)
    assert second.page_ids[:2] == first.page_ids[:2]


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("constrained", [False, True])
def test_a_stop_leaves_one_zombie_behind(constrained: bool) -> None:
    """The launch ahead of the stop token names a zombie: ignored, then released."""
    world = World()
    sequence = world.submit(stopping_task(3, constrained=constrained))
    while not sequence.finalized:
        steps(world, 1)
    assert world.sink.ended == {"r0": FinishReason.STOP}
    assert sequence.is_zombie
    assert sequence.row >= 0
    steps(world, 1)
    assert (sequence.inflight_refs, sequence.row, sequence.num_committed) == (0, -1, 3)
    assert [record.zombies for record in world.records] == [0, 0, 0, 1]
    world.check_rest()


def test_a_zombie_is_sampled_free() -> None:
    """A row that ended before its sampling was finalized gets constraint 0."""
    world = World()
    world.submit(stopping_task(3, constrained=True))
    world.scheduler.drain()
    assert world.runner.constraints[3] == [0]


def test_the_length_cap_leaves_no_zombie() -> None:
    """A sequence is launched at most `max_tokens` times, as that end is known ahead."""
    world = World()
    sequence = world.submit(long_task(max_tokens=5))
    world.scheduler.drain()
    assert world.sink.ended == {"r0": FinishReason.LENGTH}
    assert len(world.tokens(sequence)) == len(world.records) == 5
    assert sum(record.zombies for record in world.records) == 0


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    """The task's own reason goes before the length cap."""
    world = World()
    stopping = stopping_task(4, constrained=False)
    stopping.max_tokens = 4
    world.submit(stopping)
    world.scheduler.drain()
    assert world.sink.ended == {"r0": FinishReason.STOP}


def test_aborting_a_waiting_request_removes_it_at_once() -> None:
    """It is never started and holds nothing."""
    world = World(num_rows=1)
    world.submit(long_task())
    waiting = world.submit(long_task())
    steps(world, 2)
    world.abort(waiting)
    assert world.scheduler.num_waiting == 0
    world.scheduler.drain()
    assert world.sink.started_ids == ["r0"]
    world.check_rest()


def test_aborting_a_request_in_flight_releases_it_behind_its_last_launch() -> None:
    """Finalized now, released when nothing in flight names it."""
    world = World()
    sequence = world.submit(long_task())
    steps(world, 3)
    world.abort(sequence)
    assert sequence.is_zombie
    assert world.scheduler.load().running == 0
    assert world.scheduler.load().rows_used == 1
    steps(world, 1)
    world.check_rest()


def test_aborting_between_blocking_ticks_releases_at_once() -> None:
    """With nothing in flight there is no zombie."""
    world = World(depth=1)
    sequence = world.submit(long_task())
    steps(world, 3)
    world.abort(sequence)
    world.check_rest()


def test_unknown_and_ended_requests_can_be_aborted() -> None:
    """Such an abort does nothing."""
    world = World()
    sequence = world.submit(long_task(max_tokens=2))
    world.scheduler.drain()
    world.abort(sequence)
    world.scheduler.abort("never seen")
    world.check_rest()


def test_an_aborted_id_may_come_again_while_its_zombie_is_in_flight() -> None:
    """The zombie and the new sequence have nothing in common but the id."""
    world = World()
    sequence = world.submit(long_task())
    steps(world, 2)
    world.scheduler.abort("r0")
    assert sequence.is_zombie
    world.sequences.clear()
    world.sink.texts.clear()
    again = world.submit(long_task())
    assert again.request.request_id == "r0"
    world.scheduler.drain()
    assert world.tokens(again) == long_task().expected_tokens(2)
    assert sequence.row == -1


def test_a_request_may_be_aborted_by_its_own_delta() -> None:
    """The listener may give up on a request while it is being told about it."""
    world = World()
    world.sink.on_delta = world.abort
    world.submit(long_task())
    world.scheduler.drain()
    world.check_rest()
    assert world.sink.ended == {}


def test_stopping_a_waiting_request_tells_its_start_and_its_empty_end() -> None:
    """It holds nothing, yet its listener hears what every other hears."""
    world = World(num_rows=1)
    world.submit(long_task())
    waiting = world.submit(long_task())
    steps(world, 2)
    world.scheduler.stop(waiting.request.request_id)
    assert world.scheduler.num_waiting == 0
    assert world.sink.started_ids == ["r0", "r1"]
    assert world.sink.ended == {"r1": FinishReason.CANCELLED}
    assert world.tokens(waiting) == []
    world.scheduler.drain()
    world.check_rest()


@pytest.mark.parametrize("num_steps", range(1, 8))
@pytest.mark.parametrize("depth", [1, 2])
def test_stopping_after_any_step_ends_with_what_was_committed(num_steps: int, depth: int) -> None:
    """The result is at hand at once; row and pages go behind the last launch in flight."""
    world = World(depth=depth)
    sequence, other = world.submit(long_task()), world.submit(long_task())
    steps(world, num_steps)
    committed = list(world.tokens(sequence))
    world.scheduler.stop(sequence.request.request_id)
    world.scheduler.stop(sequence.request.request_id)
    assert world.sink.ended == {"r0": FinishReason.CANCELLED}
    world.scheduler.drain()
    assert world.tokens(sequence) == committed
    assert world.tokens(other) == long_task().expected_tokens(2)
    world.check_rest()


def test_a_request_may_be_stopped_by_its_own_delta() -> None:
    """The listener may end a request while it is being told about it."""
    world = World()
    world.sink.on_delta = lambda sequence: world.scheduler.stop(sequence.request.request_id)
    world.submit(long_task())
    world.scheduler.drain()
    world.check_rest()
    assert world.sink.ended == {"r0": FinishReason.CANCELLED}


def test_unknown_and_ended_requests_can_be_stopped() -> None:
    """Such a stop does nothing."""
    world = World()
    world.submit(long_task(max_tokens=2))
    world.scheduler.drain()
    ended = dict(world.sink.ended)
    world.scheduler.stop("r0")
    world.scheduler.stop("never seen")
    assert world.sink.ended == ended
    world.check_rest()


def test_logits_that_are_not_finite_fail_their_row_only() -> None:
    """The batch mate answers as if nothing had happened."""
    world = World(not_finite=frozenset({(0, 5)}))
    bad, good = world.submit(long_task()), world.submit(long_task())
    world.scheduler.drain()
    error = failure(world, bad)
    assert isinstance(error, InternalError)
    assert error.metadata == {"reason": "NUMERIC"}
    assert world.tokens(bad) == long_task().expected_tokens(2)[:3]
    assert world.tokens(good) == long_task().expected_tokens(2)
    world.check_rest()


@pytest.mark.parametrize(("position", "cached_tokens"), [(9, 0), (10, 8)])
def test_a_prefix_is_shared_no_more_when_its_prefill_gave_no_finite_logits(
    position: int, cached_tokens: int
) -> None:
    """After a bad prefill the next computes the prefix anew; a bad decode says nothing of it."""
    world = World(not_finite=frozenset({(0, position)}))
    bad = world.submit(long_task(), prefix_key="picture", prefix_length=8)
    world.scheduler.drain()
    assert isinstance(failure(world, bad), InternalError)
    following = [world.submit(long_task(), prefix_key="picture", prefix_length=8) for _ in range(2)]
    world.scheduler.drain()
    assert [sequence.cached_tokens for sequence in following] == [cached_tokens, 8]
    world.check_rest()


def test_a_task_that_raises_fails_alone() -> None:
    """A skill's bug ends its request, and the batch mate answers."""
    world = World()
    bad = world.submit(FakeTask(seed=LONG_SEED, max_tokens=14, fails_at=2))
    good = world.submit(long_task())
    world.scheduler.drain()
    assert isinstance(failure(world, bad), InternalError)
    assert world.tokens(good) == long_task().expected_tokens(2)
    world.check_rest()


@pytest.mark.parametrize("ticks", [0, 3])
def test_a_deadline_ends_waiting_and_running_requests(ticks: int) -> None:
    """Past its deadline a request fails at the next tick; the others go on."""
    world = World()
    late = world.submit(long_task(), deadline=world.clock.now() + 1.0)
    other = world.submit(long_task(), deadline=world.clock.now() + 9.0)
    steps(world, ticks)
    world.clock.advance(1.0)
    world.scheduler.drain()
    assert type(failure(world, late)) is DeadlineExceeded
    assert world.sink.ended[other.request.request_id] is FinishReason.LENGTH
    world.check_rest()


def test_a_later_deadline_is_kept_after_an_earlier_one() -> None:
    """Each of several deadlines is noticed in its turn."""
    world = World(num_rows=1)
    world.submit(long_task(), deadline=world.clock.now() + 5.0)
    world.submit(long_task(), deadline=world.clock.now() + 2.0)
    steps(world, 1)
    world.clock.advance(2.0)
    steps(world, 1)
    assert list(world.sink.ended) == ["r1"]
    world.clock.advance(3.0)
    steps(world, 1)
    assert list(world.sink.ended) == ["r1", "r0"]


# ---------------------------------------------------------------- admission


def test_what_can_never_fit_is_refused() -> None:
    """The error names the limit and what was asked."""
    world = World(num_pages=5)
    with pytest.raises(PromptTooLong) as caught:
        world.submit(FakeTask(num_prompt=10, max_tokens=7))
    assert caught.value.metadata == {"limit": "16", "actual": "17"}
    assert world.scheduler.idle


def test_a_full_queue_refuses() -> None:
    """The error says when to come back."""
    world = World(max_waiting=2)
    world.submit(long_task())
    world.submit(long_task())
    with pytest.raises(QueueFull) as caught:
        world.submit(long_task())
    assert caught.value.metadata == {"limit": "2", "retry_after_ms": "1"}
    steps(world, 1)
    world.submit(long_task())
    world.scheduler.drain()
    world.check_rest()


def test_a_request_id_is_live_once() -> None:
    """The same id cannot be submitted again while it lives."""
    world = World()
    sequence = world.submit(long_task())
    with pytest.raises(InvalidField):
        world.scheduler.submit(sequence)


def test_the_wait_is_estimated_from_completions() -> None:
    """No deadline is refused on a guess; once one is known, a hopeless one is."""
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


# ---------------------------------------------------------------- what is told


def test_a_request_starts_when_its_prefill_is_launched() -> None:
    """Status and time change with the launch, the first token comes with its commit."""
    world = World()
    sequence = world.submit(long_task())
    statuses = [sequence.status]
    steps(world, 1)
    assert world.sink.started_ids == ["r0"]
    statuses.append(sequence.status)
    assert sequence.prefill_start == 100.0
    world.clock.advance(2.0)
    steps(world, 1)
    statuses.append(sequence.status)
    assert sequence.first_token == 102.0
    world.scheduler.drain()
    assert [*statuses, sequence.status] == list(SequenceStatus)


def test_load_counts_what_is_held() -> None:
    """Running, waiting, in flight, rows and pages, and what is kept apart."""
    world = World(num_rows=1, num_pages=17)
    world.submit(long_task(), prefix_key="a", prefix_length=9)
    world.submit(long_task())
    steps(world, 1)
    load = world.scheduler.load()
    assert (load.running, load.waiting, load.inflight, load.rows_used) == (1, 1, 1, 1)
    assert (load.pages_used, load.prefix_pages, load.pages_total) == (3 + 1, 0, 16)
    world.scheduler.drain()
    assert world.scheduler.load().prefix_pages == 3 + 4  # behind the prefix: 14 positions
    world.check_rest()


def test_the_observer_sees_what_each_step_cost() -> None:
    """Plan, launch, finalize, wait and commit are measured apart, in the order of the tick."""
    world = World()
    ticks = iter(range(10_000))
    world.clock.perf_ns = lambda: next(ticks)  # type: ignore[method-assign]  # each reading is one later
    world.submit(long_task(constrained=True))
    steps(world, 3)
    record = world.records[1]
    assert record.launch.launch_id == 1
    marks = [
        record.plan_start,
        record.plan_end,
        record.launch_end,
        record.finalize_start,
        record.finalize_end,
        record.wait_start,
        record.wait_end,
        record.commit_end,
    ]
    assert marks == sorted(set(marks))
    durations = (record.plan_ns, record.launch_ns, record.finalize_ns, record.commit_ns)
    assert durations == (1, 1, 1, 1)


def test_an_idle_tick_does_nothing() -> None:
    """Without work a tick says so."""
    world = World()
    assert world.scheduler.step() is False
    world.scheduler.drain()
    assert world.runner.calls == []
