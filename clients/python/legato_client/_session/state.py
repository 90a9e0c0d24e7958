"""Session rules as a value that neither waits nor sends."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from legato.v1 import media_pb2, session_pb2, task_pb2

from legato_client._errors import (
    Cancelled,
    IncompleteStream,
    InternalError,
    LegatoError,
    SessionProtocol,
    Unavailable,
)
from legato_client._grpc.channel import to_bytes
from legato_client._images.sources import SharedFrame
from legato_client._proto import pieces, requests, responses
from legato_client._types import tasks as _tasks
from legato_client._types.results import Detection, DetectResult, FrameStamp, TrackNow
from legato_client._types.server import (
    Answer,
    FrameDelta,
    FrameDropped,
    FramePolicy,
    FrameResult,
    SessionStats,
    SessionTerms,
)

P = ParamSpec("P")
SessionT = TypeVar("SessionT")
WhenFull = Literal["wait", "drop"]

_ANSWER_WINDOW = 64  # answers
_OPEN_TIMEOUT = 30.0  # seconds
_SEND_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class SessionPlan:
    """Opening of a session, with the settings of this side only; times are in seconds."""

    opening: session_pb2.SessionOpen
    when_full: WhenFull
    send_timeout: float
    open_timeout: float
    window: int
    max_frame_age: float | None = None

    def first_message(self) -> bytes:
        return session_pb2.SessionRequest(open=self.opening).SerializeToString()


def plan(
    tasks: Sequence[_tasks.Task] = (),
    *,
    policy: FramePolicy = "latest_wins",
    max_frame_age: float | None = None,
    max_in_flight: int = 0,
    stream_deltas: bool = False,
    heartbeat_interval: float | None = None,
    model: str = "",
    adapter: str = "",
    name: str = "",
    when_full: WhenFull = "wait",
    send_timeout: float = _SEND_TIMEOUT,
    open_timeout: float = _OPEN_TIMEOUT,
    answer_window: int = _ANSWER_WINDOW,
) -> SessionPlan:
    """Open a session that runs `tasks` on each frame; use it in a `with` block.

    Results tell their task by its `task_id`: the one given, else the task's object, else its skill
    ("query", "caption"). Two tasks with one id are a ValueError.

    When frames come faster than answers, "latest_wins" keeps the newest one waiting, "preempt" also
    stops the work on the older one, and "every_frame" queues. Frames older than `max_frame_age`
    seconds are dropped instead of answered late; if most are, the logger "legato_client.session"
    warns how long answers take. `max_in_flight` frames are worked on at a time; 0
    is the server's choice. `stream_deltas` asks for events while tasks decode, and
    `heartbeat_interval` for the longest silence of the server in seconds, at least 0.1.

    The server bounds the frames under way. Beyond that, `send` waits for room for up to
    `send_timeout` seconds, or, with `when_full` "drop", leaves the frame out at once. The opening
    takes at most `open_timeout` seconds. At most `answer_window` answers lie unread here.
    """
    if when_full not in ("wait", "drop"):
        raise ValueError(f"when_full must be 'wait' or 'drop', got {when_full!r}")
    if answer_window < 1:
        raise ValueError(f"answer_window must be at least 1, got {answer_window}")
    opening = session_pb2.SessionOpen(
        session_name=name,
        model=model,
        adapter=adapter,
        standing_tasks=requests.session_tasks(tasks),
        frame_policy=pieces.enum_number(session_pb2.FramePolicy.DESCRIPTOR, "policy", policy),
        max_in_flight=max_in_flight,
        stream_deltas=stream_deltas,
        response_credits=answer_window,
        max_frame_age=pieces.duration(max_frame_age),
        heartbeat_interval=pieces.duration(heartbeat_interval),
    )
    return SessionPlan(opening, when_full, send_timeout, open_timeout, answer_window, max_frame_age)


def session_method(
    plan: Callable[P, SessionPlan], kind: Callable[[Any, Any, SessionPlan], SessionT]
) -> Callable[Concatenate[Any, P], SessionT]:
    """Make a client's method, shown by `help` and `inspect` with the parameters of `plan`."""

    def session(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> SessionT:
        return kind(self._calls, self._connection, plan(*args, **kwargs))

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *inspect.signature(plan).parameters.values()]
    session.__doc__ = plan.__doc__
    vars(session)["__signature__"] = inspect.Signature(parameters, return_annotation=kind.__name__)
    return session


