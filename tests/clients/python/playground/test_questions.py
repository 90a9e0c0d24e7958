"""Questions about an image, from the page's requests to the server and back."""

from __future__ import annotations

import dataclasses
import datetime
import json

import httpx
import pytest
from legato.v1 import error_pb2
from legato_client import Client, DetectTask, LegatoError, Options, PointTask, Unavailable
from legato_client._types.server import ConfidenceInfo, ModelInfo, model_document
from legato_client.web.playground import routes
from legato_client.web.playground.snippets import Connection, code

from tests.clients.python.playground.conftest import lines
from tests.clients.python.playground.questions import TASKS
from tests.e2e.server import until
from tests.service.harness import image_bytes

ENDLESS = {"query": {"question": "why?"}, "sampling": {"max_tokens": 7000}}


@pytest.fixture(scope="module")
def image_id(site):
    sent = httpx.post(f"http://{site}/playground/pictures", content=image_bytes(), timeout=100)
    assert (sent.json()["width"], sent.json()["height"]) == (8, 6)
    return sent.json()["image_id"]


def ask(page, task, **more):
    response = page.post("/playground/generate", json={"task": task, **more})
    assert response.status_code == 200, response.text
    return lines(response)


def test_the_server_is_described(page, server):
    """What the page chooses from, and nothing that is secret."""
    told = page.get("/playground/server").json()
    assert told["server"]["target"] == server.address
    assert [model["name"] for model in told["models"]] == ["null"]
    assert "detect" in told["models"][0]["tasks"]
    assert told["max_picture_bytes"] == routes.MAX_IMAGE_BYTES


def test_a_calibrated_model_is_described():
    """Its date too is something that JSON has."""
    fitted_at = datetime.datetime(2026, 11, 25, tzinfo=datetime.UTC)
    sure = ConfidenceInfo(("detect",), ("detect",), "my kitchen", fitted_at)
    model = ModelInfo("m", (), ("detect",), True, 2048, sure)
    assert json.loads(json.dumps(model_document(model)))["confidence"]["fitted_at"] == (
        "2026-11-25T00:00:00+00:00"
    )


@pytest.mark.parametrize(("skill", "kind"), [("detect", "object"), ("point", "point")])
def test_objects_are_streamed(page, server, image_id, skill, kind):
    """Each once, between the beginning and the whole result that the client itself gets."""
    events = ask(page, {skill: {"object": "dog"}}, image_id=image_id)
    assert [event["type"] for event in events] == ["started", *[kind] * 3, "finished"]
    result = events[-1]["result"]
    assert (result["type"], result["info"]["model"]) == (skill, "null")
    task = DetectTask("dog") if skill == "detect" else PointTask("dog")
    with Client(server.address) as client:
        (own,) = client.run_tasks(image_bytes(), [task])
    assert not isinstance(own, LegatoError)
    found = dataclasses.asdict(own)[f"{kind}s"]
    assert [{**each, "type": kind} for each in found] == events[1:-1]


@pytest.mark.parametrize("skill", ["caption", "query"])
def test_words_are_streamed(page, image_id, skill):
    """In pieces that make up the result; a reader that lags gets larger ones."""
    asked = {} if skill == "caption" else {"question": "why?"}
    events = ask(page, {skill: asked, "sampling": {"max_tokens": 5}}, image_id=image_id)
    first, *texts, last = events
    assert (first["type"], last["type"]) == ("started", "finished")
    assert {event["type"] for event in texts} == {"text"}
    whole = last["result"]["caption" if skill == "caption" else "answer"]
    assert "".join(event["text"] for event in texts) == whole
    assert last["result"]["info"]["finish_reason"] == "length"


def test_an_outline_is_streamed(page, image_id):
    """Its box first, then its path in pieces."""
    first, *pieces, last = ask(page, {"segment": {"object": "dog"}}, image_id=image_id)
    (segment,) = last["result"]["segments"]
    assert first["type"] == "started"
    assert {piece["type"] for piece in pieces} == {"outline"}
    assert pieces[0]["box"] == segment["box"]
    assert "".join(piece["path_delta"] for piece in pieces) == segment["path"]


def test_a_question_needs_no_image(page):
    """A chat without one."""
    message = {"role": "CHAT_ROLE_USER", "parts": [{"text": "hello"}]}
    events = ask(page, {"query": {"messages": [message]}, "sampling": {"max_tokens": 3}})
    words = "".join(event["text"] for event in events if event["type"] == "text")
    assert words == events[-1]["result"]["answer"]


