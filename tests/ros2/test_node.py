"""The ROS 2 node: topics, services, the action, parameters, lifecycle."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import numpy as np
import pytest
from legato_ros.camera import LATCHED, OUTPUTS
from legato_ros.node import ACTIONS, SERVICES, LegatoNode
from PIL import Image

from tests.clients.python.ros import bags
from tests.e2e.scenes import CIRCLE, two_shapes
from tests.e2e.server import PATIENCE, until
from tests.ros2 import interfaces, standin
from tests.ros2.interfaces import CLASSES
from tests.ros2.rig import Shown, header, heard, image_message, key, request, running, told
from tests.ros2.standin import Parameter, graph

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

DETECTIONS, DIAGNOSTICS = "vision_msgs/msg/Detection2DArray", "diagnostic_msgs/msg/DiagnosticArray"
IMAGE = "/camera/image_raw"


def labels(array):
    return {each.results[0].hypothesis.class_id for each in array.detections}


# ---------------------------------------------------------------- topics


def test_a_bag_played_in_real_time_gives_arrays_and_tracks(tiny, tmp_path):
    """Arrays have their images' headers and the shapes' boxes; tracks come between them."""
    frames = [
        (IMAGE, n * 33_000_000, bags.image(n * 33_000_000, two_shapes(n // 3).image))
        for n in range(1, 60)
    ]
    path = bags.write(tmp_path / "bag", frames)
    with running(tiny, {"camera.tasks": ["detect:red circle"], "camera.by_arrival": True}):
        found = heard("/legato/camera/detections", DETECTIONS)
        tracks = heard("/legato/camera/tracks", DETECTIONS)
        camera, begin = Shown(IMAGE), time.monotonic()
        shown = []
        for _, at_ns, message in bags.read(path):
            time.sleep(max(0.0, begin + at_ns / 1e9 - time.monotonic()))
            shown.append(key(camera.show(interfaces.from_other(bags.IMAGE, message))))
        until(lambda: found)
        until(lambda: any(each.detections for each in tracks))
    assert {key(each.header) for each in found} <= set(shown)
    (circle,) = found[0].detections
    left, top, right, bottom = CIRCLE
    assert abs(circle.bbox.center.position.x - (left + right) / 2) < 8
    assert abs(circle.bbox.center.position.y - (top + bottom) / 2) < 30  # it moves down
    (moved,) = next(each for each in reversed(tracks) if each.detections).detections
    assert moved.id == circle.id
    assert circle.header == found[0].header


def test_every_kind_of_result_has_its_topic(null):
    """Masks number the array's objects, drawings are JPEG, texts answers, and models latched."""
    tasks = ["detect:cup", "segment:dog", "query:How many?", "caption:short"]
    with running(null, {"camera.tasks": tasks}) as node:
        found = heard("/legato/camera/detections", DETECTIONS)
        masks = heard("/legato/camera/mask", "sensor_msgs/msg/Image", standin.SENSOR_DATA)
        drawn = heard("/legato/camera/annotated/compressed", "sensor_msgs/msg/CompressedImage")
        answers = heard("/legato/camera/answers", "legato_msgs/msg/Answer")
        Shown(IMAGE).until(lambda: found and masks and drawn and len(answers) > 1)
        info = heard("/legato/camera/vision_info", "vision_msgs/msg/VisionInfo", LATCHED)
        assert info[0].method == "null"
        assert node.get_fully_qualified_name() == "/legato"
    array = next(each for each in found if key(each.header) == key(masks[0].header))
    assert labels(array) == {"cup", "dog"}
    (number,) = [n for n, each in enumerate(array.detections, 1) if labels_of(each) == "dog"]
    pixels = np.frombuffer(masks[0].data, np.uint8).reshape(masks[0].height, masks[0].width)
    assert set(np.unique(pixels)) == {0, number}
    box = array.detections[number - 1].bbox
    assert pixels[int(box.center.position.y), int(box.center.position.x)] == number
    image = Image.open(io.BytesIO(drawn[0].data.tobytes()))
    assert image.format == "JPEG"
    assert {each.task for each in answers} == set(tasks[2:])
    assert all(each.text and each.header.frame_id == "camera_optical" for each in answers)


