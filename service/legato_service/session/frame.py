"""One frame, from its arrival to its one outcome, and what a session says about frames."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

from legato_engine.errors import LegatoError
from legato_engine.ipc.messages import Delta, Done, Queued, Started

from legato_service.session.terms import Cause

Report = Queued | Started | Delta
Outcome = Done | LegatoError | None
"""How a task ended; None: it was stopped before the engine heard of it."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Frame:
    """What the core must know of a frame; its last four fields are the core's to change.

    `born` is when its age was zero, on the clock that all of the core's `now` are read from.
    """

    sequence: int
    task_ids: tuple[str, ...]  # one for each task, at least one; may repeat when empty
    born: float
    must_run: bool = False

    accepted: bool = dataclasses.field(default=False, init=False)
    stopped: dict[int, Cause] = dataclasses.field(default_factory=dict, init=False)  # by task
    ended: set[int] = dataclasses.field(default_factory=set, init=False)  # tasks
    told: int = dataclasses.field(default=0, init=False)  # results handed to the writer

    @property
    def may_be_dropped(self) -> bool:
        """Whether `dropped` may still be its outcome: no result of it was told."""
        return self.told == 0 and not self.must_run


F = TypeVar("F", bound=Frame)


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The frame's bytes are the server's own now."""

    sequence: int
    frame_credits: int


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """The frame gets no results."""

    sequence: int
    cause: Cause
    frame_credits: int
    dropped_total: int


@dataclasses.dataclass(frozen=True, slots=True)
class GoAway:
    """The server will end the session."""

    time_left: float  # seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Event(Generic[F]):
    """What task `index` of a running frame said; a `Delta` holds one event."""

    frame: F
    index: int
    report: Report


@dataclasses.dataclass(frozen=True, slots=True)
class Result(Generic[F]):
    """How task `index` of a frame ended; `stopped` says why where the session stopped it."""

    frame: F
    index: int
    outcome: Outcome
    stopped: Cause | None
    last: bool


Notice = Accepted | Dropped | GoAway
"""What takes no credit."""
