"""Host times of a launch."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from legato_engine.scheduler.launch import Launch
from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class StepRecord:
    """The host's work on a launch, in `Clock.perf_ns` nanoseconds."""

    launch: Launch
    plan_start: int
    plan_end: int
    launch_end: int = 0
    sample_start: int = 0
    sample_end: int = 0
    wait_start: int = 0
    wait_end: int = 0
    commit_end: int = 0
    num_followed: int = 0  # steps of a loop
    zombies: int = 0  # rows whose sequence had ended before this commit
    tokens: int = 0  # committed, of the other rows
    drafted: int = 0  # draft tokens
    accepted: int = 0  # of them, those after a sequence's end included
    rejected: int = 0  # wrong ones that ended a block; `accepted + rejected` were tried
    blocks: list[int] = dataclasses.field(default_factory=list)  # draft tokens of each row and step

    @property
    def plan_ns(self) -> int:
        return self.plan_end - self.plan_start

    @property
    def launch_ns(self) -> int:
        return self.launch_end - self.plan_end

    @property
    def sample_ns(self) -> int:
        return self.sample_end - self.sample_start

    @property
    def commit_ns(self) -> int:
        return self.commit_end - self.wait_end


class Observer(Protocol):
    """Receives the record of every committed launch while the runner has its times."""

    def committed(self, record: StepRecord) -> None:
        """On the scheduler's thread; must be fast."""
        ...


class FlightRecorder(Protocol):
    """Records what is under way, for a process that may end at any moment.

    On the scheduler's thread; must take microseconds.
    """

    def submitted(self, sequence: Sequence) -> None: ...

    def launching(self, launch: Launch, at: int) -> None:
        """Before the forward pass is enqueued; `at` is in `Clock.perf_ns` nanoseconds."""
        ...

    def ended(self, sequence: Sequence) -> None: ...
