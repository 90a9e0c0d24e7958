"""Sessions over the page's websocket."""

from __future__ import annotations

import json
import struct
import time

import pytest
from legato_client.web.playground import routes
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.e2e.server import until
from tests.service.harness import image_bytes

OPENING = {"tasks": [{"task_id": "dog", "detect": {"object": "dog"}}]}


@pytest.fixture
def session(site):
    origin = Origin(f"http://{site}")
    with connect(f"ws://{site}/playground/session", origin=origin, close_timeout=100) as socket:
        yield socket


def frame(sequence, image=None, captured=None):
    now = time.time() * 1000 if captured is None else captured
    return struct.pack("<dI", now, sequence) + (image_bytes() if image is None else image)


def receive(session):
    return json.loads(session.recv(timeout=100))


def until_told(session, kind):
    while (message := receive(session))["type"] != kind:
        assert message["type"] != "failed", message
    return message


def test_frames_are_answered_and_counted(session):
    """Each with its sequence; finishing ends the session when all are answered."""
    session.send(json.dumps(OPENING))
    opened = receive(session)
    assert (opened["type"], opened["model"]) == ("opened", "null")
    assert opened["credits"] > 0
    for sequence in (3, 8):
        session.send(frame(sequence))
        message = until_told(session, "result")
        assert (message["sequence"], message["task_id"], message["last"]) == (sequence, "dog", True)
        assert len(message["outcome"]["objects"]) == 3
    session.send('{"finish": true}')
    ended = until_told(session, "ended")
    counted = {"sent": 2, "answered": 2, "dropped": 0, "skipped": 0}
    assert {name: ended["stats"][name] for name in counted} == counted


def test_objects_are_followed_and_filtered(session):
    """A tracked task names its objects from frame to frame; unsure ones are left out."""
    task = {"task_id": "dog", "detect": {"object": "dog", "min_confidence": 0.5, "tracking": {}}}
    session.send(json.dumps({"tasks": [task]}))
    assert receive(session)["type"] == "opened"
    seen = []
    for sequence in (1, 2):
        session.send(frame(sequence))
        objects = until_told(session, "result")["outcome"]["objects"]
        assert [each["confidence"] for each in objects] == [0.75, 0.9375]
        seen.append([each["track_id"] for each in objects])
    assert seen[0] == seen[1]
    assert len(set(seen[0]) - {""}) == 2
    session.send('{"finish": true}')
    until_told(session, "ended")


def test_the_newest_frame_wins(session):
    """While a frame is worked on for a second, others replace each other or are left out."""
    long = {"query": {"question": "why?"}, "sampling": {"max_tokens": 500}}
    session.send(json.dumps({"tasks": [long], "policy": "latest_wins"}))
    assert receive(session)["type"] == "opened"
    for sequence in range(1, 41):
        session.send(frame(sequence))
    session.send('{"finish": true}')
    ended = until_told(session, "ended")
    stats = ended["stats"]
    assert stats["sent"] + stats["skipped"] == 40
    assert stats["answered"] + stats["dropped"] == stats["sent"]
    assert stats["answered"] >= 1
    assert stats["dropped"] + stats["skipped"] > 0


def test_a_bad_image_fails_its_frame_only(session):
    """The next one is answered."""
    session.send(json.dumps(OPENING))
    assert receive(session)["type"] == "opened"
    session.send(frame(1, b"no image"))
    outcome = until_told(session, "result")["outcome"]
    assert (outcome["type"], outcome["reason"]) == ("failed", "IMAGE_UNDECODABLE")
    session.send(frame(2))
    assert until_told(session, "result")["outcome"]["type"] == "detect"


@pytest.mark.parametrize(
    "opening",
    [
        {},
        {"tasks": []},
        {"tasks": [{}]},
        {"tasks": OPENING["tasks"] * 2},
        OPENING | {"policy": "oldest_wins"},
        OPENING | {"policy": ["latest_wins"]},
        OPENING | {"max_frame_age": -1},
        OPENING | {"max_frame_age": 1e308},
        OPENING | {"max_frame_age": "soon"},
        OPENING | {"tempo": 3},
        [],
    ],
)
def test_a_wrong_opening_is_refused(session, opening):
    """With a failure of the same form as any other."""
    session.send(json.dumps(opening))
    failure = receive(session)
    assert (failure["type"], failure["code"]) == ("failed", "INVALID_ARGUMENT")


WRONG = {
    "short": b"short",
    "long": bytes(routes.MAX_FRAME_BYTES + 1),
    "unnumbered": frame(0),
    "before 1970": frame(1, captured=-1.0),
    "at no time": frame(1, captured=float("nan")),
    "unknown": "{}",
}


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG)
def test_a_wrong_message_ends_the_session(session, message):
    """It says what was wrong."""
    session.send(json.dumps(OPENING))
    assert receive(session)["type"] == "opened"
    session.send(message)
    failure = receive(session)
    assert (failure["type"], failure["code"]) == ("failed", "INVALID_ARGUMENT")


def test_leaving_ends_the_session(site, server):
    """The server holds none soon after the page is gone."""
    with connect(f"ws://{site}/playground/session", close_timeout=100) as socket:
        socket.send(json.dumps(OPENING))
        assert receive(socket)["type"] == "opened"
        until(lambda: server.load().sessions == 1)
    until(lambda: server.load().sessions == 0)
