"""`legato ros2` in a process, a camera and a listener in another, between them the real DDS."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("cyclonedds", reason="its wheels follow new Pythons late")

from tests.e2e.ros_bus import Bus, node
from tests.e2e.server import Server, until
from tests.e2e.test_lost_servers import end, started

NULL = ("--model", "null", "--null-objects", "2")
RATE = 30  # images a second


@pytest.fixture(scope="module")
def bus():
    """One for all tests: a domain is configured once in a process."""
    return Bus()


@pytest.fixture
def fresh(bus):
    """The bus, without what it heard before."""
    bus.listen()
    bus.found.clear()
    bus.told.clear()
    return bus


def told(bus, message):
    bus.listen()
    return [each for each in bus.told if each.message.startswith(message)]


def test_an_image_gives_an_array_with_its_stamp(fresh, tmp_path):
    """And a subscriber that comes late is told the model; the node ends when it is asked to."""
    with (
        Server(tmp_path, *NULL) as server,
        node(tmp_path, server.address, "--period", "0.1", "--absent-score", "0.25") as process,
    ):
        fresh.until_matched()
        header = fresh.show()
        until(lambda: fresh.listen() or fresh.found)
        (array,) = fresh.found
        assert array.header == header
        assert [each.results[0].hypothesis.class_id for each in array.detections] == 2 * [
            "red circle"
        ]
        assert array.detections[0].results[0].hypothesis.score == 0.25
        assert array.detections[0].header == header
        assert fresh.info().method == "null"
        until(lambda: told(fresh, "no images"))
        values = {each.key: each.value for each in fresh.told[-1].values}
        assert (values["answered"], values["engine"]) == ("1", "serving")
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_a_camera_outlives_its_servers(fresh, tmp_path, seconds):
    """One says that it goes away, the next is killed, and the last one goes on answering.

    Each array is of an image that was shown, none comes twice, and the node tells of both changes.
    """
    shown = []
    with (
        started(tmp_path, "one", *NULL) as one,
        started(tmp_path, "two", *NULL) as two,
        started(tmp_path, "three", *NULL) as three,
        node(
            tmp_path,
            "ipv4:" + ",".join(each.address for each in (one, two, three)),
            *("--period", "0.2", "--max-age", "2"),
        ),
    ):
        fresh.until_matched()
        servers = [one, two, three]
        for farewell in (lambda server: server.process.terminate(), end, None):
            play(fresh, seconds / 3, shown)
            until(lambda: play(fresh, 0.2, shown) or is_answered(fresh, shown[-3:]))
            (busy,) = [each for each in servers if each.load().sessions]
            servers.remove(busy)
            if farewell is not None:
                farewell(busy)
        until(lambda: told(fresh, "answering") or play(fresh, 0.2, shown))
        until(lambda: fresh.listen() or reconnects(fresh) == 2)
    stamps = [(each.header.stamp.sec, each.header.stamp.nanosec) for each in fresh.found]
    assert len(stamps) == len(set(stamps))
    assert set(stamps) <= set(shown)


def play(bus, seconds, shown):
    """Show images at the rate of a camera, each with another stamp."""
    end_of_play = time.monotonic() + seconds
    due = time.monotonic()
    while due < end_of_play:
        header = bus.show()
        shown.append((header.stamp.sec, header.stamp.nanosec))
        bus.listen()
        due += 1 / RATE
        time.sleep(max(0.0, due - time.monotonic()))


def is_answered(bus, stamps):
    """Whether one of these images has its array."""
    return any((a.header.stamp.sec, a.header.stamp.nanosec) in stamps for a in bus.found[-9:])


def reconnects(bus):
    values = {each.key: each.value for each in bus.told[-1].values} if bus.told else {}
    return int(values.get("reconnects", 0))
