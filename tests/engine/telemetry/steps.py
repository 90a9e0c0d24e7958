"""Steps with round times."""

from legato_engine.scheduler.batch import Launch, LaunchKind, Plan, ScheduledSequence, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes, Step

from tests.fakes import make_sequence

MS = 1_000_000


def make_step(index, *, rows=2, kind=LaunchKind.DECODE, zombies=0, drafted=0, accepted=0, riding=0):
    """Return a step of 10 ms: forward 0-6, sampling 7-8, copy until 8.5, host work of 1 ms."""
    at = index * 10 * MS
    plan = Plan(kind, tuple(ScheduledSequence(make_sequence(i), 1) for i in range(rows)), riding)
    record = StepRecord(
        launch=Launch(index, index % 2, plan),
        plan_start=at - MS,
        plan_end=at - MS // 2,
        launch_end=at - MS // 4,
        sample_start=at,
        sample_end=at + MS // 8,
        wait_start=at + MS,
        wait_end=at + 9 * MS,
        commit_end=at + 9 * MS + MS // 8,
        zombies=zombies,
        tokens=rows - zombies + accepted,
        drafted=drafted,
        accepted=accepted,
    )
    times = LaunchTimes(
        forward_start=at,
        forward_end=at + 6 * MS,
        sample_start=at + 7 * MS,
        sample_end=at + 8 * MS,
        copy_end=at + 8 * MS + MS // 2,
    )
    return Step(record, times)
