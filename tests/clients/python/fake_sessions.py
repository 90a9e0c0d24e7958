"""A session service that keeps the contract to the letter, and records violations."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from legato.v1 import inference_pb2, media_pb2, session_pb2, session_pb2_grpc, task_pb2

from tests.clients.python.failures import Failure, failure

IMAGE = media_pb2.ImageInfo(image_id="i-1", width=200, height=100)
Said: TypeAlias = "tuple[str, Message] | Failure | None"  # the last one ends with OK
COSTS_CREDIT = ("delta", "result")


class Conversation:
    """One session: what the client said, and what it is told.

    `say` queues a message; those that cost the client's credits wait for them. `violations` holds
    what the client must not have done.
    """

    def __init__(self, service: FakeSessions, context: grpc.ServicerContext) -> None:
        self.requests: list[session_pb2.SessionRequest] = []
        self.violations: list[str] = []
        self.tasks: list[task_pb2.Task] = []
        self.ended = threading.Event()
        self.num_heartbeats = 0
        self.num_granted = 0
        self.index = 0
        self._service = service
        self._credits = 0
        self._unlimited = False
        self._unacknowledged: set[int] = set()
        self._last_sequence = -1
        self._changed = threading.Condition()
        self._messages: collections.deque[Said] = collections.deque()
        context.add_callback(self._end)

    @property
    def frames(self) -> list[session_pb2.Frame]:
        """The frames that came."""
        return [each.frame for each in list(self.requests) if each.HasField("frame")]

    # ------------------------------------------------------------ what the client is told

    def say(self, kind: str, message: Message) -> None:
        """Send a message in its turn."""
        self._put((kind, message))

    def fail(self, how: Failure) -> None:
        """End with a status."""
        self._put(how)

    def end(self) -> None:
        """End with OK."""
        self._put(None)

    def accept(self, sequence: int) -> None:
        self._unacknowledged.discard(sequence)
        credits_left = self._service.frame_credits
        self.say(
            "accepted", session_pb2.FrameAccepted(sequence=sequence, frame_credits=credits_left)
        )

    def drop(self, sequence: int, reason: int, total: int = 1) -> None:
        self._unacknowledged.discard(sequence)
        message = session_pb2.FrameDropped(sequence=sequence, dropped_total=total)
        message.reason = reason  # type: ignore[assignment] # may be one of a newer contract
        message.frame_credits = self._service.frame_credits
        self.say("dropped", message)

    def delta(self, sequence: int, task_id: str, **event: Any) -> None:
        message = inference_pb2.GenerateResponse(**event)
        self.say("delta", session_pb2.FrameDelta(sequence=sequence, task_id=task_id, event=message))

    def result(self, frame: session_pb2.Frame, result: task_pb2.TaskResult, last: bool) -> None:
        message = session_pb2.FrameResult(result=result, image=IMAGE, last_for_frame=last)
        message.stamp.CopyFrom(frame.stamp)
        self.say("result", message)

    def answer(self, frame: session_pb2.Frame) -> None:
        """Accept a frame and answer its tasks: a detection finds one object, others have captions.

        The task "broken" fails.
        """
        self.accept(frame.stamp.sequence)
        standing = [] if frame.skip_standing_tasks else self.tasks
        tasks = [*standing, *frame.extra_tasks]
        for number, task in enumerate(tasks, 1):
            result = task_pb2.TaskResult(
                task_id=task.task_id,
                caption=task_pb2.CaptionResult(caption=f"frame {frame.stamp.sequence}"),
                finish_reason=task_pb2.FINISH_REASON_STOP,
            )
            if task.HasField("detect"):
                result.detect.objects.add(label=task.detect.object)
            if task.task_id == "broken":
                bad = failure(grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_UNDECODABLE")
                result.error.CopyFrom(bad.status())
            self.result(frame, result, last=number == len(tasks))

    # ------------------------------------------------------------ both directions

    def listen(self, requests: Iterator[session_pb2.SessionRequest]) -> None:
        """Hear the client out."""
        try:
            for request in requests:
                self._hear(request)
        except grpc.RpcError:
            return  # the client is gone
        with self._changed:
            self._unlimited = True
            self._changed.notify_all()
        self._service.on_finish(self)

    def messages(self, context: grpc.ServicerContext) -> Iterator[session_pb2.SessionResponse]:
        """What is said, with heartbeats in between."""
        while not self.ended.is_set():
            message = self._next()
            if isinstance(message, Failure):
                message.abort(context)
            if message is None or isinstance(message, Failure):
                return
            kind, body = message
            response = session_pb2.SessionResponse(index=self.index, **{kind: body})  # type: ignore[arg-type] # kind names body's field
            self.index += 1
            yield response

    def _next(self) -> Said:
        """What may be said next, or a heartbeat after a silence."""
        must_be_silent = self._service.silent.is_set() or self.index == 0  # `opened` is first
        quiet = None if must_be_silent else self._service.heartbeat
        with self._changed:
            if not self._changed.wait_for(lambda: self._sendable() or self.ended.is_set(), quiet):
                self.num_heartbeats += 1
                return "heartbeat", inference_pb2.Heartbeat()
            place = self._sendable()
            if place is None:
                return None
            message = self._messages[place[0]]
            del self._messages[place[0]]
            if isinstance(message, tuple) and message[0] in COSTS_CREDIT:
                self._credits -= 1
            return message

    def _sendable(self) -> tuple[int] | None:
        """The place of the first message that needs no credit, or has one; ends keep theirs."""
        for place, message in enumerate(self._messages):
            if not isinstance(message, tuple):
                return (place,) if place == 0 else None
            if message[0] not in COSTS_CREDIT or self._credits > 0 or self._unlimited:
                return (place,)
        return None

    def _put(self, message: Said) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def _hear(self, request: session_pb2.SessionRequest) -> None:
        first = not self.requests
        self.requests.append(request)
        kind = request.WhichOneof("message")
        if first != (kind == "open"):
            self.violations.append(f"message {len(self.requests)} was {kind}")
        match kind:
            case "open":
                self.tasks = list(request.open.standing_tasks)
                self._credits = request.open.response_credits
                self._unlimited = self._credits == 0
                self._service.on_open(self)
            case "frame":
                self._check(request.frame)
                self._service.on_frame(self, request.frame)
            case "grant":
                if request.grant.responses < 1:
                    self.violations.append("an empty grant")
                with self._changed:
                    self._credits += request.grant.responses
                    self.num_granted += request.grant.responses
                    self._changed.notify_all()
            case "update":
                self.tasks = list(request.update.standing_tasks)

    def _check(self, frame: session_pb2.Frame) -> None:
        sequence = frame.stamp.sequence
        if sequence <= self._last_sequence:
            self.violations.append(f"sequence {sequence} after {self._last_sequence}")
        self._last_sequence = sequence
        self._unacknowledged.add(sequence)
        if len(self._unacknowledged) > self._service.frame_credits:
            self.violations.append(f"frame {sequence} without a credit")

    def _end(self) -> None:
        self.ended.set()
        with self._changed:
            self._changed.notify_all()


class FakeSessions(session_pb2_grpc.SessionServiceServicer):
    """Opens every session and answers every frame at once, unless a test says otherwise.

    The three hooks run on the session's own reading thread. `script` holds failures to answer the
    next attempts to open with.
    """

    def __init__(self) -> None:
        self.frame_credits = 2
        self.heartbeat = 0.1
        self.silent = threading.Event()
        self.script: collections.deque[Failure] = collections.deque()
        self.num_attempts = 0
        self.conversations: list[Conversation] = []
        self.on_open: Callable[[Conversation], None] = self.open
        self.on_frame: Callable[[Conversation, session_pb2.Frame], None] = Conversation.answer
        self.on_finish: Callable[[Conversation], None] = Conversation.end

    @property
    def last(self) -> Conversation:
        """The latest session."""
        return self.conversations[-1]

    def open(self, conversation: Conversation) -> None:
        """Say that it is open."""
        opened = session_pb2.SessionOpened(
            session_id="s-1", model="fake", frame_credits=self.frame_credits, max_in_flight=1
        )
        opened.heartbeat_interval.FromNanoseconds(round(self.heartbeat * 1e9))
        conversation.say("opened", opened)

    def Session(
        self, requests: Iterator[session_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[session_pb2.SessionResponse]:
        self.num_attempts += 1
        if self.script:
            self.script.popleft().abort(context)
        conversation = Conversation(self, context)
        self.conversations.append(conversation)
        threading.Thread(target=conversation.listen, args=(requests,), daemon=True).start()
        yield from conversation.messages(context)


def ignore(conversation: Conversation, frame: session_pb2.Frame) -> None:
    """What a server does that has no time for a frame."""
