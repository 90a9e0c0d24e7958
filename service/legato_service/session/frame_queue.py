"""Where frames wait for their turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from legato_service.session.frame import F
from legato_service.session.terms import Cause, Policy


class FrameQueue(Generic[F]):
    """Holds at most `capacity` frames that must run, and beside them what the policy lets wait.

    Under EVERY_FRAME that is `capacity` frames in all, otherwise one frame: the newest.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._frames: list[F] = []

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[F]:
        return iter(list(self._frames))

    def __contains__(self, frame: object) -> bool:
        return frame in self._frames

    def put(self, frame: F) -> tuple[F, Cause] | None:
        """Let a frame wait; the frame that has to go for it, which may be itself."""
        victim = self._victim(frame)
        self._frames.append(frame)
        if victim is not None:
            self._frames.remove(victim[0])
        return victim

    def take(self) -> F:
        """The frame that has waited longest."""
        return self._frames.pop(0)

    def remove(self, frame: F) -> None:
        """Let a frame wait no longer."""
        self._frames.remove(frame)

    def _victim(self, frame: F) -> tuple[F, Cause] | None:
        replaceable = [each for each in self._frames if not each.must_run]
        if self._policy is Policy.EVERY_FRAME:
            if len(self._frames) < self._capacity:
                return None
            if frame.must_run and replaceable:
                return replaceable[-1], Cause.OVERLOADED
            return frame, Cause.OVERLOADED
        if frame.must_run and len(self._frames) - len(replaceable) >= self._capacity:
            return frame, Cause.OVERLOADED
        return (replaceable[0], Cause.SUPERSEDED) if replaceable else None
