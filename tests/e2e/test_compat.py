"""Interfaces of other services in front of a real server: `legato compat` and `legato http`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.protobuf import message_factory
from legato_client import AsyncClient, Client
from legato_client import compat as compat_module
from legato_client._images.sources import AllowedFolders
from legato_client.cli import main
from legato_client.compat import ForeignService, MappingError

from tests.clients.python.web.serving import (
    CHAT,
    DATA_URL,
    HELLO,
    data_url,
    http_server,
    post,
    send,
)
from tests.e2e.server import ENVIRONMENT, PATIENCE, Server, until
from tests.service.access.credentials import Authority, Token, write
from tests.service.harness import image_bytes

PAGE = Path(__file__).parents[2] / "docs" / "migration-from-moondream.md"
PROTO, MAPPING = (
    re.search(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]  # type: ignore[index]
    for kind in ("proto", "toml")
)
"""The page's own."""

OTHER_PROTO = """
syntax = "proto3";
service Eyes {
  rpc Caption(Ask) returns (Told);
  rpc Look(Ask) returns (Told);
  rpc Tell(Ask) returns (stream Told);
  rpc Find(Ask) returns (stream Told);
  rpc Watch(stream Ask) returns (stream Told);
  rpc Upload(stream Ask) returns (Told);
}
enum Mood { CALM = 0; BUSY = 1; }
message Ask {
  string image = 1;
  string text = 2;
  optional uint32 limit = 3;
  bytes data = 4;
  map<string, string> labels = 5;
  repeated Corner corners = 6;
}
message Corner { float x = 1; float y = 2; }
message Told {
  string text = 1;
  bool last = 2;
  int32 left = 3;
  float score = 4;
  Mood mood = 5;
  repeated string names = 6;
  Corner middle = 7;
}
"""
OTHER_MAPPING = """
proto = "eyes.proto"
service = "Eyes"

[methods.Caption]
skill = "caption"
image_form = "base64"
request = { image = "image", length = "labels.length || 'short'", max_tokens = "limit", seed = 7 }
response = { text = "caption", last = true, mood = "'BUSY'" }

[methods.Look]
skill = "detect"
image_form = "path"
request = { image = "image", object = "text", max_objects = "limit" }
response.left = "objects[0].pixels.x_min"
response.score = "objects[0].confidence || `0`"
response.names = "objects[].label"
response.middle = "objects[0].center"

[methods.Tell]
skill = "query"
request = { image = "data", question = "text", max_tokens = "limit", stop = "image" }
response = { text = "delta", last = "done" }

[methods.Find]
skill = "point"
request = { image = "data", object = "text", max_objects = 2, spatial_refs = "corners[].[x, y]" }
response = { text = "object.label", middle = "object.point", last = "done" }

[methods.Watch]
skill = "detect"
request = { image = "data", object = "text", max_objects = 1 }
response.names = "objects[].label"
"""
ROBOT = Token("robot", ["infer", "upload"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both services with their mappings, and an image."""
    made: Path = tmp_path_factory.mktemp("compat")
    for name, text in (
        ("moondream.proto", PROTO),
        ("moondream.toml", MAPPING),
        ("eyes.proto", OTHER_PROTO),
        ("eyes.toml", OTHER_MAPPING),
    ):
        (made / name).write_text(text)
    (made / "cat.png").write_bytes(image_bytes())
    return made


@pytest.fixture(scope="module")
def server(folder):
    """A server of the null engine that asks for tokens."""
    write(folder / "tokens.toml", ROBOT)
    options = ("--model", "null", "--null-step-ms", "2", "--tokens", str(folder / "tokens.toml"))
    with Server(folder, *options) as made:
        yield made


class Caller:
    """A client that a foreign .proto makes: `caller.Query(query="Who?")`."""

    def __init__(self, mapping: Path, address: str, root: bytes = b"") -> None:
        self._service = ForeignService.read(mapping).descriptor
        if root:
            self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(root))
        else:
            self.channel = grpc.insecure_channel(address)
        self.metadata = (("authorization", f"Bearer {ROBOT.text}"),)

    def __getattr__(self, name: str) -> Any:
        method = self._service.methods_by_name[name]
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        kind = (
            ("unary", "stream")[method.client_streaming],
            ("unary", "stream")[method.server_streaming],
        )
        call = getattr(self.channel, "_".join(kind))(
            f"/{self._service.full_name}/{name}", request.SerializeToString, response.FromString
        )

        def ask(*messages: dict[str, Any], timeout: float = PATIENCE, **fields: Any) -> Any:
            if method.client_streaming:
                sent = iter([request(**each) for each in messages])
                return list(call(sent, timeout=timeout, metadata=self.metadata))
            answer = call(request(**fields), timeout=timeout, metadata=self.metadata)
            return list(answer) if method.server_streaming else answer

        return ask


@contextlib.contextmanager
def compat(server, mapping, *options, root=b""):
    """A caller of `legato compat`, which is stopped as an operator does; `root` is for TLS."""
    command = [sys.executable, "-m", "legato_client.cli", "compat", str(mapping), "--json"]
    command += ["--server", server.address, "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            caller = Caller(mapping, ready["address"], root)
            yield caller
            caller.channel.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def moondream(server, folder):
    with compat(server, folder / "moondream.toml", "--require-token") as caller:
        yield caller


@pytest.fixture(scope="module")
def eyes(server, folder):
    with compat(server, folder / "eyes.toml", "--allow-path", str(folder)) as caller:
        yield caller


def refusal(code, call, **fields):
    """What the failed call says."""
    with pytest.raises(grpc.RpcError) as failed:
        call(**fields)
    assert failed.value.code() == code, failed.value
    return failed.value.details()


def test_the_page_answers_a_robots_client(moondream):
    """An image is encoded once and asked about by what stands for it, as that client does."""
    encoded = moondream.EncodeImage(image_data=image_bytes()).encoded_image
    assert encoded
    assert moondream.Query(encoded_image=encoded, query="Who?").answer
    found = moondream.Detect(encoded_image=encoded, subject="cup")
    assert found.found
    assert {each.name for each in found.objects} == {"cup"}
    assert all(0 <= each.x_min < each.x_max <= 1 for each in found.objects)
    position = moondream.FindObject(encoded_image=encoded, subject="cup").position
    middle = (found.objects[0].x_min + found.objects[0].x_max) / 2
    assert position == ("left" if middle < 0.333 else "right" if middle > 0.667 else "center")


def test_failures_have_legatos_status_in_their_words(moondream):
    """The message names the foreign request's field; what is held no more is NOT_FOUND."""
    bad = refusal(grpc.StatusCode.INVALID_ARGUMENT, moondream.EncodeImage, image_data=b"no image")
    assert "image_data" in bad
    gone = refusal(grpc.StatusCode.NOT_FOUND, moondream.Query, encoded_image=b"sha256:0", query="a")
    assert "IMAGE_NOT_FOUND" in gone or "image" in gone
    empty = refusal(grpc.StatusCode.INVALID_ARGUMENT, moondream.Query, encoded_image=b"a")
    assert empty.startswith("query: is required")
    none = refusal(grpc.StatusCode.INVALID_ARGUMENT, moondream.EncodeImage)
    assert none.startswith("image_data: is required")


def test_the_server_decides_about_tokens(moondream, monkeypatch):
    """A call without one is refused, and a wrong one by the Legato server."""
    monkeypatch.setattr(moondream, "metadata", ())
    call = moondream.EncodeImage
    assert "token" in refusal(grpc.StatusCode.UNAUTHENTICATED, call, image_data=image_bytes())
    monkeypatch.setattr(moondream, "metadata", (("authorization", "Bearer legato_x_y"),))
    refusal(grpc.StatusCode.UNAUTHENTICATED, call, image_data=image_bytes())


def test_deadlines_pass_through(moondream):
    """A call that has no time left is DEADLINE_EXCEEDED, and the next one is answered."""
    image = moondream.EncodeImage(image_data=image_bytes()).encoded_image
    call, expired = moondream.Query, grpc.StatusCode.DEADLINE_EXCEEDED
    refusal(expired, call, encoded_image=image, query="Who?", timeout=1e-4)
    assert call(encoded_image=image, query="Who?").answer


def test_images_by_path_and_in_base64(eyes, folder):
    """Both are the image; a path outside of the folder is refused, and so is bad base64."""
    text = base64.b64encode(image_bytes()).decode()
    told = eyes.Caption(image=text, limit=4)
    assert (bool(told.text), told.last, told.mood) == (True, True, 1)
    assert eyes.Caption(image=f"data:image/png;base64,{text}", limit=4).text == told.text
    assert len(eyes.Caption(image=text, limit=9).text) > len(told.text)
    found = eyes.Look(image="cat.png", text="cup", limit=2)
    assert list(found.names) == ["cup"] * len(found.names)
    assert len(found.names) in (1, 2)
    assert found.left >= 0
    assert found.middle.x > 0
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert "image: is not valid base64" in refusal(invalid, eyes.Caption, image="%")
    for path in ("../cat.png", "/etc/hostname", "no.png"):
        assert "image: cannot be read" in refusal(invalid, eyes.Look, image=path, text="cup")
    wrong = refusal(invalid, eyes.Caption, image=text, labels={"length": "epic"})
    assert "must be one of ['long', 'normal', 'short'], got 'epic'" in wrong


def test_streams(eyes):
    """Texts and objects come as they decode, the result last; two streams answer each request."""
    *texts, last = eyes.Tell(data=image_bytes(), text="Who?", limit=6)
    assert len(texts) > 1
    assert all(each.text and not each.last for each in texts)
    assert (last.text, last.last) == ("", True)
    *points, last = eyes.Find(data=image_bytes(), text="cup", corners=[{"x": 0.5, "y": 0.5}])
    assert {each.text for each in points} == {"cup"}
    assert last.last
    answers = eyes.Watch(*({"data": image_bytes(), "text": each} for each in ("cup", "cat")))
    assert [set(each.names) for each in answers] == [{"cup"}, {"cat"}]


def test_a_text_to_stop_at_is_one(eyes):
    """A field with one text is no list of its letters."""
    asked = {"data": image_bytes(), "text": "Who?", "limit": 6}
    whole = "".join(each.text for each in eyes.Tell(**asked))
    stop = whole.split()[-1]
    until_stop = "".join(each.text for each in eyes.Tell(**asked, image=stop))
    assert until_stop.strip() == whole[: whole.index(stop)].strip()


async def test_calls_at_once_are_bounded(folder, monkeypatch):
    """Each may hold the largest message, before the Legato server has seen its token."""
    monkeypatch.setattr(compat_module, "_MAX_CALLS", 1)
    service = ForeignService.read(folder / "eyes.toml")
    async with AsyncClient("127.0.0.1:1") as client:
        server = compat_module.CompatServer(
            service, client, timeout=PATIENCE, folders=AllowedFolders([])
        )
        port = await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watch: Any = channel.stream_stream("/Eyes/Watch")
            calls = [watch(timeout=PATIENCE) for _ in range(2)]  # neither sends a request
            ends = [asyncio.ensure_future(each.code()) for each in calls]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert [await each for each in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            for each in calls:
                each.cancel()
        await server.stop()


def test_a_stream_that_fails_has_its_status(eyes):
    """As a unary call has."""
    refused = refusal(grpc.StatusCode.INVALID_ARGUMENT, eyes.Tell, data=b"no image", text="Who?")
    assert refused.startswith("data:")


def test_calls_over_tls(server, folder):
    """With a certificate, and the token of each call."""
    authority = Authority()
    pair = authority.server()
    (folder / "server.pem").write_bytes(pair.chain)
    (folder / "server.key").write_bytes(pair.key)
    files = ("--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key"))
    mapping = folder / "moondream.toml"
    with compat(server, mapping, *files, root=authority.pem) as caller:
        assert caller.EncodeImage(image_data=image_bytes()).encoded_image


def test_what_is_not_mapped_is_unimplemented(eyes):
    """Upload is no method that can be mapped, and the others go on."""
    with pytest.raises(grpc.RpcError) as failed:
        eyes.channel.unary_unary("/Eyes/Upload")(b"", metadata=eyes.metadata, timeout=PATIENCE)
    assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------- mistakes

MISTAKES = [
    ('service = "Eyes"', 'service = "Eye"', "service: 'Eye' is none of Eyes"),
    ('proto = "eyes.proto"', 'proto = "eye.proto"', "eye.proto: cannot be read: No such file"),
    ('proto = "eyes.proto"\n', "", "proto: is missing"),
    ("methods.Look", "methods.Lok", "methods: 'Lok' is none of Caption, Look, Tell, Find, Watch"),
    ("methods.Look", "methods.Upload", "methods.Upload: a stream of requests needs one of"),
    ('"caption"\nimage', '"captain"\nimage', "methods.Caption.skill: 'captain' is none of detect"),
    ('form = "path"', 'form = "url"', "methods.Look.image_form: 'url' is none of file, base64"),
    ('image_form = "path"\n', "", "methods.Look.image_form: 'image' is a text, so it is base64"),
    (', object = "text", max_objects = "limit"', "", "methods.Look.request: detect needs 'object'"),
    (', question = "text"', "", "methods.Tell.request: query needs 'question'"),
    ('image = "data", object', "object", "methods.Find.request: point needs an image"),
    ('image = "data", question', "question", ""),
    ("max_objects = 2", "max_object = 2", "methods.Find.request: 'max_object' is none of image,"),
    ("length = ", "lenght = ", "methods.Caption.request: 'lenght' is none of image, length"),
    ('question = "text"', 'question = "test"', "methods.Tell.request.question: 'test': there is"),
    ('response.left = "', 'response.lft = "', "methods.Look.response: 'lft' is none of text, last"),
    ("pixels.x_min", "pixels.x", "methods.Look.response.left: 'objects[0].pixels.x': there is no"),
    ('"objects[].label"\nresponse.m', '"objects"\nresponse.m', "methods.Look.response"),
    ("objects[0].center", "objects[0].label", "response.middle: takes the fields of Corner, not a"),
    ('last = "done"', 'last = "length(delta) > `0`"', "methods.Tell.response.last"),
    ('text = "caption"', 'text = "objects["', "methods.Caption.response.text: 'objects[': "),
    ('response.names = "objects[].label"\n', "response.names = 1\n", "names: takes a list, not a"),
    ("skill", "skil", "methods.Caption: 'skil' is none of skill, request, response, image_form"),
    ('form = "path"', "form = 1", "methods.Look.image_form: must be a text, not a number"),
]


@pytest.mark.parametrize(("right", "wrong", "said"), MISTAKES, ids=[each[1] for each in MISTAKES])
def test_mistakes_are_refused_at_the_start(right, wrong, said, folder):
    """With the file, the entry and the alternatives, in one line."""
    changed = OTHER_MAPPING.replace(right, wrong, 1)
    assert changed != OTHER_MAPPING
    path = folder / "wrong.toml"
    path.write_text(changed)
    if not said:  # a question may have no image
        ForeignService.read(path)
        return
    with pytest.raises(MappingError) as refused:
        ForeignService.read(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.proto", b"service {", "bad.proto:1:9: Expected service name"),
        ("bad.proto", b'syntax = "proto3"; message A {}', "has no service"),
        ("bad.bin", b"\xff\xff", "is not readable"),
    ],
)
def test_a_contract_that_is_none_is_named(name, content, said, folder):
    """By its compiler's first line, or as a descriptor set that is none."""
    (folder / name).write_bytes(content)
    (folder / "bad.toml").write_text(f'proto = "{name}"\nservice = "A"\nmethods = {{}}\n')
    with pytest.raises(MappingError, match=re.escape(said)):
        ForeignService.read(folder / "bad.toml")


def test_the_command_refuses_before_it_listens(folder, capsys):
    """A mistake is a wrong use, and paths need a folder."""
    (folder / "wrong.toml").write_text("proto")
    assert main(["compat", str(folder / "wrong.toml")]) == 2
    assert f"{folder / 'wrong.toml'}: is not readable: " in capsys.readouterr().err
    assert main(["compat", str(folder / "eyes.toml")]) == 2
    assert "--allow-path" in capsys.readouterr().err


# ---------------------------------------------------------------- http

OPERATOR = Token("op", ["admin"], tenant="")
CALLER = Token("robot", ["infer"])


@pytest.fixture(scope="module")
def http_address(tmp_path_factory):
    """A server of the null engine that asks for tokens."""
    folder = tmp_path_factory.mktemp("http")
    write(folder / "tokens.toml", OPERATOR, CALLER)
    options = ("--model", "null", "--null-step-ms", "5", "--tokens", str(folder / "tokens.toml"))
    with Server(folder, *options) as server:
        yield server.address


@pytest.fixture(scope="module")
def url(http_address):
    """The HTTP interfaces in front of it."""
    with http_server(http_address) as found:
        yield found


@pytest.fixture(scope="module")
def openai_client(url):
    """OpenAI's client with a token of that server."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=CALLER.text, max_retries=0) as made:
        yield made


def ask(openai_client, **more):
    """A chat completion."""
    return openai_client.chat.completions.create(model="null", messages=HELLO, **more)


def test_a_stream_says_what_an_answer_says(openai_client):
    """The pieces of a stream are the text of the answer, with the same usage and reason."""
    answer = ask(openai_client, max_completion_tokens=6)
    options = {"include_usage": True}
    *told, last = ask(openai_client, max_completion_tokens=6, stream=True, stream_options=options)
    texts = [chunk.choices[0].delta.content or "" for chunk in told]
    assert "".join(texts) == answer.choices[0].message.content
    assert told[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == answer.usage.completion_tokens == 6


def test_logprobs_spell_the_answer(openai_client):
    """The tokens that are told are those of the answer, without thoughts and the ending one."""
    answer = ask(openai_client, logprobs=True, extra_body={"reasoning": True})
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert answer.choices[0].message.reasoning


@pytest.mark.parametrize(
    ("token", "status"),
    [(CALLER.text, 200), ("", 401), ("legato_x_y", 401), (OPERATOR.text, 403)],
    ids=["robot", "none", "unknown", "operator"],
)
def test_the_server_decides_about_bearer_tokens(url, token, status):
    """A caller is who its token says, and may do what its scopes say."""
    reply = post(url, CHAT, {"messages": HELLO}, {"Authorization": f"Bearer {token}"})
    assert reply.status == status


def test_what_the_server_refuses(openai_client):
    """An unknown model and a wrong order of messages are told with the server's reasons."""
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    late = [*HELLO, {"role": "system", "content": "be brief"}, *HELLO]
    with pytest.raises(openai.BadRequestError) as order:
        openai_client.chat.completions.create(model="null", messages=late)
    assert order.value.code == "invalid_field"
    assert "messages" in str(order.value.param)
    with pytest.raises(openai.BadRequestError) as cold:
        ask(openai_client, temperature=-1)
    assert cold.value.param == "temperature"


def test_leaving_frees_the_engine(http_address, openai_client):
    """When the reader of a stream leaves, the engine stops working for it."""
    stream = ask(openai_client, max_completion_tokens=7000, stream=True)
    next(iter(stream))
    with Client(http_address, token=OPERATOR.text) as operator:
        until(lambda: operator.load().running == 1)
        stream.close()
        until(lambda: operator.load().running == 0)


def test_images(url):
    """An image in a data URL is decoded by the server, and bytes that are none are refused."""
    body = {"image_url": data_url(image_bytes()), "object": "cat"}
    token = {"X-Moondream-Auth": CALLER.text}
    found = post(url, "/v1/detect", body, token).json["objects"]
    assert sorted(found[0]) == ["confidence", "x_max", "x_min", "y_max", "y_min"]
    refused = post(url, "/v1/detect", {**body, "image_url": DATA_URL}, token)
    assert (refused.status, refused.error["code"]) == (400, "image_undecodable")


def test_hundreds_of_streams_begin_and_leave_the_process_ready(tmp_path):
    """More streams than the server begins on one connection all get data; readiness is answered.

    Their tokens come slowly: none ends before the last one begins, on a slow machine either.
    """
    num_streams = 300
    options = ("--model", "null", "--null-step-ms", "500", "--max-running", str(num_streams))
    with Server(tmp_path, *options) as server, http_server(server.address) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 2000}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

        async def streams():
            async with asyncio.timeout(PATIENCE), contextlib.AsyncExitStack() as opened:
                connections = []
                for _ in range(num_streams):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    opened.callback(writer.transport.abort)
                    writer.write(sent)
                    connections.append((reader, writer))
                for reader, _ in connections:
                    await reader.readuntil(b"data: ")
                await asyncio.to_thread(until, lambda: server.load().running == num_streams)
                ready = await asyncio.to_thread(send, url, "GET", "/readyz", b"", {})
                return ready.status

        assert asyncio.run(streams()) == 200
