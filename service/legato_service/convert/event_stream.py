"""The events of Generate."""

from __future__ import annotations

from legato.v1 import inference_pb2, media_pb2
from legato_engine.client.request_stream import StreamOutput
from legato_engine.ipc.messages import Delta, Done, Queued, Started

from legato_service.convert import responses
from legato_service.convert.checkpoints import Checkpoints
from legato_service.convert.response_info import fill_info


class EventStream:
    """Converts the outputs of one request to events with `index` 0, 1, 2, ...

    Each region is an event of its own. None is a silence, and becomes a heartbeat.
    """

    def __init__(
        self,
        request_id: str,
        task_id: str,
        stamp: media_pb2.FrameStamp | None,
        checkpoints: Checkpoints | None = None,
        resumptions: int = 0,
    ) -> None:
        """`resumptions` are those of the stream, by its client."""
        self._checkpoints = checkpoints
        self._resumptions = resumptions
        self._request_id = request_id
        self._task_id = task_id
        self._stamp = stamp
        self._model = ""
        self._next_index = 0

    def convert(self, output: StreamOutput | None) -> list[inference_pb2.GenerateResponse]:
        if isinstance(output, Delta):  # nearly all
            first, self._next_index = self._next_index, self._next_index + len(output.events)
            numbered = enumerate(output.events, first)
            events = [responses.delta(event, index) for index, event in numbered]
            if self._checkpoints is not None:
                self._checkpoints.cover(events[-1], output)
            return events
        event = self._event(output)
        event.index = self._next_index
        self._next_index += 1
        return [event]

    def _event(self, output: Queued | Started | Done | None) -> inference_pb2.GenerateResponse:
        match output:
            case None:
                return inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat())
            case Queued():
                return responses.queued(output)
            case Started():
                self._model = output.model
                started = responses.started(output, self._request_id)
                if self._checkpoints is not None:
                    self._checkpoints.begin(started)
                return started
            case Done():
                return self._finished(output)

    def _finished(self, done: Done) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse()
        message.finished.result.CopyFrom(responses.task_result(self._task_id, done))
        fill_info(message.finished.info, self._request_id, self._model, done, self._stamp)
        if self._resumptions:
            message.finished.info.resumptions += self._resumptions
        return message
