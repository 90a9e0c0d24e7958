"""Checkpoints of Generate: what a stream tells of its tokens, and what a client gives back."""

from __future__ import annotations

import time

import msgspec
from legato.v1 import inference_pb2
from legato_engine.core.requests import Request, Resumed
from legato_engine.errors import InvalidField
from legato_engine.ipc.messages import Delta, ModelInfo

_FIELD = "resume_from"


class Checkpoints:
    """Fills the checkpoints of one stream; each has what came since the one before it."""

    def __init__(self, seed: int, resumptions: int = 0) -> None:
        """`resumptions` counts those of the stream so far, this one included."""
        self._seed = seed
        self._resumptions = resumptions

    def begin(self, event: inference_pb2.GenerateResponse) -> None:
        """With `started`."""
        message = event.checkpoint
        message.model = event.started.model
        message.seed = self._seed
        message.resumptions = self._resumptions

    def cover(self, event: inference_pb2.GenerateResponse, delta: Delta) -> None:
        """With the last event of a delta."""
        message = event.checkpoint
        message.token_ids.extend(delta.token_ids)
        if delta.payloads:
            message.values.extend([value for pair in delta.payloads for value in pair])
        if delta.logprobs:
            message.logprobs.extend(delta.logprobs)
        if delta.certainties:
            message.certainties.extend([share for pair in delta.certainties for share in pair])


def of(request: Request, resumptions: int) -> Checkpoints:
    """With the seed that the engine takes."""
    seed = request.sampling.seed
    return Checkpoints(request.request_id.seed if seed is None else seed, resumptions)


def resuming(message: inference_pb2.Checkpoint, request: Request, model: ModelInfo) -> Request:
    """The request from its checkpoint on; the engine checks the tokens against the task.

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


def _check_origin(message: inference_pb2.Checkpoint, request: Request, model: ModelInfo) -> None:
    if message.model != model.name:
        raise InvalidField(f"this server answers with {model.name}", field=f"{_FIELD}.model")
    if not message.HasField("seed"):
        raise InvalidField("must be given", field=f"{_FIELD}.seed")
    if request.sampling.seed not in (None, message.seed):
        raise InvalidField("differs from the seed of the sampling", field=f"{_FIELD}.seed")
