"""Results, events and tracks, as frozen values."""

from __future__ import annotations

import builtins
import math
from dataclasses import astuple, dataclass

from legato_client._svg_path import polygons

_TINY_AREA = 1e-12


@dataclass(frozen=True, slots=True)
class BoxAxes:
    """Value for each axis of a box, as fractions of the image's width or height."""

    center_x: float
    center_y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Motion:
    """Position, velocity and acceleration of a box when its frame was captured.

    Times are in seconds. The deviations are standard deviations.
    """

    position: BoxAxes
    velocity: BoxAxes
    acceleration: BoxAxes
    position_deviation: BoxAxes
    velocity_deviation: BoxAxes
    acceleration_deviation: BoxAxes

    def after(self, seconds: float) -> BoxAxes:
        """Predict the box `seconds` after the frame's capture."""
        axes = zip(*map(astuple, (self.position, self.velocity, self.acceleration)), strict=True)
        return BoxAxes(*(p + v * seconds + a * seconds**2 / 2 for p, v, a in axes))

    def deviation_after(self, seconds: float) -> BoxAxes:
        """Return the standard deviation of `after`."""
        parts = (self.position_deviation, self.velocity_deviation, self.acceleration_deviation)
        axes = zip(*map(astuple, parts), strict=True)
        return BoxAxes(*(math.hypot(p, v * seconds, a * seconds**2 / 2) for p, v, a in axes))


# ---------------------------------------------------------------- results

# All coordinates are fractions of the displayed image (after EXIF orientation): 0..1, origin at
# the top left, x to the right, y down. `to_pixels(width, height)` turns them into pixels of any
# size.


@dataclass(frozen=True, slots=True)
class Point:
    """A point in the image."""

    x: float
    y: float

    def to_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Return column and row in an image of that size, rounded."""
        return round(self.x * width), round(self.y * height)


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned box in the image."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float

    def to_pixels(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom in an image of that size, rounded."""
        left, top = Point(self.x_min, self.y_min).to_pixels(width, height)
        right, bottom = Point(self.x_max, self.y_max).to_pixels(width, height)
        return left, top, right, bottom


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union; 0 where neither has an area."""
    across = min(one.x_max, other.x_max) - max(one.x_min, other.x_min)
    down = min(one.y_max, other.y_max) - max(one.y_min, other.y_min)
    shared = max(across, 0.0) * max(down, 0.0)
    areas = ((each.x_max - each.x_min) * (each.y_max - each.y_min) for each in (one, other))
    return shared / max(sum(areas) - shared, _TINY_AREA)


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
        """Return the box in pixels: left, top, right, bottom."""
        return self.box.to_pixels(width, height)


@dataclass(frozen=True, slots=True)
class PointedObject:
    """An object pointed at; `confidence` is None when the model gives none."""

    point: Point
    label: str
    confidence: float | None = None

    def to_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Return the point in pixels: column, row."""
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
        """Return the path's closed rings as points of the whole image.

        Raises ValueError if it is not a path.
        """
        width, height = self.box.x_max - self.box.x_min, self.box.y_max - self.box.y_min
        return tuple(
            tuple(Point(self.box.x_min + x * width, self.box.y_min + y * height) for x, y in ring)
            for ring in polygons(self.path)
        )


def rings_of(outline: Outline) -> tuple[tuple[Point, ...], ...]:
    """Return the outline's polygons, or none if its path cannot be read."""
    try:
        return outline.polygons()
    except ValueError:
        return ()


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
    """Certainty of a token with a value, both in [0, 1].

    `existence` is its probability against that of ending, `concentration` that of the values close
    to its own. The product over an object's tokens is its confidence, before any calibration.
    """

    existence: float
    concentration: float


@dataclass(frozen=True, slots=True)
class Token:
    """Sampled token: text, empty while a character is incomplete, or the value it carries.

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
    """Reasoning before the answer."""

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
    """Metadata of an answer.

    `finish_reason` is "stop", "length", "max_objects", "superseded", "cancelled", or
    "unspecified" for a reason this client does not know. `tokens` are all sampled tokens, filled
    with `Options(return_tokens=True)`. `resumptions`: how often the server lost its engine
    meanwhile and went on with another. `images`: of a query about several, of which `image` is the
    first.
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
    images: tuple[ImageInfo, ...] = ()


class TaskResult:
    """Result of a task."""

    __slots__ = ()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Return the parts that have a place in the image."""
        return ()

    @property
    def text(self) -> str:
        """Return the textual part; empty where everything has a place."""
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
    """Boxes found, in the order that was asked for."""

    objects: tuple[Detection, ...]
    info: ResponseInfo
    task_id: str = ""

    @property
    def marks(self) -> tuple[Mark, ...]:
        return self.objects


@dataclass(frozen=True, slots=True)
class PointResult(TaskResult):
    """Points found, in the order that was asked for."""

    points: tuple[PointedObject, ...]
    info: ResponseInfo
    task_id: str = ""

    @property
    def marks(self) -> tuple[Mark, ...]:
        return self.points


@dataclass(frozen=True, slots=True)
class SegmentResult(TaskResult):
    """Outlines found."""

    segments: tuple[Outline, ...]
    info: ResponseInfo
    task_id: str = ""

    @property
    def marks(self) -> tuple[Mark, ...]:
        return self.segments


Result = QueryResult | CaptionResult | DetectResult | PointResult | SegmentResult


# ---------------------------------------------------------------- tracks


@dataclass(frozen=True, slots=True)
class TrackNow:
    """A tracked object at the moment of `Session.now`, `age` seconds after it was last found.

    `axes` is the centre and size of where it is expected, `deviation` their standard deviations.
    `last` is what the model found, in frame `sequence`, for task `task_id`.
    """

    axes: BoxAxes
    deviation: BoxAxes
    age: float
    last: Detection
    sequence: int
    task_id: str

    @property
    def track_id(self) -> str:
        """Names the object, in this session only."""
        return self.last.track_id

    @property
    def label(self) -> str:
        return self.last.label

    @property
    def box(self) -> Box:
        """Return the predicted box, possibly outside the image."""
        center_x, center_y = self.axes.center_x, self.axes.center_y
        across, down = max(self.axes.width, 0.0) / 2, max(self.axes.height, 0.0) / 2
        return Box(center_x - across, center_y - down, center_x + across, center_y + down)


# ---------------------------------------------------------------- events

# Order: `Queued`* `Started` then deltas, then exactly one `Finished`, which repeats everything, so
# that a caller may ignore the deltas. Boxes and points arrive as `Detection` and `PointedObject`.


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits; `position` 0 is next, `estimated_wait` is in seconds."""

    position: int
    estimated_wait: float


@dataclass(frozen=True, slots=True)
class Started:
    """The model began to read; `queue_time` is in seconds."""

    request_id: str
    model: str
    input_tokens: int
    cached_tokens: int
    image: ImageInfo | None
    queue_time: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of the answer or caption, never cumulative."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New reasoning text and the groundings that ended in it."""

    text: str
    grounding: tuple[Grounding, ...] = ()
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class TokensDelta:
    """Tokens that completed no text (values, marks, the last one); with `return_tokens` only."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class OutlineDelta:
    """A piece of outline number `index`: its box first, then pieces of its path."""

    index: int
    path_delta: str = ""
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole result; nothing follows."""

    result: Result


Event = (
    Queued
    | Started
    | TextDelta
    | ReasoningDelta
    | Detection
    | PointedObject
    | OutlineDelta
    | TokensDelta
    | Finished
)
