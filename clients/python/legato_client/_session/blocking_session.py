"""A session of the blocking client."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
from legato.v1 import session_pb2

from legato_client._client_methods import ClientMethods
from legato_client._errors import LegatoError, from_rpc_error
from legato_client._grpc import channel
from legato_client._grpc.transport import BlockingTransport, run
from legato_client._images.sources import ImageInput, SharedFrame
from legato_client._session.state import SessionPlan, SessionState
from legato_client._types import tasks as _tasks
from legato_client._types.results import FrameStamp, TrackNow
from legato_client._types.server import Answer, SessionStats, SessionTerms

_END_TIMEOUT_S = 5.0


class Session:
    """A stream of frames and their results; made by `Client.session`.

        with client.session([DetectTask("cup")], max_frame_age=0.2) as session:
            session.send(frame)
            for answer in session:
                ...

    Send from one thread and iterate in another, or in one thread if you keep reading, because the
    server's credits limit the frames in flight. One thread reads the stream and one of gRPC's
    threads writes it, so that neither direction blocks the other.

    Iterating ends when the session is finished or closed.

    Raises:
        LegatoError: From iterating and sending, once the session has failed.
    """

    def __init__(
        self, calls: ClientMethods, connection: BlockingTransport, plan: SessionPlan
    ) -> None:
        self._calls = calls
        self._connection = connection
        self._plan = plan
        self._changed = threading.Condition()  # guards the three below
        self._state = SessionState(plan.window, plan.opening.standing_tasks, plan.max_frame_age)
        self._answers: collections.deque[Answer] = collections.deque()
        self._last_heard = time.monotonic()
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: half-close
        self._call: Any = None
        self._reader: threading.Thread | None = None

    @property
    def terms(self) -> SessionTerms:
        """Return the terms that the server granted."""
        return self._state.granted()

    @property
    def stats(self) -> SessionStats:
        """Frames so far."""
        return self._state.stats

    @property
    def credits(self) -> int:
        """Frames that could be sent now without waiting."""
        return self._state.credits_left

    def __enter__(self) -> Session:
        start: grpc.StreamStreamMultiCallable[bytes, bytes] = (
            self._connection.channel.stream_stream(channel.SESSION_PATH)
        )
        self._requests.put(self._plan.first_message())
        metadata = self._connection.metadata(channel.of(self._plan.opening))
        self._call = start(iter(self._requests.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="legato-session", daemon=True)
        self._reader.start()
        try:
            self._until_opened()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ sending

    def send(
        self,
        image: ImageInput,
        *,
        stamp: FrameStamp | None = None,
        extra_tasks: Sequence[_tasks.Task] = (),
        skip_standing_tasks: bool = False,
        must_run: bool = False,
    ) -> int | None:
        """Send a frame; its sequence, or None when it was left out for want of room.

        A `stamp` comes back with the answers; without a sequence of its own it gets the next one.
        `extra_tasks` are for this frame only, and a frame that `must_run` is never dropped. A
        `SharedFrame` that was sent is released by the session, as soon as the server has it.

        Raises DeadlineExceeded when there was no room in time, and SessionProtocol for a sequence
        that does not grow.
        """
        with self._changed:
            if not self._has_room():
                self._state.skip()
                return None
            self._state.reserve()
        slot = image if isinstance(image, SharedFrame) else None
        try:
            shown = run(self._calls.image_message(image))
            with self._changed:
                self._state.check_takes_frames()
                sequence, message = self._state.frame(
                    shown, slot, stamp, extra_tasks, skip_standing_tasks, must_run
                )
                self._requests.put(message)
        except BaseException:
            with self._changed:
                self._state.release()
            raise
        return sequence

    def wait_for_credit(self, timeout: float) -> bool:
        """Wait until a frame could be sent; False after `timeout` seconds without a credit.

        So the frame to send can be chosen when there is room for it. Raises once no frame can be
        sent any more.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._state.check_takes_frames()
            while not self._state.has_credit:
                if time.monotonic() >= end:
                    return False
                self._wait(end)
                self._state.check_takes_frames()
        return True

    def cancel(self, *, sequence: int | None = None, task_id: str | None = None) -> None:
        """Stop a frame, or all running tasks of an id; naming what has ended does nothing."""
        self._say(self._state.cancel(sequence, task_id))

    def update_tasks(self, tasks: Sequence[_tasks.Task]) -> None:
        """Replace the standing tasks, from the next frame on."""
        with self._changed:
            self._say(self._state.update(tasks))

    def finish(self) -> None:
        """Stop sending; iteration ends once the frames in flight are answered."""
        with self._changed:
            self._state.check_open()
            self._state.finish()
            self._requests.put(None)

    def close(self) -> None:
        """End the session now; unanswered frames are given up. Does nothing the second time."""
        with self._changed:
            self._state.close()
            self._changed.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._requests.put(None)  # ends gRPC's writing thread
        if self._reader is not None:
            # gRPC has been seen to leave a cancelled call waiting for its next message for ever,
            # after a server that drained; the reader is a daemon, and a session is over without it.
            self._reader.join(_END_TIMEOUT_S)

    # ------------------------------------------------------------ reading

    def now(self, at_ns: int | None = None) -> tuple[TrackNow, ...]:
        """Predict the tracked objects of all standing tasks, with their uncertainty.

        From the results received so far, also those not read yet. `at_ns` is the moment, on the
        clock of the stamps' capture times; None is `time.time_ns()`. An object that was not found
        in the last `Tracking.max_unseen` seconds is not among them.
        """
        with self._changed:
            return self._state.tracks.now(at_ns)

    def __iter__(self) -> Session:
        return self

    def __next__(self) -> Answer:
        with self._changed:
            while not self._answers:
                if self._state.is_over:
                    self._state.raise_end()
                    raise StopIteration
                self._wait()
            answer = self._answers.popleft()
            self._state.read(answer)
            self._grant()
        return answer

    # ------------------------------------------------------------ how

    def _grant(self) -> None:
        grant = self._state.grant()
        if grant is not None:
            self._requests.put(grant)

    def _say(self, message: bytes) -> None:
        with self._changed:
            self._state.check_open()
            self._requests.put(message)

    def _has_room(self) -> bool:
        """Wait for a credit as the plan says; False to leave the frame out."""
        self._state.check_takes_frames()
        if not self._state.has_credit and self._plan.when_full == "drop":
            return False
        end = time.monotonic() + self._plan.send_timeout
        while not self._state.has_credit:
            if time.monotonic() >= end:
                raise self._plan.credit_timeout_error()
            self._wait(end)
            self._state.check_takes_frames()
        return True

    def _until_opened(self) -> None:
        end = time.monotonic() + self._plan.open_timeout
        with self._changed:
            while not self._state.is_open:
                if time.monotonic() >= end:
                    raise self._plan.open_timeout_error()
                self._wait(end)
            self._state.check_open()

    def _wait(self, end: float | None = None) -> None:
        """Wait for a message until `end`; end the session if the server has fallen silent."""
        patience = self._state.patience
        limits = [] if end is None else [end]
        if patience is not None:
            limits.append(self._last_heard + patience)
        if not limits:
            self._changed.wait()
            return
        self._changed.wait(max(0.0, min(limits) - time.monotonic()))
        if patience is not None and time.monotonic() - self._last_heard >= patience:
            self._call.cancel()
            self._state.end(self._state.silence())

    def _read(self) -> None:
        error: LegatoError | None = self._state.broken()
        try:
            for data in self._call:
                self._receive(channel.message_of(session_pb2.SessionResponse, data))
            error = None
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        except LegatoError as failure:
            self._call.cancel()
            error = failure
        finally:
            with self._changed:
                self._state.end(error)
                self._changed.notify_all()
            self._requests.put(None)  # ends gRPC's writing thread

    def _receive(self, message: session_pb2.SessionResponse) -> None:
        with self._changed:
            self._last_heard = time.monotonic()
            answer = self._state.receive(message)
            if answer is not None:
                self._answers.append(answer)
            self._grant()
            self._changed.notify_all()
