"""What a launch cost the host, for benchmarks and traces."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from legato_engine.scheduler.launch import Launch


@dataclasses.dataclass(slots=True, eq=False)
class StepRecord:
    """When the host worked on a launch, in `Clock.perf_ns` nanoseconds, and what came of it.

    The scheduler fills it in from the launch to its commit, then passes it to the observer.
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
    zombies: int = 0  # rows whose sequence had ended before this commit
    tokens: int = 0  # committed, of the other rows
    drafted: int = 0  # draft tokens
    accepted: int = 0  # of them, those after a sequence's end included
    rejected: int = 0  # wrong ones that ended a block; `accepted + rejected` were tried

    @property
    def plan_ns(self) -> int:
        """Time to plan the batch."""
        return self.plan_end - self.plan_start

    @property
    def launch_ns(self) -> int:
        """Time to stage and enqueue the forward pass."""
        return self.launch_end - self.plan_end

    @property
    def sample_ns(self) -> int:
        """Time to read constraints and enqueue sampling."""
        return self.sample_end - self.sample_start

    @property
    def commit_ns(self) -> int:
        """Time to process the tokens, without the wait for them."""
        return self.commit_end - self.wait_end


class Observer(Protocol):
    """Receives the record of every committed launch while the runner still has its times."""

    def committed(self, record: StepRecord) -> None:
        """Called on the scheduler's thread; must be fast."""
        ...
