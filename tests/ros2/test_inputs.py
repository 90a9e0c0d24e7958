"""Depth in 3D, and bad input: a diagnostic names the cause, and nothing else is disturbed."""

from __future__ import annotations

import array
import time
from typing import Any

import numpy as np
import pytest

from tests.e2e.scenes import CIRCLE, SIZE, two_shapes
from tests.e2e.server import until
from tests.ros2 import standin
from tests.ros2.interfaces import CLASSES
from tests.ros2.rig import Shown, header, heard, image_message, key, request, running, told
from tests.ros2.standin import graph

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

DETECTIONS, DIAGNOSTICS = "vision_msgs/msg/Detection2DArray", "diagnostic_msgs/msg/DiagnosticArray"
IMAGE, DEPTH, INFO = "/camera/image_raw", "/camera/depth", "/camera/camera_info"
WITH_DEPTH = {"camera.depth": DEPTH, "camera.tasks": ["detect:red circle"]}
FOCAL = 300.0


def info_message(own, size=SIZE, **fields):
    width, height = size
    matrix = [FOCAL, 0.0, width / 2, 0.0, FOCAL, height / 2, 0.0, 0.0, 1.0]
    return CLASSES["sensor_msgs/msg/CameraInfo"](
        header=own, width=width, height=height, k=matrix, distortion_model="plumb_bob", **fields
    )


def depth_message(own, pixels, encoding="16UC1"):
    return image_message(pixels, own, encoding)


def near_circle():
    """Return the depth of the circle at 1 m before a wall at 3 m, in millimetres."""
    pixels = np.full(SIZE[::-1], 3000, np.uint16)
    left, top, right, bottom = CIRCLE
    pixels[top : bottom + 1, left : right + 1] = 1000
    return pixels


class DepthCamera:
    """Camera with aligned depth and intrinsics, stamped a little apart."""

    def __init__(self, server):
        self.image, self.depth = Shown(IMAGE), Shown(DEPTH)
        self.info = Shown(INFO, "sensor_msgs/msg/CameraInfo")
        self.found = heard("/legato/camera/detections", DETECTIONS)
        self.lifted = heard("/legato/camera/detections_3d", "vision_msgs/msg/Detection3DArray")
        self.markers = heard("/legato/camera/markers", "visualization_msgs/msg/MarkerArray")
        self.diagnostics = heard("/diagnostics", DIAGNOSTICS)

    def until(self, condition, *, depth=None, make_info=info_message, encoding="16UC1", ahead=0):
        pixels = near_circle() if depth is None else depth

        def step():
            now_ns = time.time_ns() + ahead
            own, later = header(now_ns), header(now_ns + 2_000_000)
            self.image.show(image_message(two_shapes().image, own))
            self.depth.show(depth_message(later, pixels, encoding))
            self.info.show(make_info(own))
            time.sleep(0.05)
            return condition()

        until(step)

    def until_told(self, text, **options):
        """Show images until diagnostics have a text; 2D results come meanwhile."""
        self.found.clear()
        self.until(lambda: told(self.diagnostics, text) and self.found, **options)


def test_objects_with_depth_are_placed_in_3d(tiny):
    """The circle is a metre away, where its middle is seen, also as markers of the same place."""
    with running(tiny, WITH_DEPTH):
        camera = DepthCamera(tiny)
        camera.until(lambda: camera.lifted and camera.markers)
    (circle,) = camera.lifted[0].detections
    place = circle.results[0].pose.pose.position
    left, top, right, bottom = CIRCLE
    assert abs(place.z - 1) < 0.01
    assert abs(place.x - ((left + right) / 2 - SIZE[0] / 2) / FOCAL) < 0.03
    assert abs(place.y - ((top + bottom) / 2 - SIZE[1] / 2) / FOCAL) < 0.03
    assert circle.results[0].hypothesis.class_id == "red circle"
    assert key(camera.lifted[0].header) in {key(each.header) for each in camera.found}
    clear, cube, label = camera.markers[0].markers
    assert clear.action == clear.DELETEALL
    assert (cube.type, label.type) == (cube.CUBE, cube.TEXT_VIEW_FACING)
    assert cube.pose.position == place
    assert label.text.startswith("red circle")
    assert cube.header.frame_id == "camera_optical"


