"""Answers as ROS 2 messages."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, ClassVar

import numpy as np
import pytest
from legato_client import (
    Box,
    Detection,
    DetectResult,
    FrameStamp,
    ImageInfo,
    Point,
    PointedObject,
    PointResult,
    ResponseInfo,
    ros2,
)
from legato_client.depth import lift

STAMP = FrameStamp("camera_left", 1_700_000_000_123_456_789, 42)
AT = ros2.Header(ros2.Time(1_700_000_000, 123_456_789), "camera_left")
INFO = ResponseInfo("r", "m", "stop", image=ImageInfo("", 640, 480, False), stamp=STAMP)
CUP = Detection(Box(0.25, 0.5, 0.75, 0.625), "cup", 0.5, "track-7")

# The fields of vision_msgs 4.1.1, std_msgs and geometry_msgs, in their order.
FIELDS = {
    "Time": "sec nanosec",
    "Header": "stamp frame_id",
    "Point": "x y z",
    "Quaternion": "x y z w",
    "Pose": "position orientation",
    "PoseWithCovariance": "pose covariance",
    "ObjectHypothesis": "class_id score",
    "ObjectHypothesisWithPose": "hypothesis pose",
    "Point2D": "x y",
    "Pose2D": "position theta",
    "BoundingBox2D": "center size_x size_y",
    "Detection2D": "header results bbox id",
    "Detection2DArray": "header detections",
    "PointStamped": "header point",
    "Vector3": "x y z",
    "BoundingBox3D": "center size",
    "Detection3D": "header results bbox id",
    "Detection3DArray": "header detections",
}


def detected(*objects: Detection, info: ResponseInfo = INFO) -> DetectResult:
    """An answer with these objects."""
    return DetectResult(objects, info)


@pytest.mark.parametrize(("message", "fields"), FIELDS.items())
def test_messages_mirror_their_definitions(message: str, fields: str) -> None:
    """Names and order of the fields are those of the .msg files, and a default exists for all."""
    made = getattr(ros2, message)()
    assert [field.name for field in dataclasses.fields(made)] == fields.split()


def test_a_box_is_its_centre_and_sides_in_pixels_of_the_image() -> None:
    """Fractions become pixels of the answered image, not rounded; id and label come along."""
    (found,) = ros2.detections(detected(CUP)).detections
    assert found.bbox == ros2.BoundingBox2D(ros2.Pose2D(ros2.Point2D(320, 270), 0.0), 320, 60)
    assert [one.hypothesis for one in found.results] == [ros2.ObjectHypothesis("cup", 0.5)]
    assert found.id == "track-7"


def test_no_pose_is_made_up() -> None:
    """The pose stays what an empty message has: at the origin, not turned, without covariance."""
    (found,) = ros2.detections(detected(CUP)).detections
    pose = found.results[0].pose
    assert pose == ros2.PoseWithCovariance()
    assert (pose.pose.orientation.w, pose.covariance) == (1.0, (0.0,) * 36)


def test_the_header_is_that_of_the_image() -> None:
    """The array and each detection carry the image's own stamp and frame, to the nanosecond."""
    array = ros2.detections(detected(CUP, CUP))
    assert array.header == AT
    assert [one.header for one in array.detections] == [AT, AT]


def test_an_absent_score_is_not_a_number_unless_told() -> None:
    """NaN passes no comparison; another value stands in only if the caller names it."""
    unsure = detected(dataclasses.replace(CUP, confidence=None))
    (found,) = ros2.detections(unsure).detections
    assert math.isnan(found.results[0].hypothesis.score)
    (found,) = ros2.detections(unsure, absent_score=1.0).detections
    assert found.results[0].hypothesis.score == 1.0
    (found,) = ros2.detections(detected(CUP), absent_score=1.0).detections
    assert found.results[0].hypothesis.score == 0.5


def test_a_confidence_of_zero_is_one() -> None:
    """0.0 is said by the model and is not absence."""
    unlikely = detected(dataclasses.replace(CUP, confidence=0.0))
    (found,) = ros2.detections(unlikely, absent_score=1.0).detections
    assert found.results[0].hypothesis.score == 0.0


