"""A scripted server on a loopback port: real gRPC, no model."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from legato.v1 import (
    geometry_pb2,
    image_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    server_pb2,
    server_pb2_grpc,
    session_pb2_grpc,
    task_pb2,
)

from tests.clients.python.failures import Failure, failure
from tests.clients.python.fake_images import FakeImages
from tests.clients.python.fake_sessions import FakeSessions

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
