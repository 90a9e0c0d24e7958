"""OpenAI's and Moondream's HTTP interfaces in front of a real server with credentials."""

from __future__ import annotations

import asyncio
import contextlib
import json

import openai
import pytest
from legato_client import Client

from tests.clients.python.web.serving import (
    CHAT,
    DATA_URL,
    HELLO,
    data_url,
    http_server,
    post,
    send,
)
from tests.e2e.server import PATIENCE, Server, until
from tests.service.access.credentials import Token, write
from tests.service.harness import image_bytes

OPERATOR = Token("op", ["admin"], tenant="")
ROBOT = Token("robot", ["infer"])


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server of the null engine that asks for tokens."""
    folder = tmp_path_factory.mktemp("http")
    write(folder / "tokens.toml", OPERATOR, ROBOT)
    options = ("--model", "null", "--null-step-ms", "5", "--tokens", str(folder / "tokens.toml"))
    with Server(folder, *options) as server:
        yield server.address


@pytest.fixture(scope="module")
def url(address):
    """The HTTP interfaces in front of it."""
    with http_server(address) as found:
        yield found


@pytest.fixture(scope="module")
def client(url):
    """OpenAI's client with a token of that server."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=ROBOT.text, max_retries=0) as made:
        yield made


def ask(client, **more):
    """A chat completion."""
    return client.chat.completions.create(model="null", messages=HELLO, **more)


def test_a_stream_says_what_an_answer_says(client):
    """The pieces of a stream are the text of the answer, with the same usage and reason."""
    answer = ask(client, max_completion_tokens=6)
    options = {"include_usage": True}
    *told, last = ask(client, max_completion_tokens=6, stream=True, stream_options=options)
    texts = [chunk.choices[0].delta.content or "" for chunk in told]
    assert "".join(texts) == answer.choices[0].message.content
    assert told[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == answer.usage.completion_tokens == 6


def test_logprobs_spell_the_answer(client):
    """The tokens that are told are those of the answer, without thoughts and the ending one."""
    answer = ask(client, logprobs=True, extra_body={"reasoning": True})
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert answer.choices[0].message.reasoning


@pytest.mark.parametrize(
    ("token", "status"),
    [(ROBOT.text, 200), ("", 401), ("legato_x_y", 401), (OPERATOR.text, 403)],
    ids=["robot", "none", "unknown", "operator"],
)
def test_the_server_decides_about_tokens(url, token, status):
    """A caller is who its token says, and may do what its scopes say."""
    reply = post(url, CHAT, {"messages": HELLO}, {"Authorization": f"Bearer {token}"})
    assert reply.status == status


def test_what_the_server_refuses(client):
    """An unknown model and a wrong order of messages are told with the server's reasons."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    late = [*HELLO, {"role": "system", "content": "be brief"}, *HELLO]
    with pytest.raises(openai.BadRequestError) as order:
        client.chat.completions.create(model="null", messages=late)
    assert order.value.code == "invalid_field"
    assert "messages" in str(order.value.param)
    with pytest.raises(openai.BadRequestError) as cold:
        ask(client, temperature=-1)
    assert cold.value.param == "temperature"


def test_leaving_frees_the_engine(address, client):
    """When the reader of a stream leaves, the engine stops working for it."""
    stream = ask(client, max_completion_tokens=7000, stream=True)
    next(iter(stream))
    with Client(address, token=OPERATOR.text) as operator:
        until(lambda: operator.load().running == 1)
        stream.close()
        until(lambda: operator.load().running == 0)


def test_images(url):
    """An image in a data URL is decoded by the server, and bytes that are none are refused."""
    body = {"image_url": data_url(image_bytes()), "object": "cat"}
    token = {"X-Moondream-Auth": ROBOT.text}
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
