"""InferenceService: convert, submit, convert."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, nullcontext
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import Message
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc, media_pb2
from legato_engine import core
from legato_engine.core import RequestKey
from legato_engine.errors import InternalError

from legato_service.convert import requests, responses
from legato_service.convert.event_stream import EventStream
from legato_service.convert.info import Answers
from legato_service.convert.requests import Fields
from legato_service.requests.dispatcher import Caller, Dispatcher, answered, follow
from legato_service.requests.idempotency import IdempotencyCache, fingerprint
from legato_service.rpc import call
from legato_service.rpc.context import Context
from legato_service.servicer.task_run import TaskRun

Answer: TypeAlias = Awaitable[Any]
"""A message as it travels, which the boundary leaves so; generated code expects the message."""

Work: TypeAlias = Callable[[Fields, Fields, RequestKey, Caller], Coroutine[Any, Any, bytes]]
"""Answers a request of these fields and options under a name."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Questions about one picture. Deadlines are seconds, for calls that bring none."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        replies: IdempotencyCache,
        *,
        unary_deadline: float,
        stream_deadline: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._replies = replies
        self._unary_deadline = unary_deadline
        self._stream_deadline = stream_deadline
        self._query, self._caption, self._detect, self._point, self._segment = (
            functools.partial(self._answer, skill, Answers(skill.response, skill.fill))
            for skill in (_QUERY, _CAPTION, _DETECT, _POINT, _SEGMENT)
        )

    def Query(self, request: pb.QueryRequest, context: Context) -> Answer:
        """Answer a question."""
        return self._once(self._query, request, context)

    def Caption(self, request: pb.CaptionRequest, context: Context) -> Answer:
        """Describe the picture."""
        return self._once(self._caption, request, context)

    def Detect(self, request: pb.DetectRequest, context: Context) -> Answer:
        """Box every instance."""
        return self._once(self._detect, request, context)

    def Point(self, request: pb.PointRequest, context: Context) -> Answer:
        """Point at every instance."""
        return self._once(self._point, request, context)

    def Segment(self, request: pb.SegmentRequest, context: Context) -> Answer:
        """Outline an instance."""
        return self._once(self._segment, request, context)

    def RunTasks(self, request: pb.RunTasksRequest, context: Context) -> Answer:
        """Several tasks, one picture."""
        return self._once(self._run_tasks, request, context)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One task, streamed."""
        options = requests.fields(request.options)
        given = options.get("request_id", "")
        key = self._dispatcher.key(given)
        silence = requests.heartbeat(options)
        spec = requests.task(request.task, "task")
        requests.image(request.image, spec, "task.query.")
        sampling = requests.sampling(request.task.sampling, "task.")
        asked = requests.request(key, spec, sampling, options)
        alone = self._replies.exclusive(key) if given else nullcontext()
        with alone, self._dispatcher.admit(key, context, self._stream_deadline) as visit:
            self._dispatcher.check(asked, "task.")
            events = EventStream(
                key.caller_id,
                request.task.task_id,
                request.stamp if request.HasField("stamp") else None,
            )
            picture = await self._dispatcher.pictures.check(request.image)
            stream = self._dispatcher.submit(asked, picture, visit)
            async with aclosing(follow(stream, silence)) as reports:
                async for report in reports:
                    for event in events.of(report):
                        yield event

    def _once(self, work: Work, request: Message, context: Context) -> Answer:
        """What `work` answers; calls that their callers gave one id share it.

        No coroutine, as the handlers are none: every one on the way of a call is resumed with it.
        """
        asked = requests.fields(request)
        options = requests.fields(asked.get("options"))
        given = options.get("request_id", "")
        key = self._dispatcher.key(given)
        if given:
            return self._shared(functools.partial(work, asked, options, key), key, context)
        return work(asked, options, key, context)

    async def _shared(
        self,
        work: Callable[[Caller], Coroutine[Any, Any, bytes]],
        key: RequestKey,
        context: Context,
    ) -> bytes:
        rpc = call.current()
        asked = await fingerprint(rpc.method, rpc.received)
        return await self._replies.once(key, asked, work, context)

    async def _run_tasks(
        self, asked: Fields, options: Fields, key: RequestKey, caller: Caller
    ) -> bytes:
        requests.heartbeat(options)
        run = TaskRun(self._dispatcher, asked, options, key)
        with self._dispatcher.admit(key, caller, self._unary_deadline) as visit:
            model = run.check()
            picture = await self._dispatcher.pictures.check(asked.get("image"))
            outcomes = await run.execute(picture, visit)
        return run.response(outcomes, model, asked.get("stamp")).SerializeToString()

    async def _answer(
        self,
        skill: _Skill,
        answers: Answers,
        asked: Fields,
        options: Fields,
        key: RequestKey,
        caller: Caller,
    ) -> bytes:
        """One task's answer."""
        image: media_pb2.Image | None = asked.get("image")
        requests.heartbeat(options)
        spec = skill.convert(asked)
        has_picture = requests.image(image, spec)
        sampling = requests.sampling(asked.get("sampling"))
        request = requests.request(key, spec, sampling, options, deltas=False, progress=False)
        with self._dispatcher.admit(key, caller, self._unary_deadline) as visit:
            model = self._dispatcher.check(request)
            picture = await self._dispatcher.pictures.check(image) if has_picture else None
            done = answered(await self._dispatcher.submit(request, picture, visit).done())
        if not isinstance(done.result, skill.result):
            raise InternalError(f"the engine answered with a {type(done.result).__name__}")
        return answers.write(key.caller_id, model.name, done, asked.get("stamp"))


class _Skill(NamedTuple):
    """What sets one skill apart: how its request is read and its answer told."""

    convert: Callable[[Fields], core.TaskSpec]
    result: type[core.Value]
    response: type[Message]
    fill: Callable[[Any, Any], None]  # a response, with a result


_QUERY = _Skill(
    requests.query,
    core.QueryResult,
    pb.QueryResponse,
    responses.fill_query,
)
_CAPTION = _Skill(
    requests.caption,
    core.CaptionResult,
    pb.CaptionResponse,
    responses.fill_caption,
)
_DETECT = _Skill(
    requests.detect,
    core.DetectResult,
    pb.DetectResponse,
    responses.fill_objects,
)
_POINT = _Skill(
    requests.point,
    core.PointResult,
    pb.PointResponse,
    responses.fill_points,
)
_SEGMENT = _Skill(
    requests.segment,
    core.SegmentResult,
    pb.SegmentResponse,
    responses.fill_segments,
)
