"""The settings of a session."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from legato.v1 import session_pb2

from legato_client._convert import pieces, requests
from legato_client._errors import DeadlineExceeded
from legato_client._values import tasks as _tasks
from legato_client._values.session import FramePolicy

WhenFull = Literal["wait", "drop"]

_POLICIES: dict[str, session_pb2.FramePolicy.ValueType] = {
    "latest_wins": session_pb2.FRAME_POLICY_LATEST_WINS,
    "every_frame": session_pb2.FRAME_POLICY_EVERY_FRAME,
    "preempt": session_pb2.FRAME_POLICY_PREEMPT,
}
_ANSWER_WINDOW = 64  # answers
_OPEN_TIMEOUT = 30.0  # seconds
_SEND_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class SessionPlan:
    """The first message, and what only this side needs; times are in seconds."""

    opening: session_pb2.SessionOpen
    when_full: WhenFull
    send_timeout: float
    open_timeout: float
    window: int

    def first_message(self) -> bytes:
        return session_pb2.SessionRequest(open=self.opening).SerializeToString()

    def not_opened(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the session was not opened within {self.open_timeout:g} s")

    def no_room(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the server took no further frame within {self.send_timeout:g} s: read the answers, "
            "send fewer frames, or use when_full='drop'"
        )


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
    """A session for a stream of frames: `tasks` are done on each; use it in a `with` block.

    Results tell their task by its `task_id`: the one given, else the task's object, else its skill
    ("query", "caption"). Two tasks with one id are a ValueError.

    When frames come faster than answers, "latest_wins" keeps the newest one waiting, "preempt" also
    stops the work on the older one, and "every_frame" queues. Frames older than `max_frame_age`
    seconds are dropped instead of answered late. `max_in_flight` frames are worked on at a time; 0
    is the server's choice. `stream_deltas` asks for events while tasks decode, and
    `heartbeat_interval` for the longest silence of the server in seconds, at least 0.1.

    The server bounds the frames under way. Beyond that, `send` waits for room for up to
    `send_timeout` seconds, or, with `when_full` "drop", leaves the frame out at once. The opening
    takes at most `open_timeout` seconds. At most `answer_window` answers lie unread here.
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy must be one of {sorted(_POLICIES)}, got {policy!r}")
    if when_full not in ("wait", "drop"):
        raise ValueError(f"when_full must be 'wait' or 'drop', got {when_full!r}")
    if answer_window < 1:
        raise ValueError(f"answer_window must be at least 1, got {answer_window}")
    opening = session_pb2.SessionOpen(
        session_name=name,
        model=model,
        adapter=adapter,
        standing_tasks=requests.session_tasks(tasks),
        frame_policy=_POLICIES[policy],
        max_in_flight=max_in_flight,
        stream_deltas=stream_deltas,
        response_credits=answer_window,
    )
    if max_frame_age is not None:
        opening.max_frame_age.CopyFrom(pieces.duration(max_frame_age))
    if heartbeat_interval is not None:
        opening.heartbeat_interval.CopyFrom(pieces.duration(heartbeat_interval))
    return SessionPlan(opening, when_full, send_timeout, open_timeout, answer_window)


def show_as_method(method: Callable[..., Any], returns: str) -> None:
    """Let `help` and `inspect` show a method `session` with the parameters of `plan`."""
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *inspect.signature(plan).parameters.values()]
    method.__name__, method.__doc__ = "session", plan.__doc__
    vars(method)["__signature__"] = inspect.Signature(parameters, return_annotation=returns)
