"""The events of Generate, numbered in the order of the contract's grammar."""

from __future__ import annotations

from legato.v1 import inference_pb2, media_pb2
from legato_engine.client.request_stream import StreamOutput
from legato_engine.ipc.messages import Delta, Done, Queued, Started

from legato_service.convert import responses
from legato_service.convert.response_info import fill_info


class EventStream:
    """Converts the outputs of one request to events with `index` 0, 1, 2, ...

    Each region is an event of its own. Text comes as the engine client joined it, at least what one
    step added. An output of None is a silence, and becomes a heartbeat.
    """

    def __init__(self, request_id: str, task_id: str, stamp: media_pb2.FrameStamp | None) -> None:
        self._request_id = request_id
        self._task_id = task_id
        self._stamp = stamp
        self._model = ""
        self._next_index = 0

    def convert(self, output: StreamOutput | None) -> list[inference_pb2.GenerateResponse]:
        """Return the events of the next output."""
        if isinstance(output, Delta):  # nearly all
            first, self._next_index = self._next_index, self._next_index + len(output.events)
            numbered = enumerate(output.events, first)
            return [responses.delta(event, index) for index, event in numbered]
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
                return responses.started(output, self._request_id)
            case Done():
                return self._finished(output)

    def _finished(self, done: Done) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse()
        message.finished.result.CopyFrom(responses.task_result(self._task_id, done))
        fill_info(message.finished.info, self._request_id, self._model, done, self._stamp)
        return message
