"""What the scheduler says of sequences, turned into reports for the service."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from legato_engine.core import Event, FinishReason, ImageInfo, Timings, TokenInfo, Usage
from legato_engine.errors import LegatoError, to_value
from legato_engine.ipc.messages import Delta, Done, EngineOutput, Failed, Queued, Started
from legato_engine.sequence import Sequence
from legato_engine.tasks import tokens_of


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """What a report needs and a sequence does not hold.

    `image` and the seconds of its preparation are those of a request with a picture. `tokens` are
    those told so far, for a request that wants them.
    """

    image: ImageInfo | None = None
    image_seconds: float = 0.0
    tokens: list[TokenInfo] = dataclasses.field(default_factory=list)


class OutputSink:
    """A `scheduler.Sink`. Knows a request from `expect` to its end."""

    def __init__(self, model: str, send: Callable[[EngineOutput], None]) -> None:
        self._model = model
        self._send = send
        self._tickets: dict[str, Ticket] = {}

    def expect(self, request_id: str, ticket: Ticket) -> None:
        """This request's sequence is about to be submitted."""
        self._tickets[request_id] = ticket

    def forget(self, request_id: str) -> None:
        """This request was aborted."""
        self._tickets.pop(request_id, None)

    def fail(self, request_id: str, error: LegatoError) -> None:
        """Report a failure, of a request with or without a sequence."""
        self.forget(request_id)
        self._send(Failed(request_id=request_id, error=to_value(error)))

    def queued(self, sequence: Sequence, position: int, estimated_wait: float) -> None:
        """Report that it has to wait, about `estimated_wait` seconds; `position` 0 is next."""
        if not sequence.request.progress:
            return
        self._send(
            Queued(
                request_id=sequence.request.request_id,
                position=position,
                estimated_wait=estimated_wait,
            )
        )

    def started(self, sequence: Sequence) -> None:
        """Its prefill was launched, or the first part of it."""
        if not sequence.request.progress:
            return
        ticket = self._tickets[sequence.request.request_id]
        self._send(
            Started(
                request_id=sequence.request.request_id,
                model=self._model,
                input_tokens=sequence.prompt_length,
                cached_tokens=sequence.pages.cached_tokens,
                queue_time=_queue_time(sequence, ticket),
                image=ticket.image,
            )
        )

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        """One commit added these events; told to those who asked."""
        request = sequence.request
        if request.return_tokens:
            self._tickets[request.request_id].tokens.extend(tokens_of(events))
        if request.deltas:
            self._send(Delta(request_id=request.request_id, events=tuple(events)))

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Its last token was committed."""
        ticket = self._tickets.pop(sequence.request.request_id)
        self._send(
            Done(
                request_id=sequence.request.request_id,
                result=sequence.task.result(finish_reason),
                finish_reason=finish_reason,
                usage=_usage(sequence),
                timings=_timings(sequence, ticket),
                image=ticket.image,
                tokens=tuple(ticket.tokens),
            )
        )

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        """It ended without a result."""
        self.fail(sequence.request.request_id, error)


def _usage(sequence: Sequence) -> Usage:
    has_image = sequence.request.image is not None
    return Usage(
        input_tokens=sequence.prompt_length,
        output_tokens=sequence.num_committed,
        cached_tokens=sequence.pages.cached_tokens,
        image_tokens=sequence.prefix_length - 1 if has_image else 0,  # all of it but BOS
        reasoning_tokens=sequence.task.reasoning_tokens,
    )


def _timings(sequence: Sequence, ticket: Ticket) -> Timings:
    now = time.monotonic()
    return Timings(
        queue=_queue_time(sequence, ticket),
        image=ticket.image_seconds,
        prefill=sequence.timing.first_token - sequence.timing.prefill_start,
        first_token=sequence.timing.first_token - sequence.timing.arrival,
        decode=now - sequence.timing.first_token,
        total=now - sequence.timing.arrival,
    )


def _queue_time(sequence: Sequence, ticket: Ticket) -> float:
    """Seconds from arrival to prefill, less the picture's own preparation."""
    return max(0.0, sequence.timing.prefill_start - sequence.timing.arrival - ticket.image_seconds)
