"""A scripted server on a loopback port: real gRPC, no model."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from legato.v1 import (
    geometry_pb2,
    image_pb2,
    image_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    server_pb2,
    server_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    task_pb2,
)

# ---------------------------------------------------------------- failures


@dataclasses.dataclass(frozen=True)
class Failure:
    """A status to end a call with; `trailers` go beside the packed details."""

    code: grpc.StatusCode
    message: str = "no"
    details: tuple[Message, ...] = ()
    trailers: tuple[tuple[str, str | bytes], ...] = ()

    def status(self) -> status_pb2.Status:
        """The google.rpc.Status of this failure."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status

    def abort(self, context: grpc.ServicerContext) -> None:
        """End the call."""
        trailers = self.trailers
        if self.details:
            trailers += (("grpc-status-details-bin", self.status().SerializeToString()),)
        context.set_trailing_metadata(trailers)
        context.abort(self.code, self.message)


def failure(code: grpc.StatusCode, reason: str, *more: Message, **metadata: str) -> Failure:
    """A failure as Legato sends it: ErrorInfo, RequestInfo and more details."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain="legato", metadata=metadata)
    return Failure(code, details=(info, error_details_pb2.RequestInfo(request_id="r-9"), *more))


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    """When to come back."""
    delay = duration_pb2.Duration(nanos=int(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


# ---------------------------------------------------------------- fake images
# An image service that holds what it is sent, and refuses what the contract refuses.

BEST_CHUNK = 256 * 1024


class FakeImages(image_pb2_grpc.ImageServiceServicer):
    """Holds images by id; `held` maps an id to its header and bytes.

    `script` holds failures to answer the next uploads with, `chunks` the sizes of the last one's.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[image_pb2.PutImageHeader, bytes]] = {}
        self.script: collections.deque[Failure] = collections.deque()
        self.metadata: list[dict[str, str | bytes]] = []
        self.chunks: list[int] = []

    def PutImage(
        self, requests: Iterator[image_pb2.PutImageRequest], context: grpc.ServicerContext
    ) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        if self.script:
            self.script.popleft().abort(context)
        first, *rest = requests
        chunks = [request.chunk for request in rest]
        self.chunks = [len(chunk) for chunk in chunks]
        data = b"".join(chunks)
        if (
            first.WhichOneof("part") != "header"
            or any(request.WhichOneof("part") != "chunk" for request in rest)
            or len(data) != first.header.size_bytes
            or hashlib.sha256(data).digest() != first.header.sha256
        ):
            failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD").abort(context)
        image_id = f"img_{hashlib.sha256(data).hexdigest()[:32]}"
        self.held[image_id] = (first.header, data)
        info = media_pb2.ImageInfo(image_id=image_id, width=20, height=10)
        response = image_pb2.PutImageResponse(image=info)
        response.expire_time.FromSeconds(1_000_000_000 + first.header.ttl.seconds)
        return response

    def DeleteImage(
        self, request: image_pb2.DeleteImageRequest, context: grpc.ServicerContext
    ) -> Any:
        if self.held.pop(request.image_id, None) is None:
            failure(grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND").abort(context)
        return image_pb2.DeleteImageResponse()


# ---------------------------------------------------------------- fake sessions
# A session service that keeps the contract to the letter, and records violations.

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


# ---------------------------------------------------------------- fake server

INFO = inference_pb2.ResponseInfo(
    request_id="r-1",
    model="fake",
    finish_reason=task_pb2.FINISH_REASON_STOP,
    usage=task_pb2.Usage(input_tokens=7, output_tokens=3, cached_tokens=0),
    timings=task_pb2.Timings(total=duration_pb2.Duration(nanos=12_000_000)),
    image=media_pb2.ImageInfo(image_id="i-1", width=200, height=100),
)
BOX = geometry_pb2.Box(x_min=0.25, y_min=0.5, x_max=0.75, y_max=1.0)
CAT = geometry_pb2.DetectedObject(box=BOX, label="cat")
NOSE = geometry_pb2.PointedObject(point=geometry_pb2.Point(x=0.5, y=0.25), label="nose")
OUTLINE = geometry_pb2.Outline(path="M 0 0 L 1 0 L 1 1 z", box=BOX, label="cat", coarse=True)


def events(
    *bodies: tuple[str, Message], finished: task_pb2.TaskResult
) -> list[inference_pb2.GenerateResponse]:
    """A stream: queued, started, then `bodies` as (field, message), then finished."""
    started = inference_pb2.Started(request_id="r-1", model="fake", input_tokens=7)
    started.image.CopyFrom(INFO.image)
    rows: list[tuple[str, Any]] = [
        ("queued", inference_pb2.Queued(position=2)),
        ("started", started),
        *bodies,
        ("finished", inference_pb2.Finished(result=finished, info=INFO)),
    ]
    return [
        inference_pb2.GenerateResponse(index=index, **{name: body})
        for index, (name, body) in enumerate(rows)
    ]


STREAMS = {
    "query": events(
        ("reasoning", inference_pb2.ReasoningDelta(text="hm")),
        ("text", inference_pb2.TextDelta(text="two ")),
        ("heartbeat", inference_pb2.Heartbeat()),
        ("text", inference_pb2.TextDelta(text="cats")),
        finished=task_pb2.TaskResult(
            query=task_pb2.QueryResult(answer="two cats", reasoning=task_pb2.Reasoning(text="hm")),
            finish_reason=task_pb2.FINISH_REASON_LENGTH,
        ),
    ),
    "caption": events(
        ("text", inference_pb2.TextDelta(text="a cat")),
        finished=task_pb2.TaskResult(caption=task_pb2.CaptionResult(caption="a cat")),
    ),
    "detect": events(
        ("object", CAT),
        finished=task_pb2.TaskResult(detect=task_pb2.DetectResult(objects=[CAT])),
    ),
    "point": events(
        ("point", NOSE),
        finished=task_pb2.TaskResult(point=task_pb2.PointResult(points=[NOSE])),
    ),
    "segment": events(
        ("outline", inference_pb2.OutlineDelta(box=BOX)),
        ("outline", inference_pb2.OutlineDelta(path_delta="M 0 0 ")),
        ("outline", inference_pb2.OutlineDelta(path_delta="L 1 0 L 1 1 z")),
        finished=task_pb2.TaskResult(segment=task_pb2.SegmentResult(segments=[OUTLINE])),
    ),
}
REPLIES = {
    "Query": inference_pb2.QueryResponse(answer="two cats", info=INFO),
    "Caption": inference_pb2.CaptionResponse(caption="a cat", info=INFO),
    "Detect": inference_pb2.DetectResponse(objects=[CAT], info=INFO),
    "Point": inference_pb2.PointResponse(points=[NOSE], info=INFO),
    "Segment": inference_pb2.SegmentResponse(segments=[OUTLINE], info=INFO),
    "GetServerInfo": server_pb2.GetServerInfoResponse(
        name="legato", version="1.2.3", contract_revision=1, capabilities=["admin"]
    ),
}


class FakeServer(
    inference_pb2_grpc.InferenceServiceServicer, server_pb2_grpc.ServerServiceServicer
):
    """Answers every call with a default, or with the next scripted reply of its method.

    A scripted reply is a message, a list of stream messages, or a `Failure`. `requests` holds
    (method, request, metadata) of every call, `num_completed` counts streams sent to their end,
    `stream_ended` is set when one ended in any way, `time_left` is what the last call had of its
    deadline, in seconds. In RunTasks the task "broken" fails. `images`
    holds what was uploaded, `sessions` what was said in sessions.
    """

    def __init__(
        self,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.ServerInterceptor] = (),
    ) -> None:
        self.script: dict[str, collections.deque[Any]] = collections.defaultdict(collections.deque)
        self.requests: list[tuple[str, Message, dict[str, str | bytes]]] = []
        self.unrecorded: set[str] = set()  # methods whose calls are not in `requests`
        self.stream_ended = threading.Event()
        self.num_completed = 0
        self.time_left: float | None = None
        self._server = grpc.server(
            futures.ThreadPoolExecutor(4),
            interceptors=list(interceptors),
            options=(("grpc.max_receive_message_length", 8 * 1024 * 1024),),
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        server_pb2_grpc.add_ServerServiceServicer_to_server(self, self._server)
        self.images = FakeImages()
        image_pb2_grpc.add_ImageServiceServicer_to_server(self.images, self._server)
        self.sessions = FakeSessions()
        session_pb2_grpc.add_SessionServiceServicer_to_server(self.sessions, self._server)
        address = "127.0.0.1:0"
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.target = f"127.0.0.1:{port}"

    def __enter__(self) -> FakeServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def last(self, method: str) -> Any:
        """The last request of a method."""
        return next(request for name, request, _ in reversed(self.requests) if name == method)

    def count(self, method: str) -> int:
        """How often a method was called."""
        return sum(name == method for name, _, _ in self.requests)

    def _next(self, method: str, request: Message, context: grpc.ServicerContext) -> Any:
        self.time_left = context.time_remaining()
        if method not in self.unrecorded:
            self.requests.append((method, request, dict(context.invocation_metadata())))
        reply = self.script[method].popleft() if self.script[method] else None
        if isinstance(reply, Failure):
            reply.abort(context)
        return reply

    def _unary(self, method: str, request: Message, context: grpc.ServicerContext) -> Any:
        return self._next(method, request, context) or REPLIES[method]

    def Query(self, request: Any, context: grpc.ServicerContext) -> Any:
        reply = self._unary("Query", request, context)
        if not request.reasoning:
            return reply
        return inference_pb2.QueryResponse(
            answer=reply.answer, info=reply.info, reasoning=task_pb2.Reasoning(text="hm")
        )

    def Caption(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("Caption", request, context)

    def Detect(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("Detect", request, context)

    def Point(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("Point", request, context)

    def Segment(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("Segment", request, context)

    def GetServerInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._unary("GetServerInfo", request, context)

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._next("ListModels", request, context)
        name = "second" if request.page_token else "first"
        model = server_pb2.Model(name=name, tasks=["detect"], max_context_tokens=2048)
        model.notice = "It knows drawings only."
        if request.page_token:
            sure = model.confidence
            sure.tasks.append("detect")
            sure.calibrated_tasks.append("detect")
            sure.fitted_on = "my kitchen, 400 images"
            sure.fitted_at.FromSeconds(1795564800)
        return server_pb2.ListModelsResponse(
            models=[model],
            next_page_token="" if request.page_token else "more",
        )

    def RunTasks(self, request: Any, context: grpc.ServicerContext) -> Any:
        scripted = self._next("RunTasks", request, context)
        if scripted is not None:
            return scripted
        results = []
        for task in request.tasks:
            result = task_pb2.TaskResult(task_id=task.task_id)
            if task.task_id == "broken":
                failed = failure(grpc.StatusCode.FAILED_PRECONDITION, "TASK_UNSUPPORTED")
                result.error.CopyFrom(failed.status())
            else:
                result.MergeFrom(STREAMS[task.WhichOneof("kind")][-1].finished.result)
            results.append(result)
        return inference_pb2.RunTasksResponse(results=results, info=INFO)

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Any:
        context.add_callback(self.stream_ended.set)
        rows = self._next("Generate", request, context) or STREAMS[request.task.WhichOneof("kind")]
        for row in rows:
            if isinstance(row, Failure):
                row.abort(context)
            if isinstance(row, threading.Event):
                row.wait(30)
                continue
            yield row
        self.num_completed += 1
