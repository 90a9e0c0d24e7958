"""InferenceService."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, TypeAlias

import msgspec
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc, media_pb2
from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import InternalError, LegatoError
from legato_engine.ipc.messages import Done, ServedModel
from legato_engine.types import Request, RequestKey

from legato_service.convert import requests, skills
from legato_service.convert.responses import (
    fill_duration,
    fill_info,
    fill_tokens,
    fill_usage,
    image_info,
)
from legato_service.convert.stream import Checkpoints, EventStream, resume
from legato_service.images.intake import CheckedImage, NewImage
from legato_service.requests.dispatcher import (
    SHARED_FAILURES,
    Dispatcher,
    cached_image,
    completed,
    follow,
    started,
    task_result,
)
from legato_service.requests.idempotency import IdempotencyCache, ReplyT, fingerprint
from legato_service.requests.registry import ActiveRequest
from legato_service.rpc import call
from legato_service.rpc.call import Context


def _task_requests(message: pb.RunTasksRequest, key: RequestKey) -> list[Request]:
    """Convert the tasks; their image is always cached, so that it is encoded once.

    Raises:
        InvalidField: the list of tasks is malformed.
    """
    converted = []
    for index, task in enumerate(requests.tasks(message.tasks)):
        sampling = requests.sampling(message.tasks[index].sampling, f"tasks[{index}].")
        part = key.with_part(str(index))
        request = requests.request(part, task, sampling, message.options, deltas=False)
        converted.append(msgspec.structs.replace(request, cache_image=True))
    return converted


async def _run_all(
    dispatcher: Dispatcher,
    message: pb.RunTasksRequest,
    converted: Sequence[Request],
    image: CheckedImage,
    active: ActiveRequest,
) -> list[Done | LegatoError]:
    """Run all tasks at the same time and return their outcomes in order.

    The first task that starts carries the image's bytes, the others refer to the engine's cache.

    Raises:
        LegatoError: a failure that all tasks share.
    """
    submitted: list[RequestStream | LegatoError] = []
    original = image
    for index, request in enumerate(converted):
        try:
            requests.check_image(message.image, request.task, f"tasks[{index}].query.")
            stream = dispatcher.submit(
                request, (image,), active, originals=(original,), may_wait=index > 0
            )
            if isinstance(image, NewImage) and index + 1 < len(converted):
                image = cached_image(await started(stream)) or image
        except SHARED_FAILURES:
            raise
        except LegatoError as error:
            submitted.append(error)
        else:
            submitted.append(stream)
    return [await _outcome(each) for each in submitted]


async def _outcome(submitted: RequestStream | LegatoError) -> Done | LegatoError:
    if isinstance(submitted, LegatoError):
        return submitted
    try:
        return completed(await submitted.done())
    except SHARED_FAILURES:
        raise
    except LegatoError as error:
        return error


def _tasks_response(
    message: pb.RunTasksRequest,
    converted: Sequence[Request],
    outcomes: Sequence[Done | LegatoError],
    model: ServedModel,
) -> pb.RunTasksResponse:
    """Build the response, with the sum of usages, and the time of the whole call."""
    request_id = converted[0].request_id.caller_id
    results = [
        task_result(task.task_id, each, request_id)
        for task, each in zip(message.tasks, outcomes, strict=True)
    ]
    response = pb.RunTasksResponse(results=results)
    done = [each for each in outcomes if isinstance(each, Done)]
    info = response.info
    info.request_id = request_id
    info.model = model.name
    info.resumptions = max((each.resumptions for each in done), default=0)
    fill_usage(info.usage, call.total(each.usage for each in done))
    fill_duration(info.timings.image, max((each.timings.image for each in done), default=0.0))
    fill_duration(info.timings.total, time.monotonic() - call.current().started)
    if done and done[0].image is not None:
        info.image.CopyFrom(image_info(done[0].image))
    if message.HasField("stamp"):
        info.stamp.CopyFrom(message.stamp)
    if converted[0].return_tokens:
        for each in outcomes:
            tokens = each.tokens if isinstance(each, Done) else ()
            fill_tokens(response.tokens.add().tokens, tokens)
    return response


# ---------------------------------------------------------------- inference

Reply: TypeAlias = Coroutine[Any, Any, ReplyT]
"""An un-awaited coroutine; saves one frame per call."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Handlers of InferenceService. The deadlines, in seconds, are for calls without one."""

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
        return self._unary(self._run_skill, request, context)

    def Caption(self, request: pb.CaptionRequest, context: Context) -> Reply[pb.CaptionResponse]:
        return self._unary(self._run_skill, request, context)

    def Detect(self, request: pb.DetectRequest, context: Context) -> Reply[pb.DetectResponse]:
        return self._unary(self._run_skill, request, context)

    def Point(self, request: pb.PointRequest, context: Context) -> Reply[pb.PointResponse]:
        return self._unary(self._run_skill, request, context)

    def Segment(self, request: pb.SegmentRequest, context: Context) -> Reply[pb.SegmentResponse]:
        return self._unary(self._run_skill, request, context)

    def RunTasks(self, request: pb.RunTasksRequest, context: Context) -> Reply[pb.RunTasksResponse]:
        return self._unary(self._run_tasks, request, context)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        request_id = request.options.request_id
        key = self._dispatcher.key(request_id)
        silence = requests.heartbeat(request.options)
        task = requests.task(request.task, "task", own_images=True)
        images = requests.images(request.image, request.task.query.images, task, "task.query.")
        sampling = requests.sampling(request.task.sampling, "task.")
        converted = requests.request(key, task, sampling, request.options)
        stamp = request.stamp if request.HasField("stamp") else None
        resumes = request.HasField("resume_from")
        # Check first: an invalid resumption must not end the stream that it names.
        checked = await self._checked(request, converted, images) if resumes else None
        if resumes and request_id:
            self._idempotency_cache.forget_stream(key)
        with (
            self._idempotency_cache.exclusive(key) if request_id else nullcontext(),
            self._dispatcher.admit(
                key, context.time_remaining(), self._stream_deadline, resumes=resumes
            ) as active,
        ):
            active.is_generate = True
            converted, given = checked or await self._checked(request, converted, images)
            stream = self._dispatcher.submit(converted, given, active)
            resumptions = request.resume_from.resumptions + 1 if resumes else 0
            call.current().resumptions = resumptions
            checkpointer = Checkpoints(converted, resumptions) if request.checkpoints else None
            events = EventStream(
                key.caller_id, request.task.task_id, stamp, checkpointer, resumptions
            )
            async with aclosing(follow(stream, silence)) as outputs:
                async for output in outputs:
                    for event in events.convert(output):
                        yield event

    async def _checked(
        self, request: pb.GenerateRequest, converted: Request, images: Sequence[media_pb2.Image]
    ) -> tuple[Request, Sequence[CheckedImage]]:
        """Validate a request and convert it, from its checkpoint if there is one."""
        model = self._dispatcher.check(converted, "task.", len(images))
        if request.HasField("resume_from"):
            converted = resume(request.resume_from, converted, model)
        return converted, await self._dispatcher.images.check_all(images, "task.query.")

    def _unary(
        self,
        run: Callable[[Any, RequestKey, float | None], Reply[ReplyT]],
        request: Any,
        context: Context,
    ) -> Reply[ReplyT]:
        """Answer a unary call; calls with the same client request id share one run."""
        given = request.options.request_id
        key = self._dispatcher.key(given)
        if not given:
            return run(request, key, context.time_remaining())
        return self._deduplicated(lambda left: run(request, key, left), key, context)

    async def _deduplicated(
        self,
        work: Callable[[float | None], Reply[ReplyT]],
        key: RequestKey,
        context: Context,
    ) -> ReplyT:
        rpc = call.current()
        content = await fingerprint(rpc.method, rpc.received)
        return await self._idempotency_cache.get_or_run(key, content, work, context)

    async def _run_skill(self, request: Any, key: RequestKey, time_left: float | None) -> Any:
        skill = skills.BY_REQUEST[type(request)]
        task = skill.task(request, "")
        several = request.images if isinstance(request, pb.QueryRequest) else ()
        images = requests.images(request.image, several, task)
        sampling = requests.sampling(request.sampling)
        converted = requests.request(
            key, task, sampling, request.options, deltas=False, progress=False
        )
        with self._dispatcher.admit(key, time_left, self._unary_deadline) as active:
            model = self._dispatcher.check(converted, num_images=len(images))
            given = await self._dispatcher.images.check_all(images)
            done = completed(await self._dispatcher.submit(converted, given, active).done())
        if not isinstance(done.result, skill.result):
            raise InternalError(f"the engine answered with a {type(done.result).__name__}")
        response = skill.answer(done.result)
        stamp = request.stamp if request.HasField("stamp") else None
        fill_info(response.info, key.caller_id, model.name, done, stamp)
        return response

    async def _run_tasks(
        self, request: pb.RunTasksRequest, key: RequestKey, time_left: float | None
    ) -> pb.RunTasksResponse:
        converted = _task_requests(request, key)
        with self._dispatcher.admit(key, time_left, self._unary_deadline) as active:
            models = [
                self._dispatcher.check(each, f"tasks[{index}].")
                for index, each in enumerate(converted)
            ]
            image = await self._dispatcher.images.check(request.image)
            outcomes = await _run_all(self._dispatcher, request, converted, image, active)
        return _tasks_response(request, converted, outcomes, models[0])
