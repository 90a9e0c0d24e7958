"""OpenAI's own client in front of a Legato server, and the OpenAPI document."""

from __future__ import annotations

import base64
import json
import re
import textwrap
import urllib.parse

import grpc
import msgspec
import openai
import pytest
from google.rpc import error_details_pb2
from legato.v1 import inference_pb2, task_pb2
from legato_client.web import openapi
from legato_client.web.operations import OperationRoute

from tests.clients.python.fake_server import STREAMS, events, failure
from tests.clients.python.web.serving import CHAT, DATA_URL, HELLO, IMAGE


def ask(client, messages=HELLO, **more):
    """A chat completion."""
    return client.chat.completions.create(model="fake", messages=messages, **more)


@pytest.mark.usefixtures("web")
def test_an_answer_has_what_the_client_reads(client):
    """Text, finish reason, usage, model and the request's id arrive where OpenAI's client looks."""
    answer = ask(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "two cats")
    assert (choice.finish_reason, answer.model, choice.logprobs) == ("stop", "fake", None)
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (7, 3, 10)
    assert (answer.id, answer._request_id) == ("chatcmpl-r-1", "r-1")


def test_parameters_arrive(web, client):
    """Each parameter that is served reaches the contract's field of the same meaning."""
    ask(
        client,
        temperature=0.5,
        top_p=0.25,
        max_completion_tokens=9,
        seed=3,
        stop=["\n", "end"],
        n=1,
        user="somebody",
        frequency_penalty=0,
        extra_body={"top_k": 4, "reasoning": True},
        extra_headers={"X-Request-Id": "mine"},
    )
    asked = web.fake.last("Query")
    assert asked.sampling == task_pb2.Sampling(
        temperature=0.5, top_p=0.25, top_k=4, max_tokens=9, seed=3, stop=["\n", "end"]
    )
    assert (asked.reasoning, asked.options.model, asked.options.request_id) == (
        True,
        "fake",
        "mine",
    )
    ask(client, max_tokens=8, stop="end")
    assert web.fake.last("Query").sampling == task_pb2.Sampling(max_tokens=8, stop=["end"])


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({"top_p": 0}, task_pb2.Sampling(top_k=1)),
        ({"top_p": 0, "top_k": 50}, task_pb2.Sampling(top_k=1)),
        ({"top_k": -1}, task_pb2.Sampling()),
        ({"top_k": 0}, task_pb2.Sampling(top_k=0)),
        ({"seed": -1}, task_pb2.Sampling()),
        ({"seed": -2}, task_pb2.Sampling(seed=2**64 - 2)),
        ({"seed": -(2**63)}, task_pb2.Sampling(seed=2**63)),
    ],
)
def test_parameters_of_a_wider_range(web, given, sampling):
    """Values that only OpenAI's API and servers like it have mean what they mean there."""
    assert web.post(CHAT, {"messages": HELLO, **given}).status == 200
    assert web.fake.last("Query").sampling == sampling


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("chat", "response", "schema"),
    [
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            SCHEMA,
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "any"}},
            {"type": "json_schema", "name": "any"},
            {},
        ),
        ({"type": "json_object"}, {"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, {"type": "text"}, None),
    ],
)
def test_formats_arrive(web, chat, response, schema):
    """A schema reaches the contract as it was written, from both APIs; text asks for nothing."""
    bodies = {
        CHAT: {"messages": HELLO, "response_format": chat},
        "/v1/responses": {"input": "hello", "text": {"format": response}},
    }
    for path, body in bodies.items():
        assert web.post(path, body).status == 200
        asked = web.fake.last("Query")
        assert asked.HasField("response_format") == (schema is not None)
        if schema is not None:
            assert json.loads(asked.response_format.json_schema) == schema


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_unknown_formats_are_refused(web, path, body, field):
    """A format that does not exist is a 400 that names the field; nothing is asked."""
    answer = web.post(path, {"messages": HELLO, **body} if path == CHAT else {"input": "x", **body})
    assert answer.status == 400
    assert answer.error["param"].startswith(field)


