"""RunTasks: several tasks on one image."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from legato.v1 import inference_pb2 as pb
from legato.v1 import task_pb2
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request
from legato_engine.core.task_specs import TaskSpec
from legato_engine.errors import LegatoError
from legato_engine.ipc.messages import Done, ModelInfo

from legato_service.convert import requests
from legato_service.convert.response_info import fill_duration, fill_tokens, fill_usage, image_info
from legato_service.engine import Stream
from legato_service.images.intake import CheckedImage, NewImage
from legato_service.requests.dispatcher import Dispatcher, completed, started
from legato_service.requests.registry import ActiveRequest
from legato_service.requests.shared_image import SHARED_FAILURES, cached_image, task_result
from legato_service.rpc import call


class TaskRun:
    """One RunTasks call.

    Raises:
        InvalidField: the list of tasks is malformed.
    """

    def __init__(
        self, dispatcher: Dispatcher, message: pb.RunTasksRequest, key: RequestKey
    ) -> None:
        self._dispatcher = dispatcher
        self._message = message
        self._key = key
        self._requests = [
            self._request(index, task, each)
            for index, (task, each) in enumerate(
                zip(requests.tasks(message.tasks), message.tasks, strict=True)
            )
        ]

    def _request(self, index: int, task: TaskSpec, message: task_pb2.Task) -> Request:
        """The image is cached whatever the options say, so that it is encoded once."""
        sampling = requests.sampling(message.sampling, f"tasks[{index}].")
        key = self._key.with_part(str(index))
        options = self._message.options
        request = requests.request(key, task, sampling, options, deltas=False)
        return msgspec.structs.replace(request, cache_image=True)

    def check(self) -> ModelInfo:
        models = [
            self._dispatcher.check(request, f"tasks[{index}].")
            for index, request in enumerate(self._requests)
        ]
        return models[0]

    async def execute(self, image: CheckedImage, active: ActiveRequest) -> list[Done | LegatoError]:
        """Run all tasks at the same time and return their outcomes in order.

        The first task that starts carries the image's bytes, the others refer to the engine's
        cache.

        Raises:
            LegatoError: a failure that all tasks share.
        """
        submitted: list[Stream | LegatoError] = []
        original = image
        for index, request in enumerate(self._requests):
            try:
                requests.check_image(self._message.image, request.task, f"tasks[{index}].query.")
                stream = self._dispatcher.submit(
                    request, image, active, original=original, may_wait=index > 0
                )
                if isinstance(image, NewImage) and index + 1 < len(self._requests):
                    image = cached_image(await started(stream)) or image
            except SHARED_FAILURES:
                raise
            except LegatoError as error:
                submitted.append(error)
            else:
                submitted.append(stream)
        return [await _outcome(each) for each in submitted]

    def response(
        self, outcomes: Sequence[Done | LegatoError], model: ModelInfo
    ) -> pb.RunTasksResponse:
        results = [
            task_result(task.task_id, each, self._key.caller_id)
            for task, each in zip(self._message.tasks, outcomes, strict=True)
        ]
        response = pb.RunTasksResponse(results=results)
        done = [each for each in outcomes if isinstance(each, Done)]
        self._fill_info(response.info, done, model)
        if self._requests[0].return_tokens:
            for each in outcomes:
                tokens = each.tokens if isinstance(each, Done) else ()
                fill_tokens(response.tokens.add().tokens, tokens)
        return response

    def _fill_info(self, info: pb.ResponseInfo, done: Sequence[Done], model: ModelInfo) -> None:
        """The sum of usages, the longest image time, and the time of the whole call."""
        info.request_id = self._key.caller_id
        info.model = model.name
        info.resumptions = max((each.resumptions for each in done), default=0)
        fill_usage(info.usage, call.total(each.usage for each in done))
        fill_duration(info.timings.image, max((each.timings.image for each in done), default=0.0))
        fill_duration(info.timings.total, time.monotonic() - call.current().started)
        if done and done[0].image is not None:
            info.image.CopyFrom(image_info(done[0].image))
        if self._message.HasField("stamp"):
            info.stamp.CopyFrom(self._message.stamp)


async def _outcome(submitted: Stream | LegatoError) -> Done | LegatoError:
    if isinstance(submitted, LegatoError):
        return submitted
    try:
        return completed(await submitted.done())
    except SHARED_FAILURES:
        raise
    except LegatoError as error:
        return error
