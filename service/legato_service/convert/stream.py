"""The event stream of Generate, with checkpoints."""

from __future__ import annotations

import time

import msgspec
from legato.v1 import inference_pb2, media_pb2
from legato_engine.client.request_stream import StreamOutput
from legato_engine.errors import InvalidField
from legato_engine.ipc.messages import Done, OutputDelta, PrefillStarted, QueuePosition, ServedModel
from legato_engine.types import Request, Resumed

from legato_service.convert import responses
from legato_service.convert.responses import fill_info

_FIELD = "resume_from"


class Checkpoints:
    """Builder of one stream's checkpoints; each has the changes since the previous one."""

    def __init__(self, request: Request, resumptions: int) -> None:
        """Create the builder; `resumptions` counts the stream's, this one included."""
        seed = request.sampling.seed
        self._seed = request.request_id.seed if seed is None else seed  # the engine's own
        self._resumptions = resumptions

    def begin(self, event: inference_pb2.GenerateResponse) -> None:
        message = event.checkpoint
        message.model = event.started.model
        message.seed = self._seed
        message.resumptions = self._resumptions

    def cover(self, event: inference_pb2.GenerateResponse, delta: OutputDelta) -> None:
        """Attach a checkpoint to the last event of a delta."""
        message = event.checkpoint
        message.token_ids.extend(delta.token_ids)
        if delta.payloads:
            message.values.extend([value for pair in delta.payloads for value in pair])
        if delta.logprobs:
            message.logprobs.extend(delta.logprobs)
        if delta.certainties:
            message.certainties.extend([share for pair in delta.certainties for share in pair])


def resume(message: inference_pb2.Checkpoint, request: Request, model: ServedModel) -> Request:
    """Resume the request from its checkpoint; the engine checks the tokens against the task.

    Raises:
        InvalidField: the checkpoint is malformed, or of another model or request.
    """
    _check_origin(message, request, model)
    sampling = msgspec.structs.replace(request.sampling, seed=message.seed)
    resumed = _resumed(message, model.max_output_tokens, logprobs=request.logprobs)
    return msgspec.structs.replace(request, sampling=sampling, resumed=resumed)


def _resumed(message: inference_pb2.Checkpoint, limit: int, *, logprobs: bool) -> Resumed:
    token_ids, values, count = message.token_ids, message.values, len(message.token_ids)
    if count > limit:
        raise InvalidField(
            f"at most {limit} tokens", field=f"{_FIELD}.token_ids", limit=limit, actual=count
        )
    if len(values) not in (0, 2 * count):
        raise InvalidField("two for each token, or none", field=f"{_FIELD}.values")
    if len(message.logprobs) != (count if logprobs else 0):
        raise InvalidField(
            "one for each token if `options.top_logprobs` is set, else none",
            field=f"{_FIELD}.logprobs",
        )
    certainties = message.certainties if len(message.certainties) == 2 * count else ()
    now = time.monotonic()
    return Resumed(
        arrival=now,
        first_token=now if count else 0.0,
        token_ids=tuple(token_ids),
        payloads=tuple(zip(values[::2], values[1::2], strict=True)),
        logprobs=tuple(message.logprobs),
        certainties=tuple(zip(certainties[::2], certainties[1::2], strict=True)),
        admitted=False,
    )


def _check_origin(message: inference_pb2.Checkpoint, request: Request, model: ServedModel) -> None:
    if message.model != model.name:
        raise InvalidField(f"this server answers with {model.name}", field=f"{_FIELD}.model")
    if not message.HasField("seed"):
        raise InvalidField("must be given", field=f"{_FIELD}.seed")
    if request.sampling.seed not in (None, message.seed):
        raise InvalidField("differs from the seed of the sampling", field=f"{_FIELD}.seed")


# ---------------------------------------------------------------- event stream


class EventStream:
    """Converter of one request's outputs to events with `index` 0, 1, 2, ...

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
        """Create the converter; `resumptions` are the stream's, as counted by its client."""
        self._checkpoints = checkpoints
        self._resumptions = resumptions
        self._request_id = request_id
        self._task_id = task_id
        self._stamp = stamp
        self._model = ""
        self._next_index = 0

    def convert(self, output: StreamOutput | None) -> list[inference_pb2.GenerateResponse]:
        if isinstance(output, OutputDelta):  # nearly all
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

    def _event(
        self, output: QueuePosition | PrefillStarted | Done | None
    ) -> inference_pb2.GenerateResponse:
        match output:
            case None:
                return inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat())
            case QueuePosition():
                return responses.queued(output)
            case PrefillStarted():
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
