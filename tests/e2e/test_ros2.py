"""`legato ros2` in a process, a camera and a listener in another, between them the real DDS."""

from __future__ import annotations

import contextlib
import time

import pytest

pytest.importorskip("cyclonedds", reason="its wheels follow new Pythons late")

from legato_client import Box
from legato_client.ros import messages

from tests.e2e.ros_bus import PREDICTIONS, Bus, node
from tests.e2e.scenes import CIRCLE, SIZE, overlap, two_shapes
from tests.e2e.server import until
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
    bus.predicted.clear()
    bus.told.clear()
    return bus


def told(bus, message):
    bus.listen()
    return [each for each in bus.told if each.message.startswith(message)]


def test_an_image_gives_an_array_with_its_stamp(server, fresh, tmp_path):
    """And a subscriber that comes late is told the model; the node ends when it is asked to.

    Its endpoints announce their types' hashes.
    """
    with node(tmp_path, server.address, "--period", "0.1") as process:
        fresh.until_matched()
        assert fresh.type_hashes() == [messages.TYPE_HASHES[messages.Image]]
        header = fresh.show()
        until(lambda: fresh.listen() or fresh.found)
        (array,) = fresh.found
        assert array.header == header
        (circle,) = array.detections
        assert circle.header == header
        assert circle.results[0].hypothesis.class_id == "red circle"
        left, top, right, bottom = CIRCLE
        assert abs(circle.bbox.center.position.x - (left + right) / 2) < 8
        assert abs(circle.bbox.size_y - (bottom - top)) < 16
        assert fresh.info().method == "legato-tiny"
        until(lambda: fresh.listen() or value(fresh, "answered") == "1")
        until(lambda: fresh.listen() or value(fresh, "engine") == "serving")
        until(lambda: fresh.listen() or told(fresh, "no images"))
        process.terminate()
        assert process.wait() == 0


def test_tracked_objects_are_published_where_they_are_now(server, fresh, tmp_path):
    """Predictions fit what is shown at their own time better than the arrays that came before."""
    speed = 24  # pixels a second; the circle starts at the top

    def box(array):
        (circle,) = array.detections
        center = circle.bbox.center.position
        sides = circle.bbox.size_x / 2, circle.bbox.size_y / 2
        xs, ys = (
            (at - half, at + half) for at, half in zip((center.x, center.y), sides, strict=True)
        )
        return Box(xs[0] / SIZE[0], ys[0] / SIZE[1], xs[1] / SIZE[0], ys[1] / SIZE[1])

    def seconds(array):
        return array.header.stamp.sec + array.header.stamp.nanosec / 1e9

    def fall():
        """Return how well predictions of one fall fit, and the arrays before them."""
        begin, fits = time.time(), []
        while time.time() < begin + 5:
            fresh.show(round(speed * (time.time() - begin)) - 57)
            fresh.listen()
            time.sleep(0.05)
        during = [each for each in fresh.found if begin < seconds(each)]
        measured = [each for each in during if each.detections]
        for array in fresh.predicted:
            before = [each for each in measured if seconds(each) < seconds(array)]
            if len(before) > 2 and array.detections and seconds(array) < begin + 5:
                truth = two_shapes(round(speed * (seconds(array) - begin)) - 57).boxes["red circle"]
                assert array.detections[0].id == measured[-1].detections[0].id
                fits.append([overlap(box(each), truth) for each in (array, before[-1])])
        return fits

    options = ("--track", "--predictions", PREDICTIONS, "--prediction-rate", "10")
    with node(tmp_path, server.address, *options):
        fresh.until_matched()
        falls = iter(fall, None)
        fits = next(each for each in falls if each)  # a slow machine answers too few in the first
    expected, last = (sum(each) / len(fits) for each in zip(*fits, strict=True))
    assert expected > last, f"{len(fits)} predictions"


def drain(server):
    """As an operator ends it: it says that it goes away, and answers what it has."""
    server.process.terminate()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("seconds", "losses"),
    [(3, [end]), pytest.param(60, [drain, end], marks=pytest.mark.slow)],
)
def test_a_camera_outlives_its_servers(fresh, tmp_path, seconds, losses):
    """One after another is lost while it answers; the last one goes on.

    Each array is of an image that was shown, none comes twice, and the node tells of each change.
    """
    shown: list[tuple[int, int]] = []
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(started(tmp_path, f"server-{number}", *NULL))
            for number in range(len(losses) + 1)
        ]
        addresses = "ipv4:" + ",".join(each.address for each in servers)
        stack.enter_context(node(tmp_path, addresses, "--period", "0.2", "--max-age", "2"))
        fresh.until_matched()
        for lose in (*losses, None):
            play(fresh, seconds / (len(losses) + 1), shown)
            until(lambda: play(fresh, 0.2, shown) or is_answered(fresh, shown[-3:]))
            if lose is not None:
                (busy,) = [each for each in servers if each.load().sessions]
                servers.remove(busy)
                lose(busy)
        until(lambda: told(fresh, "answering") or play(fresh, 0.2, shown))
        until(lambda: fresh.listen() or value(fresh, "reconnects") == str(len(losses)))
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


def value(bus, key):
    """Of the last diagnostics."""
    values = {each.key: each.value for each in bus.told[-1].values} if bus.told else {}
    return values.get(key)
