"""The queue of waiting frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from legato_service.session.frame import F
from legato_service.session.settings import DropReason, FramePolicy


class FrameQueue(Generic[F]):
    """At most `capacity` frames that must run, and droppable frames as the policy allows.

    EVERY_FRAME allows `capacity` frames of both kinds together; the other policies the newest
    droppable frame.
    """

    def __init__(self, policy: FramePolicy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._frames: list[F] = []

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[F]:
        return iter(list(self._frames))

    def __contains__(self, frame: object) -> bool:
        return frame in self._frames

    def put(self, frame: F) -> tuple[F, DropReason] | None:
        """Return the frame to drop for the new one, perhaps itself."""
        victim = self._victim(frame)
        self._frames.append(frame)
        if victim is not None:
            self._frames.remove(victim[0])
        return victim

    def take(self) -> F:
        return self._frames.pop(0)

    def remove(self, frame: F) -> None:
        self._frames.remove(frame)

    def _victim(self, frame: F) -> tuple[F, DropReason] | None:
        replaceable = [each for each in self._frames if not each.must_run]
        if self._policy is FramePolicy.EVERY_FRAME:
            if len(self._frames) < self._capacity:
                return None
            if frame.must_run and replaceable:
                return replaceable[-1], DropReason.OVERLOADED
            return frame, DropReason.OVERLOADED
        if frame.must_run and len(self._frames) - len(replaceable) >= self._capacity:
            return frame, DropReason.OVERLOADED
        return (replaceable[0], DropReason.SUPERSEDED) if replaceable else None
