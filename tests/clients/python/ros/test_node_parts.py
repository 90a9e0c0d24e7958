"""What a node is called, and what it says of itself."""

from __future__ import annotations

import time

import pytest
from legato_client.ros.node import Health, Level
from legato_client.stream.frames import FrameCounters

participant = pytest.importorskip(
    "legato_client.ros.node", reason="wheels of cyclonedds follow new Pythons late"
)


@pytest.mark.parametrize("topic", ["/camera/image_raw", "/a", "/_x/Y9"])
def test_topics_are_named_as_in_ros(topic):
    """With rt in front."""
    assert participant.dds_name(topic) == f"rt{topic}"


@pytest.mark.parametrize("topic", ["", "/", "camera", "/camera/", "//camera", "/9", "/a b", "/a\n"])
def test_other_names_are_refused(topic):
    """The message says what a name is."""
    with pytest.raises(ValueError, match="a topic is /NAME"):
        participant.dds_name(topic)


def connected() -> FrameCounters:
    counters = FrameCounters()
    counters.server = "connected"
    return counters


def test_a_lost_server_is_an_error():
    """Whatever was answered before."""
    counters = connected()
    counters.count("taken")
    counters.count_answered(0.1, 0)
    counters.server = "lost: connection refused"
    level, message, values = Health(counters).now("serving")
    assert (level, message) == (Level.ERROR, "server lost: connection refused")
    assert (values["answered"], values["age"], values["age p95"]) == ("1", "0.100", "0.100")


@pytest.mark.parametrize("engine", ["lost", "stuck"])
def test_a_lost_engine_is_an_error(engine):
    """Though its server is there."""
    assert Health(connected()).now(engine)[:2] == (Level.ERROR, f"engine {engine}")


def test_silence_is_a_warning():
    """Of the camera, else of the server."""
    counters = connected()
    health = Health(counters)
    assert health.now("serving")[:2] == (Level.WARN, "no images")
    counters.count("taken")
    assert health.now("serving")[:2] == (Level.WARN, "no answers")
    counters.count_answered(0.1, 0)
    assert health.now("serving")[:2] == (Level.OK, "answering")


def test_failed_tasks_are_told_once():
    """In the period in which they failed."""
    counters = connected()
    health = Health(counters)
    counters.count("taken")
    counters.count_answered(0.1, 3)
    assert health.now("serving")[:2] == (Level.WARN, "3 tasks failed")
    assert health.now("serving")[:2] == (Level.OK, "answering")


def test_an_engine_of_unknown_state_is_no_fault():
    """Its state is told as it is."""
    counters = connected()
    counters.count("taken")
    counters.count_answered(time.time() * 0, 0)
    level, _, values = Health(counters).now("unknown: PERMISSION_DENIED")
    assert (level, values["engine"]) == (Level.OK, "unknown: PERMISSION_DENIED")
