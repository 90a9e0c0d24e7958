"""The step, the pipeline, the ends of sequences, and refinements."""

import pytest
from legato_engine.errors import DeadlineExceeded, InternalError, NumericError
from legato_engine.scheduler.batch import LaunchKind, Plan, Refinement, ScheduledSequence
from legato_engine.scheduler.scheduler import Pipeline
from legato_engine.sequence import Sequence
from legato_engine.types import FinishReason, RequestKey

from tests.engine.scheduler.world import LONG_SEED, World, long_task, stopping_task
from tests.fakes import FakeTask, make_sequence

R0, R1 = RequestKey("r0"), RequestKey("r1")


# ---------------------------------------------------------------- order


def test_constrained_sampling_waits_for_the_commit_before_it() -> None:
    """Forward t+1, commit t, sample t+1: commit before sampling."""
    world = World()
    world.submit(long_task(constrained=True))
    world.steps(4)
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
    """Sampling of an unconstrained launch is enqueued right after its forward."""
    world = World()
    world.submit(long_task())
    world.steps(3)
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


def test_one_constrained_row_delays_the_batch() -> None:
    """A launch is sampled as a whole, so one constrained row makes it wait."""
    world = World()
    world.submit(long_task())
    world.submit(long_task(constrained=True))
    world.steps(6)
    batches = [r.launch for r in world.records if len(r.launch.plan.rows) == 2]
    assert batches
    for launch in batches:
        order = [call for call, number in world.runner.calls]
        sample = world.runner.calls.index(("sample", launch.launch_id))
        assert order[sample - 1] == "collect"


@pytest.mark.parametrize("constrained", [False, True])
def test_depth_one_blocks(constrained: bool) -> None:
    """At depth 1 every launch is sampled and committed in its own step."""
    world = World(depth=1)
    world.submit(long_task(constrained=constrained))
    world.steps(3)
    assert world.runner.calls == [
        (call, number) for number in range(3) for call in ("forward", "sample", "collect")
    ]


def test_prefill_and_decode_alternate() -> None:
    """Two prefills never follow each other while a sequence can decode."""
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
    world.steps(2)
    assert world.runner.calls[:4] == [("forward", 0), ("sample", 0), ("forward", 1), ("sample", 1)]
    world.scheduler.drain()
    assert [record.launch.plan.kind for record in world.records] == [LaunchKind.PREFILL] * 4


def test_a_request_launched_next_hits_the_prefix_of_the_one_before() -> None:
    """The second of two equal images shares a prefix that is still being computed."""
    world = World()
    first = world.submit(long_task(), prefix_key="a", prefix_length=9)
    second = world.submit(long_task(), prefix_key="a", prefix_length=9)
    world.steps(3)
    assert (first.pages.cached_tokens, second.pages.cached_tokens) == (0, 9)
    assert second.pages.ids[:2] == first.pages.ids[:2]


# ---------------------------------------------------------------- events


def test_a_request_starts_when_its_prefill_is_launched() -> None:
    """It stops waiting at the launch, the first token comes with its commit."""
    world = World()
    sequence = world.submit(long_task())
    states = [(sequence.is_waiting, sequence.finalized)]
    world.steps(1)
    assert world.sink.started_ids == [R0]
    states.append((sequence.is_waiting, sequence.finalized))
    assert sequence.timing.prefill_start == 100.0
    world.clock.advance(2.0)
    world.steps(1)
    assert sequence.timing.first_token == 102.0
    world.scheduler.drain()
    states.append((sequence.is_waiting, sequence.finalized))
    assert states == [(True, False), (False, False), (False, True)]


def test_load_counts_resources_in_use() -> None:
    """Running, waiting, launches, rows and pages in use; cached pages are counted separately."""
    world = World(num_rows=1, num_pages=17)
    world.submit(long_task(), prefix_key="a", prefix_length=9)
    world.submit(long_task())
    world.steps(1)
    load = world.scheduler.load()
    assert (load.running, load.waiting, load.inflight, load.rows_used) == (1, 1, 1, 1)
    assert (load.pages_used, load.prefix_pages, load.pages_total) == (3 + 1, 0, 16)
    world.scheduler.drain()
    assert world.scheduler.load().prefix_pages == 3 + 4  # after the prefix: 14 positions
    world.check_rest()


