"""Requests, tasks, results and events, as frozen values without torch or gRPC."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping
from typing import ClassVar

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of values sent between processes; the class name is the tag."""


# ---------------------------------------------------------------- request key

# The identity of a request in all processes.


class RequestKey(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, cache_hash=True
):
    """The identity of a request in all processes."""

    caller_id: str
    """Given by the caller, else made up by the service; unique within its tenant."""

    tenant: str = ""
    part: str = ""  # of a call of several: "2" of RunTasks, frame and task "7.0" of a session
    worker: int = 0  # number of the service process

    @property
    def name(self) -> str:
        """The same from every service process; seeds derive from it."""
        name = f"{self.tenant}/{self.caller_id}" if self.tenant else self.caller_id
        return f"{name}#{self.part}" if self.part else name

    @property
    def seed(self) -> int:
        """Return the 63-bit seed of a request that gives none; retries sample the same tokens."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8]) >> 1

    @property
    def call(self) -> RequestKey:
        return self.with_part("")

    def with_part(self, part: str) -> RequestKey:
        return RequestKey(self.caller_id, self.tenant, part, self.worker)

    def matches(self, target: RequestKey) -> bool:
        """Without a tenant, `target` matches the requests of all tenants."""
        return self.caller_id == target.caller_id and target.tenant in ("", self.tenant)


# ---------------------------------------------------------------- geometry

# Places in an image, normalised to 0..1.


class Point(Value, frozen=True):
    """A point in the displayed image: origin top-left, y down, 0..1."""

    x: float
    y: float


class Box(Value, frozen=True):
    """A box in the displayed image, 0..1; `x_min <= x_max`, `y_min <= y_max`."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


SpatialRef = Point | Box


# ---------------------------------------------------------------- images

# Images of requests: where their bytes are, and what is known of them once they were read.


class PixelFormat(enum.StrEnum):
    """Layouts of raw pixels."""

    RGB8 = "rgb8"
    BGR8 = "bgr8"
    RGBA8 = "rgba8"
    BGRA8 = "bgra8"
    MONO8 = "mono8"
    NV12 = "nv12"
    YUYV = "yuyv"


class BlobRef(Value, frozen=True):
    """A file in shared memory, of which `size` bytes are valid.

    Generation 0 is a file of its own, any other a reused segment (`segment_pool`).
    """

    name: str
    size: int
    generation: int = 0


class EncodedImage(Value, frozen=True):
    """An image file in a blob; `mime_type` is detected from its bytes."""

    blob: BlobRef
    mime_type: str


class RawImage(Value, frozen=True):
    """Pixels in a blob; `row_stride` is in bytes."""

    blob: BlobRef
    width: int
    height: int
    row_stride: int
    format: PixelFormat


class CachedImage(Value, frozen=True):
    """An image in the engine, by id."""

    image_id: str


ImageSource = EncodedImage | RawImage | CachedImage
WITH_BLOB = (EncodedImage, RawImage)  # kinds that own a blob


class ImageInfo(Value, frozen=True):
    """An image; its size is after EXIF orientation."""

    image_id: str
    width: int
    height: int
    cache_hit: bool


# ---------------------------------------------------------------- task specs

# What a request asks a model to do: one type for each skill.


class CaptionLength(enum.StrEnum):
    """The length of a caption."""

    SHORT = "short"
    NORMAL = "normal"
    LONG = "long"


class Turn(Value, frozen=True):
    """An earlier question and answer."""

    question: str
    answer: str


class QueryTask(Value, frozen=True):
    """Answer a question, about the image if there is one.

    The image precedes the first question of `history`; `shows_image` requires one. Then that
    question may be empty: it asks for a description.
    """

    question: str
    reasoning: bool = False
    spatial_refs: tuple[SpatialRef, ...] = ()
    system: str = ""
    history: tuple[Turn, ...] = ()
    shows_image: bool = False

    @property
    def num_characters(self) -> int:
        earlier = sum(len(turn.question) + len(turn.answer) for turn in self.history)
        return len(self.system) + earlier + len(self.question)


class CaptionTask(Value, frozen=True):
    """Describe the image."""

    length: CaptionLength = CaptionLength.NORMAL