LONG = bytes(range(256)) * 3 + b"\xfb\xff"  # needs padding, and both signs that are not letters
LONG_BASE64 = base64.b64encode(LONG).decode()


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64," + base64.encodebytes(LONG).decode(),
        "data:image/png;base64," + "\r\n".join(textwrap.wrap(LONG_BASE64, 76)) + "\r\n",
        "data:image/png;base64," + LONG_BASE64.rstrip("="),
        "data:image/png;base64," + base64.urlsafe_b64encode(LONG).decode(),
        "data:image/png;base64," + base64.urlsafe_b64encode(LONG).decode().rstrip("="),
        "data:image/png;base64," + urllib.parse.quote(LONG_BASE64, safe=""),
        "data:image/png;base64," + urllib.parse.quote(base64.encodebytes(LONG), safe="/"),
        " DATA:image/png;charset=utf-8; BASE64 ," + LONG_BASE64,
        "data:;base64," + LONG_BASE64,
    ],
    ids=[
        "line breaks",
        "line breaks of HTTP",
        "no padding",
        "URL-safe",
        "URL-safe without padding",
        "percent-encoded",
        "percent-encoded line breaks",
        "spaces and capitals",
        "no type",
    ],
)
def test_data_urls_as_programs_write_them(web, url):
    """Each form that browsers read is the same image, at both APIs."""
    asked = [{"type": "text", "text": "what is it?"}, _shown(url)]
    assert web.post(CHAT, {"messages": [{"role": "user", "content": asked}]}).status == 200
    assert web.post("/v1/caption", {"image_url": url}).status == 200
    assert web.fake.last("Query").image.encoded.data == LONG
    assert web.fake.last("Caption").image.encoded.data == LONG


def test_a_large_data_url_with_line_breaks(web):
    """Images that are decoded on another thread are decoded alike."""
    large = LONG * 400
    url = "data:image/png;base64," + base64.encodebytes(large).decode()
    assert web.post("/v1/caption", {"image_url": url}).status == 200
    assert web.fake.last("Caption").image.encoded.data == large


@pytest.mark.parametrize("rest", [[], [{"type": "text", "text": ""}]])
def test_a_image_needs_no_words(web, client, rest):
    """A message with only an image arrives as one."""
    ask(client, [{"role": "user", "content": [_shown(), *rest]}])
    (message,) = web.fake.last("Query").messages
    assert message.parts[0].WhichOneof("part") == "image"
    assert "".join(part.text for part in message.parts) == ""


@pytest.mark.parametrize("empty", [{"content": ""}, {"content": None}, {}, {"content": []}])
def test_an_empty_answer_may_be_sent_back(web, empty):
    """A conversation with an answer of no words goes on."""
    turns = [*HELLO, {"role": "assistant", **empty}, *HELLO]
    assert web.post(CHAT, {"messages": turns}).status == 200
    said = [
        (each.role, [part.text for part in each.parts]) for each in web.fake.last("Query").messages
    ]
    assert [role for role, _ in said] == [
        task_pb2.CHAT_ROLE_USER,
        task_pb2.CHAT_ROLE_ASSISTANT,
        task_pb2.CHAT_ROLE_USER,
    ]
    assert "".join(said[1][1]) == ""


def test_a_conversation_about_a_image(web, client):
    """Roles and texts are kept, and the image of the first question stands before its words."""
    image = {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}}
    first = ask(client).choices[0].message
    ask(
        client,
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]},
            first,
            {"role": "user", "content": [{"type": "text", "text": "how "}] * 2},
        ],
    )
    asked = web.fake.last("Query")
    assert asked.image.encoded.data == IMAGE
    said = [(each.role, [part.text for part in each.parts]) for each in asked.messages]
    assert said == [
        (task_pb2.CHAT_ROLE_SYSTEM, ["be brief"]),
        (task_pb2.CHAT_ROLE_USER, ["", "what is it?"]),
        (task_pb2.CHAT_ROLE_ASSISTANT, ["two cats"]),
        (task_pb2.CHAT_ROLE_USER, ["how ", "how "]),
    ]
    assert asked.messages[1].parts[0].WhichOneof("part") == "image"


