"""The page: its files, questions and sessions to the server and back, and what others may do."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format
from legato.v1 import error_pb2, inference_pb2
from legato_client import (
    Box,
    CachedImage,
    CaptionTask,
    Client,
    DetectTask,
    LegatoError,
    Message,
    Options,
    Point,
    PointTask,
    QueryTask,
    ResponseFormat,
    Sampling,
    SegmentTask,
    Task,
    Unavailable,
)
from legato_client._proto import requests
from legato_client._types.server import ConfidenceInfo, ModelInfo, model_document
from legato_client.web.playground import routes
from legato_client.web.playground.routes import CONTENT_SECURITY_POLICY, STATIC
from legato_client.web.playground.snippets import Connection, code
from legato_client.web.playground.tasks import read_task
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.clients.python.web.serving import http_server
from tests.e2e.server import Server, until
from tests.service.harness import image_bytes

QUOTES = "a \"quoted\" 'text' with \\n, $HOME, `date`, $(date), %d\nand 日本語 in {two} lines"
TASKS: list[Task] = [
    DetectTask("dog"),
    DetectTask(QUOTES, max_objects=2, sampling=Sampling(temperature=0.7, seed=3)),
    DetectTask("cup", min_confidence=0.35, order="confidence"),
    PointTask("cup", min_confidence=0.9, order="confidence"),
    PointTask("gaze", spatial_refs=(Point(0.25, 0.125),)),
    SegmentTask("tree", spatial_refs=(Box(0.1, 0.2, 0.3, 0.4), Point(0.5, 0.6))),
    CaptionTask("short", Sampling(max_tokens=5, top_p=0.9, top_k=4, stop=("dog", "$HOME `x` \\n"))),
    QueryTask("What is this?", reasoning=True, task_id="what"),
    QueryTask(
        messages=(
            Message("system", "Be brief."),
            Message("user", QUOTES),
            Message("assistant", "Two."),
            Message("user", "Why?"),
        )
    ),
    QueryTask(QUOTES, response_format=ResponseFormat(json_schema='{"type": "integer"}')),
    QueryTask("Which?", response_format=ResponseFormat(choices=("a", QUOTES))),
    QueryTask("Which?", response_format=ResponseFormat(regex='[a-c]+"\\d$')),
    QueryTask("Which?", response_format=ResponseFormat(grammar='root ::= "a" | "b"\n')),
]


def conversation(*images):
    """Two messages that show images, as the page asks them."""
    first, second = images
    said = (Message("user", (first, QUOTES)), Message("assistant", "Two."))
    return QueryTask(messages=(*said, Message("user", (second, "And here?"))), task_id="two")


SHOWN = conversation(Path("street.jpg"), Path("fruit.jpg"))


# ---------------------------------------------------------------- questions
# Questions about an image, from the page's requests to the server and back.

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
        ({"task": {"query": {"response_format": {}}}}, "task.query.response_format"),
        ({"task": {"query": {"images": [{"image": {"image_id": "a"}}]}}}, "task.query.images"),
        (
            {"task": {"query": {"messages": [{"role": 2, "parts": [{"image": {}}]}]}}},
            "task.query.images",
        ),
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


@pytest.mark.parametrize("task", [*TASKS, SHOWN], ids=lambda task: type(task).__name__)
def test_the_python_program_asks_the_task(task, server, tmp_path, monkeypatch, capsys):
    """Run as it is shown, it prints the events that the server streams."""
    (tmp_path / "street.jpg").write_bytes(image_bytes())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fruit.jpg").write_bytes(image_bytes(size=(6, 8)))
    program = code(Connection(server.address), "street.jpg", task, Options()).python
    namespace: dict[str, object] = {}
    has_format = isinstance(task, QueryTask) and task.response_format is not None
    lacks = pytest.raises(LegatoError, match="the null engine has no response_format")
    with lacks if has_format else contextlib.nullcontext():
        exec(compile(program, "snippet", "exec"), namespace)
    assert namespace["task"] == task
    shown = capsys.readouterr().out
    assert has_format or shown.startswith("Started(")
    assert has_format or "Finished(" in shown
    assert ("width=6, height=8" in shown) == (task == SHOWN)


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


# ---------------------------------------------------------------- live

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


# ---------------------------------------------------------------- snippets
# The programs that the page shows are programs that work.

each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
SECURED = Connection(
    "h.example:443", encrypted=True, authorities=True, certificate=True, token=True
)


@each_task
def test_the_page_s_json_is_the_contract_s(task):
    """A task survives the way from the client's values to JSON and back."""
    message = requests.generate(None, task, Options()).task
    assert read_task(json_format.MessageToDict(message)) == task
    assert read_task(json_format.MessageToDict(message, preserving_proto_field_name=True)) == task


@each_task
def test_the_command_sends_the_request(task, tmp_path):
    """What the shell gives grpcurl is the request, byte for byte in each text."""
    (tmp_path / "street.jpg").write_bytes(image_bytes())
    options = Options(model="null")
    command = code(Connection("127.0.0.1:50051"), "street.jpg", task, options).grpcurl
    sent = run_shell(command, tmp_path)
    expected = requests.generate(None, task, options)
    expected.image.encoded.data = image_bytes()
    assert json_format.Parse(sent, inference_pb2.GenerateRequest()) == expected


