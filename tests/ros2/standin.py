"""A stand-in for rclpy and message_filters: what the node uses of them, in one process.

It follows rclpy's documentation where the node relies on it: names, remapping, descriptors,
lifecycle, matching of QoS, latched messages. Callbacks run in the publishing thread, one at a time
in a mutually exclusive group.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.ros2 import interfaces

_MODULES = interfaces.modules()
_RCL, _TIME = _MODULES["rcl_interfaces.msg"], _MODULES["builtin_interfaces.msg"]


# ---------------------------------------------------------------- quality of service


class ReliabilityPolicy(enum.Enum):
    RELIABLE = 1
    BEST_EFFORT = 2


class DurabilityPolicy(enum.Enum):
    TRANSIENT_LOCAL = 1
    VOLATILE = 2


@dataclasses.dataclass
class QoSProfile:
    depth: int
    reliability: ReliabilityPolicy = ReliabilityPolicy.RELIABLE
    durability: DurabilityPolicy = DurabilityPolicy.VOLATILE

    def offers(self, wanted: QoSProfile) -> bool:
        """Return whether a publisher of this quality matches a subscription."""
        return (
            self.reliability.value <= wanted.reliability.value
            and self.durability.value <= wanted.durability.value
        )


SENSOR_DATA = QoSProfile(5, ReliabilityPolicy.BEST_EFFORT)


def _profile(qos: QoSProfile | int) -> QoSProfile:
    return QoSProfile(qos) if isinstance(qos, int) else qos


# ---------------------------------------------------------------- graph


class Graph:
    """Topics, services and actions of all nodes, and the simulated time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forget everything, for another test."""
        self.publishers: dict[str, list[Publisher]] = collections.defaultdict(list)
        self.subscriptions: dict[str, list[Subscription]] = collections.defaultdict(list)
        self.services: dict[str, Service] = {}
        self.actions: dict[str, ActionServer] = {}
        self.sim_time_ns = 0
        self.is_ok = True

    def call(self, name: str, request: Any) -> Any:
        """Call a service in this thread; the response."""
        service = self.services[name]
        assert isinstance(request, service.srv_type.Request)
        response = service.callback(request, service.srv_type.Response())
        assert isinstance(response, service.srv_type.Response)
        return response

    def send_goal(self, name: str, goal: Any) -> GoalHandle:
        """Send a goal to an action; its handle, whose `result` comes later."""
        return self.actions[name].start(goal)

    def listen(
        self,
        topic: str,
        kind: Any,
        qos: QoSProfile | int = 100,
        callback: Callable[[Any], object] = lambda message: None,
    ) -> collections.deque[Any]:
        """Subscribe as another node; the messages so far."""
        found: collections.deque[Any] = collections.deque(maxlen=2000)

        def take(message: Any) -> None:
            found.append(message)
            callback(message)

        Subscription(self, kind, topic, take, _profile(qos), CallbackGroup())
        return found


graph = Graph()


class CallbackGroup:
    """Mutually exclusive."""

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()


class ReentrantCallbackGroup(CallbackGroup):
    def __init__(self) -> None:
        self.lock = contextlib.nullcontext()


class Publisher:
    def __init__(self, own: Graph, kind: Any, topic: str, qos: QoSProfile) -> None:
        self.graph, self.msg_type, self.topic, self.qos = own, kind, topic, qos
        self.is_enabled = True
        self._latched: collections.deque[Any] = collections.deque(maxlen=qos.depth)
        with own.lock:
            own.publishers[topic].append(self)

    def publish(self, message: Any) -> None:
        assert isinstance(message, self.msg_type), f"{self.topic}: {message!r}"
        if not self.is_enabled:
            return
        if not self.graph.is_ok:
            raise RuntimeError("publisher's context is invalid")
        interfaces.to_cdr(message)  # what cannot be sent fails here
        with self.graph.lock:
            self._latched.append(message)
            matched = [each for each in self.graph.subscriptions[self.topic] if self._fits(each)]
        for subscription in matched:
            subscription.deliver(message)

    def get_subscription_count(self) -> int:
        with self.graph.lock:
            return sum(map(self._fits, self.graph.subscriptions[self.topic]))

    def latched(self) -> list[Any]:
        is_kept = self.qos.durability is DurabilityPolicy.TRANSIENT_LOCAL
        return list(self._latched) if is_kept else []

    def _fits(self, subscription: Subscription) -> bool:
        return self.msg_type is subscription.msg_type and self.qos.offers(subscription.qos)


class Subscription:
    def __init__(
        self,
        own: Graph,
        kind: Any,
        topic: str,
        callback: Callable[[Any], object],
        qos: QoSProfile,
        group: CallbackGroup,
    ) -> None:
        self.msg_type, self.topic, self.qos = kind, topic, qos
        self._callback, self._group = callback, group
        with own.lock:
            own.subscriptions[topic].append(self)
            publishers = [p for p in own.publishers[topic] if p._fits(self)]
        if qos.durability is DurabilityPolicy.TRANSIENT_LOCAL:
            for message in (each for p in publishers for each in p.latched()):
                self.deliver(message)

    def deliver(self, message: Any) -> None:
        with self._group.lock:
            self._callback(message)


@dataclasses.dataclass
class Service:
    srv_type: Any
    callback: Callable[[Any, Any], Any]


# ---------------------------------------------------------------- time


class ClockType(enum.Enum):
    ROS_TIME = 1
    STEADY_TIME = 3


class Time:
    def __init__(self, nanoseconds: int) -> None:
        self.nanoseconds = nanoseconds

    def to_msg(self) -> Any:
        sec, nanosec = divmod(self.nanoseconds, 10**9)
        return _TIME.Time(sec=sec, nanosec=nanosec)


class Clock:
    def __init__(self, *, clock_type: ClockType = ClockType.ROS_TIME) -> None:
        self.is_simulated = False

    def now(self) -> Time:
        return Time(graph.sim_time_ns if self.is_simulated else time.time_ns())


class Timer:
    def __init__(self, period: float, callback: Callable[[], object], group: CallbackGroup) -> None:
        self._ended = threading.Event()
        self._work = period, callback, group
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        period, callback, group = self._work
        while not self._ended.wait(period):
            with group.lock:
                callback()

    def destroy(self) -> None:
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


# ---------------------------------------------------------------- parameters


class ParameterType(enum.Enum):
    BOOL = 1
    INTEGER = 2
    DOUBLE = 3
    STRING = 4
    STRING_ARRAY = 9


class Parameter:
    Type = ParameterType

    def __init__(self, name: str, type_: ParameterType | None = None, value: Any = None) -> None:
        kinds = {bool: "BOOL", int: "INTEGER", float: "DOUBLE", str: "STRING"}
        own = ParameterType[kinds.get(type(value), "STRING_ARRAY")]
        assert type_ in (None, own), f"{name}: {value!r} is no {type_}"
        self.name, self.type_, self.value = name, own, value


class InvalidParameterValueException(Exception):
    pass


# ---------------------------------------------------------------- node


class TransitionCallbackReturn(enum.Enum):
    SUCCESS = 0
    FAILURE = 1
    ERROR = 2


_TRANSITIONS = {
    "configure": ("unconfigured", "inactive"),
    "activate": ("inactive", "active"),
    "deactivate": ("active", "inactive"),
    "cleanup": ("inactive", "unconfigured"),
}


class LifecycleNode:
    """Node of the graph; `cli_args` may remap names, as rclpy's do."""

    def __init__(
        self,
        node_name: str,
        *,
        namespace: str = "",
        parameter_overrides: list[Parameter] | None = None,
        cli_args: list[str] | None = None,
    ) -> None:
        self._name, self._namespace = node_name, "/" + namespace.strip("/") if namespace else ""
        rules = [each.partition(":=") for each in (cli_args or []) if ":=" in each]
        self._remapped = {self._expand(old): self._expand(new) for old, _, new in rules}
        self._parameters: dict[str, Parameter] = {}
        self._descriptors: dict[str, Any] = {}
        self._overrides = {each.name: each for each in parameter_overrides or []}
        self._on_set: list[Callable[[list[Parameter]], Any]] = []
        self._own_clock = Clock()
        self.state = "unconfigured"
        self.managed: set[Publisher] = set()
        self.logged: list[str] = []
        self.default_callback_group = CallbackGroup()
        self.context = SimpleNamespace(ok=lambda: graph.is_ok)
        self.declare_parameter("use_sim_time", False, _RCL.ParameterDescriptor())
        self._own_clock.is_simulated = self.get_parameter("use_sim_time").value

    # names

    def get_name(self) -> str:
        return self._name

    def get_namespace(self) -> str:
        return self._namespace or "/"

    def get_fully_qualified_name(self) -> str:
        return f"{self._namespace}/{self._name}"

    def resolve_topic_name(self, topic: str) -> str:
        full = self._expand(topic)
        return self._remapped.get(full, full)

    def _expand(self, topic: str) -> str:
        if topic.startswith("~"):
            return self.get_fully_qualified_name() + topic[1:]
        return topic if topic.startswith("/") else f"{self._namespace}/{topic}"

    def get_clock(self) -> Clock:
        return self._own_clock

    def get_logger(self) -> Any:
        return SimpleNamespace(info=self.logged.append, error=self.logged.append)

    # parameters

    def declare_parameter(self, name: str, value: Any, descriptor: Any) -> Parameter:
        parameter = self._overrides.get(name, Parameter(name, None, value))
        descriptor.name, descriptor.type = name, Parameter(name, None, value).type_.value
        self._descriptors[name] = descriptor
        result = self._set([parameter], check_read_only=False)
        if not result.successful:
            raise InvalidParameterValueException(result.reason)
        return parameter

    def has_parameter(self, name: str) -> bool:
        return name in self._parameters

    def get_parameter(self, name: str) -> Parameter:
        return self._parameters[name]

    def describe_parameter(self, name: str) -> Any:
        return self._descriptors[name]

    def add_on_set_parameters_callback(self, callback: Callable[[list[Parameter]], Any]) -> None:
        self._on_set.insert(0, callback)

    def set_parameters_atomically(self, parameters: list[Parameter]) -> Any:
        return self._set(parameters, check_read_only=True)

    def _set(self, parameters: list[Parameter], *, check_read_only: bool) -> Any:
        for each in parameters:
            if reason := self._objection(each, check_read_only):
                return _RCL.SetParametersResult(successful=False, reason=reason)
        for callback in self._on_set:
            result = callback(parameters)
            if not result.successful:
                return result
        self._parameters |= {each.name: each for each in parameters}
        self._own_clock.is_simulated = self._parameters["use_sim_time"].value
        return _RCL.SetParametersResult(successful=True)

    def _objection(self, parameter: Parameter, check_read_only: bool) -> str:
        descriptor = self._descriptors[parameter.name]
        if check_read_only and descriptor.read_only:
            return f"Trying to set a read-only parameter: {parameter.name}."
        if parameter.type_.value != descriptor.type:
            return f"Wrong parameter type of {parameter.name}"
        for each in descriptor.floating_point_range:
            if not each.from_value <= parameter.value <= each.to_value:
                return f"Parameter {parameter.name} out of range"
        return ""

    # topics, services, timers

    def create_publisher(self, kind: Any, topic: str, qos: QoSProfile | int) -> Publisher:
        return Publisher(graph, kind, self.resolve_topic_name(topic), _profile(qos))

    def create_lifecycle_publisher(self, kind: Any, topic: str, qos: QoSProfile | int) -> Publisher:
        made = self.create_publisher(kind, topic, qos)
        made.is_enabled = False
        self.managed.add(made)
        return made

    def destroy_publisher(self, publisher: Publisher) -> None:
        with graph.lock:
            graph.publishers[publisher.topic].remove(publisher)

    def destroy_lifecycle_publisher(self, publisher: Publisher) -> None:
        self.managed.discard(publisher)
        self.destroy_publisher(publisher)

    def create_subscription(
        self,
        kind: Any,
        topic: str,
        callback: Callable[[Any], object],
        qos_profile: QoSProfile | int,
        *,
        callback_group: CallbackGroup | None = None,
    ) -> Subscription:
        group = callback_group or self.default_callback_group
        full, qos = self.resolve_topic_name(topic), _profile(qos_profile)
        return Subscription(graph, kind, full, callback, qos, group)

    def destroy_subscription(self, subscription: Subscription) -> None:
        with graph.lock:
            graph.subscriptions[subscription.topic].remove(subscription)

    def get_publishers_info_by_topic(self, topic: str) -> list[Any]:
        with graph.lock:
            kinds = [each.msg_type.TYPE for each in graph.publishers[topic]]
        return [SimpleNamespace(topic_type=kind) for kind in kinds]

    def create_service(
        self,
        kind: Any,
        name: str,
        callback: Callable[[Any, Any], Any],
        *,
        callback_group: CallbackGroup,
    ) -> str:
        full = self.resolve_topic_name(name)
        graph.services[full] = Service(kind, callback)
        return full

    def destroy_service(self, service: str) -> None:
        del graph.services[service]

    def create_timer(
        self,
        period: float,
        callback: Callable[[], object],
        *,
        callback_group: CallbackGroup,
        clock: Clock | None = None,
    ) -> Timer:
        return Timer(period, callback, callback_group)

    def destroy_timer(self, timer: Timer) -> None:
        timer.destroy()

    # lifecycle

    def trigger_configure(self) -> TransitionCallbackReturn:
        return self._change("configure")

    def trigger_activate(self) -> TransitionCallbackReturn:
        return self._change("activate")

    def trigger_deactivate(self) -> TransitionCallbackReturn:
        return self._change("deactivate")

    def trigger_cleanup(self) -> TransitionCallbackReturn:
        return self._change("cleanup")

    def _change(self, name: str) -> TransitionCallbackReturn:
        before, after = _TRANSITIONS[name]
        assert self.state == before, f"{name} in {self.state}"
        result = getattr(self, f"on_{name}")(SimpleNamespace(label=before))
        if result is TransitionCallbackReturn.SUCCESS:
            self.state = after
        return TransitionCallbackReturn(result)

    def _succeed(self, state: Any) -> TransitionCallbackReturn:
        return TransitionCallbackReturn.SUCCESS

    on_configure = on_cleanup = on_shutdown = on_error = _succeed

    def on_activate(self, state: Any) -> TransitionCallbackReturn:
        for each in self.managed:
            each.is_enabled = True
        return TransitionCallbackReturn.SUCCESS

    def on_deactivate(self, state: Any) -> TransitionCallbackReturn:
        for each in self.managed:
            each.is_enabled = False
        return TransitionCallbackReturn.SUCCESS