@pytest.mark.usefixtures("web")
def test_a_stream_is_in_order(client):
    """The role first, then thoughts and text as they are made, the reason, the usage last."""
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    *told, usage = chunks
    deltas = [chunk.choices[0].delta for chunk in told]
    assert [each.role for each in deltas] == ["assistant", *[None] * 4]
    assert [each.content for each in deltas] == ["", None, "two ", "cats", None]
    assert deltas[1].reasoning == "hm"
    assert [chunk.choices[0].finish_reason for chunk in told] == [*[None] * 4, "length"]
    assert [chunk.usage for chunk in told] == [None] * 5
    assert (usage.choices, usage.usage.total_tokens) == ([], 10)
    assert {(each.id, each.model) for each in chunks} == {("chatcmpl-r-1", "fake")}


def test_a_stream_tells_no_usage_unasked(web):
    """Without stream_options no event has a usage, and the stream ends with [DONE]."""
    reply = web.post(CHAT, {"messages": HELLO, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-request-id"] == "r-1"
    assert not [each for each in reply.events if "usage" in each]
    assert reply.body.endswith(b"data: [DONE]\n\n")


def _tokens(*pieces: str | bytes) -> list[inference_pb2.Token]:
    """Tokens of whole characters, or of parts of one, which complete no text."""
    return [
        inference_pb2.Token(token_id=1, text=each, bytes=each.encode(), logprob=-0.5)
        if isinstance(each, str)
        else inference_pb2.Token(token_id=2, bytes=each, logprob=-0.5)
        for each in pieces
    ]


_BYTES = "é😀".encode()
_END = ("tokens", inference_pb2.TokensDelta(tokens=_tokens("")))


def _stream_with_tokens(*last, reason):
    """Thoughts, then the first letter in two tokens, then text and what follows it."""
    completing = inference_pb2.Token(token_id=1, text="é", bytes=_BYTES[1:2], logprob=-0.5)
    told = events(
        ("reasoning", inference_pb2.ReasoningDelta(text="hm", tokens=_tokens("hm"))),
        ("tokens", inference_pb2.TokensDelta(tokens=_tokens("", _BYTES[:1]))),
        ("text", inference_pb2.TextDelta(text="é", tokens=[completing])),
        ("text", inference_pb2.TextDelta(text="ab", tokens=_tokens("a", "b"))),
        *last,
        finished=task_pb2.TaskResult(query=task_pb2.QueryResult(answer="éab")),
    )
    told[-1].finished.info.finish_reason = reason
    return told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("last", "reason", "more"),
    [
        pytest.param([_END], task_pb2.FINISH_REASON_STOP, [], id="the token of the end"),
        pytest.param(
            [("tokens", inference_pb2.TokensDelta(tokens=_tokens(_BYTES[2:5], _BYTES[5:6])))],
            task_pb2.FINISH_REASON_LENGTH,
            [("\\xf0\\x9f\\x98", [0xF0, 0x9F, 0x98]), ("\\x80", [0x80])],
            id="a character that the limit cuts",
        ),
        pytest.param(
            [("tokens", inference_pb2.TokensDelta(tokens=_tokens("E", "ND")))],
            task_pb2.FINISH_REASON_STOP,
            [],
            id="a stop string",
        ),
        pytest.param(
            [
                ("tokens", inference_pb2.TokensDelta(tokens=_tokens("E"))),
                _END,
                ("text", inference_pb2.TextDelta(text="E")),
            ],
            task_pb2.FINISH_REASON_STOP,
            [("E", [0x45])],
            id="the beginning of a stop string",
        ),
    ],
)
def test_logprobs(web, client, stream, last, reason, more):
    """Every token of the answer has its own bytes, also where it is a part of a character."""
    web.fake.script["Generate"].append(_stream_with_tokens(*last, reason=reason))
    answer = ask(client, logprobs=True, top_logprobs=0, stream=stream)
    if stream:
        told = [chunk.choices[0].logprobs for chunk in answer]
        tokens = [token for each in told if each is not None for token in each.content]
    else:
        assert answer.choices[0].message.content == "éab"
        tokens = answer.choices[0].logprobs.content
    assert [(token.token, token.bytes) for token in tokens] == [
        ("\\xc3", [0xC3]),
        ("\\xa9", [0xA9]),
        ("a", [0x61]),
        ("b", [0x62]),
        *more,
    ]
    assert {token.logprob for token in tokens} == {-0.5}
    assert web.fake.last("Generate").options.HasField("top_logprobs")


def test_alternatives(web, client):
    """The likeliest tokens come with their bytes, null where there are none, beside `logprobs`."""
    token = inference_pb2.Token(token_id=1, text="é", bytes="é".encode(), logprob=-0.5)
    token.alternatives.add(token_id=1, text="é", bytes="é".encode(), logprob=-0.5)
    token.alternatives.add(token_id=2, text="a", bytes=b"a", logprob=-1.5)
    token.alternatives.add(token_id=3, bytes=b"\xf0\x9f", logprob=-2.5)
    token.alternatives.add(token_id=4, logprob=-3.5)
    web.fake.script["Generate"].append(
        events(
            ("text", inference_pb2.TextDelta(text="é", tokens=[token])),
            finished=task_pb2.TaskResult(query=task_pb2.QueryResult(answer="é")),
        )
    )
    answer = ask(client, logprobs=True, top_logprobs=4)
    (told,) = answer.choices[0].logprobs.content
    assert [(each.token, each.logprob, each.bytes) for each in told.top_logprobs] == [
        ("é", -0.5, [0xC3, 0xA9]),
        ("a", -1.5, [0x61]),
        ("\\xf0\\x9f", -2.5, [0xF0, 0x9F]),
        ("", -3.5, None),
    ]
    assert web.fake.last("Generate").options.top_logprobs == 4
    web.fake.requests.clear()
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        ask(client, top_logprobs=2)
    assert not web.fake.requests


async def test_the_asyncio_client(web):
    """OpenAI's other client does the same, streaming and not."""
    async with openai.AsyncOpenAI(base_url=f"{web.url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.chat.completions.create(model="fake", messages=HELLO)
        assert answer.choices[0].message.content == "two cats"
        stream = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        assert isinstance(stream, openai.AsyncStream)
        texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(text for text in texts if text) == "two cats"


@pytest.mark.usefixtures("web")
def test_models(client):
    """All pages of the served models are listed, and each is found by its name."""
    assert [model.id for model in client.models.list()] == ["first", "second"]
    assert client.models.retrieve("second").context_length == 2048
    with pytest.raises(openai.NotFoundError, match="third"):
        client.models.retrieve("third")


REFUSED = {
    "n": 2,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "logit_bias": {"1": 5},
    "presence_penalty": 0.5,
    "reasoning_effort": "high",
    "modalities": ["text", "audio"],
    "store": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_is_refused(web, client, name):
    """A parameter that is not served is a 400 that names it; nothing is asked."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={name: REFUSED[name]})
    assert (caught.value.param, caught.value.code) == (name, "unsupported")
    assert not web.fake.requests


@pytest.mark.parametrize(
    "body",
    [
        {"temprature": 1},
        {"temperature": "hot"},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"seed": 2**64},
        {"max_tokens": 1, "max_completion_tokens": 2},
    ],
)
def test_malformed_bodies_are_refused(web, body):
    """A body of another form is a 400 whose message names the field."""
    reply = web.post(CHAT, {"messages": HELLO, **body})
    assert reply.status == 400
    assert next(iter(body)) in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"
    assert not web.fake.requests


HI = {"role": "assistant", "content": "hi"}


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def _shown(url: str = DATA_URL) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_several_images_stand_where_they_are_shown(web):
    """In order among the words; a single one stands before those of its message."""
    said = {"role": "user", "content": [_text("One:"), _shown(), _text("two:"), _shown()]}
    assert web.post(CHAT, {"messages": [said]}).status == 200
    asked = web.fake.last("Query")
    parts = [part.WhichOneof("part") for part in asked.messages[0].parts]
    assert parts == ["text", "image", "text", "image"]
    assert len(asked.images) == 2
    later = [*HELLO, HI, {"role": "user", "content": [_text("And?"), _shown()]}]
    assert web.post(CHAT, {"messages": later}).status == 200
    parts = [part.WhichOneof("part") for part in web.fake.last("Query").messages[2].parts]
    assert parts == ["text", "image"]
    alone = {"role": "user", "content": [_text("What?"), _shown()]}
    assert web.post(CHAT, {"messages": [alone]}).status == 200
    asked = web.fake.last("Query")
    assert [part.WhichOneof("part") for part in asked.messages[0].parts] == ["image", "text"]
    assert asked.HasField("image")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (
            [{"role": "user", "content": [_shown("https://a.example/a.jpg")]}],
            "messages[0].content[0]",
        ),
        (
            [{"role": "user", "content": [_shown("data:image/png;base64,***")]}],
            "messages[0].content[0]",
        ),
        *(
            (
                [{"role": "user", "content": [_shown(f"data:image/png;base64,{text}")]}],
                "messages[0]",
            )
            for text in ("QUJD=QUI", "QUJDR", "QUJD%zz", "QUJDé", "QU%")
        ),
        ([{"role": "user", "content": [_shown("file:///etc/passwd")]}], "messages[0].content[0]"),
        ([*HELLO, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls"),
    ],
)
def test_images_that_are_refused(web, messages, field):
    """A URL, bad base64 or a call of a tool is a 400 with its place."""
    reply = web.post(CHAT, {"messages": messages})
    assert reply.status == 400
    assert reply.error["param"].startswith(field)
    assert not web.fake.requests


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [], "metadata": ' + b"[" * 5_000,
        b"\xff",
        b"",
    ],
    ids=["half of a pair", "deep", "no text", "empty"],
)
def test_what_is_no_json(web, body):
    """Bytes that are no document are the caller's fault, not a bug."""
    reply = web.send("POST", CHAT, body, {"content-type": "application/json"})
    assert reply.status == 400


# ---------------------------------------------------------------- responses

RESPONSES = "/v1/responses"
LOGPROBS = ["message.output_text.logprobs"]
NUMERIC = failure(grpc.StatusCode.INTERNAL, "NUMERIC")


@pytest.mark.usefixtures("web")
def test_a_response_has_what_the_client_reads(client):
    """Text, status, usage, model and the request's id arrive where OpenAI's client looks."""
    response = client.responses.create(model="fake", input="hello", max_output_tokens=3)
    assert (response.output_text, response.model, response.id) == ("two cats", "fake", "resp_r-1")
    (message,) = response.output
    assert (message.role, message.status, message.id) == ("assistant", "completed", "msg_r-1")
    used = response.usage
    assert (used.input_tokens, used.output_tokens, used.total_tokens) == (7, 3, 10)
    assert (response.status, response.max_output_tokens, response.store) == ("completed", 3, False)
    assert response._request_id == "r-1"


def test_parameters_of_a_response_arrive(web, client):
    """Each parameter that is served reaches the field that chat completions' reach."""
    client.responses.create(
        model="fake",
        input="hello",
        instructions="be brief",
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=9,
        reasoning={"effort": "medium"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        store=False,
        truncation="disabled",
        metadata={"a": "b"},
        safety_identifier="somebody",
        extra_headers={"X-Request-Id": "mine"},
    )
    asked = web.fake.last("Query")
    assert asked.sampling == task_pb2.Sampling(temperature=0.5, top_p=0.25, max_tokens=9)
    assert (asked.reasoning, asked.options.request_id) == (True, "mine")
    assert [(each.role, each.parts[0].text) for each in asked.messages] == [
        (task_pb2.CHAT_ROLE_SYSTEM, "be brief"),
        (task_pb2.CHAT_ROLE_USER, "hello"),
    ]


def test_both_forms_ask_the_same(web, client):
    """A conversation about an image becomes one request, in whichever form it is sent."""
    image = {"type": "image_url", "image_url": {"url": DATA_URL}}
    ask(
        client,
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]},
            {"role": "assistant", "content": [{"type": "text", "text": "two cats"}]},
            {"role": "user", "content": "how?"},
        ],
    )
    chat = web.fake.last("Query")
    first = client.responses.create(model="fake", input="hello")
    client.responses.create(
        model="fake",
        input=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "type": "message",
                "content": [
                    {"type": "input_text", "text": "what is it?"},
                    {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
                ],
            },
            {"type": "reasoning", "id": "rs_1", "summary": []},
            *(each.model_dump(exclude_none=True) for each in first.output),
            {"role": "user", "content": "how?"},
        ],
    )
    assert web.fake.last("Query") == chat
    assert chat.image.encoded.data == IMAGE


