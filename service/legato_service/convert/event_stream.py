"""The event grammar of Generate, held by the one object that numbers the events."""

from __future__ import annotations

from legato.v1 import inference_pb2, media_pb2
from legato_engine.client.request_stream import StreamOutput
from legato_engine.ipc.messages import Delta, Done, Queued, Started

from legato_service.convert import responses
from legato_service.convert.info import Info


class EventStream:
    """Turns the reports of one request into its events, `index` 0, 1, 2, ...

    One message per region, at once; text as the engine client joined it, at least what one step
    added. A report of None is a silence: a heartbeat.
    """

    def __init__(self, request_id: str, task_id: str, stamp: media_pb2.FrameStamp | None) -> None:
        self._request_id = request_id
        self._task_id = task_id
        self._stamp = stamp
        self._model = ""
        self._next = 0

    def of(self, report: StreamOutput | None) -> list[inference_pb2.GenerateResponse]:
        """The events of the next report."""
        if isinstance(report, Delta):  # nearly all
            first, self._next = self._next, self._next + len(report.events)
            numbered = enumerate(report.events, first)
            return [responses.delta(event, index) for index, event in numbered]
        events = self._unnumbered(report)
        for event in events:
            event.index = self._next
            self._next += 1
        return events

    def _unnumbered(
        self, report: Queued | Started | Done | None
    ) -> list[inference_pb2.GenerateResponse]:
        if report is None:
            return [inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat())]
        if isinstance(report, Done):
            return [self._finished(report)]
        if isinstance(report, Queued):
            return [responses.queued(report)]
        self._model = report.model
        return [responses.started(report, self._request_id)]

    def _finished(self, done: Done) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse()
        finished = message.finished
        finished.result.CopyFrom(responses.task_result(self._task_id, done))
        Info(finished.info).fill(self._request_id, self._model, done, self._stamp)
        return message