def test_the_observer_receives_the_times_of_each_step() -> None:
    """Plan, launch, sample, wait and commit are measured separately, in the order of the step."""
    world = World()
    times = iter(range(10_000))
    world.clock.perf_ns = lambda: next(times)  # type: ignore[method-assign]  # advances by one per reading
    world.submit(long_task(constrained=True))
    world.steps(3)
    record = world.records[1]
    assert record.launch.launch_id == 1
    marks = [
        record.plan_start,
        record.plan_end,
        record.launch_end,
        record.sample_start,
        record.sample_end,
        record.wait_start,
        record.wait_end,
        record.commit_end,
    ]
    assert marks == sorted(set(marks))
    planned, launched = record.plan_end - record.plan_start, record.launch_end - record.plan_end
    sampling, commit = record.sample_end - record.sample_start, record.commit_end - record.wait_end
    assert (planned, launched, sampling, commit) == (1, 1, 1, 1)


def test_an_idle_step_does_nothing() -> None:
    """Without work a step returns False."""
    world = World()
    assert world.scheduler.step() is False
    world.scheduler.drain()
    assert world.runner.calls == []


# ---------------------------------------------------------------- pipeline
# The pipeline: slots, order and references.


def plan(*sequences: Sequence) -> Plan:
    """A decode batch."""
    return Plan(
        LaunchKind.DECODE, tuple(ScheduledSequence(sequence, position=2) for sequence in sequences)
    )


def test_launches_alternate_between_two_slots() -> None:
    """A slot is taken again only after its launch was committed."""
    pipeline, sequence = Pipeline(2), make_sequence(0)
    first = pipeline.launch(plan(sequence))
    pipeline.mark_sampled(first)
    second = pipeline.launch(plan(sequence))
    pipeline.mark_sampled(second)
    assert not pipeline.can_launch()
    assert {first.slot, second.slot} == {0, 1}
    pipeline.commit(first)
    assert pipeline.launch(plan(sequence)).slot == first.slot


def test_depth_one_has_one_launch_in_flight() -> None:
    """At depth 1 a launch waits for the commit before it."""
    pipeline, sequence = Pipeline(1), make_sequence(0)
    launch = pipeline.launch(plan(sequence))
    pipeline.mark_sampled(launch)
    assert not pipeline.can_launch()
    pipeline.commit(launch)
    assert pipeline.can_launch()


def test_only_one_launch_waits_for_sampling() -> None:
    """No launch follows an unsampled launch."""
    pipeline = Pipeline(2)
    launch = pipeline.launch(plan(make_sequence(0)))
    assert pipeline.unsampled() is launch
    assert not pipeline.can_launch()
    with pytest.raises(AssertionError, match="unsampled"):
        pipeline.launch(plan(make_sequence(1)))
    pipeline.mark_sampled(launch)
    assert pipeline.unsampled() is None
    assert pipeline.can_launch()


def test_a_launch_is_sampled_once() -> None:
    """Sampling is marked on the one launch that waits for it."""
    pipeline = Pipeline(2)
    launch = pipeline.launch(plan(make_sequence(0)))
    pipeline.mark_sampled(launch)
    with pytest.raises(AssertionError, match="not the unsampled one"):
        pipeline.mark_sampled(launch)


def test_the_oldest_commits_first() -> None:
    """Commits come in launch order."""
    pipeline = Pipeline(2)
    first = pipeline.launch(plan(make_sequence(0)))
    pipeline.mark_sampled(first)
    second = pipeline.launch(plan(make_sequence(1)))
    pipeline.mark_sampled(second)
    assert pipeline.oldest() is first
    with pytest.raises(AssertionError, match="not the oldest"):
        pipeline.commit(second)
    pipeline.commit(first)
    assert pipeline.oldest() is second


def test_an_unsampled_launch_cannot_commit() -> None:
    """A launch is sampled before its commit."""
    pipeline = Pipeline(2)
    launch = pipeline.launch(plan(make_sequence(0)))
    with pytest.raises(AssertionError, match="unsampled"):
        pipeline.commit(launch)


