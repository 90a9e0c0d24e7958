"""Requests and results, which all rooms share.

All are frozen values without torch and without transport that can be sent between processes (see
`ipc.messages`).
"""

from __future__ import annotations

import enum

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of values that are sent between processes; the class name is the tag."""


# ---------------------------------------------------------------- geometry (normalised, 0..1)


class Point(Value, frozen=True):
    """A point in the displayed image, origin top-left, x right, y down, both in 0..1."""

    x: float
    y: float


class Box(Value, frozen=True):
    """An axis-aligned box in the displayed image, 0..1, `x_min <= x_max`, `y_min <= y_max`."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


SpatialRef = Point | Box


# ---------------------------------------------------------------- tasks


class CaptionLength(enum.StrEnum):
    """The length of a caption."""

    SHORT = "short"
    NORMAL = "normal"
    LONG = "long"


class Turn(Value, frozen=True):
    """An earlier question and answer of a conversation."""

    question: str
    answer: str


class QueryTask(Value, frozen=True):
    """Answer a question, about the image if there is one.

    `history` are the earlier turns of the conversation, `system` is the system message. The image
    precedes the first question; `shows_image` requires one.
    """

    question: str
    reasoning: bool = False
    spatial_refs: tuple[SpatialRef, ...] = ()
    system: str = ""
    history: tuple[Turn, ...] = ()
    shows_image: bool = False


class CaptionTask(Value, frozen=True):
    """Describe the image."""

    length: CaptionLength = CaptionLength.NORMAL


class DetectTask(Value, frozen=True):
    """Find the boxes of all instances of `object`."""

    object: str
    max_objects: int | None = None


class PointTask(Value, frozen=True):
    """Point at all instances of `object`."""

    object: str
    max_objects: int | None = None
    spatial_refs: tuple[SpatialRef, ...] = ()


class SegmentTask(Value, frozen=True):
    """Outline one instance of `object`."""

    object: str
    spatial_refs: tuple[SpatialRef, ...] = ()


TaskSpec = QueryTask | CaptionTask | DetectTask | PointTask | SegmentTask


class SamplingParams(Value, frozen=True):
    """Sampling parameters of a request; None is the task's default (greedy for spatial tasks).

    `temperature` 0 is greedy; `top_p` is in (0, 1]; `top_k` 0 or None is off. `seed` None derives
    the seed from the request's name, so that a retry has the same result.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


# ---------------------------------------------------------------- images


class PixelFormat(enum.StrEnum):
    """Supported layouts of raw pixels."""

    RGB8 = "rgb8"
    BGR8 = "bgr8"
    RGBA8 = "rgba8"
    BGRA8 = "bgra8"
    MONO8 = "mono8"
    NV12 = "nv12"
    YUYV = "yuyv"


class BlobRef(Value, frozen=True):
    """Bytes in shared memory: a file's name and its number of valid bytes.

    Files of their own have generation 0; others are segments that are reused, see `segment_pool`.
    """

    name: str
    size: int
    generation: int = 0


class EncodedImage(Value, frozen=True):
    """A JPEG, PNG or WebP file in a blob; `mime_type` is detected from its bytes."""

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
    """An image that the engine has, by the id in its `ImageInfo`."""

    image_id: str


ImageSource = EncodedImage | RawImage | CachedImage
WITH_BLOB = (EncodedImage, RawImage)  # kinds that own a blob


class ImageInfo(Value, frozen=True):
    """The id of an image and its size after EXIF orientation."""

    image_id: str
    width: int
    height: int
    cache_hit: bool


# ---------------------------------------------------------------- requests


class RequestKey(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, cache_hash=True
):
    """The identity of a request in all processes of a server."""

    caller_id: str
    """Given by the caller, else made up by the service; unique within its tenant."""

    tenant: str = ""
    part: str = ""  # of a call of several: "2" of RunTasks, frame and task "7.0" of a session
    worker: int = 0  # number of the service process; 0 is the first

    @property
    def name(self) -> str:
        """`tenant/caller_id#part`: the same from every service process. Seeds derive from it."""
        name = f"{self.tenant}/{self.caller_id}" if self.tenant else self.caller_id
        return f"{name}#{self.part}" if self.part else name

    @property
    def call(self) -> RequestKey:
        """The key that all parts of a call share."""
        return self.with_part("")

    def with_part(self, part: str) -> RequestKey:
        """The key of this part of the same call."""
        return RequestKey(self.caller_id, self.tenant, part, self.worker)

    def matches(self, target: RequestKey) -> bool:
        """Whether `target` means this request; without a tenant, it means those of all tenants."""
        return self.caller_id == target.caller_id and target.tenant in ("", self.tenant)


class Request(Value, frozen=True):
    """One task on at most one image, as the service sends it to the engine.

    `deadline` is in absolute `time.monotonic()` seconds, one clock for all processes of a host.
    Waiting requests of a higher `priority` start first. Without `deltas` only the whole result is
    sent, which includes all of them; without `progress` `Queued` and `Started` are not sent either.
    With `return_tokens` every token is sent, with its probability if `logprobs`.
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
    deltas: bool = True
    progress: bool = True
    priority: int = 0

    @property
    def tenant(self) -> str:
        """The tenant whose quota the request counts against."""
        return self.request_id.tenant