def test_a_found_object_has_its_depth_whatever_the_session_does(null):
    """The action and the session may ask about one image, and the depth comes after it."""
    with running(null, WITH_DEPTH):
        camera = DepthCamera(null)
        goal = request("FindObject_Goal", object="cup")
        for _ in range(5):
            handle = graph.send_goal("/legato/find_object", goal)
            camera.until(lambda own=handle: own.result)
            found = handle.result
            assert len(found.detections_3d.detections) == len(found.detections.detections) == 2


WRONG_DEPTH: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": (
        {"depth": np.full(SIZE[::-1], np.nan, np.float32), "encoding": "32FC1"},
        f"{DEPTH}: depth has no value in 320x240 pixels: all are NaN or 0",
    ),
    "no depth at the objects": (
        {"depth": np.pad(np.full((240, 8), 2000, np.uint16), ((0, 0), (312, 0)))},
        f"{DEPTH}: 2 of 2 objects have no depth: 0 of ",
    ),
    "another size": (
        {"depth": np.full((120, 160), 2000, np.uint16)},
        f"{DEPTH}: depth is 160x120, but the image is 320x240: align the depth image",
    ),
    "another encoding": (
        {"depth": np.zeros((*SIZE[::-1], 3), np.uint8), "encoding": "rgb8"},
        f"{DEPTH}: encoding is one of 16UC1, mono16, 32FC1, not 'rgb8'",
    ),
    "intrinsics of another size": (
        {"make_info": lambda own: info_message(own, (640, 480))},
        f"{INFO}: intrinsics are of 640x480 pixels, but depth is 320x240",
    ),
    "no intrinsics": (
        {"make_info": lambda own: CLASSES["sensor_msgs/msg/CameraInfo"](header=own)},
        f"{INFO}: intrinsics are ",
    ),
    "distortion": (
        {"make_info": lambda own: info_message(own, d=[0.1, 0.0, 0.0, 0.0, 0.0])},
        f"{INFO}: intrinsics have the distortion d = ",
    ),
}


@pytest.mark.parametrize("case", WRONG_DEPTH)
def test_wrong_depth_is_named_and_2d_goes_on(null, case):
    """The diagnostic names the topic and the reason; right depth gives 3D again."""
    options, text = WRONG_DEPTH[case]
    with running(null, WITH_DEPTH):
        camera = DepthCamera(null)
        camera.until_told(text, **options)
        assert not any(each.detections for each in camera.lifted)
        camera.until(lambda: any(each.detections for each in camera.lifted))


def test_depth_that_stops_is_named(null):
    """Images are answered as before."""
    with running(null, {**WITH_DEPTH, "camera.silence": 0.3}):
        camera = DepthCamera(null)
        camera.until(lambda: camera.lifted)
        camera.depth.leave()
        camera.found.clear()
        text = f"{DEPTH}: nothing for"
        camera.image.until(lambda: told(camera.diagnostics, text) and len(camera.found) > 2)
        assert told(camera.diagnostics, ": no publisher")


def test_depth_is_matched_after_stamps_have_jumped_back(null):
    """A bag that is played again, whose first stamps are older than all that wait."""
    with running(null, WITH_DEPTH):
        camera = DepthCamera(null)
        hour = 3600 * 10**9
        camera.until(lambda: camera.lifted, ahead=hour)
        for _ in range(12):  # without depth, so they wait for it
            camera.image.show(image_message(two_shapes().image, header(time.time_ns() + hour)))
        camera.lifted.clear()
        camera.until(lambda: told(camera.diagnostics, f"{DEPTH}: stamps jumped by -3"))
        begin = time.time_ns() // 10**9
        camera.until(lambda: any(each.header.stamp.sec <= begin + 60 for each in camera.lifted))


# ---------------------------------------------------------------- images


@pytest.fixture
def watched(null):
    """An active node, what it says, and its camera."""
    parameters = {"cameras": ["camera", "other"], "camera.silence": 0.3, "other.tasks": ["point:x"]}
    with running(null, parameters):
        found = heard("/legato/camera/detections", DETECTIONS)
        diagnostics = heard("/diagnostics", DIAGNOSTICS)
        camera = Shown(IMAGE)
        camera.until(lambda: found)
        yield camera, found, diagnostics


