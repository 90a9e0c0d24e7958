"""InferenceService: convert, submit, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc, media_pb2
from legato_engine import core
from legato_engine.errors import InternalError
from legato_engine.messages import Done

from legato_service import call, convert_request, convert_response
from legato_service.dispatch import Context, Dispatcher, follow, outcome
from legato_service.servicer.event_stream import EventStream
from legato_service.servicer.task_run import TaskRun

Skill = TypeVar(
    "Skill",
    pb.QueryRequest,
    pb.CaptionRequest,
    pb.DetectRequest,
    pb.PointRequest,
    pb.SegmentRequest,
)
Result = TypeVar("Result", bound=core.Value)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Questions about one picture. Deadlines are seconds, for calls that bring none."""

    def __init__(
        self, dispatcher: Dispatcher, *, unary_deadline: float, stream_deadline: float
    ) -> None:
        self._dispatcher = dispatcher
        self._unary_deadline = unary_deadline
        self._stream_deadline = stream_deadline

    async def Query(self, request: pb.QueryRequest, context: Context) -> pb.QueryResponse:
        """Answer a question."""
        done, info = await self._answer(request, convert_request.query, context)
        result = convert_response.query(_expect(done, core.QueryResult))
        reasoning = result.reasoning if result.HasField("reasoning") else None
        return pb.QueryResponse(answer=result.answer, reasoning=reasoning, info=info)

    async def Caption(self, request: pb.CaptionRequest, context: Context) -> pb.CaptionResponse:
        """Describe the picture."""
        done, info = await self._answer(request, convert_request.caption, context)
        return pb.CaptionResponse(caption=_expect(done, core.CaptionResult).caption, info=info)

    async def Detect(self, request: pb.DetectRequest, context: Context) -> pb.DetectResponse:
        """Box every instance."""
        done, info = await self._answer(request, convert_request.detect, context)
        result = convert_response.detect(_expect(done, core.DetectResult))
        return pb.DetectResponse(objects=result.objects, info=info)

    async def Point(self, request: pb.PointRequest, context: Context) -> pb.PointResponse:
        """Point at every instance."""
        done, info = await self._answer(request, convert_request.point, context)
        result = convert_response.point(_expect(done, core.PointResult))
        return pb.PointResponse(points=result.points, info=info)

    async def Segment(self, request: pb.SegmentRequest, context: Context) -> pb.SegmentResponse:
        """Outline an instance."""
        done, info = await self._answer(request, convert_request.segment, context)
        result = convert_response.segment(_expect(done, core.SegmentResult))
        return pb.SegmentResponse(segments=result.segments, info=info)

    async def RunTasks(self, request: pb.RunTasksRequest, context: Context) -> pb.RunTasksResponse:
        """Several tasks, one picture."""
        request_id = call.current().adopt(request.options.request_id)
        convert_request.options(request.options)
        run = TaskRun(self._dispatcher, request, request_id)
        with self._dispatcher.admit(request_id, context, self._unary_deadline) as deadline:
            model = run.check()
            picture = await self._dispatcher.pictures.check(request.image)
            outcomes = await run.execute(picture, deadline, context)
        return run.response(outcomes, model, _stamp(request))

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One task, streamed."""
        request_id = call.current().adopt(request.options.request_id)
        convert_request.options(request.options)
        spec = convert_request.task(request.task, "task")
        convert_request.image(request.image, spec, "task.query.")
        sampling = convert_request.sampling(request.task.sampling, "task.")
        asked = convert_request.request(request_id, spec, sampling, request.options)
        silence = convert_request.heartbeat(request.options)
        with self._dispatcher.admit(request_id, context, self._stream_deadline) as deadline:
            self._dispatcher.check(asked, "task.")
            events = EventStream(request_id, request.task.task_id, _stamp(request))
            picture = await self._dispatcher.pictures.check(request.image)
            with self._dispatcher.submit(asked, picture, deadline, context) as stream:
                async with aclosing(follow(stream, deadline, silence)) as reports:
                    async for report in reports:
                        for event in events.of(report):
                            yield event

    async def _answer(
        self, request: Skill, convert: Callable[[Skill], core.TaskSpec], context: Context
    ) -> tuple[Done, pb.ResponseInfo]:
        """One unary task: its result, and what is told beside it."""
        request_id = call.current().adopt(request.options.request_id)
        convert_request.options(request.options)
        spec = convert(request)
        convert_request.image(request.image, spec)
        sampling = convert_request.sampling(request.sampling)
        asked = convert_request.request(request_id, spec, sampling, request.options, deltas=False)
        with self._dispatcher.admit(request_id, context, self._unary_deadline) as deadline:
            model = self._dispatcher.check(asked)
            picture = await self._dispatcher.pictures.check(request.image)
            with self._dispatcher.submit(asked, picture, deadline, context) as stream:
                done = await outcome(stream, deadline)
        return done, convert_response.info(request_id, model.name, done, _stamp(request))


def _stamp(
    request: pb.GenerateRequest | pb.RunTasksRequest | Skill,
) -> media_pb2.FrameStamp | None:
    return request.stamp if request.HasField("stamp") else None


def _expect(done: Done, kind: type[Result]) -> Result:
    if not isinstance(done.result, kind):
        raise InternalError(f"the engine answered with a {type(done.result).__name__}")
    return done.result