DEFAULT_UNSEEN = 2.0  # seconds, the contract's default of `Tracking.max_unseen`
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tracked object in the newest frame that it was found in."""

    found: Detection
    task_id: str
    sequence: int
    captured_ns: int


class TrackMemory:
    """The newest state of each track, until its object was not found for `Tracking.max_unseen`.

    Times are on the clock of the stamps' capture times. A frame whose stamp has none counts as
    captured when it is sent, by the wall clock.
    """

    def __init__(self, standing_tasks: Iterable[task_pb2.Task]) -> None:
        self._seen: dict[str, _Seen] = {}  # by track
        self._sent_ns: dict[int, int] = {}  # by sequence, of open frames without a capture time
        self.use(standing_tasks)

    def use(self, standing_tasks: Iterable[task_pb2.Task]) -> None:
        """Forget the tracks of all other tasks."""
        self._max_unseen_ns = {
            (task.task_id, task.detect.object): _max_unseen_ns(task.detect.tracking)
            for task in standing_tasks
            if task.detect.HasField("tracking")
        }
        self._seen = {key: each for key, each in self._seen.items() if self._follows(each)}

    def note_set_back(self, captured_ns: int) -> None:
        """Forget what was seen later by a clock that was set back."""
        self._seen = {
            key: each for key, each in self._seen.items() if each.captured_ns <= captured_ns
        }

    def note_sent(self, sequence: int, stamp: FrameStamp) -> None:
        if stamp.capture_time_ns is None and self._max_unseen_ns:
            self._sent_ns[sequence] = time.time_ns()

    def note_settled(self, sequence: int) -> None:
        """Forget a frame that gets no more results."""
        self._sent_ns.pop(sequence, None)

    def note_received(self, result: FrameResult) -> None:
        """Record a response; call it before `note_settled`."""
        captured_ns = result.stamp.capture_time_ns
        if captured_ns is None:
            captured_ns = self._sent_ns.get(result.sequence)
        if captured_ns is None or not isinstance(result.outcome, DetectResult):
            return
        for found in result.outcome.objects:
            each = _Seen(found, result.task_id, result.sequence, captured_ns)
            is_newest = self._seen.get(found.track_id, each).captured_ns <= captured_ns
            if found.motion is not None and is_newest and self._follows(each):
                self._seen[found.track_id] = each
        self._seen = {
            key: each for key, each in self._seen.items() if self._is_current(each, captured_ns)
        }

    def now(self, at_ns: int | None) -> tuple[TrackNow, ...]:
        at_ns = time.time_ns() if at_ns is None else at_ns
        return tuple(
            _extrapolated(e, at_ns) for e in self._seen.values() if self._is_current(e, at_ns)
        )

    def _follows(self, seen: _Seen) -> bool:
        return (seen.task_id, seen.found.label) in self._max_unseen_ns

    def _is_current(self, seen: _Seen, at_ns: int) -> bool:
        """Return whether the track is alive; false if the clock was set back since."""
        limit = self._max_unseen_ns[seen.task_id, seen.found.label]
        return abs(at_ns - seen.captured_ns) <= limit


def _extrapolated(seen: _Seen, at_ns: int) -> TrackNow:
    motion = seen.found.motion
    assert motion is not None, "only tracked objects are kept"
    age = max(at_ns - seen.captured_ns, 0) / _NS
    return TrackNow(
        axes=motion.after(age),
        deviation=motion.deviation_after(age),
        age=age,
        last=seen.found,
        sequence=seen.sequence,
        task_id=seen.task_id,
    )


def _max_unseen_ns(tracking: task_pb2.Tracking) -> int:
    if tracking.HasField("max_unseen"):
        return tracking.max_unseen.ToNanoseconds()
    return round(DEFAULT_UNSEEN * _NS)


log = logging.getLogger("legato_client.session")

_PROBE_AFTER = 4  # frames too old in a row
_ENOUGH = 8  # outcomes for a warning


def age_limit_problem(too_old: int, answered: int, limit: float, response: float | None) -> str:
    """Return why most frames are too old, or an empty text if most are not."""
    if too_old <= answered:
        return ""
    takes = "longer" if response is None else f"{response:.2f} s"
    return (
        f"{too_old} of {too_old + answered} frames too old: answers take {takes}, "
        f"the age limit is {limit:g} s"
    )


class AgeLimitWatch:
    """Detector of an age limit below the response time, which no answer would ever show.

    Once several frames in a row were too old, the next one is a probe: the server finishes it
    however late. Its results are withheld, and it counts as too old; only its time counts.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.num_answered = 0
        self.num_too_old = 0
        self.num_withheld = 0
        self.response_time: float | None = None
        self._in_a_row = 0
        self._probe: tuple[int, float] | None = None  # sequence and time of sending
        self._warned = False

    def starts_probe(self, sequence: int) -> bool:
        """Return whether this frame is to be a probe: one until the next answer."""
        if self._probe is not None or self._in_a_row < _PROBE_AFTER:
            return False
        self._probe = sequence, time.monotonic()
        return True

    def is_probe(self, sequence: int) -> bool:
        return self._probe is not None and self._probe[0] == sequence

    def note_probed(self) -> None:
        assert self._probe is not None, "asked before"
        self.response_time = time.monotonic() - self._probe[1]
        self.num_withheld += 1

    def note_too_old(self) -> None:
        self.num_too_old += 1
        self._in_a_row += 1
        if self.num_too_old + self.num_answered >= _ENOUGH and self.response_time is not None:
            self.warn()

    def note_answered(self) -> None:
        self.num_answered += 1
        self._in_a_row = 0
        self._probe = None

    def warn(self) -> None:
        """Log the problem, if there is one, once."""
        if self.limit is None or self._warned:
            return
        if problem := age_limit_problem(
            self.num_too_old, self.num_answered, self.limit, self.response_time
        ):
            self._warned = True
            log.warning("%s: raise max_frame_age", problem)


