"""Reading a Generate stream, over the servers that it takes."""

from __future__ import annotations

import random

from legato.v1 import inference_pb2

from legato_client._errors import Busy, IncompleteStream, InternalError, LegatoError, Unavailable
from legato_client._transport.methods import GENERATE
from legato_client._values import events

_DELAYS = (0.05, 1.0, 3.0)
"""Seconds before each resumption at most: a proxy has another server at once, a name may need a
moment, and a server that was alone comes back."""


class EventReader:
    """Checks the grammar of a stream and converts its messages.

    A broken path may end a stream with any code; the absence of `Finished` is what tells. Where
    the server sends checkpoints, events wait for the one that covers them, so that a stream that
    goes on with another server tells everything once.
    """

    def __init__(self) -> None:
        self._next_index = 0
        self._begun = False  # some server has sent something
        self._started = False
        self._checkpoint: inference_pb2.Checkpoint | None = None
        self._request_id = ""
        self._uncovered: list[events.Event] = []
        self._finished: events.Finished | None = None
        self._num_resumptions = 0

    def read(self, message: inference_pb2.GenerateResponse) -> list[events.Event]:
        """The events that may be given on; `Finished` is kept for the end.

        Raises IncompleteStream when an event was lost, and the task's own error when it failed.
        """
        if message.index != self._next_index:
            raise IncompleteStream(
                f"event {self._next_index} of the stream is missing, got {message.index}"
            )
        self._next_index += 1
        self._begun = True
        event = GENERATE.parse(message)
        if isinstance(event, events.Finished):
            self._finished = event
            return []
        if isinstance(event, events.Queued | events.Started):
            return self._opened(event, message)
        if event is not None:
            self._uncovered.append(event)
        if message.HasField("checkpoint"):
            self._add(message.checkpoint)
        elif self._checkpoint is not None:
            return []
        known, self._uncovered = self._uncovered, []
        return known

    def end(self) -> events.Finished:
        """The last event, given after the stream ended with OK: to stop at it cancels nothing.

        Raises IncompleteStream when there was none.
        """
        if self._finished is None:
            raise IncompleteStream("the stream ended before the answer was finished")
        return self._finished

    def resumption(self, error: LegatoError, time_left: float) -> float | None:
        """Seconds until the stream may go on elsewhere, or None when the error must be raised."""
        if not self._can_resume(error) or self._num_resumptions == len(_DELAYS):
            return None
        # A lost server had many streams.
        delay = max(_DELAYS[self._num_resumptions] * random.uniform(0.5, 1), error.retry_after or 0)
        if delay >= time_left:
            return None
        self._num_resumptions += 1
        self._next_index = 0
        self._uncovered.clear()
        self._finished = None
        return delay

    def addition(self) -> bytes:
        """What the request needs, appended to its bytes, to go on; a parser merges it."""
        message = inference_pb2.GenerateRequest()
        if self._checkpoint is not None:
            message.resume_from.CopyFrom(self._checkpoint)
            message.options.request_id = self._request_id
        return message.SerializeToString()

    def _opened(
        self, event: events.Queued | events.Started, message: inference_pb2.GenerateResponse
    ) -> list[events.Event]:
        """Of several servers the first one that starts is told."""
        if message.HasField("checkpoint"):
            self._add(message.checkpoint)
        if self._started:
            return []
        if isinstance(event, events.Started):
            self._started = True
            self._request_id = event.request_id
        return [event]

    def _add(self, checkpoint: inference_pb2.Checkpoint) -> None:
        if self._checkpoint is None:
            self._checkpoint = inference_pb2.Checkpoint()
        self._checkpoint.MergeFrom(checkpoint)

    def _can_resume(self, error: LegatoError) -> bool:
        """Before the first event gRPC itself has retried, and without checkpoints nothing can be.

        A failure without a reason is not the server's: its connection was cut.
        """
        known = self._checkpoint is not None or not self._started
        if not (self._begun and known):
            return False
        if isinstance(error, Busy):
            return error.retry_after is not None and self._num_resumptions > 0
        return isinstance(error, Unavailable) or (
            isinstance(error, InternalError) and not error.reason
        )