def test_nothing_found_is_an_empty_array_of_that_image() -> None:
    """That there is none is published too, under the image's header."""
    assert ros2.detections(detected()) == ros2.Detection2DArray(AT, ())


def test_a_point_is_a_box_without_sides() -> None:
    """Points keep their place, in pixels, and take no room."""
    result = PointResult((PointedObject(Point(0.5, 0.25), "cup"),), INFO)
    (found,) = ros2.detections(result).detections
    assert found.bbox == ros2.BoundingBox2D(ros2.Pose2D(ros2.Point2D(320, 120)), 0, 0)
    assert found.results[0].hypothesis.class_id == "cup"


def test_what_the_caller_knows_goes_before_what_the_server_echoed() -> None:
    """A given stamp and size are used, also where the answer has none."""
    bare = ResponseInfo("r", "m", "stop")
    array = ros2.detections(detected(CUP, info=bare), stamp=STAMP, size=(64, 48))
    assert array.header == AT
    assert array.detections[0].bbox.size_x == 32
    given = FrameStamp("other", 5, 1)
    assert ros2.detections(detected(), stamp=given).header == ros2.Header(ros2.Time(0, 5), "other")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"size": (640, 480)}, "stamp"),
        ({"stamp": STAMP}, "size"),
        ({"stamp": STAMP, "size": (0, 480)}, "size"),
    ],
)
def test_what_nobody_knows_is_an_error(options: dict[str, Any], word: str) -> None:
    """Without a stamp or a size there is no message, and the error says which is missing."""
    with pytest.raises(ValueError, match=word):
        ros2.detections(detected(CUP, info=ResponseInfo("r", "m", "stop")), **options)


@pytest.mark.parametrize(
    "stamp", [STAMP, FrameStamp("a", 1, 0), FrameStamp("", None, 3), FrameStamp("a", 10**9, 3)]
)
def test_a_stamp_survives_the_way_through_a_header(stamp: FrameStamp) -> None:
    """Stamp to header and back is the same stamp, given its sequence; no time is no time."""
    assert ros2.frame_stamp(ros2.header(stamp), stamp.sequence) == stamp


@pytest.mark.parametrize("time", [-1, 2**31 * 10**9])
def test_a_time_that_ros_cannot_say_is_an_error(time: int) -> None:
    """Seconds are an int32; beyond them nothing wraps around."""
    with pytest.raises(ValueError, match="capture_time_ns"):
        ros2.header(FrameStamp("a", time, 0))


# ---------------------------------------------------------------- depth

DEPTH = np.full((480, 640), 2.0)
DEPTH[:, :64] = np.nan
K = (500.0, 500.0, 319.5, 239.5)


def array_3d() -> ros2.Detection3DArray:
    """A cup, and a point on a hole in the depth image, with depth."""
    hole = PointedObject(Point(0.05, 0.5), "cup")
    return ros2.detections_3d(lift((CUP, hole), DEPTH, K), STAMP)


def test_what_was_lifted_keeps_its_centre_size_and_covariance() -> None:
    """What has no centre is left out; everything else of the mark comes along."""
    (cup,) = lift([CUP], DEPTH, K)
    made = array_3d()
    assert made.header == AT
    (found,) = made.detections
    (result,) = found.results
    assert (found.id, result.hypothesis.class_id, result.hypothesis.score) == (
        "track-7",
        "cup",
        0.5,
    )
    assert dataclasses.astuple(found.bbox.center.position) == cup.center
    assert dataclasses.astuple(found.bbox.size) == cup.size
    matrix = np.reshape(result.pose.covariance, (6, 6))
    assert np.array_equal(matrix[:3, :3], np.array(cup.covariance))
    assert np.array_equal(matrix[3:, 3:], np.eye(3) * math.pi**2 / 3)
    assert not matrix[:3, 3:].any()
    assert ros2.point_stamped(cup, STAMP) == ros2.PointStamped(AT, found.bbox.center.position)