_LATE_NS = 100_000_000
_LATE_IN_A_ROW = 3  # frames; a single one is late, or another camera's


class CaptureClockWatch:
    """Detector of capture times that jump back, by the server's rule: several frames in a row."""

    def __init__(self) -> None:
        self._newest_ns: int | None = None
        self._num_late = 0
        self._warned = False

    def is_set_back(self, sequence: int, captured_ns: int | None) -> bool:
        """Return whether the clock was set back before this frame; log it the first time."""
        if captured_ns is None:
            return False
        newest_ns = captured_ns if self._newest_ns is None else self._newest_ns
        self._num_late = self._num_late + 1 if captured_ns < newest_ns - _LATE_NS else 0
        if self._num_late < _LATE_IN_A_ROW:
            self._newest_ns = max(newest_ns, captured_ns)
            return False
        self._newest_ns, self._num_late = captured_ns, 0
        if not self._warned:
            self._warned = True
            log.warning(
                "capture times jumped back by %.3f s before frame %d: is the clock of the stamps "
                "steady? Until the jump was noticed, frames may have been dropped as too old",
                (newest_ns - captured_ns) / _NS,
                sequence,
            )
        return True


# ---------------------------------------------------------------- state

# State machine of a session, without I/O.
#
# Both sessions feed received messages into it, send the messages that it builds, and wait for it.

SILENT_INTERVALS = 3
LEAST_PATIENCE = 1.0  # seconds; a busy machine may miss several short heartbeats


