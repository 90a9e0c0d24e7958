"""Moondream's own package in front of a Legato server, and the requests that it sends."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from legato.v1 import geometry_pb2, inference_pb2, task_pb2
from PIL import Image

from tests.clients.python.fake_server import INFO, failure
from tests.clients.python.web.serving import DATA_URL, IMAGE

BOX = {"x_min": 0.25, "y_min": 0.5, "x_max": 0.75, "y_max": 1.0}
ABOUT = {"request_id": "r-1", "finish_reason": "stop"}
END = {"completed": True, "request_id": "r-1"}
OUTLINE = {"path": "M 0 0 L 1 0 L 1 1 z", "bbox": BOX}
PIECES = ("M 0 0 ", "L 1 0 L 1 1 z")

needs_moondream = pytest.mark.skipif(
    importlib.util.find_spec("moondream") is None,
    reason="needs the package moondream, without the kernels that it brings: make tools",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of the package, the request that version 2.6.1 makes of it, and its answers."""

    call: Callable[[Any, Any], Any]
    path: str
    body: dict[str, Any]
    answer: Any  # of the endpoint: a document, or the events of a stream
    value: Any  # of the package


CASES = {
    "caption": Case(
        lambda model, image: model.caption(image, length="short", settings={"temperature": 0.5}),
        "caption",
        {"length": "short", "stream": False, "settings": {"temperature": 0.5}},
        {"caption": "a cat", **ABOUT},
        {"caption": "a cat"},
    ),
    "caption, streamed": Case(
        lambda model, image: list(model.caption(image, stream=True)["caption"]),
        "caption",
        {"length": "normal", "stream": True},
        [{"chunk": "a cat"}, END],
        ["a cat"],
    ),
    "query": Case(
        lambda model, image: model.query(image, "why?", reasoning=True, spatial_refs=[[0.5, 0.25]]),
        "query",
        {"question": "why?", "stream": False, "reasoning": True, "spatial_refs": [[0.5, 0.25]]},
        {"answer": "two cats", "reasoning": {"text": "hm", "grounding": []}, **ABOUT},
        {"answer": "two cats", "reasoning": {"text": "hm", "grounding": []}},
    ),
    "query, streamed": Case(
        lambda model, image: list(model.query(image, "why?", stream=True)["answer"]),
        "query",
        {"question": "why?", "stream": True},
        [
            {"chunk": "two "},
            {"chunk": "cats"},
            {**END, "reasoning": {"text": "hm", "grounding": []}},
        ],
        ["two ", "cats"],
    ),
    "detect": Case(
        lambda model, image: model.detect(image, "cat", settings={"max_objects": 3}),
        "detect",
        {"object": "cat", "settings": {"max_objects": 3}},
        {"objects": [BOX], **ABOUT},
        {"objects": [BOX]},
    ),
    "point": Case(
        lambda model, image: model.point(image, "nose", spatial_refs=[[0, 0, 1, 1]]),
        "point",
        {"object": "nose", "spatial_refs": [[0, 0, 1, 1]]},
        {"points": [{"x": 0.5, "y": 0.25}], "count": 1, **ABOUT},
        {"points": [{"x": 0.5, "y": 0.25}]},
    ),
    "segment": Case(
        lambda model, image: model.segment(image, "cat"),
        "segment",
        {"object": "cat", "stream": False},
        {**OUTLINE, **ABOUT},
        OUTLINE,
    ),
    "segment, streamed": Case(
        lambda model, image: list(model.segment(image, "cat", stream=True)),
        "segment",
        {"object": "cat", "stream": True},
        [
            {"type": "bbox", "bbox": BOX},
            *[{"type": "path_delta", "chunk": each, "completed": False} for each in PIECES],
            {"type": "final", **OUTLINE, **END},
        ],
        [{"bbox": BOX}, *[{"chunk": each} for each in PIECES], {**OUTLINE, "completed": True}],
    ),
}
TOKEN = {"X-Moondream-Auth": "legato_a_b"}


def _without_reason(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "finish_reason"}


@pytest.mark.parametrize("name", CASES)
def test_recorded_requests(web, name):
    """What the package sends is answered in the form that it reads, and its token is passed on."""
    case = CASES[name]
    reply = web.post(f"/v1/{case.path}", {"image_url": DATA_URL, **case.body}, TOKEN)
    assert reply.status == 200
    assert reply.headers["x-request-id"] == "r-1"
    if case.body.get("stream"):
        assert [_without_reason(event) for event in reply.events] == case.answer
    else:
        assert reply.json == case.answer
    _, asked, metadata = web.fake.requests[-1]
    assert asked.image.encoded.data == IMAGE
    assert metadata["authorization"] == "Bearer legato_a_b"