def test_a_camera_that_changes_its_images_is_named(watched):
    """Those of another size are answered in their own pixels; unreadable ones are left out."""
    camera, found, diagnostics = watched
    half = image_message(two_shapes().image.resize((160, 120)))
    until(lambda: camera.show(half) and told(diagnostics, "changed from 320x240 rgb8 to 160x120"))
    centers = [each.bbox.center.position for each in found[-1].detections]
    assert centers
    assert all(0 <= each.x <= 160 and 0 <= each.y <= 120 for each in centers)
    strange = image_message(np.zeros((12, 16, 2), np.uint8), encoding="16UC1")
    until(lambda: camera.show(strange) and told(diagnostics, "encoding is one of rgb8, bgr8"))
    short = image_message(np.zeros((12, 16, 3), np.uint8))
    short.data = array.array("B", bytes(5))
    until(lambda: camera.show(short) and told(diagnostics, "need 576 bytes, got 5"))
    found.clear()
    camera.until(lambda: found)
    (status,) = told(diagnostics, IMAGE)
    assert status.level == b"\1"
    assert int(dict_of(status)[f"{IMAGE}: layout changes"]) > 2


def dict_of(status):
    return {each.key: each.value for each in status.values}


def test_stamps_that_jump_are_named_and_tracks_go_on(watched):
    """A camera whose clock was an hour ahead has tracks as soon as it is set right."""
    camera, found, diagnostics = watched
    tracks = heard("/legato/camera/tracks", DETECTIONS)

    def show(ahead):
        camera.show(image_message(two_shapes().image, header(time.time_ns() + ahead)))
        time.sleep(0.03)
        return True

    hour = 3600 * 10**9
    until(lambda: show(hour) and told(diagnostics, "stamps jumped by +36"))
    until(lambda: show(hour) and told(diagnostics, "s ahead of this node's clock: set use_sim"))
    found.clear()
    until(lambda: show(hour) and found)
    found.clear()
    tracks.clear()
    until(lambda: show(0) and told(diagnostics, "stamps jumped by -3"))
    until(lambda: show(0) and found and any(each.detections for each in tracks))
    early = header()
    early.stamp = CLASSES["builtin_interfaces/msg/Time"](sec=-1, nanosec=0)
    camera.show(image_message(two_shapes().image, early))
    until(lambda: show(0) and told(diagnostics, "stamped before 1970"))


def test_a_topic_that_stops_or_has_another_type_is_named(watched):
    """With what there is instead; images that come again are answered again."""
    camera, found, diagnostics = watched
    camera.leave()
    until(lambda: told(diagnostics, f"{IMAGE}: nothing for"))
    until(lambda: told(diagnostics, ": no publisher"))
    other = standin.Publisher(
        graph, CLASSES["sensor_msgs/msg/CompressedImage"], IMAGE, standin.SENSOR_DATA
    )
    text = "sensor_msgs/msg/CompressedImage is published, not sensor_msgs/msg/Image"
    until(lambda: told(diagnostics, text))
    with graph.lock:
        graph.publishers[IMAGE].remove(other)
    found.clear()
    again = Shown(IMAGE)
    again.until(lambda: found)
    again.until(lambda: not told(diagnostics, "nothing for", "camera"))


def test_a_server_that_refuses_the_session_is_named(null):
    """An unknown model; the next model is asked without a restart."""
    with running(null, {"model": "unheard-of"}) as node:
        diagnostics = heard("/diagnostics", DIAGNOSTICS)
        found = heard("/legato/camera/detections", DETECTIONS)
        camera = Shown(IMAGE)
        camera.until(lambda: told(diagnostics, "the server refuses: "))
        (status,) = told(diagnostics, "the server refuses: ")
        assert status.level == b"\2"
        assert not found
        assert node.set_parameters_atomically([standin.Parameter("model", None, "")]).successful
        camera.until(lambda: found)
        camera.until(lambda: told(diagnostics, "answering"))