def test_leaving_cancels_the_work(page, server):
    """The server holds nothing soon after the page is gone."""
    with page.stream("POST", "/playground/generate", json={"task": ENDLESS}) as response:
        events = response.iter_lines()  # kept: httpx leaves with it
        assert '"started"' in next(events)
        until(lambda: server.holds(running=1, waiting=0))
    until(lambda: server.holds(running=0, waiting=0))


def test_an_error_names_its_field_and_what_to_do(page):
    """That of the server, within the stream."""
    (failure,) = ask(page, {"detect": {"object": ""}})
    assert failure["type"] == "failed"
    assert failure["reason"] == "INVALID_FIELD"
    assert failure["fields"][0]["field"]
    assert failure["hint"] == "Correct it and ask again."


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"task": {"detect": {"objekt": "dog"}}}, "task"),
        ({"task": {}}, "task"),
        ({"task": []}, "task"),
        ({"task": {"caption": {"length": 77}}}, "task.caption.length"),
        ({"task": {"detect": {"object": "dog"}}, "options": []}, "options"),
        ({"task": {"detect": {"object": "dog"}}, "image_id": 5}, "image_id"),
        ({"task": {"query": {"question": "?", "spatial_refs": [{}]}}}, "task.spatial_refs"),
    ],
)
def test_a_malformed_request_is_refused(page, body, field):
    """By the process itself, with the field."""
    response = page.post("/playground/generate", json=body)
    assert response.status_code == 400
    assert [each["field"] for each in response.json()["fields"]] == [field]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_what_is_no_json_object_is_refused(page, body):
    """Also what nests too deep."""
    response = page.post("/playground/code", content=body)
    assert (response.status_code, response.json()["code"]) == (400, "INVALID_ARGUMENT")


def test_a_file_that_is_no_image_is_refused(page):
    """As soon as it is sent."""
    response = page.post("/playground/pictures", content=b"no image")
    assert response.status_code == 400
    assert response.json()["reason"] == "IMAGE_UNDECODABLE"
    assert response.json()["hint"]


def test_bodies_are_bounded(page, monkeypatch):
    """Before they are in memory."""
    monkeypatch.setattr(routes, "MAX_IMAGE_BYTES", 1000)
    response = page.post("/playground/pictures", content=iter([b"x" * 600] * 2))
    assert response.status_code == 413
    assert response.json()["message"] == "the body has more than 1000 bytes"


def test_every_reason_has_a_remedy():
    """All that the contract knows, and none that it does not."""
    prefix = "ERROR_REASON_"
    reasons = {
        name.removeprefix(prefix) for name in error_pb2.ErrorReason.DESCRIPTOR.values_by_name
    }
    assert set(routes._REMEDIES) == reasons - {"UNSPECIFIED"}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_the_python_program_asks_the_task(task, server, tmp_path, monkeypatch, capsys):
    """Run as it is shown, it prints the events that the server streams."""
    (tmp_path / "street.jpg").write_bytes(image_bytes())
    monkeypatch.chdir(tmp_path)
    program = code(Connection(server.address), "street.jpg", task, Options()).python
    namespace: dict[str, object] = {}
    exec(compile(program, "snippet", "exec"), namespace)
    assert namespace["task"] == task
    shown = capsys.readouterr().out
    assert shown.startswith("Started(")
    assert "Finished(" in shown


def test_the_page_gets_the_programs(page, server):
    """Of the request as it asked it."""
    request = {"task": {"detect": {"object": "dog"}}, "picture": "scene.jpg"}
    made = page.post("/playground/code", json=request).json()
    assert made["python"].startswith("from legato_client import Client, DetectTask\n")
    assert f'with Client("{server.address}") as client' in made["python"]


def test_a_token_s_bytes_reach_the_page(page):
    """Tokens with their alternatives are JSON, whatever bytes they have."""
    body = {"task": {"query": {"question": "why?"}}, "options": {"top_logprobs": 2}}
    response = page.post("/playground/generate", json=body)
    *_, finished = map(json.loads, response.text.splitlines())
    token = finished["result"]["info"]["tokens"][0]
    assert bytes(token["bytes"]).decode() == token["text"]


def test_a_lost_server_is_told_in_words():
    """What gRPC says of it is a detail."""
    told = routes.failure_json(Unavailable("failed to connect to all addresses; last error: ..."))
    assert told["message"] == "the server does not answer"
    assert told["detail"].startswith("failed to connect")
    loading = routes.failure_json(Unavailable("loading", reason="ENGINE_STARTING"))
    assert loading["message"] == "loading"