@needs_moondream
@pytest.mark.parametrize("name", CASES)
def test_the_package_itself(web, name, monkeypatch):
    """The installed package sends the recorded request, and understands the answer to it."""
    import moondream
    from moondream import cloud_vl

    sent = []
    send = cloud_vl.urllib.request.urlopen

    def record(request):
        sent.append(request)
        return send(request)

    monkeypatch.setattr(cloud_vl.urllib.request, "urlopen", record)
    case = CASES[name]
    model = moondream.vl(endpoint=f"{web.url}/v1", api_key="legato_a_b")
    assert case.call(model, Image.new("RGB", (8, 8))) == case.value
    (request,) = sent
    body = json.loads(request.data)
    assert body.pop("image_url").startswith("data:image/jpeg;base64,")
    assert (request.full_url, body) == (f"{web.url}/v1/{case.path}", case.body)
    assert request.get_header("X-moondream-auth") == "legato_a_b"


@needs_moondream
def test_the_packages_chat(web):
    """Its chat is OpenAI's, streamed or not, with the image as a part of a message."""
    import moondream

    model = moondream.vl(endpoint=f"{web.url}/v1", model="fake")
    image = {"type": "image_url", "image_url": {"url": DATA_URL}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "how many?"}]}]
    settings = {"temperature": 0.5, "max_tokens": 9}
    answer = model.chat(messages, settings=settings, reasoning=True)
    assert answer["message"]["content"] == "two cats"
    assert answer["message"]["reasoning"] == "hm"
    assert list(model.chat(messages, stream=True)["message"]) == ["two ", "cats"]
    asked = web.fake.last("Query")
    assert asked.sampling == task_pb2.Sampling(temperature=0.5, max_tokens=9)


def test_parameters_arrive(web):
    """Settings, places and names of models reach the contract's fields of the same meaning."""
    image = {"image_url": DATA_URL}
    settings = {"temperature": 0.5, "top_p": 0.25, "max_tokens": 9, "max_objects": 3}
    places = [[0.5, 0.25], [0.0, 0.25, 0.5, 1.0]]
    body = {**image, "object": "nose", "settings": settings, "spatial_refs": places}
    web.post("/v1/point", {**body, "model": "fake/cups@12"})
    asked = web.fake.last("Point")
    assert asked.sampling == task_pb2.Sampling(temperature=0.5, top_p=0.25, max_tokens=9)
    assert (asked.max_objects, asked.object) == (3, "nose")
    assert list(asked.spatial_refs) == [
        geometry_pb2.SpatialRef(point=geometry_pb2.Point(x=0.5, y=0.25)),
        geometry_pb2.SpatialRef(box=geometry_pb2.Box(x_min=0.0, y_min=0.25, x_max=0.5, y_max=1.0)),
    ]
    assert (asked.options.model, asked.options.adapter) == ("fake", "cups@12")


def test_a_question_without_a_image(web):
    """`/v1/query` needs no image, and other endpoints do."""
    assert web.post("/v1/query", {"question": "why?"}).json["answer"] == "two cats"
    assert not web.fake.last("Query").HasField("image")
    refused = web.post("/v1/caption", {"length": "short"})
    assert (refused.status, "image_url" in refused.error["message"]) == (400, True)


def test_nothing_found(web):
    """An outline of nothing is an empty path without a box."""
    web.fake.script["Segment"].append(inference_pb2.SegmentResponse(info=INFO))
    reply = web.post("/v1/segment", {"image_url": DATA_URL, "object": "unicorn"})
    assert reply.json == {"path": "", "bbox": None, **ABOUT}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("detect", {"object": "cat", "stream": True}, "stream"),
        ("point", {"object": "cat", "spatial_refs": [[0.1, 0.2, 0.3]]}, "spatial_refs[0]"),
        ("caption", {"image_url": "http://a.example/a.jpg"}, "image_url"),
        ("caption", {"image_url": "data:,text"}, "image_url"),
    ],
)
def test_refusals(web, path, body, field):
    """What cannot be answered is a 400 with the field; nothing is asked, and no URL fetched."""
    reply = web.post(f"/v1/{path}", {"image_url": DATA_URL, **body})
    assert (reply.status, reply.error["param"]) == (400, field)
    assert not web.fake.requests


def test_a_failure_before_the_stream_has_its_status(web):
    """A request that the server refuses is no stream that begins with 200."""
    refusal = failure(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    web.fake.script["Generate"].append([refusal])
    reply = web.post("/v1/caption", {"image_url": DATA_URL, "stream": True})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
