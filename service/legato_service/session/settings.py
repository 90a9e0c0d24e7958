"""What a session was opened with. Times are seconds."""

from __future__ import annotations

import dataclasses
import enum
import math


class FramePolicy(enum.Enum):
    """What happens when frames arrive faster than they are processed."""

    LATEST_WINS = enum.auto()
    EVERY_FRAME = enum.auto()
    PREEMPT = enum.auto()


class DropReason(enum.Enum):
    """Why a frame was dropped, or its running tasks stopped."""

    SUPERSEDED = enum.auto()
    TOO_OLD = enum.auto()
    OVERLOADED = enum.auto()
    CANCELLED = enum.auto()
    GOING_AWAY = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How a session treats its frames.

    `frame_credits` limits the waiting frames, and so the frames that a client may have sent without
    knowing whether they were accepted or dropped. `response_credits` None is unlimited.
    `max_unsent_frames` limits the frames with results that wait for credits. A client that grants
    none for `credit_timeout` while messages wait is disconnected.
    """

    policy: FramePolicy = FramePolicy.LATEST_WINS
    max_in_flight: int = 1
    frame_credits: int = 2
    max_frame_age: float = math.inf
    response_credits: int | None = None
    max_unsent_frames: int = 16
    credit_timeout: float = 30.0