# ---------------------------------------------------------------- actions


class GoalResponse(enum.Enum):
    REJECT = 1
    ACCEPT = 2


class CancelResponse(enum.Enum):
    REJECT = 1
    ACCEPT = 2


class GoalHandle:
    """Both sides of a goal."""

    def __init__(self, goal: Any) -> None:
        self.request = goal
        self.status = ""
        self.feedback: list[Any] = []
        self.result: Any = None
        self.is_cancel_requested = False
        self.thread: threading.Thread | None = None

    def publish_feedback(self, feedback: Any) -> None:
        interfaces.to_cdr(feedback)
        self.feedback.append(feedback.images)

    def succeed(self) -> None:
        self.status = "succeeded"

    def abort(self) -> None:
        self.status = "aborted"

    def canceled(self) -> None:
        self.status = "canceled"


class ActionServer:
    def __init__(
        self,
        node: LifecycleNode,
        kind: Any,
        name: str,
        execute_callback: Callable[[Any], Any],
        *,
        callback_group: CallbackGroup,
        goal_callback: Callable[[Any], GoalResponse],
        cancel_callback: Callable[[Any], CancelResponse],
    ) -> None:
        self._kind, self._execute, self._goal = kind, execute_callback, goal_callback
        self._full = node.resolve_topic_name(name)
        graph.actions[self._full] = self

    def start(self, goal: Any) -> GoalHandle:
        assert isinstance(goal, self._kind.Goal)
        handle = GoalHandle(goal)
        if self._goal(goal) is not GoalResponse.ACCEPT:
            handle.status = "rejected"
            return handle

        def run() -> None:
            result = self._execute(handle)
            interfaces.to_cdr(result)
            handle.result = result

        handle.thread = threading.Thread(target=run, daemon=True)
        handle.thread.start()
        return handle

    def destroy(self) -> None:
        del graph.actions[self._full]