def test_references_count_the_launches_in_flight() -> None:
    """A sequence in two launches is releasable after the second commit, if it ended."""
    pipeline, ended, alive = Pipeline(2), make_sequence(0), make_sequence(1)
    first = pipeline.launch(plan(ended, alive))
    pipeline.mark_sampled(first)
    second = pipeline.launch(plan(ended, alive))
    pipeline.mark_sampled(second)
    assert (ended.inflight_refs, alive.inflight_refs) == (2, 2)
    ended.finalized = True
    assert pipeline.commit(first) == []
    assert ended.finalized
    assert ended.inflight_refs
    assert pipeline.commit(second) == [ended]
    assert (ended.inflight_refs, alive.inflight_refs) == (0, 0)
    assert len(pipeline) == 0


def test_a_finalized_sequence_is_not_launched() -> None:
    """A zombie gets no further launch."""
    sequence = make_sequence(0)
    sequence.finalized = True
    with pytest.raises(AssertionError, match="launched when finalized"):
        Pipeline(2).launch(plan(sequence))


@pytest.mark.parametrize("depth", [0, 3])
def test_there_are_two_depths(depth: int) -> None:
    """Two slots serve depth 1 and depth 2."""
    with pytest.raises(AssertionError, match="depth"):
        Pipeline(depth)


# ---------------------------------------------------------------- ends
# The end of a sequence: by its task, its client, its deadline or an error.

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


# ---------------------------------------------------------------- refinements
# Refinements among decodes and waiting requests.

_, PREFILL, DECODE, REFINE = LaunchKind


def kinds(world: World) -> list[LaunchKind]:
    """Return the kinds of all launches, in order."""
    return [plan.kind for plan in world.runner.plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_refinement_alone_is_a_launch_like_any_other(depth: int) -> None:
    """The scheduler is not idle until the refinement is committed and has its answer."""
    world = World(depth=depth)
    refinement = world.refine()
    assert not world.scheduler.idle
    world.drain()
    assert kinds(world) == [REFINE]
    assert world.refined == [0]
    assert refinement.result == ("better", 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_decodes_alternate_with_refinements(depth: int) -> None:
    """Decodes wait for one refinement at a time, and refinements for one decode."""
    world = World(depth=depth)
    world.submit(FakeTask(seed=LONG_SEED, max_tokens=14))
    world.step()
    for _ in range(3):
        world.refine()
    world.drain()
    assert kinds(world)[:8] == [PREFILL, DECODE, REFINE, DECODE, REFINE, DECODE, REFINE, DECODE]


def test_a_refinement_goes_before_a_prefill() -> None:
    """A refinement ends a request, a prefill begins one."""
    world = World()
    world.submit(FakeTask(max_tokens=1))
    world.refine()
    world.drain()
    assert kinds(world) == [REFINE, PREFILL]


def test_a_refinement_needs_no_row() -> None:
    """Sequences may use all rows and pages meanwhile."""
    world = World(num_rows=1)
    world.submit(FakeTask(seed=LONG_SEED, max_tokens=14))
    world.step()
    world.refine()
    while REFINE not in kinds(world):
        world.step()
    assert world.scheduler.load().rows_used == 1
    world.drain()


def test_a_completed_refinement_may_submit_the_next() -> None:
    """A refinement may be submitted inside the commit of another."""
    world = World()
    first = world.refine()
    first_done = first.done

    def done(refinement: Refinement) -> None:
        first_done(refinement)
        if len(world.refinements) == 1:
            world.refine()

    first.done = done
    world.drain()
    assert world.refined == [0, 1]


def test_an_image_waits_for_its_prefill_across_a_refinement() -> None:
    """A refinement between two encodes of an image does not change its features."""
    world = World(crops_per_launch=2)
    world.submit(FakeTask(seed=LONG_SEED, max_tokens=14))
    world.step()
    world.submit(FakeTask(max_tokens=2), prefix_key="p", prefix_length=9, num_crops=6)
    while LaunchKind.ENCODE not in kinds(world):
        world.step()
    world.refine()
    world.drain()
    order = [kind for kind in kinds(world)[1:] if kind is not DECODE]
    encode = LaunchKind.ENCODE
    assert order == [encode, REFINE, encode, encode, PREFILL] or order == [
        encode,
        encode,
        REFINE,
        encode,
        PREFILL,
    ]