class ObjectOrder(enum.StrEnum):
    """The order of objects in a result."""

    MODEL = "model"
    CONFIDENCE = "confidence"  # the greatest first


class DetectTask(Value, frozen=True):
    """Find all instances of `object`, but for those of a known and lower `min_confidence`."""

    object: str
    max_objects: int | None = None
    min_confidence: float = 0.0
    order: ObjectOrder = ObjectOrder.MODEL


class PointTask(Value, frozen=True):
    """Point at all instances of `object`; see `DetectTask`."""

    object: str
    max_objects: int | None = None
    spatial_refs: tuple[SpatialRef, ...] = ()
    min_confidence: float = 0.0
    order: ObjectOrder = ObjectOrder.MODEL


class SegmentTask(Value, frozen=True):
    """Outline one instance of `object`."""

    object: str
    spatial_refs: tuple[SpatialRef, ...] = ()


TaskSpec = QueryTask | CaptionTask | DetectTask | PointTask | SegmentTask

SKILL_OF_TASK: Mapping[type[TaskSpec], str] = {
    QueryTask: "query",
    CaptionTask: "caption",
    DetectTask: "detect",
    PointTask: "point",
    SegmentTask: "segment",
}
SKILLS = tuple(SKILL_OF_TASK.values())


# ---------------------------------------------------------------- tokens

# Tokens of a prompt, and those that a model sampled.

Certainty = tuple[float, float]
"""Of a token with a value: its probability against that of ending, and that of its value and the
values close to it. (1, 1) for other tokens.
"""


class PromptToken(msgspec.Struct, frozen=True):
    """An input position; only the model interprets `payload`."""

    token_id: int
    payload: tuple[float, float] = (0.0, 0.0)


class Alternative(Value, frozen=True):
    """A token that might have been chosen; `logprob` is without that of a value."""

    token_id: int
    text: str
    logprob: float
    piece: bytes = b""


class TokenInfo(Value, frozen=True):
    """A sampled token and its text, empty while a character is incomplete, or its value.

    `piece` has its own bytes, perhaps a part of a character; none for tokens that carry no text.
    `logprob` is the natural logarithm of its probability at temperature 1 under its constraint,
    times that of its value.
    """

    token_id: int
    text: str = ""
    logprob: float | None = None
    coordinate: float | None = None
    size: tuple[float, float] | None = None  # width, height
    certainty: Certainty | None = None  # only beside a logprob
    alternatives: tuple[Alternative, ...] = ()
    piece: bytes = b""


# ---------------------------------------------------------------- events

# Events of a running request: pieces of its result, in the order of the tokens.


class TextDelta(Value, frozen=True):
    """New text of an answer or caption."""

    text: str
    tokens: tuple[TokenInfo, ...] = ()


class Grounding(Value, frozen=True):
    """Points of a span of the reasoning, in characters."""

    start_index: int
    end_index: int
    points: tuple[Point, ...] = ()


