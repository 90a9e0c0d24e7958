"""A LeRobot robot that also sees objects by their names.

Each name becomes features of the robot's observation: where the object is now in a camera's image,
and how sure that is. They are floats, so LeRobot joins them to `observation.state`, for recording
as well as for its remote policies:

    python -m examples.lerobot_perception --see "red cube" --camera front -- --robot.type=... \
        --server_address=gpu-box:8080 --policy_type=act ...

The words after `--` are those of LeRobot's own `robot_client`. Nothing here waits for an answer.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from legato_client import Client, DetectTask, LegatoError, RawFrame, Session, Tracking, TrackNow

FIELDS = ("x", "y", "width", "height", "age", "seen")
"""Centre and size as fractions of the image, seconds since it was found, and 1 if it is tracked."""

_TIMEOUT = 2.0  # seconds to open a session
_RETRY = 1.0  # seconds after a session that failed


class ObjectFeatures:
    """Objects in a camera's frames, extrapolated to the moment of the question."""

    def __init__(self, client: Client, names: Sequence[str], max_unseen: float = 1.0) -> None:
        """Follow objects of these names; each is forgotten after `max_unseen` seconds unseen."""
        self._client = client
        self._tasks = [
            DetectTask(name, max_objects=4, tracking=Tracking(max_unseen=max_unseen))
            for name in names
        ]
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()  # of this thread
        self.features: dict[str, type] = {
            f"{name}.{field}": float for name in names for field in FIELDS
        }

    def update(self, frame: np.ndarray[Any, Any]) -> dict[str, float]:
        """Send an RGB frame if the server has room, and return the features' values now.

        They are all 0 while no session is open; a thread opens one again.
        """
        if self._thread is None:
            self._closed = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._closed,), daemon=True)
            self._thread.start()
        session = self._session
        tracks: tuple[TrackNow, ...] = ()
        if session is not None:
            with contextlib.suppress(LegatoError):  # the thread opens another session
                session.send(RawFrame.from_array(frame))
                tracks = session.now()
        values = dict.fromkeys(self.features, 0.0)
        for track in sorted(tracks, key=lambda each: each.last.confidence or 0.0):
            values.update(_values(track))  # the most confident one is the last
        return values

    def close(self) -> None:
        """End the session; the next frame opens one again."""
        self._closed.set()
        session, thread = self._session, self._thread
        if session is not None:
            session.close()
        if thread is not None:
            thread.join(2 * _TIMEOUT)
        self._thread = None

    def _run(self, closed: threading.Event) -> None:
        """Keep a session open, and read its answers, which `Session.now` remembers."""
        while not closed.is_set():
            with (
                contextlib.suppress(LegatoError),
                self._client.session(
                    self._tasks, when_full="drop", open_timeout=_TIMEOUT, name="lerobot"
                ) as session,
            ):
                self._session = session
                if not closed.is_set():  # `close` may not have seen this session
                    collections.deque(session, maxlen=0)
            self._session = None
            closed.wait(_RETRY)


def _values(track: TrackNow) -> dict[str, float]:
    axes = track.axes
    values = (axes.center_x, axes.center_y, axes.width, axes.height, track.age, 1.0)
    return {
        f"{track.label}.{field}": float(value) for field, value in zip(FIELDS, values, strict=True)
    }


class PerceivingRobot:
    """A robot of LeRobot whose observations have the features of objects, too.

    Everything else is the robot's own.
    """

    def __init__(self, robot: Any, camera: str, objects: ObjectFeatures) -> None:
        cameras = [name for name, each in robot.observation_features.items() if each is not float]
        if camera not in cameras:
            raise ValueError(f"the robot has no camera {camera!r}, but {', '.join(cameras)}")
        self._robot = robot
        self._camera = camera
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._robot, name)

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**self._robot.observation_features, **self._objects.features}

    def get_observation(self) -> dict[str, Any]:
        observation = self._robot.get_observation()
        return {**observation, **self._objects.update(observation[self._camera])}

    def disconnect(self) -> None:
        self._objects.close()
        self._robot.disconnect()


def main(argv: Sequence[str]) -> None:
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="lerobot_perception", description=__doc__)
    parser.add_argument("--see", action="append", required=True, metavar="NAME", help="an object")
    parser.add_argument("--camera", required=True, help="the camera of the robot that looks")
    parser.add_argument("--server", default="127.0.0.1:50051", help="Legato's address")
    args = parser.parse_args(argv[:end])
    client_module: Any = importlib.import_module("lerobot.async_inference.robot_client")
    make = client_module.make_robot_from_config
    with Client(args.server) as client:
        client_module.make_robot_from_config = lambda config: PerceivingRobot(
            make(config), args.camera, ObjectFeatures(client, args.see)
        )
        sys.argv[1:] = argv[end + 1 :]
        client_module.async_client()


if __name__ == "__main__":
    main(sys.argv[1:])