def test_filters_orders_and_alternatives_are_in_the_programs():
    """In each language, as that language writes them."""
    task = DetectTask("cup", min_confidence=0.35, order="confidence")
    made = code(Connection("127.0.0.1:50051"), "street.jpg", task, Options(top_logprobs=3))
    assert 'DetectTask("cup", min_confidence=0.35, order="confidence")' in made.python
    assert "Options(top_logprobs=3)" in made.python
    assert "legato.WithMinConfidence(0.35), legato.WithOrder(legato.OrderConfidence)" in made.go
    assert "legato.WithAlternatives(3)" in made.go
    assert '"min_confidence": 0.35, "order": "OBJECT_ORDER_CONFIDENCE"' in made.grpcurl
    assert '"top_logprobs": 3' in made.grpcurl


def test_a_conversation_shows_several_images(page, image_id):
    """The page names images by their ids in the contract's JSON, and files for the programs."""
    task = conversation(CachedImage(image_id), CachedImage(image_id))
    message = requests.generate(None, task, Options()).task
    for _ in range(2):
        message.query.images.add().image.image_id = image_id
    document = json_format.MessageToDict(message, preserving_proto_field_name=True)
    assert read_task(document) == task
    finished = ask(page, document)[-1]
    assert [each["image_id"] for each in finished["result"]["info"]["images"]] == [image_id] * 2
    del document["query"]["images"]
    request = {"task": document, "pictures": ["street.jpg", "a b.jpg"]}
    made = page.post("/playground/code", json=request).json()
    assert made["python"].startswith("from pathlib import Path\n\nfrom legato_client import Client")
    assert 'legato.WithImages(legato.File("street.jpg"), legato.File("image-2.jpg"))' in made["go"]
    assert "client.Generate(context.Background(), nil, task)" in made["go"]
    assert 'legato.UserParts(legato.Shown(), legato.Words("And here?"))' in made["go"]


def test_the_command_sends_the_images_that_messages_show(tmp_path):
    """In the task, in order, whatever the texts are."""
    files = {"street.jpg": image_bytes(), "fruit.jpg": image_bytes(size=(6, 8))}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    sent = run_shell(code(Connection("h:1"), None, SHOWN, Options(model="m")).grpcurl, tmp_path)
    expected = requests.generate(None, SHOWN, Options(model="m"))
    for data in files.values():
        expected.task.query.images.add().image.encoded.data = data
    assert json_format.Parse(sent, inference_pb2.GenerateRequest()) == expected


def run_shell(command: str, folder: Path) -> str:
    """The standard input of the command's grpcurl."""
    script = f"grpcurl() {{ cat; }}\n{command}"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_command_of_a_question_without_a_image(tmp_path):
    """It has no image at all."""
    command = code(Connection("127.0.0.1:50051"), None, QueryTask("why?"), Options()).grpcurl
    assert json.loads(run_shell(command, tmp_path)) == {"task": {"query": {"question": "why?"}}}