# ---------------------------------------------------------------- message_filters


class Subscriber:
    def __init__(self, node: LifecycleNode, kind: Any, topic: str, **options: Any) -> None:
        self._callbacks: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.sub = node.create_subscription(kind, topic, self._receive, **options)

    def registerCallback(self, callback: Callable[..., object], *args: Any) -> None:
        self._callbacks.append((callback, args))

    def _receive(self, message: Any) -> None:
        for callback, args in self._callbacks:
            callback(message, *args)


class ApproximateTimeSynchronizer:
    """Joins the messages of all inputs within `slop` seconds; drops the oldest stamps."""

    def __init__(self, inputs: list[Subscriber], queue_size: int, slop: float) -> None:
        self.lock = threading.Lock()
        self.queues: list[dict[int, Any]] = [{} for _ in inputs]
        self._size, self._slop_ns = queue_size, round(slop * 1e9)
        self._callback: Callable[..., object] = lambda *messages: None
        for each, waiting in zip(inputs, self.queues, strict=True):
            each.registerCallback(self._add, waiting)

    def registerCallback(self, callback: Callable[..., object]) -> None:
        self._callback = callback

    def _add(self, message: Any, waiting: dict[int, Any]) -> None:
        stamp = message.header.stamp
        at = stamp.sec * 10**9 + stamp.nanosec
        with self.lock:
            waiting[at] = message
            while len(waiting) > self._size:
                del waiting[min(waiting)]
            nearest = [min(q, key=lambda s: abs(s - at), default=None) for q in self.queues]
            stamps = [each for each in nearest if each is not None]
            if len(stamps) < len(nearest) or max(stamps) - min(stamps) >= self._slop_ns:
                return
            self._callback(*(q.pop(s) for q, s in zip(self.queues, stamps, strict=True)))


