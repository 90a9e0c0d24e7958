"""The examples for LeRobot and DimOS, with these frameworks' interfaces, and a real server.

Neither is installed for the tests: a robot has LeRobot's interface, and DimOS's modules stand in
with their classes' fields, as of dimos 0.0.15.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import threading
import time
import types
from typing import Any

import numpy as np
import pytest
from legato_client import Client, Session

from examples.lerobot_perception import FIELDS, ObjectFeatures, PerceivingRobot
from tests.e2e.scenes import overlap, two_shapes
from tests.e2e.server import Server, until

SCENE = two_shapes()
PIXELS = np.asarray(SCENE.image)
NOUN = "red circle"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of legato-tiny."""
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with Client(server.address) as connected:
        yield connected


# ---------------------------------------------------------------- LeRobot


class Arm:
    """A robot of LeRobot with one joint and one camera."""

    def __init__(self) -> None:
        self.observation_features = {"shoulder.pos": float, "front": PIXELS.shape}
        self.action_features = {"shoulder.pos": float}
        self.is_connected = True

    def get_observation(self) -> dict[str, Any]:
        return {"shoulder.pos": 0.25, "front": PIXELS}

    def disconnect(self) -> None:
        self.is_connected = False


def test_a_robot_sees_objects_by_name(client):
    """Observations have the joints, the image and where the object is, without waiting for it."""
    robot = PerceivingRobot(Arm(), "front", ObjectFeatures(client, [NOUN, "dog"], 60.0))
    names = [f"{name}.{field}" for name in (NOUN, "dog") for field in FIELDS]
    assert list(robot.observation_features) == ["shoulder.pos", "front", *names]
    assert robot.action_features == {"shoulder.pos": float}
    first = robot.get_observation()
    assert first["shoulder.pos"] == 0.25
    assert first[f"{NOUN}.seen"] == 0.0
    seen: dict[str, Any] = {}

    def sees() -> bool:
        time.sleep(0.02)
        seen.update(robot.get_observation())
        return bool(seen[f"{NOUN}.seen"])

    until(sees)
    box = SCENE.boxes[NOUN]
    assert seen[f"{NOUN}.x"] == pytest.approx((box.x_min + box.x_max) / 2, abs=0.05)
    assert seen[f"{NOUN}.width"] == pytest.approx(box.x_max - box.x_min, abs=0.1)
    assert all(type(seen[name]) is float for name in names)
    robot.disconnect()
    assert not robot.is_connected


class SlowToOpen(Client):
    """A client whose sessions open late."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.may_open, self.opened = threading.Event(), False

    def session(self, *arguments: Any, **options: Any) -> Session:
        self.may_open.wait(10)
        self.opened = True
        return super().session(*arguments, **options)


def test_a_session_that_opens_late_leaves_zeros(server):
    """The control loop goes on without objects until there is a session, also a second one."""
    client = SlowToOpen(server.address)
    with client:
        objects = ObjectFeatures(client, [NOUN], 60.0)
        for _ in range(2):
            assert objects.update(PIXELS) == dict.fromkeys(objects.features, 0.0)
            assert not client.opened
            client.may_open.set()

            def sees() -> bool:
                time.sleep(0.02)
                return bool(objects.update(PIXELS)[f"{NOUN}.seen"])

            until(sees)
            client.may_open.clear()
            objects.close()
            client.opened = False
        client.may_open.set()


def test_a_server_that_is_away_leaves_zeros():
    """The control loop goes on without objects."""
    with Client("127.0.0.1:1") as nobody:
        objects = ObjectFeatures(nobody, [NOUN])
        for _ in range(3):
            assert objects.update(PIXELS) == dict.fromkeys(objects.features, 0.0)
        objects.close()


def test_a_camera_must_exist(client):
    """Its name is compared with the robot's."""
    with pytest.raises(ValueError, match="no camera 'wrist', but front"):
        PerceivingRobot(Arm(), "wrist", ObjectFeatures(client, [NOUN]))


# ---------------------------------------------------------------- DimOS


@dataclasses.dataclass
class Picture:
    """DimOS's image."""

    data: np.ndarray[Any, Any]
    ts: float = 1.5

    @property
    def height(self) -> int:
        return int(self.data.shape[0])

    @property
    def width(self) -> int:
        return int(self.data.shape[1])

    def to_rgb(self) -> Picture:
        return self


@dataclasses.dataclass
class Detected:
    """DimOS's box."""

    bbox: tuple[float, float, float, float]
    track_id: int
    class_id: int
    confidence: float
    name: str
    ts: float
    image: Picture

    def is_valid(self) -> bool:
        return self.bbox[2] > self.bbox[0]


@dataclasses.dataclass
class Pointed:
    """DimOS's point."""

    x: float
    y: float
    name: str
    ts: float
    image: Picture
    track_id: int = -1

    def is_valid(self) -> bool:
        return 0 <= self.x <= self.image.width


class Found:
    """DimOS's list of either."""

    def __init__(self, image: Picture) -> None:
        self.image = image
        self.detections: list[Any] = []


class Config:
    """DimOS's configuration of a model."""

    auto_resize = None

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class Model:
    """DimOS's model, which makes its configuration of the annotated type."""

    def __init__(self, **given: Any) -> None:
        module = sys.modules[type(self).__module__]
        self.config = getattr(module, type(self).__annotations__["config"])(**given)

    def _prepare_image(self, image: Picture) -> tuple[Picture, float]:
        return image, 1.0


@pytest.fixture
def model(server, monkeypatch):
    """The example's model, on stand-ins for DimOS's modules."""
    detection = "dimos.perception.detection.type.detection2d"
    modules: dict[str, dict[str, Any]] = {
        "dimos.models.vl.base": {"VlModel": Model, "VlModelConfig": Config},
        "dimos.msgs.sensor_msgs.Image": {"Image": Picture},
        f"{detection}.bbox": {"Detection2DBBox": Detected},
        f"{detection}.imageDetections2D": {"ImageDetections2D": Found},
        f"{detection}.point": {"Detection2DPoint": Pointed},
    }
    for name, members in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            monkeypatch.setitem(
                sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent)
            )
        vars(sys.modules[name]).update(members)
    monkeypatch.delitem(sys.modules, "examples.dimos_model", raising=False)
    made = importlib.import_module("examples.dimos_model").LegatoVlModel(server=server.address)
    made.start()
    yield made
    made.stop()
    del sys.modules["examples.dimos_model"]


def test_a_model_of_dimos(model, client):
    """Answers are the server's, and places are in pixels of DimOS's image."""
    image = Picture(PIXELS)
    question = "How many circles are there?"
    answer = client.query(PIXELS, question).answer
    assert model.query(image, question) == answer
    assert model.query_multi(image, [question, question]) == [answer, answer]
    assert model.query_multi(image, []) == []
    assert model.caption(image) == client.caption(PIXELS).caption
    (found,) = model.query_detections(image, NOUN, max_objects=1).detections
    (expected,) = client.detect(PIXELS, NOUN, max_objects=1).objects
    assert overlap(expected.box, SCENE.boxes[NOUN]) > 0.6
    assert found.bbox[2] == pytest.approx(expected.box.x_max * image.width)
    assert (found.name, found.confidence, found.ts) == (NOUN, expected.confidence, 1.5)
    (point,) = model.query_points(image, NOUN).detections
    assert point.y == pytest.approx(client.point(PIXELS, NOUN).points[0].point.y * image.height)