class SessionState:
    """Protocol state of a session; at most `window` answers may be unread.

    A frame is unacknowledged, and counts against the credits, until `accepted`, `dropped` or its
    last result. It is open until its last result or its drop.
    """

    def __init__(
        self,
        window: int,
        standing_tasks: Sequence[task_pb2.Task] = (),
        max_frame_age: float | None = None,
    ) -> None:
        self.terms: SessionTerms | None = None
        self.stats = SessionStats()
        self._age_limit = AgeLimitWatch(max_frame_age)
        self._capture_clock = CaptureClockWatch()
        self._server_drops = 0
        self.tracks = TrackMemory(standing_tasks)
        self._window = window
        self._num_read = 0  # not granted again yet
        self._next_index = 0
        self._last_sequence = 0
        self._credits = 0
        self._reserved = 0
        self._unacknowledged: dict[int, SharedFrame | None] = {}
        self._open: set[int] = set()
        self._going_away = False
        self._finished = False
        self.is_over = False
        self._error: LegatoError | None = None

    # ------------------------------------------------------------ queries

    @property
    def credits_left(self) -> int:
        return max(0, self._credits - len(self._unacknowledged) - self._reserved)

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which the server counts as lost; None while it owes nothing."""
        interval = self.terms.heartbeat_interval if self.terms else 0.0
        return max(SILENT_INTERVALS * interval, LEAST_PATIENCE) if interval else None

    def silence(self) -> Unavailable:
        return Unavailable(f"the server has been silent for {self.patience or 0:g} s")

    def broken(self) -> InternalError:
        """Return the error of a reader that ended on its own, which is a bug of this package."""
        return InternalError("the session's reader ended unexpectedly")

    def granted(self) -> SessionTerms:
        if self.terms is None:
            raise _not_open()
        return self.terms

    def check_open(self) -> None:
        """Raise why nothing can be sent (any more)."""
        if self._error is not None:
            raise self._error
        if self.is_over:
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

    # ------------------------------------------------------------ sending

    def reserve(self) -> None:
        assert self.credits_left, "ask first"
        self._reserved += 1

    def release(self) -> None:
        """Undo `reserve`: the frame was not built."""
        self._reserved -= 1

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
        frame.must_run = must_run or self._age_limit.starts_probe(sequence)
        frame.image.CopyFrom(image)
        data = to_bytes(request)
        self._reserved -= 1
        self._last_sequence = sequence
        if self._capture_clock.is_set_back(sequence, stamp.capture_time_ns):
            self.tracks.note_set_back(stamp.capture_time_ns or 0)
        self.tracks.note_sent(sequence, stamp)
        self._unacknowledged[sequence] = slot
        self._open.add(sequence)
        self.count("sent")
        return sequence, data

    def read(self, answer: Answer) -> None:
        if isinstance(answer, FrameResult | FrameDelta):
            self._num_read += 1

    def grant(self) -> bytes | None:
        """Grant what was read, once it is worth a message."""
        if self._num_read < (self._window + 1) // 2 or self._finished or self.is_over:
            return None
        grant = session_pb2.GrantCredits(responses=self._num_read)
        self._num_read = 0
        return session_pb2.SessionRequest(grant=grant).SerializeToString()

    def cancel(self, sequence: int | None, task_id: str | None) -> bytes:
        """Build a cancellation. Raises ValueError unless exactly one target is named."""
        if (sequence is None) == (task_id is None):
            raise ValueError("name either a sequence or a task_id")
        target: dict[str, Any] = {"sequence": sequence, "task_id": task_id}
        cancel = session_pb2.CancelFrame(**target)
        return session_pb2.SessionRequest(cancel=cancel).SerializeToString()

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
                self._credits = message.opened.frame_credits
                self.terms = pieces.read(SessionTerms, message.opened)
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
                return responses.go_away(message.go_away)
        return None

    def end(self, error: LegatoError | None) -> None:
        """End the session; only the first call counts."""
        if self.is_over:
            return
        self.close()
        if error is None and self._open:
            error = IncompleteStream(f"the session ended with {len(self._open)} frames unanswered")
        self._error = error

    def close(self) -> None:
        """Close the session; unanswered frames are then no error."""
        self.is_over = True
        for sequence in list(self._unacknowledged):
            self._acknowledge(sequence)
        self._age_limit.warn()

    def count(self, name: str) -> None:
        """Add to one of the fields of `stats`."""
        counts: dict[str, Any] = {name: getattr(self.stats, name) + 1}
        self.stats = dataclasses.replace(self.stats, **counts)

    def _dropped(self, dropped: session_pb2.FrameDropped) -> FrameDropped:
        self._credits = dropped.frame_credits
        self._server_drops = dropped.dropped_total
        return self._drop(dropped.sequence, pieces.read(FrameDropped, dropped).reason)

    def _drop(self, sequence: int, reason: str) -> FrameDropped:
        if sequence in self._open:
            self.count("dropped")
        watch = self._age_limit
        if reason == "too_old":
            watch.note_too_old()
            self.stats = dataclasses.replace(
                self.stats, too_old=watch.num_too_old, response_time=watch.response_time
            )
        self._settle(sequence)
        return FrameDropped(sequence, reason, self._server_drops + watch.num_withheld)

    def _delta(self, message: session_pb2.FrameDelta) -> FrameDelta | None:
        delta = responses.delta(message)
        if delta is None:
            self._num_read += 1  # it took a credit as any other
        return delta

    def _result(self, message: session_pb2.FrameResult) -> FrameResult | FrameDropped | None:
        result = responses.result(message, self.terms.model if self.terms else "")
        if self._age_limit.is_probe(result.sequence) and result.sequence in self._open:
            return self._withhold(result)
        self.tracks.note_received(result)
        if result.last_for_frame:
            self._age_limit.note_answered()
            self.count("answered")
            self._settle(result.sequence)
        return result

    def _withhold(self, result: FrameResult) -> FrameDropped | None:
        self._num_read += 1  # it took a credit as any other
        if not result.last_for_frame:
            return None
        self._age_limit.note_probed()
        return self._drop(result.sequence, "too_old")

    def _settle(self, sequence: int) -> None:
        self._acknowledge(sequence)
        self._open.discard(sequence)
        self.tracks.note_settled(sequence)

    def _acknowledge(self, sequence: int) -> None:
        slot = self._unacknowledged.pop(sequence, None)
        if slot is not None:
            slot.release()


def _not_open() -> SessionProtocol:
    return SessionProtocol("the session is not open: use it in a `with` block")
