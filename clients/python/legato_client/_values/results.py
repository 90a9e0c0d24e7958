"""What a server answers, as frozen values.

All coordinates are fractions of the displayed image (after EXIF orientation): 0..1, origin at
the top left, x to the right, y down. `to_pixels(width, height)` turns them into pixels of any size.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass

from legato_client._values.motion import Motion
from legato_client._values.svg_path import polygons


@dataclass(frozen=True, slots=True)
class Point:
    """A point in the image."""

    x: float
    y: float

    def to_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Column and row in an image of that size, rounded."""
        return round(self.x * width), round(self.y * height)


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned box in the image."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float

    def to_pixels(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right, bottom in an image of that size, rounded."""
        left, top = Point(self.x_min, self.y_min).to_pixels(width, height)
        right, bottom = Point(self.x_max, self.y_max).to_pixels(width, height)
        return left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Detection:
    """A boxed object; `confidence` is None when the model gives none.

    `track_id` names the object from frame to frame of a session, `motion` says how it moves: ""
    and None where the task is not tracked.
    """

    box: Box
    label: str
    confidence: float | None = None
    track_id: str = ""
    motion: Motion | None = None

    def to_pixels(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The box in pixels: left, top, right, bottom."""
        return self.box.to_pixels(width, height)


@dataclass(frozen=True, slots=True)
class PointedObject:
    """An object pointed at; `confidence` is None when the model gives none."""

    point: Point
    label: str
    confidence: float | None = None

    def to_pixels(self, width: int, height: int) -> tuple[int, int]:
        """The point in pixels: column, row."""
        return self.point.to_pixels(width, height)


@dataclass(frozen=True, slots=True)
class Outline:
    """An SVG path whose coordinates are fractions of `box`; `coarse` means not refined."""

    path: str
    box: Box
    label: str
    confidence: float | None = None
    coarse: bool = False

    def polygons(self) -> tuple[tuple[Point, ...], ...]:
        """The path's closed rings as points of the whole image; ValueError when it is no path."""
        width, height = self.box.x_max - self.box.x_min, self.box.y_max - self.box.y_min
        return tuple(
            tuple(Point(self.box.x_min + x * width, self.box.y_min + y * height) for x, y in ring)
            for ring in polygons(self.path)
        )


Mark = Detection | PointedObject | Outline


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    """A token that the model might have chosen; `text` is what it would have completed.

    `bytes` are as those of `Token`.
    """

    token_id: int
    text: str
    logprob: float
    bytes: builtins.bytes = b""


@dataclass(frozen=True, slots=True)
class TokenCertainty:
    """How sure the model was of a token with a value, both in [0, 1].

    `existence` is its probability against that of ending, `concentration` that of the values close
    to its own. The product over an object's tokens is its confidence, before any calibration.
    """

    existence: float
    concentration: float


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token: text, empty while a character is incomplete, or the value it carries.

    `logprob` is the natural logarithm of the probability that the model gave it, its value's
    included; None unless asked for, as is `certainty`. `alternatives` are as many of the likeliest
    tokens in its place as were asked for, the likeliest first. `bytes` are the token's own, in
    UTF-8 perhaps a part of a character; none if it carries no text.
    """

    token_id: int
    text: str
    logprob: float | None = None
    coordinate: float | None = None
    size: tuple[float, float] | None = None  # width, height
    alternatives: tuple[TokenAlternative, ...] = ()
    certainty: TokenCertainty | None = None
    bytes: builtins.bytes = b""


@dataclass(frozen=True, slots=True)
class Grounding:
    """Points that ground the characters `start_index` to `end_index` of the reasoning text."""

    start_index: int
    end_index: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str
    grounding: tuple[Grounding, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameStamp:
    """A camera frame's identity, echoed unchanged; `capture_time_ns` counts from the Unix epoch."""

    frame_id: str = ""
    capture_time_ns: int | None = None
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The image as answered about; `image_id` may name it again in `CachedImage`."""

    image_id: str
    width: int
    height: int
    cache_hit: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out; None where the server did not count."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    image_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent on the server in each part of the request's life."""

    queue: float = 0.0
    image: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """How the answer came about.

    `finish_reason` is "stop", "length", "max_objects", "superseded", "cancelled", or
    "unspecified" for a reason this client does not know. `tokens` are all sampled tokens, filled
    with `Options(return_tokens=True)`. `resumptions`: how often the server lost its engine
    meanwhile and went on with another.
    """

    request_id: str
    model: str
    finish_reason: str
    usage: Usage | None = None
    timings: Timings | None = None
    image: ImageInfo | None = None
    stamp: FrameStamp | None = None
    tokens: tuple[Token, ...] = ()
    resumptions: int = 0


class TaskResult:
    """What any task gives."""

    __slots__ = ()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What of it has a place in the image."""
        return ()

    @property
    def text(self) -> str:
        """What of it is words; empty where all of it has a place."""
        return ""


@dataclass(frozen=True, slots=True)
class QueryResult(TaskResult):
    """The answer to a question."""

    answer: str
    reasoning: Reasoning | None
    info: ResponseInfo
    task_id: str = ""

    @property
    def text(self) -> str:
        return self.answer


@dataclass(frozen=True, slots=True)
class CaptionResult(TaskResult):
    """A description of the image."""

    caption: str
    info: ResponseInfo
    task_id: str = ""

    @property
    def text(self) -> str:
        return self.caption


@dataclass(frozen=True, slots=True)
class DetectResult(TaskResult):
    """Every box found, in the order that was asked for."""

    objects: tuple[Detection, ...]
    info: ResponseInfo
    task_id: str = ""

    @property
    def marks(self) -> tuple[Mark, ...]:
        return self.objects


@dataclass(frozen=True, slots=True)
class PointResult(TaskResult):
    """Every point found, in the order that was asked for."""

    points: tuple[PointedObject, ...]
    info: ResponseInfo
    task_id: str = ""

    @property
    def marks(self) -> tuple[Mark, ...]:
        return self.points


@dataclass(frozen=True, slots=True)
class SegmentResult(TaskResult):
    """Every outline found."""

    segments: tuple[Outline, ...]
    info: ResponseInfo
    task_id: str = ""

    @property
    def marks(self) -> tuple[Mark, ...]:
        return self.segments


Result = QueryResult | CaptionResult | DetectResult | PointResult | SegmentResult
