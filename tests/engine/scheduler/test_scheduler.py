"""The step: its order, and what sink and observer receive."""

import pytest
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.sequence import SequenceStatus
from legato_engine.types import RequestKey

from tests.engine.scheduler.tasks import long_task
from tests.engine.scheduler.world import World
from tests.fakes import FakeTask

R0 = RequestKey("r0")

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
    """Status and time change at the launch, the first token comes with its commit."""
    world = World()
    sequence = world.submit(long_task())
    statuses = [sequence.status]
    world.steps(1)
    assert world.sink.started_ids == [R0]
    statuses.append(sequence.status)
    assert sequence.timing.prefill_start == 100.0
    world.clock.advance(2.0)
    world.steps(1)
    statuses.append(sequence.status)
    assert sequence.timing.first_token == 102.0
    world.scheduler.drain()
    assert [*statuses, sequence.status] == list(SequenceStatus)


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
    durations = (record.plan_ns, record.launch_ns, record.sample_ns, record.commit_ns)
    assert durations == (1, 1, 1, 1)


def test_an_idle_step_does_nothing() -> None:
    """Without work a step returns False."""
    world = World()
    assert world.scheduler.step() is False
    world.scheduler.drain()
    assert world.runner.calls == []