def labels_of(detection):
    return detection.results[0].hypothesis.class_id


def test_a_drawing_is_made_for_subscribers_only(null):
    """Without one none is published."""
    with running(null, {}):
        found = heard("/legato/camera/detections", DETECTIONS)
        Shown(IMAGE).until(lambda: found)
        (publisher,) = graph.publishers["/legato/camera/annotated/compressed"]
        assert not publisher._latched


def test_compressed_images_and_remapped_names(null):
    """The topic is that of image_transport; namespaces and remapping rules hold."""
    file = io.BytesIO()
    two_shapes().image.save(file, "PNG")
    rules = "front/image_raw/compressed:=/eye/compressed", "~/front/detections:=/seen"
    remapped = ["--ros-args", *(word for rule in rules for word in ("-r", rule))]
    parameters = {"cameras": ["front"], "front.transport": "compressed"}
    with running(null, parameters, namespace="robot", cli_args=remapped):
        found = heard("/seen", DETECTIONS)
        camera = Shown("/eye/compressed", "sensor_msgs/msg/CompressedImage")
        message = CLASSES["sensor_msgs/msg/CompressedImage"](
            header=header(), format="png", data=list(file.getvalue())
        )
        until(lambda: camera.show(message) and found)
        assert "/robot/legato/front/tracks" in graph.publishers
        assert "/robot/legato/query" in graph.services


def test_cameras_are_apart(null):
    """Each has its own images, tasks and diagnostics; one without images disturbs none."""
    parameters = {
        "cameras": ["front", "rear", "dark"],
        "front.tasks": ["detect:cup"],
        "rear.tasks": ["detect:door"],
        "rear.image": "/back/image",
        "dark.silence": 0.1,
    }
    with running(null, parameters):
        diagnostics = heard("/diagnostics", DIAGNOSTICS)
        front, rear = (heard(f"/legato/{n}/detections", DETECTIONS) for n in ("front", "rear"))
        cameras = Shown("/front/image_raw"), Shown("/back/image")
        until(lambda: [each.show() for each in cameras] and front and rear)
        until(lambda: [each.show() for each in cameras] and told(diagnostics, "answering", "front"))
        assert labels(front[0]) == {"cup"}
        assert labels(rear[0]) == {"door"}
        until(lambda: told(diagnostics, "/dark/image_raw: nothing for", "dark"))


def published():
    """Return the topics below the node's name."""
    return [name for name, own in graph.publishers.items() if own and name.startswith("/legato/")]


# ---------------------------------------------------------------- services and action


def test_questions_are_about_the_newest_image(null):
    """Their answers have its header; what cannot be answered says why."""
    with running(null, {"timeout": 5.0}):
        ask = request("Query_Request", question="How many?", reasoning=True)
        early = graph.call("/legato/query", ask)
        assert (early.success, early.message) == (
            False,
            "no image of camera yet; the node must be active",
        )
        blind = graph.call(
            "/legato/query", request("Query_Request", question="Hello", without_image=True)
        )
        assert blind.success, blind.message
        shown = Shown(IMAGE).show()
        answer = graph.call("/legato/query", ask)
        assert answer.success, answer.message
        assert answer.header == shown
        assert answer.answer
        assert answer.reasoning
        caption = graph.call("/legato/caption", request("Caption_Request", camera="camera"))
        assert caption.success, caption.message
        assert caption.caption
        unknown = graph.call("/legato/caption", request("Caption_Request", camera="front"))
        assert unknown.message == "a camera is one of camera, not 'front'"
        wrong = graph.call("/legato/caption", request("Caption_Request", length="huge"))
        assert "caption length" in wrong.message


