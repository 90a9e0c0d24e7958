"""InferenceService."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, nullcontext
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request
from legato_engine.core.results import TaskResult
from legato_engine.errors import InternalError

from legato_service.convert import checkpoints, requests, skills
from legato_service.convert.event_stream import EventStream
from legato_service.convert.response_info import fill_info
from legato_service.convert.skills import Skill
from legato_service.images.intake import CheckedImage
from legato_service.requests.dispatcher import CallContext, Dispatcher, completed, follow
from legato_service.requests.idempotency import IdempotencyCache, ReplyT, fingerprint
from legato_service.rpc import call
from legato_service.rpc.context import Context
from legato_service.servicer.task_run import TaskRun

ResultT = TypeVar("ResultT", bound=TaskResult)
ResponseT = TypeVar("ResponseT", bound=Message)
AnyT = TypeVar("AnyT")
Reply: TypeAlias = Coroutine[Any, Any, AnyT]
"""What a handler returns that leaves the work to another coroutine: one frame less a call."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Tasks on one image. The deadlines, in seconds, are for calls that bring none."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        idempotency_cache: IdempotencyCache,
        *,
        unary_deadline: float,
        stream_deadline: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._idempotency_cache = idempotency_cache
        self._unary_deadline = unary_deadline
        self._stream_deadline = stream_deadline

    def Query(self, request: pb.QueryRequest, context: Context) -> Reply[pb.QueryResponse]:
        return self._unary(skills.QUERY, request, context)

    def Caption(self, request: pb.CaptionRequest, context: Context) -> Reply[pb.CaptionResponse]:
        return self._unary(skills.CAPTION, request, context)

    def Detect(self, request: pb.DetectRequest, context: Context) -> Reply[pb.DetectResponse]:
        return self._unary(skills.DETECT, request, context)

    def Point(self, request: pb.PointRequest, context: Context) -> Reply[pb.PointResponse]:
        return self._unary(skills.POINT, request, context)

    def Segment(self, request: pb.SegmentRequest, context: Context) -> Reply[pb.SegmentResponse]:
        return self._unary(skills.SEGMENT, request, context)

    def RunTasks(self, request: pb.RunTasksRequest, context: Context) -> Reply[pb.RunTasksResponse]:
        work = functools.partial(self._run_tasks, request)
        return self._once(work, request.options.request_id, context)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        given = request.options.request_id
        key = self._dispatcher.key(given)
        silence = requests.heartbeat(request.options)
        task = requests.task(request.task, "task")
        requests.check_image(request.image, task, "task.query.")
        sampling = requests.sampling(request.task.sampling, "task.")
        converted = requests.request(key, task, sampling, request.options)
        stamp = request.stamp if request.HasField("stamp") else None
        resumes = request.HasField("resume_from")
        # What cannot be resumed must not end the stream whose id it names.
        checked = await self._checked(request, converted) if resumes else None
        if resumes and given:
            self._idempotency_cache.forget_stream(key)
        with (
            self._idempotency_cache.exclusive(key) if given else nullcontext(),
            self._dispatcher.admit(key, context, self._stream_deadline, resumes=resumes) as active,
        ):
            active.is_generate = True
            converted, image = checked or await self._checked(request, converted)
            stream = self._dispatcher.submit(converted, image, active)
            resumptions = request.resume_from.resumptions + 1 if resumes else 0
            call.current().resumptions = resumptions
            told = checkpoints.of(converted, resumptions) if request.checkpoints else None
            events = EventStream(key.caller_id, request.task.task_id, stamp, told, resumptions)
            async with aclosing(follow(stream, silence)) as outputs:
                async for output in outputs:
                    for event in events.convert(output):
                        yield event

    async def _checked(
        self, request: pb.GenerateRequest, converted: Request
    ) -> tuple[Request, CheckedImage]:
        """What goes to the engine, from the checkpoint on if there is one."""
        model = self._dispatcher.check(converted, "task.")
        if request.HasField("resume_from"):
            converted = checkpoints.resuming(request.resume_from, converted, model)
        return converted, await self._dispatcher.images.check(request.image)

    def _unary(
        self,
        skill: Skill[ResultT, ResponseT],
        request: Any,
        context: Context,
    ) -> Reply[ResponseT]:
        work = functools.partial(self._run_skill, skill, request)
        return self._once(work, request.options.request_id, context)

    def _once(
        self,
        work: Callable[[RequestKey, CallContext], Reply[ReplyT]],
        given: str,
        context: Context,
    ) -> Reply[ReplyT]:
        """Calls to which clients gave one id share `work`."""
        key = self._dispatcher.key(given)
        return self._shared(work, key, context) if given else work(key, context)

    async def _shared(
        self,
        work: Callable[[RequestKey, CallContext], Reply[ReplyT]],
        key: RequestKey,
        context: Context,
    ) -> ReplyT:
        rpc = call.current()
        return await self._idempotency_cache.get_or_run(
            key,
            await fingerprint(rpc.method, rpc.received),
            functools.partial(work, key),
            context,
        )

    async def _run_skill(
        self,
        skill: Skill[ResultT, ResponseT],
        request: Any,
        key: RequestKey,
        context: CallContext,
    ) -> ResponseT:
        options = request.options
        task = skill.task(request, "")
        has_image = requests.check_image(request.image, task)
        sampling = requests.sampling(request.sampling)
        converted = requests.request(key, task, sampling, options, deltas=False, progress=False)
        with self._dispatcher.admit(key, context, self._unary_deadline) as active:
            model = self._dispatcher.check(converted)
            image = await self._dispatcher.images.check(request.image) if has_image else None
            done = completed(await self._dispatcher.submit(converted, image, active).done())
        if not isinstance(done.result, skill.result):
            raise InternalError(f"the engine answered with a {type(done.result).__name__}")
        response: Any = skill.answer(done.result)
        stamp = request.stamp if request.HasField("stamp") else None
        fill_info(response.info, key.caller_id, model.name, done, stamp)
        answer: ResponseT = response
        return answer

    async def _run_tasks(
        self, request: pb.RunTasksRequest, key: RequestKey, context: CallContext
    ) -> pb.RunTasksResponse:
        run = TaskRun(self._dispatcher, request, key)
        with self._dispatcher.admit(key, context, self._unary_deadline) as active:
            model = run.check()
            image = await self._dispatcher.images.check(request.image)
            outcomes = await run.execute(image, active)
        return run.response(outcomes, model)