class ReasoningDelta(Value, frozen=True):
    """New reasoning, and the groundings that end in it."""

    text: str
    grounding: tuple[Grounding, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()


class PointEvent(Value, frozen=True):
    """A completed point."""

    point: Point
    label: str
    confidence: float | None = None


class ObjectEvent(Value, frozen=True):
    """A completed box."""

    box: Box
    label: str
    confidence: float | None = None


class OutlineEvent(Value, frozen=True):
    """A piece of outline `index`: first its box, then text of its path."""

    index: int
    path_delta: str = ""
    box: Box | None = None


class TokensDelta(Value, frozen=True):
    """Tokens without complete text."""

    tokens: tuple[TokenInfo, ...]


Event = TextDelta | ReasoningDelta | PointEvent | ObjectEvent | OutlineEvent | TokensDelta


# ---------------------------------------------------------------- results

# How a request ended: its result, and what it took.


class FinishReason(enum.StrEnum):
    """Reason that a request ended."""

    STOP = "stop"
    LENGTH = "length"
    MAX_OBJECTS = "max_objects"
    CANCELLED = "cancelled"


class Result(Value, frozen=True):
    """Result of a task; `has_places`: each object has a place and a confidence."""

    has_places: ClassVar[bool] = False


class QueryResult(Result, frozen=True):
    """The result of a `QueryTask`."""

    answer: str
    reasoning: str | None = None
    grounding: tuple[Grounding, ...] = ()


class CaptionResult(Result, frozen=True):
    """The result of a `CaptionTask`."""

    caption: str


class DetectResult(Result, frozen=True):
    """All boxes."""

    has_places: ClassVar[bool] = True
    objects: tuple[ObjectEvent, ...] = ()


class PointResult(Result, frozen=True):
    """All points."""

    has_places: ClassVar[bool] = True
    points: tuple[PointEvent, ...] = ()


class Outline(Value, frozen=True):
    """An SVG path with coordinates in the unit square of `box`."""

    path: str
    box: Box
    label: str
    coarse: bool = True
    confidence: float | None = None


class SegmentResult(Result, frozen=True):
    """All outlines."""

    has_places: ClassVar[bool] = True
    segments: tuple[Outline, ...] = ()


TaskResult = QueryResult | CaptionResult | DetectResult | PointResult | SegmentResult

SKILL_OF_RESULT: Mapping[type[TaskResult], str] = {
    QueryResult: "query",
    CaptionResult: "caption",
    DetectResult: "detect",
    PointResult: "point",
    SegmentResult: "segment",
}


class ConfidenceInfo(Value, frozen=True):
    """Skills whose results have confidences, and those of them that were calibrated."""

    skills: tuple[str, ...]
    calibrated: tuple[str, ...] = ()
    fitted_on: str = ""
    fitted_at: int = 0  # seconds since the epoch; 0: not calibrated


class Usage(Value, frozen=True):
    """Numbers of tokens; `cached_tokens` came from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    image_tokens: int = 0
    reasoning_tokens: int = 0


class Timings(Value, frozen=True):
    """Seconds of each part of a request."""

    queue: float = 0.0
    image: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    total: float = 0.0


# ---------------------------------------------------------------- requests

# A request: one task, with its image, its sampling and what was done for it before.


class SamplingParams(Value, frozen=True):
    """Sampling parameters; None is the task's default (greedy for spatial tasks).

    `top_p` is in (0, 1]; `temperature` 0 is greedy. `seed` None derives it from the request's name,
    so that a retry has the same result.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Resumed(Value, frozen=True):
    """Progress of a request on lost engines. Times are `time.monotonic()` seconds.

    Its outputs have told the tokens in `token_ids`, with `payloads` and `certainties` if the task
    has them (a caller may not know the latter) and `logprobs` if the request wants them. A request
    that is `alone` runs with nothing beside it. One that is not `admitted` comes from a caller's
    checkpoint, and has no place in the queue yet.
    """

    arrival: float
    first_token: float = 0.0  # 0: none was told
    token_ids: tuple[int, ...] = ()
    payloads: tuple[tuple[float, float], ...] = ()
    logprobs: tuple[float, ...] = ()
    certainties: tuple[Certainty, ...] = ()
    admitted: bool = True
    alone: bool = False
    fingerprint: str = ""  # of its content, if `alone`
    is_last: bool = False  # it is not resumed once more


class Request(Value, frozen=True):
    """One task on at most one image.

    `deadline` is in `time.monotonic()` seconds, one clock for all processes of a host. A higher
    `priority` starts first. Without `progress`, `Queued` and `Started` are not sent.
    """

    request_id: RequestKey
    task: TaskSpec
    image: ImageSource | None = None
    sampling: SamplingParams = SamplingParams()
    model: str = ""
    adapter: str = ""
    deadline: float | None = None
    cache_image: bool = True
    return_tokens: bool = False
    logprobs: bool = False
    top_logprobs: int = 0  # alternatives to each token; above 0 only with `logprobs`
    deltas: bool = True
    progress: bool = True
    priority: int = 0
    resumed: Resumed | None = None

    @property
    def tenant(self) -> str:
        return self.request_id.tenant

    @property
    def ends_by(self) -> float:
        """Return the deadline; infinity without one."""
        return math.inf if self.deadline is None else self.deadline

    @property
    def was_admitted(self) -> bool:
        """An engine that was lost had admitted it."""
        return self.resumed is not None and self.resumed.admitted