def test_tasks_change_while_tracks_stay(null):
    """By the service as by the parameter; what is no task changes nothing."""
    with running(null, {"camera.tasks": ["detect:cup"]}) as node:
        found = heard("/legato/camera/detections", DETECTIONS)
        camera = Shown(IMAGE)
        camera.until(lambda: found)
        ids = {each.id for each in found[0].detections}
        both = request("SetTasks_Request", tasks=["detect:cup", "detect:door"])
        changed = graph.call("/legato/set_tasks", both)
        assert changed.success, changed.message
        assert changed.tasks == both.tasks == node.get_parameter("camera.tasks").value
        camera.until(lambda: labels(found[-1]) == {"cup", "door"})
        kept = {each.id for each in found[-1].detections if labels_of(each) == "cup"}
        assert kept == ids
        wrong = graph.call("/legato/set_tasks", request("SetTasks_Request", tasks=["find:cup"]))
        assert not wrong.success
        assert wrong.message == (
            "camera.tasks: a task is one of detect, point, segment, caption, query, not 'find'"
        )
        assert wrong.tasks == both.tasks
        result = node.set_parameters_atomically(
            [
                Parameter("camera.tasks", None, ["detect:door"]),
                Parameter("camera.track", None, False),
            ]
        )
        assert result.successful
        camera.until(lambda: labels(found[-1]) == {"door"} and not found[-1].detections[0].id)


def goal(**values):
    duration = CLASSES["builtin_interfaces/msg/Duration"](sec=0, nanosec=values.pop("ns", 0))
    return request("FindObject_Goal", timeout=duration, **values)


def test_an_object_is_looked_for_until_it_is_found(null):
    """Then there are its boxes; else the action ends with its time, or is cancelled."""
    with running(null, {}):
        camera = Shown(IMAGE)
        handle = graph.send_goal("/legato/find_object", goal(object="cup"))
        camera.until(lambda: handle.result)
        assert handle.status == "succeeded"
        assert handle.result.found
        assert labels(handle.result.detections) == {"cup"}
        assert handle.feedback == [1]
        late = graph.send_goal(
            "/legato/find_object", goal(object="cup", min_confidence=1.0, ns=300_000_000)
        )
        camera.until(lambda: late.result)
        assert late.status == "aborted"
        assert "within 0.3 s" in late.result.message
        endless = graph.send_goal("/legato/find_object", goal(object="cup", min_confidence=1.0))
        camera.until(lambda: len(endless.feedback) > 1)
        endless.is_cancel_requested = True
        camera.until(lambda: endless.result)
        assert endless.status == "canceled"
        for wrong in (goal(object=" "), goal(object="cup", camera="front")):
            assert graph.send_goal("/legato/find_object", wrong).status == "rejected"


def test_goals_without_an_end_leave_threads_to_others(null):
    """Each keeps a thread of the executor, so one too many is aborted until another ends."""
    with running(null, {}):
        camera = Shown(IMAGE)
        endless = goal(object="cup", min_confidence=1.0)
        handles = [graph.send_goal("/legato/find_object", endless) for _ in range(4)]
        camera.until(lambda: all(each.feedback for each in handles))
        refused = graph.send_goal("/legato/find_object", endless)
        camera.until(lambda: refused.result)
        assert refused.status == "aborted"
        assert refused.result.message == "4 goals run already, the maximum"
        handles[0].is_cancel_requested = True
        camera.until(lambda: handles[0].result)
        handles[0] = graph.send_goal("/legato/find_object", endless)
        camera.until(lambda: handles[0].feedback)
        for each in handles:
            each.is_cancel_requested = True
        camera.until(lambda: all(each.result for each in handles))


# ---------------------------------------------------------------- parameters and lifecycle


def refusal(node, name, value):
    return node.set_parameters_atomically([Parameter(name, None, value)]).reason


