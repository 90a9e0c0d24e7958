"""The queue of frames that wait to run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from legato_service.session.frame import F
from legato_service.session.settings import DropReason, FramePolicy


class FrameQueue(Generic[F]):
    """Holds at most `capacity` frames that must run, and droppable frames as the policy allows.

    EVERY_FRAME allows `capacity` frames of both kinds together. The other policies allow one
    droppable frame, the newest.
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
        """Append a frame; return the frame to drop for it, which may be the new one itself."""
        victim = self._victim(frame)
        self._frames.append(frame)
        if victim is not None:
            self._frames.remove(victim[0])
        return victim

    def take(self) -> F:
        """Remove and return the oldest frame."""
        return self._frames.pop(0)

    def remove(self, frame: F) -> None:
        """Remove a frame."""
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
