"""Answers as ROS 2 messages, without ROS: `vision_msgs/Detection2DArray` and `std_msgs/Header`.

The dataclasses here have the names, fields and defaults of the messages (vision_msgs 4, which is
Humble and later), so a test or a program outside ROS can use them as they are. In a node:

    import vision_msgs.msg
    from legato_client import ros2

    def on_image(image):                      # sensor_msgs/Image
        stamp = ros2.frame_stamp(image.header, sequence=next(counter))
        result = client.detect(pixels(image), "cup", options=Options(stamp=stamp))
        publisher.publish(ros2.to_ros(ros2.detections(result), vision_msgs.msg))

| message | from |
| --- | --- |
| header.stamp, header.frame_id | the request's stamp, and so the header of the image |
| detections[].bbox.center.position, size_x, size_y | the box, in pixels of the image, not rounded |
| detections[].bbox.center.theta | 0: boxes are not turned |
| detections[].results[0].hypothesis.class_id | the label |
| detections[].results[0].hypothesis.score | the confidence; see `detections` where there is none |
| detections[].results[0].pose | left as it is: an image gives none |
| detections[].id | the track id; empty: not tracked |

With depth, `detections_3d` and `point_stamped` build `vision_msgs/Detection3DArray` and
`geometry_msgs/PointStamped` from what `legato_client.depth.lift` found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from legato_client._types.results import (
    Box,
    Detection,
    DetectResult,
    FrameStamp,
    PointResult,
    TrackNow,
)

if TYPE_CHECKING:  # it needs numpy
    from legato_client.depth import Lifted

_NS = 1_000_000_000
_ANY_ANGLE = math.pi**2 / 3  # variance of a uniform angle, in square radians
_MAX_SEC = 2**31 - 1  # builtin_interfaces/Time counts seconds in an int32


# ---------------------------------------------------------------- messages


@dataclasses.dataclass(frozen=True, slots=True)
class Time:
    """builtin_interfaces/Time: since the Unix epoch; both 0 where it is not known."""

    sec: int = 0
    nanosec: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """std_msgs/Header."""

    stamp: Time = Time()
    frame_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """geometry_msgs/Point, in metres."""

    x: float = 0.0
    y: float = 0.0
    z: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PointStamped:
    """geometry_msgs/PointStamped."""

    header: Header = Header()
    point: Point = Point()


@dataclasses.dataclass(frozen=True, slots=True)
class Vector3:
    """geometry_msgs/Vector3, in metres."""

    x: float = 0.0
    y: float = 0.0
    z: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Quaternion:
    """geometry_msgs/Quaternion; no rotation."""

    x: float = 0.0
    y: float = 0.0
    z: float = 0.0
    w: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Pose:
    """geometry_msgs/Pose."""

    position: Point = Point()
    orientation: Quaternion = Quaternion()


@dataclasses.dataclass(frozen=True, slots=True)
class PoseWithCovariance:
    """geometry_msgs/PoseWithCovariance: 6 x 6, row by row."""

    pose: Pose = Pose()
    covariance: tuple[float, ...] = (0.0,) * 36


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectHypothesis:
    """vision_msgs/ObjectHypothesis."""

    class_id: str = ""
    score: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectHypothesisWithPose:
    """vision_msgs/ObjectHypothesisWithPose."""

    hypothesis: ObjectHypothesis = ObjectHypothesis()
    pose: PoseWithCovariance = PoseWithCovariance()


@dataclasses.dataclass(frozen=True, slots=True)
class Point2D:
    """vision_msgs/Point2D, in pixels: x to the right, y down."""

    x: float = 0.0
    y: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Pose2D:
    """vision_msgs/Pose2D; theta in radians, counterclockwise."""

    position: Point2D = Point2D()
    theta: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class BoundingBox2D:
    """vision_msgs/BoundingBox2D: centre and sides, in pixels."""

    center: Pose2D = Pose2D()
    size_x: float = 0.0
    size_y: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Detection2D:
    """vision_msgs/Detection2D."""

    header: Header = Header()
    results: tuple[ObjectHypothesisWithPose, ...] = ()
    bbox: BoundingBox2D = BoundingBox2D()
    id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Detection2DArray:
    """vision_msgs/Detection2DArray."""

    header: Header = Header()
    detections: tuple[Detection2D, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class BoundingBox3D:
    """vision_msgs/BoundingBox3D: centre and sides."""

    center: Pose = Pose()
    size: Vector3 = Vector3()


@dataclasses.dataclass(frozen=True, slots=True)
class Detection3D:
    """vision_msgs/Detection3D."""

    header: Header = Header()
    results: tuple[ObjectHypothesisWithPose, ...] = ()
    bbox: BoundingBox3D = BoundingBox3D()
    id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Detection3DArray:
    """vision_msgs/Detection3DArray."""

    header: Header = Header()
    detections: tuple[Detection3D, ...] = ()


# ---------------------------------------------------------------- conversions


def detections(
    result: DetectResult | PointResult,
    *,
    stamp: FrameStamp | None = None,
    size: tuple[int, int] | None = None,
    absent_score: float = math.nan,
) -> Detection2DArray:
    """Build the message for an answer, in its order. Points are boxes without width and height.

    `stamp` and `size` (width, height in pixels) are those of the image; left out, they are what
    the server echoed in `result.info`. ValueError if neither has them: pixels need a size, and a
    message without a stamp would match no image.

    Legato never makes a confidence up, and the message has no way to leave it out: `absent_score`
    stands for it. NaN, the default, is in no range, so `score > limit` keeps nothing: a consumer
    that filters needs a score for unknown ones, say 1.0 to let them pass.
    """
    stamp = stamp or result.info.stamp
    if stamp is None:
        raise ValueError("no stamp: neither given nor in result.info.stamp")
    if size is None and result.info.image is not None:
        size = result.info.image.width, result.info.image.height
    if size is None or min(size) < 1:
        raise ValueError(f"no image size in pixels: {size} given, {result.info.image} in the info")
    at = header(stamp)
    found = (_detection(at, one, size, absent_score) for one in _as_boxes(result))
    return Detection2DArray(at, tuple(found))


def detections_3d(
    lifted: Iterable[Lifted], stamp: FrameStamp, *, absent_score: float = math.nan
) -> Detection3DArray:
    """Build the message for what `lift` found, in its order; what has no centre is left out.

    `stamp` is that of the image, whose frame_id must name the camera's optical frame. The boxes are
    of the visible surface and not turned. A rotation was not estimated: its variance is that of any
    angle. `absent_score` is that of `detections`.
    """
    at = header(stamp)
    found = (_detection_3d(at, one, absent_score) for one in lifted if one.center is not None)
    return Detection3DArray(at, tuple(found))


def point_stamped(lifted: Lifted, stamp: FrameStamp) -> PointStamped:
    """Build the message for one centre; ValueError with the reason if there is none."""
    if lifted.center is None:
        raise ValueError(f"lifted has no center: {lifted.reason}")
    return PointStamped(header(stamp), Point(*lifted.center))


def header(stamp: FrameStamp) -> Header:
    """Return the header of the stamp's image; the sequence number has no place in it.

    A stamp without a capture time gives the time 0. ValueError for a time before 1970 or, as the
    message counts seconds in 32 bits, after January 2038.
    """
    sec, nanosec = divmod(stamp.capture_time_ns or 0, _NS)
    if not 0 <= sec <= _MAX_SEC:
        raise ValueError(f"capture_time_ns {stamp.capture_time_ns} is not a ROS time")
    return Header(Time(sec, nanosec), stamp.frame_id)


class TimeLike(Protocol):
    """builtin_interfaces.msg.Time, or `Time`."""

    @property
    def sec(self) -> int:
        """Whole seconds."""

    @property
    def nanosec(self) -> int:
        """The rest, in nanoseconds."""


class HeaderLike(Protocol):
    """std_msgs.msg.Header, or `Header`."""

    @property
    def stamp(self) -> TimeLike:
        """Return the capture time."""

    @property
    def frame_id(self) -> str:
        """The coordinate frame it is in."""


def frame_stamp(header: HeaderLike, sequence: int) -> FrameStamp:
    """Return an image's stamp from its header; ROS 2 headers lack a counter, so it is passed.

    The time 0, which in ROS means that none was set, gives a stamp without a capture time. With
    simulated time leave it out as well (`FrameStamp(header.frame_id, None, sequence)`) if the
    session has a `max_frame_age`: ages pass by the server's clock, whatever the simulation's does.
    """
    since_epoch = header.stamp.sec * _NS + header.stamp.nanosec
    return FrameStamp(header.frame_id, since_epoch or None, sequence)


def _as_boxes(result: DetectResult | PointResult) -> tuple[Detection, ...]:
    if isinstance(result, DetectResult):
        return result.objects
    spots = ((one, one.point.x, one.point.y) for one in result.points)
    return tuple(Detection(Box(x, y, x, y), one.label, one.confidence) for one, x, y in spots)


def _detection(
    at: Header, found: Detection, size: tuple[int, int], absent_score: float
) -> Detection2D:
    (width, height), box = map(float, size), found.box  # ROS's setters refuse an int
    middle = Point2D((box.x_min + box.x_max) / 2 * width, (box.y_min + box.y_max) / 2 * height)
    sides = (box.x_max - box.x_min) * width, (box.y_max - box.y_min) * height
    score = absent_score if found.confidence is None else found.confidence
    hypothesis = ObjectHypothesisWithPose(ObjectHypothesis(found.label, score))
    return Detection2D(at, (hypothesis,), BoundingBox2D(Pose2D(middle), *sides), found.track_id)


def _detection_3d(at: Header, lifted: Lifted, absent_score: float) -> Detection3D:
    mark = lifted.mark.last if isinstance(lifted.mark, TrackNow) else lifted.mark
    score = absent_score if mark.confidence is None else mark.confidence
    pose = Pose(Point(*(lifted.center or ())))
    covariance = [_ANY_ANGLE * (row == column) for row in range(6) for column in range(6)]
    for row, values in enumerate(lifted.covariance or ()):
        covariance[6 * row : 6 * row + 3] = values
    hypothesis = ObjectHypothesisWithPose(
        ObjectHypothesis(mark.label, score),
        PoseWithCovariance(pose, tuple(covariance)),
    )
    track_id = mark.track_id if isinstance(mark, Detection) else ""
    return Detection3D(
        at, (hypothesis,), BoundingBox3D(pose, Vector3(*(lifted.size or ()))), track_id
    )


# ---------------------------------------------------------------- conversion to ROS classes

_Message = TypeVar("_Message")


def to_ros(
    message: Detection2DArray | Detection3DArray | PointStamped | Header, messages: Any
) -> Any:
    """Convert to an object of ROS; `messages` is the module of its class, `vision_msgs.msg`.

    Whatever has the classes of the message, of its detections and `ObjectHypothesisWithPose` will
    do, made without arguments and with their fields to set. AttributeError names the field that an
    older vision_msgs lacks. A `PointStamped` is of `geometry_msgs.msg`, a `Header` of
    `std_msgs.msg`.
    """
    return _element(message, messages)


def _filled(message: _Message, value: Any, messages: Any) -> _Message:
    """Fill an object of ROS; lists hold classes of `messages`."""
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if dataclasses.is_dataclass(part):
            _filled(getattr(message, field.name), part, messages)
        elif isinstance(part, tuple):
            setattr(message, field.name, [_element(one, messages) for one in part])
        else:
            setattr(message, field.name, part)
    return message


def _element(value: Any, messages: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    return _filled(getattr(messages, type(value).__name__)(), value, messages)
