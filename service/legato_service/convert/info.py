"""What an answer tells beside its result, as protobuf. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from google.protobuf import duration_pb2
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from legato.v1 import inference_pb2, media_pb2, task_pb2
from legato_engine import core
from legato_engine.ipc.messages import Done

_SECOND = 1_000_000_000  # nanoseconds
_SHORT = 0.9  # seconds
FINISH = {
    core.FinishReason.STOP: task_pb2.FINISH_REASON_STOP,
    core.FinishReason.LENGTH: task_pb2.FINISH_REASON_LENGTH,
    core.FinishReason.MAX_OBJECTS: task_pb2.FINISH_REASON_MAX_OBJECTS,
    core.FinishReason.CANCELLED: task_pb2.FINISH_REASON_CANCELLED,
}


class Info:
    """A `ResponseInfo` that is filled for one answer, or for one after another.

    To make a message and to reach its parts costs several times what it does to set its fields.
    """

    __slots__ = ("_durations", "_has_image", "_is_plain", "_message", "_usage")

    def __init__(self, message: inference_pb2.ResponseInfo) -> None:
        self._message = message
        self._usage = message.usage
        self._durations = _durations(message.timings)
        self._has_image = False
        self._is_plain = True  # has nothing else that most answers have not

    def fill(
        self, request_id: str, model: str, done: Done, stamp: media_pb2.FrameStamp | None
    ) -> None:
        """Tell of this answer; `stamp` None when the request had none."""
        if not self._is_plain:
            self._make_plain()
        self._is_plain = False  # until all is well
        message = self._message
        message.request_id = request_id
        message.model = model
        message.finish_reason = FINISH[done.finish_reason]
        fill_usage(self._usage, done.usage)
        took_seconds = _fill_durations(self._durations, done.timings)
        if done.image is not None:
            self._has_image = True
            _fill_image(message.image, done.image)
        elif self._has_image:
            self._has_image = False
            message.ClearField("image")
        if stamp is not None:
            message.stamp.CopyFrom(stamp)
        if done.tokens:
            fill_tokens(message.tokens, done.tokens)
        self._is_plain = stamp is None and not done.tokens and not took_seconds

    def _make_plain(self) -> None:
        self._message.ClearField("stamp")
        self._message.ClearField("tokens")
        for message in self._durations:
            message.ClearField("seconds")


class Answers:
    """The answers of one RPC, as they travel: one message, filled and written again and again.

    Belongs to one event loop. `fill` fills a result into a `response`, of which it leaves no scalar
    field as it was.
    """

    def __init__(self, response: type[Any], fill: Callable[[Any, Any], None]) -> None:
        self._message = response()
        self._fill = fill
        self._info = Info(self._message.info)
        fields = self._message.DESCRIPTOR.fields
        self._parts = [each.name for each in fields if each.message_type and each.name != "info"]

    def write(
        self, request_id: str, model: str, done: Done, stamp: media_pb2.FrameStamp | None
    ) -> bytes:
        """One answer; see `Info.fill`."""
        message = self._message
        for name in self._parts:
            message.ClearField(name)
        self._fill(message, done.result)
        self._info.fill(request_id, model, done, stamp)
        written: bytes = message.SerializeToString()
        return written


def usage(value: core.Usage) -> task_pb2.Usage:
    """Tokens in and out."""
    message = task_pb2.Usage()
    fill_usage(message, value)
    return message


def fill_usage(message: task_pb2.Usage, value: core.Usage) -> None:
    """Tokens in and out; the last three are told even when they are 0."""
    message.input_tokens = value.input_tokens
    message.output_tokens = value.output_tokens
    message.cached_tokens = value.cached_tokens
    message.image_tokens = value.image_tokens
    message.reasoning_tokens = value.reasoning_tokens


def image(value: core.ImageInfo | None) -> media_pb2.ImageInfo | None:
    """The picture as answered about."""
    if value is None:
        return None
    message = media_pb2.ImageInfo()
    _fill_image(message, value)
    return message


def _fill_image(message: media_pb2.ImageInfo, value: core.ImageInfo) -> None:
    message.image_id = value.image_id
    message.width, message.height = value.width, value.height
    message.cache_hit = value.cache_hit


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds, to the nanosecond. Not negative."""
    whole, nanos = divmod(round(seconds * 1e9), _SECOND)
    return duration_pb2.Duration(seconds=whole, nanos=nanos)


def fill_timings(message: task_pb2.Timings, value: core.Timings) -> None:
    """Where the time went."""
    _fill_durations(_durations(message), value)


_Durations: TypeAlias = tuple[duration_pb2.Duration, ...]
"""The parts of a `Timings`, in the order of `core.Timings`."""


def _durations(message: task_pb2.Timings) -> _Durations:
    return tuple(getattr(message, name) for name in core.Timings.__struct_fields__)


def _fill_durations(messages: _Durations, value: core.Timings) -> bool:
    """Whether any has whole seconds. Filled, they are there even when they are 0."""
    # Nearly always all of them together, and so each, take less than a second.
    together = value.queue + value.image + value.prefill + value.first_token + value.decode
    if together + value.total < _SHORT:
        queue, image, prefill, first_token, decode, total = messages
        # To round by a call takes as long as to set the field.
        queue.nanos = (value.queue * 1e9 + 0.5).__trunc__()
        image.nanos = (value.image * 1e9 + 0.5).__trunc__()
        prefill.nanos = (value.prefill * 1e9 + 0.5).__trunc__()
        first_token.nanos = (value.first_token * 1e9 + 0.5).__trunc__()
        decode.nanos = (value.decode * 1e9 + 0.5).__trunc__()
        total.nanos = (value.total * 1e9 + 0.5).__trunc__()
        return False
    for message, seconds in zip(messages, msgspec.structs.astuple(value), strict=True):
        message.seconds, message.nanos = divmod(round(seconds * 1e9), _SECOND)
    return True


def fill_tokens(
    messages: RepeatedCompositeFieldContainer[inference_pb2.Token],
    tokens: Sequence[core.TokenInfo],
) -> None:
    """Add the tokens of an event or of a whole answer."""
    for token in tokens:
        message = messages.add(token_id=token.token_id, text=token.text)
        if token.logprob is not None:
            message.logprob = token.logprob
        if token.coordinate is not None:
            message.coordinate = token.coordinate
        if token.size is not None:
            message.size.width, message.size.height = token.size