def test_parameters_are_checked_by_their_descriptors(null):
    """A wrong one is refused with its name and its limits, and the node goes on as before."""
    with running(null, {}) as node:
        assert "out of range" in refusal(node, "camera.min_confidence", 1.5)
        assert "read-only" in refusal(node, "cameras", ["other"])
        assert refusal(node, "camera.depth", "/depth") == (
            "camera.depth is read when the node is configured: clean it up first"
        )
        assert refusal(node, "camera.max_age", 0.5) == ""
        for name, spec in node._specs.items():
            descriptor = node.describe_parameter(name)
            assert descriptor.description == spec.description
    with running(null, {}, activate=False) as node:
        assert refusal(node, "camera.transport", "jpeg") == (
            "camera.transport: one of raw, compressed, not 'jpeg'"
        )
        assert refusal(node, "camera.image", "/a b") == (
            "camera.image: a topic is NAME/NAME of letters, digits and _, not '/a b'"
        )
        assert refusal(node, "camera.depth", "/depth") == ""
    with pytest.raises(ValueError, match="cameras: a name is letters, digits and _, not '1st'"):
        LegatoNode(parameter_overrides=[Parameter("cameras", None, ["1st"])])


def test_a_wrong_start_is_told_and_not_configured(null):
    """What rclpy's descriptors cannot exclude fails the transition."""
    with running(null, {"camera.tasks": ["dance"]}, activate=False) as node:
        assert node.trigger_configure() is standin.TransitionCallbackReturn.FAILURE
        assert "camera.tasks: a task is one of" in node.logged[-1]
        assert not graph.services


def test_transitions_begin_and_end_everything(null):
    """Inactive it publishes nothing and subscribes to nothing; cleaned up it has no topics."""
    with running(null, {}, activate=False) as node:
        node.trigger_configure()
        diagnostics = heard("/diagnostics", DIAGNOSTICS)
        found = heard("/legato/camera/detections", DETECTIONS)
        until(lambda: told(diagnostics, "inactive"))
        assert not graph.subscriptions[IMAGE]
        for _ in range(2):
            node.trigger_activate()
            Shown(IMAGE).until(lambda: found)
            node.trigger_deactivate()
            assert not graph.subscriptions[IMAGE]
            found.clear()
        node.trigger_cleanup()
        assert not graph.services
        assert not graph.actions
        assert not [
            each for each in graph.publishers if graph.publishers[each] and "legato" in each
        ]
        node.trigger_configure()


def test_a_node_is_cleaned_up_while_it_reports(null):
    """Its diagnostics callback, in another thread, ends first: rclpy ends a node whose fails."""
    with running(null, {"cameras": ["front", "rear"]}, activate=False) as node:
        node.trigger_configure()
        front: Any = node._cameras["front"]
        status, reports = front.status, threading.Event()

        def slow():
            reports.set()
            time.sleep(0.2)
            return status()

        front.status = slow
        assert reports.wait(PATIENCE)
        node.trigger_cleanup()


def test_simulated_time_counts_ages_from_arrival(null):
    """A bag's stamps are years old, and no image is too old."""
    with running(null, {"use_sim_time": True, "camera.max_age": 5.0}) as node:
        found = heard("/legato/camera/detections", DETECTIONS)
        diagnostics = heard("/diagnostics", DIAGNOSTICS)
        graph.sim_time_ns = 77 * 10**9
        camera = Shown(IMAGE)

        def play():
            graph.sim_time_ns += 30_000_000
            own = header(graph.sim_time_ns)
            camera.show(image_message(two_shapes().image, own))
            time.sleep(0.03)
            return found and told(diagnostics, "answering")

        until(play)
        assert found[0].header.stamp.sec >= 77
        assert node.get_clock().now().nanoseconds == graph.sim_time_ns


def test_what_is_documented_is_what_the_node_has(null):
    """Every topic, service and action is created, and nothing else below the node's name."""
    with running(null, {"camera.depth": "/depth"}):
        own = {
            name.removeprefix("/legato/camera/") for name in graph.publishers if "/legato/" in name
        }
        assert own == {output.topic for output in OUTPUTS}
        assert {name.removeprefix("/legato/") for name in graph.services} == set(SERVICES)
        assert {name.removeprefix("/legato/") for name in graph.actions} == set(ACTIONS)
