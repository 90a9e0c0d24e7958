"""The other side of `legato ros2`: a camera and a listener, as participants of DDS on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cyclonedds.core import Policy
from cyclonedds.domain import Domain
from legato_client.ros import messages
from legato_client.ros.node import DEFAULT, LATCHED, SENSOR_DATA, Participant

from tests.e2e.scenes import two_shapes
from tests.e2e.server import ENVIRONMENT, until

IMAGE, DETECTIONS, INFO = "/camera/image_raw", "/legato/detections", "/legato/vision_info"
PREDICTIONS = "/legato/predictions"
LOOPBACK = (
    "<CycloneDDS><Domain><General><AllowMulticast>false</AllowMulticast><Interfaces>"
    '<NetworkInterface name="lo" multicast="false"/></Interfaces></General><Discovery>'
    '<ParticipantIndex>auto</ParticipantIndex><Peers><Peer address="127.0.0.1"/></Peers>'
    "</Discovery></Domain></CycloneDDS>"
)
DOMAIN = 1 + os.getpid() % 200  # not that of another test's process


class Bus:
    """Publishes images, and keeps what is published about them."""

    def __init__(self) -> None:
        self._domain = Domain(DOMAIN, LOOPBACK)
        self._participant = participant = Participant(DOMAIN)
        self._camera = participant.writer(IMAGE, messages.Image, SENSOR_DATA)
        self._detections = participant.reader(DETECTIONS, messages.Detection2DArray, DEFAULT)
        self._diagnostics = participant.reader("/diagnostics", messages.DiagnosticArray, DEFAULT)
        self._predictions = participant.reader(PREDICTIONS, messages.Detection2DArray, DEFAULT)
        self.predicted: list[messages.Detection2DArray] = []
        self.found: list[messages.Detection2DArray] = []
        self.told: list[messages.DiagnosticStatus] = []

    def show(self, offset: int = 0) -> messages.Header:
        """Publish an image that is taken now, of shapes `offset` pixels lower; its header."""
        image = two_shapes(offset).image
        stamp = messages.Time(*divmod(time.time_ns(), 10**9))
        header = messages.Header(stamp, "camera_optical")
        width, height = image.size
        self._camera.write(
            messages.Image(header, height, width, "rgb8", 0, 3 * width, image.tobytes())
        )
        return header

    def listen(self) -> None:
        """Take what has come."""
        for array in self._detections.take(100):
            if isinstance(array, messages.Detection2DArray):  # not word of a writer's end
                self.found.append(array)
        for array in self._predictions.take(100):
            if isinstance(array, messages.Detection2DArray):
                self.predicted.append(array)
        for told in self._diagnostics.take(100):
            if isinstance(told, messages.DiagnosticArray):
                self.told += told.status

    def info(self) -> messages.VisionInfo | None:
        """What a subscriber that comes now is told of the model."""
        reader = self._participant.reader(INFO, messages.VisionInfo, LATCHED)
        found: list[messages.VisionInfo] = []

        def has_come() -> bool:
            found.extend(reader.take(1))
            return bool(found)

        until(has_come)
        return found[0]

    def type_hashes(self) -> list[str]:
        """What the readers of the images announce of their type."""
        texts = []
        for handle in self._camera.get_matched_subscriptions():
            found = self._camera.get_matched_subscription_data(handle)
            texts.append(found.qos[Policy.Userdata].data.decode() if found else "")
        return [text.removeprefix("typehash=RIHS01_").removesuffix(";") for text in texts]

    def until_matched(self) -> None:
        """Return once the node listens and speaks."""
        until(self._camera.get_matched_subscriptions)
        until(self._detections.get_matched_publications)


@contextmanager
def node(folder: Path, server: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`legato ros2` in a process of its own."""
    command: Sequence[str] = (
        *(sys.executable, "-m", "legato_client.cli", "ros2", "--image", IMAGE),
        *("--task", "detect:red circle", "--server", server, "--domain", str(DOMAIN), *options),
    )
    environment = {**ENVIRONMENT, "CYCLONEDDS_URI": LOOPBACK}
    with (folder / "node.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
