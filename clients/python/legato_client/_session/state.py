"""The rules of a session, as a value that neither waits nor sends.

Both sessions read messages into it, write what it makes, and wait where it says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from legato.v1 import media_pb2, session_pb2, task_pb2

from legato_client._convert import requests, session
from legato_client._errors import (
    Cancelled,
    IncompleteStream,
    InternalError,
    LegatoError,
    SessionProtocol,
    Unavailable,
)
from legato_client._images.shared_frames import SharedFrame
from legato_client._session.track_memory import TrackMemory
from legato_client._transport.wire import to_bytes
from legato_client._values import tasks as _tasks
from legato_client._values.results import FrameStamp
from legato_client._values.session import (
    Answer,
    FrameDelta,
    FrameDropped,
    FrameResult,
    SessionStats,
    SessionTerms,
)

SILENT_INTERVALS = 3
LEAST_PATIENCE = 1.0  # seconds; a busy machine may miss several short heartbeats


class SessionState:
    """What was sent and received so far; at most `window` answers may lie unread.

    A frame is unacknowledged, and counts against the credits, until `accepted`, `dropped` or its
    last result. It is open until its last result or its drop.
    """

    def __init__(self, window: int, standing_tasks: Sequence[task_pb2.Task] = ()) -> None:
        self.terms: SessionTerms | None = None
        self.stats = SessionStats()
        self.tracks = TrackMemory(standing_tasks)
        self._window = window
        self._num_read = 0  # not granted again yet
        self._next_index = 0
        self._last_sequence = 0
        self._credits = 0
        self._reserved = 0
        self._unacknowledged: set[int] = set()
        self._open: set[int] = set()
        self._slots: dict[int, SharedFrame] = {}  # of unacknowledged frames
        self._going_away = False
        self._finished = False
        self._over = False
        self._error: LegatoError | None = None

    # ------------------------------------------------------------ what can be asked

    @property
    def credits_left(self) -> int:
        return max(0, self._credits - len(self._unacknowledged) - self._reserved)

    @property
    def has_credit(self) -> bool:
        return self.credits_left > 0

    @property
    def is_over(self) -> bool:
        return self._over

    @property
    def is_open(self) -> bool:
        """Also true when it is over."""
        return self._over or self.terms is not None

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which the server counts as lost; None while it owes nothing."""
        interval = self.terms.heartbeat_interval if self.terms else 0.0
        return max(SILENT_INTERVALS * interval, LEAST_PATIENCE) if interval else None

    def silence(self) -> Unavailable:
        return Unavailable(f"the server has been silent for {self.patience or 0:g} s")

    def broken(self) -> InternalError:
        """The error of a reader that ended on its own, which is a bug of this package."""
        return InternalError("the session's reader ended unexpectedly")

    def granted(self) -> SessionTerms:
        if self.terms is None:
            raise _not_open()
        return self.terms

    def check_open(self) -> None:
        """Raise why nothing can be sent (any more)."""
        if self._error is not None:
            raise self._error
        if self._over:
            raise Cancelled("the session is closed")
        if self._finished:
            raise SessionProtocol("the session is finished: it takes no more messages")
        if self.terms is None:
            raise _not_open()

    def check_takes_frames(self) -> None:
        """Raise why no frame can be sent (any more)."""
        self.check_open()
        if self._going_away:
            raise Unavailable("the server is ending this session: open another one")

    def raise_end(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------ this side

    def reserve(self) -> None:
        assert self.has_credit, "ask first"
        self._reserved += 1

    def release(self) -> None:
        """The frame was not made."""
        self._reserved -= 1

    def skip(self) -> None:
        self.stats = dataclasses.replace(self.stats, skipped=self.stats.skipped + 1)

    def frame(
        self,
        image: media_pb2.Image,
        slot: SharedFrame | None,
        stamp: FrameStamp | None,
        extra_tasks: Sequence[_tasks.Task],
        skip_standing_tasks: bool,
        must_run: bool,
    ) -> tuple[int, bytes]:
        """Use up a reserved credit, and `image`; return the sequence and the message.

        A stamp without a sequence gets the next one. `slot` is released once the server has the
        frame, or will not have it any more. Raises SessionProtocol for a sequence that does not
        grow.
        """
        stamp = stamp or FrameStamp()
        sequence = stamp.sequence or self._last_sequence + 1
        if sequence <= self._last_sequence:
            raise SessionProtocol(
                f"the stamp's sequence {sequence} is not above {self._last_sequence}",
                reason="SESSION_PROTOCOL",
                metadata={"field": "frame.stamp.sequence"},
            )
        request = session_pb2.SessionRequest()
        frame = request.frame
        frame.stamp.CopyFrom(requests.stamp_message(dataclasses.replace(stamp, sequence=sequence)))
        frame.extra_tasks.extend(requests.session_tasks(extra_tasks))
        frame.skip_standing_tasks = skip_standing_tasks
        frame.must_run = must_run
        frame.image.CopyFrom(image)
        data = to_bytes(request)
        self._reserved -= 1
        self._last_sequence = sequence
        self.tracks.sent(sequence, stamp)
        self._unacknowledged.add(sequence)
        self._open.add(sequence)
        if slot is not None:
            self._slots[sequence] = slot
        self.stats = dataclasses.replace(self.stats, sent=self.stats.sent + 1)
        return sequence, data

    def read(self, answer: Answer) -> None:
        if isinstance(answer, FrameResult | FrameDelta):
            self._num_read += 1

    def grant(self) -> bytes | None:
        """Grant what was read, once it is worth a message."""
        if self._num_read < (self._window + 1) // 2 or self._finished or self._over:
            return None
        grant = session_pb2.GrantCredits(responses=self._num_read)
        self._num_read = 0
        return session_pb2.SessionRequest(grant=grant).SerializeToString()

    def cancel(self, sequence: int | None, task_id: str | None) -> bytes:
        """ValueError unless exactly one target is named."""
        target = session_pb2.CancelFrame()
        if sequence is not None and task_id is None:
            target.sequence = sequence
        elif task_id is not None and sequence is None:
            target.task_id = task_id
        else:
            raise ValueError("name either a sequence or a task_id")
        return session_pb2.SessionRequest(cancel=target).SerializeToString()

    def update(self, tasks: Sequence[_tasks.Task]) -> bytes:
        update = session_pb2.UpdateTasks(standing_tasks=requests.session_tasks(tasks))
        self.tracks.use(update.standing_tasks)
        return session_pb2.SessionRequest(update=update).SerializeToString()

    def finish(self) -> None:
        self._finished = True

    # ------------------------------------------------------------ the server's side

    def receive(self, message: session_pb2.SessionResponse) -> Answer | None:
        """Return the answer for the program, if any.

        Raises IncompleteStream when a message was lost, and InternalError when the server breaks
        the contract.
        """
        if message.index != self._next_index:
            raise IncompleteStream(
                f"message {self._next_index} of the session is missing, got {message.index}"
            )
        self._next_index += 1
        kind = message.WhichOneof("message")
        if (kind == "opened") != (message.index == 0):
            raise InternalError(f"message {message.index} of the session was {kind or 'unknown'}")
        match kind:
            case "opened":
                self._opened(message.opened)
            case "accepted":
                self._credits = message.accepted.frame_credits
                self._acknowledge(message.accepted.sequence)
            case "dropped":
                return self._dropped(message.dropped)
            case "delta":
                return self._delta(message.delta)
            case "result":
                return self._result(message.result)
            case "go_away":
                self._going_away = True
                return session.go_away(message.go_away)
        return None

    def end(self, error: LegatoError | None) -> None:
        """Only the first end counts."""
        if self._over:
            return
        self._end()
        if error is None and self._open:
            error = IncompleteStream(f"the session ended with {len(self._open)} frames unanswered")
        self._error = error

    def close(self) -> None:
        """Unanswered frames are no error then."""
        self._end()

    def _opened(self, opened: session_pb2.SessionOpened) -> None:
        self._credits = opened.frame_credits
        self.terms = session.terms(opened)

    def _dropped(self, dropped: session_pb2.FrameDropped) -> FrameDropped:
        self._credits = dropped.frame_credits
        if dropped.sequence in self._open:
            self.stats = dataclasses.replace(self.stats, dropped=self.stats.dropped + 1)
        self._settle(dropped.sequence)
        return session.dropped(dropped)

    def _delta(self, message: session_pb2.FrameDelta) -> FrameDelta | None:
        delta = session.delta(message)
        if delta is None:
            self._num_read += 1  # it took a credit as any other
        return delta

    def _result(self, message: session_pb2.FrameResult) -> FrameResult:
        result = session.result(message, self.terms.model if self.terms else "")
        self.tracks.received(result)
        if result.last_for_frame:
            self.stats = dataclasses.replace(self.stats, answered=self.stats.answered + 1)
            self._settle(result.sequence)
        return result

    def _settle(self, sequence: int) -> None:
        self._acknowledge(sequence)
        self._open.discard(sequence)
        self.tracks.settled(sequence)

    def _acknowledge(self, sequence: int) -> None:
        self._unacknowledged.discard(sequence)
        slot = self._slots.pop(sequence, None)
        if slot is not None:
            slot.release()

    def _end(self) -> None:
        self._over = True
        for sequence in list(self._slots):
            self._acknowledge(sequence)


def _not_open() -> SessionProtocol:
    return SessionProtocol("the session is not open: use it in a `with` block")
