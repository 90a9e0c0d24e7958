"""Tasks, sampling and options, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from legato_client._images.sources import ImageInput
from legato_client._types.results import Box, FrameStamp, Point

SpatialRef = Point | Box
CaptionLength = Literal["short", "normal", "long"]
ObjectOrder = Literal["model", "confidence"]
Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; None keeps the server's default (greedy for spatial tasks).

    `temperature` 0 is greedy, `top_p` lies in (0, 1], `top_k` 0 is off.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """Options of any request.

    `request_id` empty lets the server choose one. `model` empty means the served default.
    `cache_image` None leaves the server's default. `return_tokens` tells every token, in
    `ResponseInfo.tokens` and while a stream decodes; `top_logprobs` also how likely each
    was, with as many alternatives (0 to 20).
    """

    request_id: str = ""
    model: str = ""
    adapter: str = ""
    cache_image: bool | None = None
    return_tokens: bool = False
    top_logprobs: int | None = None
    stamp: FrameStamp | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ClipFrame:
    """A frame of a clip, taken `time` seconds after the clip began.

    Frames follow each other, each later than the one before.
    """

    image: ImageInput
    time: float


Images: TypeAlias = "ImageInput | Sequence[ImageInput | ClipFrame]"
"""One image, or a list of several."""


@dataclass(frozen=True, slots=True)
class Message:
    """Conversation message: text, or parts of which strings are text.

    Any other part is an image of the user's. A model that takes one (`ModelInfo.max_images`) takes
    it only at the beginning of the user's first message. "system" comes first or not at all, then
    "user" and "assistant" take turns. Messages of one role in a row are one turn.
    """

    role: Role
    content: str | Sequence[str | ImageInput | ClipFrame]


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Texts that an answer may be; one field is set.

    `json_schema` is a schema or its text ({} for any JSON), `regex` is in Rust's syntax, and
    `grammar` is context-free, in GBNF or Lark. An answer with the finish reason "stop" matches.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str = ""
    choices: tuple[str, ...] = ()
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class QueryTask:
    """Answer a question, or the last one of a conversation, about the images when there are any."""

    question: str = ""
    reasoning: bool = False
    spatial_refs: tuple[SpatialRef, ...] = ()
    sampling: Sampling = Sampling()
    task_id: str = ""
    messages: tuple[Message, ...] = ()
    response_format: ResponseFormat | None = None


@dataclass(frozen=True, slots=True)
class CaptionTask:
    """Describe the image."""

    length: CaptionLength = "normal"
    sampling: Sampling = Sampling()
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class Tracking:
    """Follow objects from frame to frame; a track waits `max_unseen` seconds (2) for its object."""

    max_unseen: float | None = None


@dataclass(frozen=True, slots=True)
class DetectTask:
    """Box every instance of `object` whose confidence is at least `min_confidence`.

    `order` is that of the result; "confidence" puts the greatest first. `tracking` is for the
    standing tasks of a session.
    """

    object: str
    max_objects: int | None = None
    sampling: Sampling = Sampling()
    task_id: str = ""
    min_confidence: float | None = None
    order: ObjectOrder = "model"
    tracking: Tracking | None = None


@dataclass(frozen=True, slots=True)
class PointTask:
    """Point at every instance of `object`; see `DetectTask`."""

    object: str
    max_objects: int | None = None
    spatial_refs: tuple[SpatialRef, ...] = ()
    sampling: Sampling = Sampling()
    task_id: str = ""
    min_confidence: float | None = None
    order: ObjectOrder = "model"


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """Outline `object`."""

    object: str
    spatial_refs: tuple[SpatialRef, ...] = ()
    sampling: Sampling = Sampling()
    task_id: str = ""


Task = QueryTask | CaptionTask | DetectTask | PointTask | SegmentTask
