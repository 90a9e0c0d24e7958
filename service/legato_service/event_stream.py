"""The event grammar of Generate, held by the one object that numbers the events."""

from __future__ import annotations

from collections.abc import Iterator

from legato.v1 import inference_pb2, media_pb2
from legato_engine.messages import Delta, Done, Queued, Started
from legato_engine.stream import StreamReport

from legato_service import convert_response


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

    def of(self, report: StreamReport | None) -> Iterator[inference_pb2.GenerateResponse]:
        """The events of the next report."""
        for event in self._unnumbered(report):
            event.index = self._next
            self._next += 1
            yield event

    def _unnumbered(self, report: StreamReport | None) -> Iterator[inference_pb2.GenerateResponse]:
        match report:
            case None:
                yield inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat())
            case Queued():
                yield convert_response.queued(report)
            case Started():
                self._model = report.model
                yield convert_response.started(report, self._request_id)
            case Delta():
                for event in report.events:
                    yield convert_response.delta(event)
            case Done():
                message = inference_pb2.GenerateResponse()
                finished = message.finished
                finished.result.CopyFrom(convert_response.task_result(self._task_id, report))
                convert_response.fill_info(
                    finished.info, self._request_id, self._model, report, self._stamp
                )
                yield message