@pytest.mark.parametrize("task", [*TASKS, SHOWN], ids=lambda task: type(task).__name__)
def test_the_go_program_has_the_texts_and_the_right_form(task):
    """As gofmt reads it, where there is one; its strings are those of the task."""
    program = code(Connection("127.0.0.1:50051"), "street.jpg", task, Options(model="m")).go
    assert 'legato.File("street.jpg")' in program
    texts = [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', program)]
    if isinstance(task, DetectTask):
        assert task.object in texts
    gofmt = shutil.which("gofmt")
    if gofmt:
        done = subprocess.run([gofmt], input=program, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == program


def test_a_secured_server_is_reached_without_telling_a_secret():
    """Files have names to fill in, and the token stays in the environment."""
    made = code(SECURED, None, QueryTask("why?"), Options())
    assert 'ca="ca.pem", cert="client.pem", key="client-key.pem"' in made.python
    assert "LEGATO_TOKEN" in made.python
    assert 'legato.WithToken(os.Getenv("LEGATO_TOKEN"))' in made.go
    assert '-cacert ca.pem -cert client.pem -key client-key.pem -H "authorization: Bearer' in (
        made.grpcurl
    )
    plain = code(Connection("h:1", encrypted=True), None, QueryTask("why?"), Options())
    assert "tls=True" in plain.python
    assert "-plaintext" not in plain.grpcurl


@pytest.mark.parametrize("name", ["a b.jpg", "$(reboot).jpg", "-x.jpg", "../x.jpg", "é.jpg", ""])
def test_a_file_name_that_needs_quotes_is_replaced(name):
    """It would be another file's name in one language or the other."""
    made = code(Connection("h:1"), name, CaptionTask(), Options())
    assert "base64 -w0 image.jpg" in made.grpcurl
    assert '"image.jpg"' in made.python


# ---------------------------------------------------------------- files of the page

SCRIPTS = sorted(STATIC.glob("*.js"))
TEXTS = [*SCRIPTS, *STATIC.glob("*.css"), *STATIC.glob("*.html")]
PAGE = (STATIC / "index.html").read_text()
LATE = {"timeline.js"}  # loaded when its tab is shown, which says so if it is missing


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_file_names_another_host(path):
    """The page works without a network; the name of SVG's namespace is no address."""
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?://|[\"'(]//|@import|wss?://(?!\$)", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_what_exists(path):
    """Each name that is imported is exported there."""
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    for names, module in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', text):
        exported = (STATIC / module).read_text()
        for name in filter(None, (each.strip() for each in names.split(","))):
            assert re.search(rf"export (async )?(function\*?|class|const) {name}\b", exported), name
    for module in re.findall(r'import\("\./([^"]+)"\)', text):
        assert module in LATE or (STATIC / module).is_file()


def test_scripts_look_for_elements_that_exist():
    """An id that is looked for is in the page, or made by a script."""
    texts = "".join(path.read_text() for path in SCRIPTS)
    looked_for = set(re.findall(r'byId\("([^"]+)"\)', texts))
    known = set(re.findall(r'id="([^"]+)"', PAGE)) | set(re.findall(r'id: "([^"]+)"', texts))
    assert looked_for
    assert looked_for <= known


def test_the_page_s_files_exist():
    """Scripts, styles, the icon; styles and scripts are never inline."""
    named = re.findall(r'(?:src|href)="/static/([^"]+)"', PAGE)
    assert {"app.js", "theme.js", "base.css", "page.css", "icon.svg"} <= set(named)
    assert all((STATIC / name).is_file() for name in named)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", PAGE)


def test_the_images_come_with_their_licence():
    """And each that a script names is there."""
    for folder in ("samples", "drawings"):
        assert "MIT License" in (STATIC / folder / "LICENSE-fluent-emoji").read_text()
    samples = re.findall(r'file: "([^"]+)"', (STATIC / "picture.js").read_text())
    nouns = re.findall(r'noun: "([^"]+)"', (STATIC / "scene.js").read_text())
    assert len(samples) == 3
    assert all((STATIC / "samples" / name).is_file() for name in samples)
    assert {f"{noun}.webp" for noun in nouns} == {
        path.name for path in (STATIC / "drawings").glob("*.webp")
    }


NOWHERE = "127.0.0.1:9"
"""A server that is never asked."""

POSTS = ("/playground/generate", "/timeline/depth", "/v1/query")


@pytest.fixture(scope="module")
def bare_site():
    with serving(NOWHERE) as address:
        yield address


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://elsewhere.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_requests_of_other_sites_are_refused(bare_site, path, headers):
    """Whatever they ask for."""
    response = httpx.post(f"http://{bare_site}{path}", headers=headers, content=b"{}")
    assert response.status_code == 403
    assert response.json()["error"]["message"] == "requests of other sites are refused"


def test_sessions_of_other_sites_are_refused(bare_site):
    """A websocket is not bound by the browser's rules of origin."""
    address = f"ws://{bare_site}/playground/session"
    with pytest.raises(InvalidStatus) as refused:
        connect(address, origin=Origin("https://elsewhere.example"))
    assert refused.value.response.status_code == 403


def test_a_name_that_was_pointed_here_is_refused(bare_site):
    """DNS rebinding: the host is another's, so the origin agrees with it."""
    own = {"host": "rebound.example", "origin": "http://rebound.example"}
    reply = httpx.get(f"http://{bare_site}/", headers=own)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "wrong_host")


def test_the_page_may_be_opened_by_a_link_elsewhere(bare_site):
    """But not be a part of another page, nor be asked by its scripts."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx.get(f"http://{bare_site}/", headers=link).status_code == 200
    for path in ("/", "/static/app.js", "/playground/server", "/timeline/events"):
        part = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert httpx.get(f"http://{bare_site}{path}", headers=part).status_code == 403


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/healthz", "/nowhere"])
def test_every_answer_has_the_policies(bare_site, path):
    """Errors and files too."""
    headers = httpx.get(f"http://{bare_site}{path}", timeout=100).headers
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


STEP_MS = 2


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A token every two milliseconds, so that a stream is one."""
    options = ("--model", "null", "--null-step-ms", str(STEP_MS))
    with Server(tmp_path_factory.mktemp("null"), *options) as running:
        yield running


@pytest.fixture(scope="session")
def site(server: Server) -> Iterator[str]:
    """Where the page is, as HOST:PORT."""
    with serving(server.address) as address:
        yield address


@contextmanager
def serving(server: str) -> Iterator[str]:
    """A playground before a server; its HOST:PORT."""
    with http_server(server, page=True) as url:
        yield url.removeprefix("http://")


@pytest.fixture
def page(site: str) -> Iterator[httpx.Client]:
    """What the page's scripts see."""
    origin = {"origin": f"http://{site}"}
    with httpx.Client(base_url=f"http://{site}", headers=origin, timeout=100) as client:
        yield client


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON lines of a stream."""
    return [json.loads(line) for line in response.iter_lines()]
