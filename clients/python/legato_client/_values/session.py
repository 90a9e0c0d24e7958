"""What a session answers, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legato_client._errors import LegatoError
from legato_client._values.events import Event
from legato_client._values.results import FrameStamp, ImageInfo, Result

FramePolicy = Literal["latest_wins", "every_frame", "preempt"]


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What the server granted; `heartbeat_interval` is in seconds.

    `session_id` is the server's name for the session, `max_in_flight` how many frames it works on
    at a time.
    """

    session_id: str
    model: str
    max_in_flight: int
    heartbeat_interval: float


@dataclass(frozen=True, slots=True)
class FrameResult:
    """How one task ended on one frame; `stamp` is the frame's own, unchanged.

    `age` is how many seconds after the frame's capture the server sent this; None: not said.
    """

    stamp: FrameStamp
    task_id: str
    outcome: Result | LegatoError
    image: ImageInfo | None
    last_for_frame: bool
    age: float | None = None

    @property
    def sequence(self) -> int:
        """The frame, as `send` named it."""
        return self.stamp.sequence

    @property
    def result(self) -> Result:
        """The result; raises the error of a task that failed."""
        if isinstance(self.outcome, LegatoError):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True, slots=True)
class FrameDropped:
    """The frame gets no results.

    `reason` is "superseded", "too_old", "overloaded", "cancelled", or "unspecified" for one this
    client does not know. `dropped_total` counts since the session opened.
    """

    sequence: int
    reason: str
    dropped_total: int


@dataclass(frozen=True, slots=True)
class FrameDelta:
    """An event of a task that runs, as `generate` has them; the `FrameResult` is its end."""

    sequence: int
    task_id: str
    event: Event


@dataclass(frozen=True, slots=True)
class GoAway:
    """The server will end the session in `time_left` seconds: open another one elsewhere.

    `reason` is None where the session merely reached its greatest age.
    """

    time_left: float
    reason: LegatoError | None


Answer = FrameResult | FrameDropped | FrameDelta | GoAway


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Frames so far: `sent` is `answered` + `dropped` + those still open.

    `skipped` counts frames that were never sent, for want of a credit.
    """

    sent: int = 0
    answered: int = 0
    dropped: int = 0
    skipped: int = 0
