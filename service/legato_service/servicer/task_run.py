"""RunTasks: several tasks on one picture, whose bytes reach the engine once."""

from __future__ import annotations

import time

import msgspec
from legato.v1 import inference_pb2 as pb
from legato.v1 import media_pb2, task_pb2
from legato_engine import core
from legato_engine.core import RequestKey
from legato_engine.errors import LegatoError
from legato_engine.ipc.messages import Done, ModelInfo

from legato_service.convert import info as convert_info
from legato_service.convert import requests
from legato_service.convert.requests import Fields
from legato_service.engine import Stream
from legato_service.images.intake import NewPicture, Picture
from legato_service.requests.dispatcher import Dispatcher, answered, started
from legato_service.requests.registry import ActiveRequest
from legato_service.requests.shared_image import SHARED_FAILURES, held_name, task_result
from legato_service.rpc import call


class TaskRun:
    """One RunTasks call. Raises `InvalidField` when its list of tasks is malformed."""

    def __init__(
        self, dispatcher: Dispatcher, asked: Fields, options: Fields, key: RequestKey
    ) -> None:
        tasks = asked.get("tasks", ())
        self._dispatcher = dispatcher
        self._key = key
        self._image = asked.get("image")
        self._task_ids = [message.task_id for message in tasks]
        self._asked = [
            self._ask(index, spec, message, options)
            for index, (spec, message) in enumerate(zip(requests.tasks(tasks), tasks, strict=True))
        ]

    def _ask(
        self, index: int, spec: core.TaskSpec, task: task_pb2.Task, options: Fields
    ) -> core.Request:
        """A task's own request.

        The picture is kept for the later tasks whatever the options say: it is encoded once.
        """
        sampling = requests.sampling(task.sampling, f"tasks[{index}].")
        key = self._key.with_part(str(index))
        asked = requests.request(key, spec, sampling, options, deltas=False)
        return msgspec.structs.replace(asked, cache_image=True)

    def check(self) -> ModelInfo:
        """The model that will answer; raises as `Dispatcher.check` does."""
        models = [
            self._dispatcher.check(asked, f"tasks[{index}].")
            for index, asked in enumerate(self._asked)
        ]
        return models[0]

    async def execute(self, picture: Picture, visit: ActiveRequest) -> list[Done | LegatoError]:
        """How each task ended, in order; raises what fails them all.

        The first task that starts carries the picture's bytes, the others name what it put into the
        engine's cache. All run at the same time; unread reports pile up in bounded streams.
        """
        begun: list[Stream | LegatoError] = []
        for index, asked in enumerate(self._asked):
            try:
                self._check_picture(index, asked)
                stream = self._dispatcher.submit(asked, picture, visit)
                if isinstance(picture, NewPicture) and index + 1 < len(self._asked):
                    picture = await _held(stream) or picture
            except SHARED_FAILURES:
                raise
            except LegatoError as error:
                begun.append(error)
            else:
                begun.append(stream)
        return [await _ended(each) for each in begun]

    def response(
        self,
        outcomes: list[Done | LegatoError],
        model: ModelInfo,
        stamp: media_pb2.FrameStamp | None,
    ) -> pb.RunTasksResponse:
        """The answer, its results in the order of the tasks."""
        done = [each for each in outcomes if isinstance(each, Done)]
        image_time = max((each.timings.image for each in done), default=0.0)
        total_time = time.monotonic() - call.current().started
        info = pb.ResponseInfo(
            request_id=self._key.caller_id,
            model=model.name,
            usage=convert_info.usage(call.total(each.usage for each in done)),
            timings=task_pb2.Timings(
                image=convert_info.duration(image_time),
                total=convert_info.duration(total_time),
            ),
            image=convert_info.image(done[0].image) if done else None,
            stamp=stamp,
        )
        results = [
            task_result(task_id, each, self._key.caller_id)
            for task_id, each in zip(self._task_ids, outcomes, strict=True)
        ]
        response = pb.RunTasksResponse(results=results, info=info)
        if self._asked[0].return_tokens:
            for each in outcomes:
                tokens = each.tokens if isinstance(each, Done) else ()
                convert_info.fill_tokens(response.tokens.add().tokens, tokens)
        return response

    def _check_picture(self, index: int, asked: core.Request) -> None:
        """Without a picture, tasks that need one fail by themselves."""
        requests.image(self._image, asked.task, f"tasks[{index}].query.")


async def _held(stream: Stream) -> core.CachedImage | None:
    """The name of the picture that `stream` brought into the engine; None when it is not held."""
    return held_name(await started(stream))


async def _ended(begun: Stream | LegatoError) -> Done | LegatoError:
    if isinstance(begun, LegatoError):
        return begun
    try:
        return answered(await begun.done())
    except SHARED_FAILURES:
        raise
    except LegatoError as error:
        return error