# ---------------------------------------------------------------- results


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    MAX_OBJECTS = "max_objects"
    CANCELLED = "cancelled"


class TokenInfo(Value, frozen=True):
    """One sampled token and its text, empty while a character is incomplete, or its value.

    `logprob` is the natural logarithm of its probability at temperature 1 among the tokens that its
    constraint allows, times that of its value; None unless requested.
    """

    token_id: int
    text: str = ""
    logprob: float | None = None
    coordinate: float | None = None
    size: tuple[float, float] | None = None  # width, height


class TextDelta(Value, frozen=True):
    """New text of an answer or caption, not cumulative."""

    text: str
    tokens: tuple[TokenInfo, ...] = ()


class Grounding(Value, frozen=True):
    """Points that ground a span of the reasoning text, by character offsets."""

    start_index: int
    end_index: int
    points: tuple[Point, ...] = ()


class ReasoningDelta(Value, frozen=True):
    """New reasoning text, and the groundings that end in it."""

    text: str
    grounding: tuple[Grounding, ...] = ()
    tokens: tuple[TokenInfo, ...] = ()


class PointEvent(Value, frozen=True):
    """A point, sent in the step that completes it."""

    point: Point
    label: str


class ObjectEvent(Value, frozen=True):
    """A box, sent in the step that completes it."""

    box: Box
    label: str


class OutlineEvent(Value, frozen=True):
    """A piece of outline `index`: first its box, then text of its path."""

    index: int
    path_delta: str = ""
    box: Box | None = None


class TokensDelta(Value, frozen=True):
    """Tokens without complete text; only sent with `return_tokens`."""

    tokens: tuple[TokenInfo, ...]


Event = TextDelta | ReasoningDelta | PointEvent | ObjectEvent | OutlineEvent | TokensDelta


class QueryResult(Value, frozen=True):
    """The result of a `QueryTask`."""

    answer: str
    reasoning: str | None = None
    grounding: tuple[Grounding, ...] = ()


class CaptionResult(Value, frozen=True):
    """The result of a `CaptionTask`."""

    caption: str


class DetectResult(Value, frozen=True):
    """All boxes, in the model's order."""

    objects: tuple[ObjectEvent, ...] = ()


class PointResult(Value, frozen=True):
    """All points, in the model's order."""

    points: tuple[PointEvent, ...] = ()


class Outline(Value, frozen=True):
    """An SVG path with coordinates in the unit square of `box`."""

    path: str
    box: Box
    label: str
    coarse: bool = True


class SegmentResult(Value, frozen=True):
    """All outlines."""

    segments: tuple[Outline, ...] = ()


TaskResult = QueryResult | CaptionResult | DetectResult | PointResult | SegmentResult


class Usage(Value, frozen=True):
    """Numbers of tokens; `cached_tokens` of the input came from the prefix cache."""

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


# ---------------------------------------------------------------- tokens


class PromptToken(msgspec.Struct, frozen=True):
    """An input position: a token id, and the value of tokens that have one.

    Only the model interprets `payload`.
    """

    token_id: int
    payload: tuple[float, float] = (0.0, 0.0)
