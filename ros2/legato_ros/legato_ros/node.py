"""Lifecycle node: cameras' images to a Legato server, results to topics, services, an action."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rclpy
import vision_msgs.msg
from diagnostic_msgs.msg import DiagnosticArray
from legato_client import Client, LegatoError, Options, ros2
from legato_client.ros import images
from legato_client.stream.frames import CapturedFrame
from legato_msgs.action import FindObject
from legato_msgs.srv import Caption, Query, SetTasks
from rcl_interfaces.msg import SetParametersResult
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.executors import ExternalShutdownException, MultiThreadedExecutor
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.parameter import Parameter

from legato_ros.camera import OUTPUTS, RELIABLE, Camera
from legato_ros.parameters import (
    NODE,
    CameraSettings,
    NodeSettings,
    Spec,
    When,
    camera_settings,
    node_settings,
    specs,
)

_POLL_S = 0.02  # between two looks for a newer image
_MAX_GOALS = 4  # that look for an object at once; each keeps a thread of the executor
_EXTRA_THREADS = _MAX_GOALS + 4  # of the executor, for services that wait for the server

SERVICES = {
    "query": (Query, "answer a question about the newest image"),
    "caption": (Caption, "describe the newest image"),
    "set_tasks": (SetTasks, "replace a camera's tasks"),
}
"""Services of the node, below its name: type and description."""
ACTIONS = {"find_object": (FindObject, "look at images until one shows an object")}
"""Actions of the node, in the same form."""


class CallError(Exception):
    """The request cannot be served; the message is for the caller."""


class LegatoNode(LifecycleNode):
    """Node with any number of cameras and one server.

    Configuring creates topics and services, activating subscribes and opens sessions.
    """

    def __init__(self, node_name: str = "legato", **arguments: Any) -> None:
        """Declare all parameters.

        Raises ValueError for camera names that are none, and rclpy's errors for values outside a
        descriptor's limits.
        """
        super().__init__(node_name, **arguments)
        cameras = next(spec for spec in NODE if spec.name == "cameras")
        self._declare(cameras.name, cameras)
        self.camera_names: list[str] = list(self.get_parameter(cameras.name).value)
        cameras.validate(cameras.name, self.camera_names)
        self._specs = specs(self.camera_names)
        for name, spec in self._specs.items():
            if name != cameras.name:
                self._declare(name, spec)
        self._cameras: dict[str, Camera] = {}
        self._client: Client | None = None
        self._shared: NodeSettings | None = None
        self._destroy: list[Callable[[], object]] = []
        self._timers_while_active: list[Any] = []
        self._calls = ReentrantCallbackGroup()
        self._goals = threading.BoundedSemaphore(_MAX_GOALS)
        self._closing = threading.Lock()  # a diagnostics callback may run while the node closes
        self.add_on_set_parameters_callback(self._on_set_parameters)

    def _declare(self, name: str, spec: Spec) -> None:
        self.declare_parameter(name, spec.default, spec.descriptor())

    def start(self) -> None:
        """Configure and activate, if the parameter `autostart` says so."""
        if self.get_parameter("autostart").value:
            for step in (self.trigger_configure, self.trigger_activate):
                if step() != TransitionCallbackReturn.SUCCESS:
                    return

    # ------------------------------------------------------------ parameters

    def _values(self, changed: Sequence[Any] = ()) -> dict[str, Any]:
        values = {name: self.get_parameter(name).value for name in self._specs}
        sim_time = "use_sim_time"
        values[sim_time] = self.has_parameter(sim_time) and self.get_parameter(sim_time).value
        return values | {each.name: each.value for each in changed}

    def _settings(self, values: dict[str, Any]) -> tuple[NodeSettings, list[CameraSettings]]:
        """Build all settings. Raises ValueError that names the parameter."""
        for name, spec in self._specs.items():
            spec.validate(name, values[name])
        sim_time = bool(values["use_sim_time"])
        cameras = [camera_settings(name, values, sim_time) for name in self.camera_names]
        return node_settings(values), cameras

    def _on_set_parameters(self, changed: list[Any]) -> Any:
        """Check a change, and apply it to running cameras; descriptors were checked before."""
        try:
            for each in changed:
                spec = self._specs.get(each.name)
                if self._client is not None and spec is not None and spec.when is When.CONFIGURE:
                    raise ValueError(
                        f"{each.name} is read when the node is configured: clean it up first"
                    )
            shared, cameras = self._settings(self._values(changed))
        except ValueError as error:
            return SetParametersResult(successful=False, reason=str(error))
        self._shared = shared
        for settings in cameras:
            if settings.name in self._cameras:
                self._cameras[settings.name].change(settings, shared)
        return SetParametersResult(successful=True)

    # ------------------------------------------------------------ lifecycle

    def on_configure(self, state: Any) -> TransitionCallbackReturn:
        try:
            shared, cameras = self._settings(self._values())
            self._client = Client(
                shared.server,
                timeout=shared.timeout,
                ca=shared.ca or None,
                cert=shared.cert or None,
                key=shared.key or None,
                token=Path(shared.token_file) if shared.token_file else None,
            )
        except (ValueError, OSError, LegatoError) as error:
            self.get_logger().error(f"not configured: {error}")
            return TransitionCallbackReturn.FAILURE
        self._shared = shared
        for settings in cameras:
            publishers = self._publishers_of(settings)
            self._cameras[settings.name] = Camera(self, settings, shared, publishers)
        self._create_calls()
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", RELIABLE)
        self._destroy.append(partial(self.destroy_publisher, self._diagnostics))
        timer = self.create_timer(
            shared.diagnostics_period,
            self._publish_diagnostics,
            callback_group=MutuallyExclusiveCallbackGroup(),
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )
        self._destroy.append(partial(self.destroy_timer, timer))
        return super().on_configure(state)

    def on_activate(self, state: Any) -> TransitionCallbackReturn:
        result = super().on_activate(state)  # publishers first: results may come at once
        for camera in self._cameras.values():
            camera.start(self._connected())
            self._timers_while_active.append(
                self.create_timer(
                    1 / camera.settings.prediction_rate,
                    camera.publish_tracks,
                    callback_group=MutuallyExclusiveCallbackGroup(),
                )
            )
        return result

    def on_deactivate(self, state: Any) -> TransitionCallbackReturn:
        self._stop()
        return super().on_deactivate(state)

    def on_cleanup(self, state: Any) -> TransitionCallbackReturn:
        self.close()
        return super().on_cleanup(state)

    def on_shutdown(self, state: Any) -> TransitionCallbackReturn:
        self.close()
        return super().on_shutdown(state)

    def on_error(self, state: Any) -> TransitionCallbackReturn:
        self.close()
        return super().on_error(state)

    def _stop(self) -> None:
        while self._timers_while_active:
            self.destroy_timer(self._timers_while_active.pop())
        for camera in self._cameras.values():
            camera.stop()

    def close(self) -> None:
        """End sessions and give back everything that configuring made."""
        self._stop()
        with self._closing:
            self._cameras.clear()
        while self._destroy:
            self._destroy.pop()()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _publishers_of(self, settings: CameraSettings) -> dict[str, Any]:
        found = {}
        for output in OUTPUTS:
            if output.needs != "depth" or settings.depth:
                publisher = self.create_lifecycle_publisher(
                    output.kind, f"~/{settings.name}/{output.topic}", output.qos
                )
                found[output.topic] = publisher
                self._destroy.append(partial(self.destroy_lifecycle_publisher, publisher))
        return found

    def _create_calls(self) -> None:
        answers = {
            "query": self._on_query,
            "caption": self._on_caption,
            "set_tasks": self._on_set_tasks,
        }
        for name, (kind, _) in SERVICES.items():
            service = self.create_service(
                kind, f"~/{name}", answers[name], callback_group=self._calls
            )
            self._destroy.append(partial(self.destroy_service, service))
        finder = ActionServer(
            self,
            FindObject,
            "~/find_object",
            execute_callback=self._find,
            goal_callback=self._on_goal,
            cancel_callback=lambda goal: CancelResponse.ACCEPT,
            callback_group=self._calls,
        )
        self._destroy.append(finder.destroy)

    # ------------------------------------------------------------ diagnostics

    def _publish_diagnostics(self) -> None:
        with self._closing:
            if not self._cameras:
                return
            array = DiagnosticArray(status=[camera.status() for camera in self._cameras.values()])
            array.header.stamp = self.get_clock().now().to_msg()
            self._diagnostics.publish(array)

    # ------------------------------------------------------------ services

    def _on_query(self, request: Any, response: Any) -> Any:
        def ask(client: Client, image: Any, options: Options) -> None:
            result = client.query(
                image, request.question, reasoning=request.reasoning, options=options
            )
            response.answer = result.answer
            response.reasoning = result.reasoning.text if result.reasoning is not None else ""
            response.finish_reason = result.info.finish_reason

        return self._answer(response, request.camera, ask, needs_image=not request.without_image)

    def _on_caption(self, request: Any, response: Any) -> Any:
        def ask(client: Client, image: Any, options: Options) -> None:
            result = client.caption(image, request.length or "normal", options=options)
            response.caption = result.caption
            response.finish_reason = result.info.finish_reason

        return self._answer(response, request.camera, ask)

    def _answer(
        self,
        response: Any,
        camera: str,
        ask: Callable[[Client, Any, Options], None],
        *,
        needs_image: bool = True,
    ) -> Any:
        """Let `ask` fill the response about a camera's newest image, or say why it cannot."""
        try:
            client, image = self._connected(), None
            if needs_image:
                frame = self._newest(camera)
                image, response.header = frame.read(), frame.origin
            ask(client, image, self._options())
            response.success = True
        except (CallError, LegatoError, OSError, ValueError) as error:
            response.success, response.message = False, _text(error)
        return response

    def _on_set_tasks(self, request: Any, response: Any) -> Any:
        """Set the camera's parameter, so that parameter, service and session agree."""
        try:
            name = f"{self._camera(request.camera).settings.name}.tasks"
            value = Parameter(name, Parameter.Type.STRING_ARRAY, list(request.tasks))
            result = self.set_parameters_atomically([value])
            response.success, response.message = result.successful, result.reason
            response.tasks = list(self.get_parameter(name).value)
        except CallError as error:
            response.success, response.message = False, str(error)
        return response

    def _options(self) -> Options:
        assert self._shared is not None, "it is configured"
        return Options(model=self._shared.model, adapter=self._shared.adapter)

    def _connected(self) -> Client:
        if self._client is None:
            raise CallError("the node is not configured")
        return self._client

    def _camera(self, name: str) -> Camera:
        found = self._cameras.get(name or self.camera_names[0])
        if found is None:
            raise CallError(f"a camera is one of {', '.join(self.camera_names)}, not {name!r}")
        return found

    def _newest(self, camera: str) -> CapturedFrame:
        found = self._camera(camera)
        if found.newest is None:
            raise CallError(f"no image of {found.settings.name} yet; the node must be active")
        return found.newest

    # ------------------------------------------------------------ action

    def _on_goal(self, goal: Any) -> Any:
        known = not goal.camera or goal.camera in self.camera_names
        return GoalResponse.ACCEPT if known and goal.object.strip() else GoalResponse.REJECT

    def _find(self, goal_handle: Any) -> Any:
        """Search, unless goals without an end would take the threads of all other callbacks."""
        if not self._goals.acquire(blocking=False):
            goal_handle.abort()
            return FindObject.Result(message=f"{_MAX_GOALS} goals run already, the maximum")
        try:
            return self._search(goal_handle)
        finally:
            self._goals.release()

    def _search(self, goal_handle: Any) -> Any:
        """Ask about one image after another; the last one is asked about once."""
        goal, result, feedback = goal_handle.request, FindObject.Result(), FindObject.Feedback()
        seconds = goal.timeout.sec + goal.timeout.nanosec / 1e9
        end = time.monotonic() + (seconds or math.inf)
        last = 0
        while time.monotonic() < end and self.context.ok():
            if goal_handle.is_cancel_requested:
                goal_handle.canceled()
                result.message = "cancelled"
                return result
            try:
                frame = self._camera(goal.camera).newest
                if frame is None or frame.number == last:
                    time.sleep(_POLL_S)
                    continue
                last = frame.number
                self._look(frame, goal, result)
            except (CallError, LegatoError, OSError, ValueError) as error:
                goal_handle.abort()
                result.message = _text(error)
                return result
            header: Any = frame.origin
            feedback.images += 1
            feedback.stamp = header.stamp
            goal_handle.publish_feedback(feedback)
            if result.found:
                goal_handle.succeed()
                return result
        goal_handle.abort()
        result.message = f"not found in {feedback.images} images within {seconds:g} s"
        return result

    def _look(self, frame: CapturedFrame, goal: Any, result: Any) -> None:
        """Ask about one image, and fill the result if the object is there."""
        least = goal.min_confidence or None
        found = self._connected().detect(
            frame.read(), goal.object, min_confidence=least, options=self._options()
        )
        if not found.objects or found.info.image is None:
            return
        assert self._shared is not None, "it is configured"
        header: Any = frame.origin
        size = found.info.image.width, found.info.image.height
        array = images.of((found,), header, size, self._shared.absent_score)
        result.found = True
        result.detections = ros2.to_ros(array, vision_msgs.msg)
        result.detections_3d = self._camera(goal.camera).lift(frame, found)


def _text(error: Exception) -> str:
    return error.message if isinstance(error, LegatoError) else str(error)


# ---------------------------------------------------------------- program


def main(args: list[str] | None = None) -> None:
    """Run the node until it is interrupted."""
    rclpy.init(args=args)
    node = LegatoNode()
    executor = MultiThreadedExecutor(num_threads=2 * len(node.camera_names) + _EXTRA_THREADS)
    executor.add_node(node)
    try:
        node.start()
        executor.spin()
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    finally:
        node.close()
        executor.shutdown()
        node.destroy_node()
        rclpy.try_shutdown()