@pytest.mark.usefixtures("web")
def test_a_response_streams_in_order(client):
    """OpenAI's own accumulator takes the events; items are within their response, in order."""
    with client.responses.stream(model="fake", input="hello") as stream:
        told = list(stream)
        # The scripted answer ends at the token limit.
        response = told[-1].response
    assert [each.type for each in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [each.output_index for each in told[2:-1]] == [0] * 6 + [1] * 7
    thought, message = response.output
    assert (thought.content[0].text, response.output_text) == ("hm", "two cats")
    assert (message.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert response.usage.total_tokens == 10


def test_events_of_a_response_are_named(web):
    """Each server-sent event has the name of its type and the next number; none is [DONE]."""
    reply = web.post(RESPONSES, {"input": "hello", "stream": True})
    frames = [each.split("\n") for each in reply.body.decode().split("\n\n") if each]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {each['type']}" for each in documents]
    assert [each["sequence_number"] for each in documents] == list(range(len(frames)))


def test_a_response_that_fails_later(web, client):
    """The last event tells the failure and its code, and the connection is cut before any end."""
    web.fake.script["Generate"].append([*STREAMS["query"][:5], NUMERIC])
    stream, received = client.responses.create(model="fake", input="hello", stream=True), []
    with pytest.raises(openai.APIConnectionError):
        received.extend(stream)
    assert (received[-1].type, received[-1].code) == ("error", "numeric")
    assert received[-2].type == "response.output_text.delta"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_response(web, client, stream):
    """Every token of the answer is told, in the delta that has its text and in the whole."""
    told = _stream_with_tokens(_END, reason=task_pb2.FINISH_REASON_STOP)
    web.fake.script["Generate"].append(told)
    response = client.responses.create(
        model="fake", input="hello", include=LOGPROBS, top_logprobs=2, stream=stream
    )
    if stream:
        received = list(response)
        response = received[-1].response
        deltas = [each for each in received if each.type == "response.output_text.delta"]
        assert [[token.token for token in each.logprobs] for each in deltas] == [
            ["\\xc3", "\\xa9"],
            ["a", "b"],
        ]
    tokens = response.output[-1].content[0].logprobs
    assert b"".join(bytes(each.bytes) for each in tokens).decode() == "éab" == response.output_text
    assert web.fake.last("Generate").options.top_logprobs == 2


def _content(part: dict[str, str]) -> dict[str, object]:
    return {"input": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("reasoning.effort", {"reasoning": {"effort": "high"}}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("store", {"store": True}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("include[0]", {"include": ["reasoning.encrypted_content"]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("temprature", {"temprature": 1}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("input", {"input": []}),
        ("input[0].type", {"input": [{"type": "function_call", "call_id": "c"}]}),
        ("input[0].role", {"input": [{"content": "hello"}]}),
        ("input[0].content[0].type", _content({"type": "input_file", "file_id": "f"})),
        ("input[0].content[0].file_id", _content({"type": "input_image", "file_id": "f"})),
        (
            "input[0].content[0].image_url",
            _content({"type": "input_image", "image_url": "https://a.example/a.jpg"}),
        ),
    ],
)
def test_a_response_that_is_not_served(web, field, body):
    """What is malformed or would change the answer is a 400 that names the field."""
    reply = web.post(RESPONSES, {"input": "hello", **body})
    assert (reply.status, reply.error["param"]) == (400, field)
    assert reply.error["type"] == "invalid_request_error"
    assert not web.fake.requests


@pytest.mark.parametrize(
    ("field", "param", "path", "body"),
    [
        ("sampling.max_tokens", "max_tokens", CHAT, {"messages": HELLO, "max_tokens": 9}),
        (
            "task.sampling.max_tokens",
            "max_completion_tokens",
            CHAT,
            {"messages": HELLO, "max_completion_tokens": 9},
        ),
        ("sampling.max_tokens", "max_output_tokens", RESPONSES, {"input": "x"}),
        ("messages[0].parts", "instructions.parts", RESPONSES, {"input": "x", "instructions": "y"}),
        ("messages[1].role", "input[0].role", RESPONSES, {"input": HELLO, "instructions": "y"}),
    ],
)
def test_a_refusal_of_the_server_names_the_body_s_field(web, field, param, path, body):
    """What the server finds is named as the body names it, not as the contract does."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description="no")
    details = error_details_pb2.BadRequest(field_violations=[violation])
    refusal = failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", details)
    web.fake.script["Query"].append(refusal)
    reply = web.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


# ---------------------------------------------------------------- openapi

PATHS = {
    "/v1/chat/completions": ["post"],
    "/v1/responses": ["post"],
    "/v1/models": ["get"],
    "/v1/models/{name}": ["get"],
    "/v1/caption": ["post"],
    "/v1/query": ["post"],
    "/v1/detect": ["post"],
    "/v1/point": ["post"],
    "/v1/segment": ["post"],
}


def test_every_operation_is_described(web):
    """The document that is served has each path with its summary, body and answers."""
    document = web.get("/openapi.json").json
    assert {path: list(each) for path, each in document["paths"].items()} == PATHS
    for path, (method,) in PATHS.items():
        entry = document["paths"][path][method]
        assert entry["summary"]
        assert ("requestBody" in entry) == (method == "post")
        assert {"200", "default"} == set(entry["responses"])
    ids = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_somewhere(web):
    """Each schema that is referred to is there, and each that is there is referred to."""
    document = web.get("/openapi.json").json
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named == set(document["components"]["schemas"])


def test_bodies_are_those_of_the_code():
    """A schema has the fields of the type that is parsed, with their bounds."""
    served = [each for each in openapi.routes() if isinstance(each, OperationRoute)]
    schemas = openapi.make_document(served)["components"]["schemas"]
    for each in served:
        body = each.body
        if body is not None:
            schema = schemas[body.__name__]
            assert issubclass(body, msgspec.Struct)
            assert set(schema["properties"]) == set(body.__struct_fields__)
            assert schema["additionalProperties"] is False
    most = schemas["ChatBody"]["properties"]["max_tokens"]
    assert {"type": "integer", "minimum": 1, "maximum": 2**32 - 1} in most["anyOf"]
    assert {"ChatChunk", "TextChunk", "BoxEvent", "PathEvent", "FinalOutline"} < set(schemas)
