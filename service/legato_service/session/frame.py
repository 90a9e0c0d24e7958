"""A frame of a session, and the messages about frames."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

from legato_engine.errors import LegatoError
from legato_engine.ipc.messages import Delta, Done, Queued, Started

from legato_service.session.settings import DropReason

Output = Queued | Started | Delta
Outcome = Done | LegatoError | None
"""How a task ended; None: it was stopped before it was submitted to the engine."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Frame:
    """What `SessionCore` knows of a frame. Only the core changes the last four fields.

    `captured_at` is when the frame's age was zero, on the clock of the core's `now`.
    """

    sequence: int
    task_ids: tuple[str, ...]  # one for each task, at least one; empty ids may repeat
    captured_at: float
    must_run: bool = False

    accepted: bool = dataclasses.field(default=False, init=False)
    stopped: dict[int, DropReason] = dataclasses.field(default_factory=dict, init=False)  # by task
    ended: set[int] = dataclasses.field(default_factory=set, init=False)  # tasks
    num_sent: int = dataclasses.field(default=0, init=False)  # results handed to the writer

    @property
    def may_be_dropped(self) -> bool:
        """Whether the frame may still be dropped: none of its results was sent."""
        return self.num_sent == 0 and not self.must_run


F = TypeVar("F", bound=Frame)


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The server has the frame's bytes."""

    sequence: int
    frame_credits: int


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """The frame gets no results."""

    sequence: int
    reason: DropReason
    frame_credits: int
    dropped_total: int


@dataclasses.dataclass(frozen=True, slots=True)
class GoAway:
    """The server will end the session."""

    time_left: float  # seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Event(Generic[F]):
    """An output of task `index` of a running frame; a `Delta` has one event."""

    frame: F
    index: int
    output: Output


@dataclasses.dataclass(frozen=True, slots=True)
class Result(Generic[F]):
    """How task `index` of a frame ended; `stopped` is set if the session stopped it."""

    frame: F
    index: int
    outcome: Outcome
    stopped: DropReason | None
    last: bool  # of its frame


Notice = Accepted | Dropped | GoAway
"""Messages that need no credit."""
