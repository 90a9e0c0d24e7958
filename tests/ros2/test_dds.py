"""What the node publishes, on DDS: a peer in another process decodes every message type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("cyclonedds", reason="its wheels follow new Pythons late")

from cyclonedds.domain import Domain

from tests.e2e.ros_bus import LOOPBACK
from tests.e2e.server import ENVIRONMENT, until
from tests.ros2 import dds, interfaces, standin
from tests.ros2.dds import DEPTH, IMAGE, INFO, QUALITIES, TOPICS
from tests.ros2.rig import running
from tests.ros2.standin import DurabilityPolicy, QoSProfile, ReliabilityPolicy, graph

DOMAIN = 201 + os.getpid() % 30  # not those of tests/e2e
TASKS = ["detect:cup", "segment:dog", "caption:short"]


def words(qos):
    """Return a quality of rclpy in words."""
    return (
        "reliable" if qos.reliability is ReliabilityPolicy.RELIABLE else "best effort",
        "volatile" if qos.durability is DurabilityPolicy.VOLATILE else "transient local",
    )


class Bridge:
    """The node's side: its topics on DDS, and its images from there."""

    def __init__(self, participant):
        self.published: dict[str, list[Any]] = {topic: [] for topic in TOPICS}
        self.participant = participant
        self._ended = threading.Event()
        for topic, name in TOPICS.items():
            (publisher,) = graph.publishers[topic]
            assert name == publisher.msg_type.TYPE
            writer = participant.writer(topic, dds.struct(name), dds.quality(*words(publisher.qos)))
            send = self._sender(topic, name, writer)
            graph.listen(topic, publisher.msg_type, publisher.qos, send)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _sender(self, topic, name, writer):
        def send(message):
            self.published[topic].append(message)
            writer.write(dds.fill(name, message))

        return send

    def _receive(self):
        """Pass images on as a driver of the stand-in's graph."""
        kinds = {IMAGE: "Image", DEPTH: "Image", INFO: "CameraInfo"}
        ways = []
        for topic, kind in kinds.items():
            name = f"sensor_msgs/msg/{kind}"
            reader = self.participant.reader(
                topic, dds.struct(name), dds.quality("best effort", "volatile")
            )
            kept = standin.Publisher(graph, interfaces.CLASSES[name], topic, standin.SENSOR_DATA)
            ways.append((name, reader, kept))
        while not self._ended.wait(0.01):
            for name, reader, publisher in ways:
                for sample in reader.take(5):
                    if isinstance(sample, dds.struct(name)):
                        publisher.publish(interfaces.from_other(name, sample))

    def close(self):
        self._ended.set()
        self._thread.join()


def test_a_peer_decodes_every_topic_and_matches_as_ros_does(null):
    """Field by field what the node published; each quality of service matches what it must."""
    domain = Domain(DOMAIN, LOOPBACK)
    participant = dds.Peer(DOMAIN)
    string = dds.struct("std_msgs/msg/String")
    matrix = [
        participant.writer(f"/matrix_{n}", string, dds.quality(*offered))
        for n, offered in enumerate(QUALITIES)
    ]
    command = (sys.executable, "-m", "tests.ros2.dds", str(DOMAIN))
    with running(null, {"camera.depth": DEPTH, "camera.tasks": TASKS}):
        bridge = Bridge(participant)
        with subprocess.Popen(
            command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as peer:
            assert peer.stdout is not None
            heard = json.loads(peer.stdout.readline())
            bridge.close()
            for offered, writer in zip(QUALITIES, matrix, strict=True):
                wanted = {each for each in QUALITIES if profile(offered).offers(profile(each))}
                until(lambda: matched(writer) == wanted)  # noqa: B023 - called at once
            peer.communicate()
    for topic, published in bridge.published.items():
        own = [dds.document(interfaces.through_bytes(each)) for each in published]
        assert heard[topic], topic
        assert all(each in own for each in heard[topic]), topic
    del domain


def profile(quality):
    reliability, durability = quality
    return QoSProfile(
        10,
        ReliabilityPolicy.RELIABLE if reliability == "reliable" else ReliabilityPolicy.BEST_EFFORT,
        DurabilityPolicy.VOLATILE if durability == "volatile" else DurabilityPolicy.TRANSIENT_LOCAL,
    )


def matched(writer):
    """Return the qualities of the subscriptions that a writer matches."""
    handles = writer.get_matched_subscriptions()
    found = [writer.get_matched_subscription_data(handle) for handle in handles]
    return {dds.names_of(each.qos) for each in found if each is not None}


@pytest.mark.parametrize(
    "name", sorted(n for n in interfaces.CLASSES if n.startswith("legato_msgs"))
)
def test_own_messages_have_one_form(name):
    """DDS and rosbags write the same bytes of services, the action and the message."""
    empty = interfaces.CLASSES[name]()
    texts = {field: f"{field} of it" for field, kind in empty.FIELDS.items()
             if kind == (interfaces.BASE, ("string", 0))}  # fmt: skip
    message = interfaces.CLASSES[name](**texts)
    data = interfaces.to_cdr(message)
    assert bytes(dds.fill(name, message).serialize()) == data
    read = dds.struct(name).deserialize(data)
    assert interfaces.from_other(name, read) == message
