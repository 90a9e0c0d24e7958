"""Conversion of the scheduler's events to outputs for the service."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from legato_engine.core.requests import RequestTable, ScheduledRequest
from legato_engine.errors import LegatoError, to_value
from legato_engine.ipc.messages import (
    Done,
    EngineOutput,
    Failed,
    OutputDelta,
    PrefillStarted,
    QueuePosition,
)
from legato_engine.sequence import Sequence, tokens_of
from legato_engine.types import (
    Event,
    FinishReason,
    RequestKey,
    RequestTimings,
    TokenUsage,
)


@dataclasses.dataclass(slots=True, eq=False)
class OutputSink:
    """A `scheduler.Sink` that removes requests from the table when they end."""

    model: str
    requests: RequestTable
    _: dataclasses.KW_ONLY
    send: Callable[[EngineOutput], None]
    finish: Callable[[ScheduledRequest, Done], None]

    def fail(self, request_id: RequestKey, error: LegatoError) -> None:
        """Send the failure of a request that is not scheduled."""
        self.send(Failed(request_id=request_id, error=to_value(error)))

    def queued(self, sequence: Sequence, position: int, estimated_wait: float) -> None:
        if not sequence.request.progress:
            return
        self.send(
            QueuePosition(
                request_id=sequence.request.request_id,
                position=position,
                estimated_wait=estimated_wait,
            )
        )

    def started(self, sequence: Sequence) -> None:
        if not sequence.request.progress:
            return
        request = self._scheduled(sequence)
        waited = sequence.timing.prefill_start - sequence.timing.arrival
        self.send(
            PrefillStarted(
                request_id=request.request_id,
                model=self.model,
                input_tokens=sequence.prompt_length,
                cached_tokens=sequence.pages.cached_tokens,
                queue_time=max(0.0, waited - request.image_seconds),
                image=request.images[0] if request.images else None,
            )
        )

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        request = sequence.request
        if not (request.deltas or request.return_tokens):
            return
        scheduled = self._scheduled(sequence)
        if request.return_tokens:
            scheduled.tokens.extend(tokens_of(events))
        if request.deltas:
            self.send(_delta(sequence, scheduled, events))

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        request = self._scheduled(sequence)
        self.requests.remove(request.request_id)
        self.finish(
            request,
            Done(
                request_id=request.request_id,
                result=sequence.task.result(finish_reason),
                finish_reason=finish_reason,
                usage=TokenUsage(
                    input_tokens=sequence.prompt_length,
                    output_tokens=sequence.num_committed,
                    cached_tokens=sequence.pages.cached_tokens,
                    image_tokens=sequence.num_image_tokens,
                    reasoning_tokens=sequence.task.reasoning_tokens,
                ),
                timings=RequestTimings.of(
                    arrival=sequence.timing.arrival,
                    image=request.image_seconds,
                    started=sequence.timing.prefill_start,
                    first_token=sequence.timing.first_token,
                    now=time.monotonic(),
                ),
                image=request.images[0] if request.images else None,
                more_images=request.images[1:],
                tokens=tuple(request.tokens),
                preemptions=sequence.pages.num_preemptions,
            ),
        )

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        self.requests.remove(sequence.request.request_id)
        self.fail(sequence.request.request_id, error)

    def _scheduled(self, sequence: Sequence) -> ScheduledRequest:
        request = self.requests.get(sequence.request.request_id)
        assert isinstance(request, ScheduledRequest), "the scheduler has an unknown request"
        return request


def _delta(sequence: Sequence, request: ScheduledRequest, events: Many[Event]) -> OutputDelta:
    """Return the tokens since the last delta, with all that another engine needs to resume."""
    tokens = sequence.tokens[len(sequence.prompt) + request.num_sent_tokens :]
    request.num_sent_tokens += len(tokens)
    has_payload, count = sequence.task.has_payload, len(tokens)
    logprobs: tuple[float, ...] = ()
    if sequence.request.logprobs:
        logprobs = tuple([each.logprob or 0.0 for each in request.tokens[-count:]])
    return OutputDelta(
        request_id=request.request_id,
        events=tuple(events),
        token_ids=tuple([token_id for token_id, _ in tokens]),
        payloads=tuple([payload for _, payload in tokens]) if has_payload else (),
        logprobs=logprobs,
        certainties=tuple(sequence.certainties[-count:]) if has_payload else (),
    )