def test_a_point_without_depth_is_no_message() -> None:
    """The reason is in the error."""
    (hole,) = lift([PointedObject(Point(0.05, 0.5), "cup")], DEPTH, K)
    with pytest.raises(ValueError, match="lifted has no center: 0 of 36 pixels have depth"):
        ros2.point_stamped(hole, STAMP)


# ---------------------------------------------------------------- ROS's own classes


class Message:
    """As rosidl's Python classes: made empty, fields fixed, each of its declared type."""

    fields: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        for name, kind in self.fields.items():
            empty = [] if isinstance(kind, list) else kind()
            object.__setattr__(self, name, empty)

    def __setattr__(self, name: str, value: object) -> None:
        kind = self.fields.get(name)
        if kind is None:
            raise AttributeError(name)
        if isinstance(kind, list):
            assert isinstance(value, list)
            assert all(isinstance(one, kind[0]) for one in value)
        else:
            assert type(value) is kind
        object.__setattr__(self, name, value)


def message(name: str, **fields: Any) -> type[Message]:
    """A class of messages with these fields, each of a type or a list of one."""
    return type(name, (Message,), {"fields": fields})


TIME = message("Time", sec=int, nanosec=int)
HEADER = message("Header", stamp=TIME, frame_id=str)
POINT = message("Point", x=float, y=float, z=float)
TURN = message("Quaternion", x=float, y=float, z=float, w=float)
POSE = message("Pose", position=POINT, orientation=TURN)
COVARIANCE = message("PoseWithCovariance", pose=POSE, covariance=[float])
HYPOTHESIS = message("ObjectHypothesis", class_id=str, score=float)
WITH_POSE = message("ObjectHypothesisWithPose", hypothesis=HYPOTHESIS, pose=COVARIANCE)
CENTER = message("Pose2D", position=message("Point2D", x=float, y=float), theta=float)
BOX = message("BoundingBox2D", center=CENTER, size_x=float, size_y=float)
DETECTION = message("Detection2D", header=HEADER, results=[WITH_POSE], bbox=BOX, id=str)
ARRAY = message("Detection2DArray", header=HEADER, detections=[DETECTION])
VISION_MSGS = types.SimpleNamespace(
    Detection2DArray=ARRAY, Detection2D=DETECTION, ObjectHypothesisWithPose=WITH_POSE
)


def plain(value: Any) -> Any:
    """A message of either kind as lists and dicts."""
    if isinstance(value, Message):
        return {name: plain(getattr(value, name)) for name in value.fields}
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def test_ros_classes_are_filled_whole() -> None:
    """Every field of every part arrives, of the type that ROS's setters insist on."""
    whole = Detection(Box(0, 0, 1, 1), "plate")  # integers, as a caller may write them
    array = ros2.detections(detected(CUP, whole))
    filled = ros2.to_ros(array, VISION_MSGS)
    assert isinstance(filled, ARRAY)
    assert repr(plain(filled)) == repr(plain(array))  # as text, for NaN equals nothing


def test_messages_share_nothing() -> None:
    """Two detections of one image are filled apart, so a node may change one."""
    filled: Any = ros2.to_ros(ros2.detections(detected(CUP, CUP)), VISION_MSGS)
    filled.detections[0].header.frame_id = "elsewhere"
    assert filled.detections[1].header.frame_id == filled.header.frame_id == "camera_left"


def test_a_ros_header_gives_the_stamp() -> None:
    """A header of ROS's own class is read as ours is."""
    image_header: Any = HEADER()
    image_header.stamp.sec, image_header.stamp.nanosec = 1_700_000_000, 123_456_789
    image_header.frame_id = "camera_left"
    assert ros2.frame_stamp(image_header, 42) == STAMP


def test_an_older_vision_msgs_is_named_by_the_field_it_lacks() -> None:
    """No field is dropped in silence."""
    older = message("ObjectHypothesisWithPose", id=str, score=float, pose=COVARIANCE)
    messages = types.SimpleNamespace(**{**vars(VISION_MSGS), "ObjectHypothesisWithPose": older})
    with pytest.raises(AttributeError, match="hypothesis"):
        ros2.to_ros(ros2.detections(detected(CUP)), messages)
