"""What a session was opened with, as the pure core reads it. Times are seconds."""

from __future__ import annotations

import dataclasses
import enum
import math


class Policy(enum.Enum):
    """What happens when frames come faster than answers."""

    LATEST_WINS = enum.auto()
    EVERY_FRAME = enum.auto()
    PREEMPT = enum.auto()


class Cause(enum.Enum):
    """Why a frame was dropped, or its running work stopped."""

    SUPERSEDED = enum.auto()
    TOO_OLD = enum.auto()
    OVERLOADED = enum.auto()
    CANCELLED = enum.auto()
    GOING_AWAY = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How frames are treated for as long as the session lasts.

    `frame_credits` bounds the frames that wait, and so those a client may have sent without having
    seen them accepted or dropped. `response_credits` None is unlimited. `ring` bounds the frames
    whose results wait for their reader, who has `patience` to grant more.
    """

    policy: Policy = Policy.LATEST_WINS
    max_in_flight: int = 1
    frame_credits: int = 2
    max_frame_age: float = math.inf
    response_credits: int | None = None
    ring: int = 16
    patience: float = 30.0
