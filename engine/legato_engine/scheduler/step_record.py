"""What one launch cost the host, for benchmarks and traces."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from legato_engine.scheduler.launch import Launch


@dataclasses.dataclass(slots=True, eq=False)
class StepRecord:
    """When the host worked on a launch: starts and ends in `Clock.perf_ns` nanoseconds.

    The scheduler fills it between the launch and its commit; it is complete when the observer gets
    it. `zombies` counts the rows sampled in vain: their sequence had ended before this commit.
    Of the others, `tokens` were committed; `drafted` and `accepted` count drafts, `accepted` those
    behind a sequence's end too, and `rejected` the wrong ones that ended a block: `accepted` and
    `rejected` together were tried.
    """

    launch: Launch
    plan_start: int
    plan_end: int
    launch_end: int = 0
    sample_start: int = 0
    sample_end: int = 0
    wait_start: int = 0
    wait_end: int = 0
    commit_end: int = 0
    zombies: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def plan_ns(self) -> int:
        """Choosing the batch."""
        return self.plan_end - self.plan_start

    @property
    def launch_ns(self) -> int:
        """Staging and enqueueing the forward."""
        return self.launch_end - self.plan_end

    @property
    def sample_ns(self) -> int:
        """Reading the constraints and enqueueing the sampling."""
        return self.sample_end - self.sample_start

    @property
    def commit_ns(self) -> int:
        """Bookkeeping after they had."""
        return self.commit_end - self.wait_end


class Observer(Protocol):
    """Told about every launch once it is committed, while the runner still knows its times."""

    def committed(self, record: StepRecord) -> None:
        """Called on the scheduler's thread; must be quick."""
        ...