# ---------------------------------------------------------------- installation


def install() -> None:
    """Put the stand-ins where the node imports them from, in place of nothing."""
    assert "rclpy" not in sys.modules, "the real rclpy is imported"
    own: dict[str, dict[str, Any]] = {
        "rclpy": {},
        "rclpy.action": {
            "ActionServer": ActionServer,
            "CancelResponse": CancelResponse,
            "GoalResponse": GoalResponse,
        },
        "rclpy.callback_groups": {
            "MutuallyExclusiveCallbackGroup": CallbackGroup,
            "ReentrantCallbackGroup": ReentrantCallbackGroup,
        },
        "rclpy.clock": {"Clock": Clock, "ClockType": ClockType},
        "rclpy.executors": {"ExternalShutdownException": Exception, "MultiThreadedExecutor": None},
        "rclpy.lifecycle": {
            "LifecycleNode": LifecycleNode,
            "TransitionCallbackReturn": TransitionCallbackReturn,
        },
        "rclpy.parameter": {"Parameter": Parameter},
        "rclpy.qos": {
            "DurabilityPolicy": DurabilityPolicy,
            "QoSProfile": QoSProfile,
            "ReliabilityPolicy": ReliabilityPolicy,
            "qos_profile_sensor_data": SENSOR_DATA,
        },
        "message_filters": {
            "ApproximateTimeSynchronizer": ApproximateTimeSynchronizer,
            "Subscriber": Subscriber,
        },
    }
    for name, members in own.items():
        module = _MODULES.setdefault(name, ModuleType(name))
        for member, value in members.items():
            setattr(module, member, value)
    for name, module in _MODULES.items():
        package, _, own_name = name.partition(".")
        sys.modules[name] = module
        if own_name:
            setattr(_MODULES[package], own_name, module)
