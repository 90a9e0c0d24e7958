"""Sampled tokens, as both faces of the client give them."""

from __future__ import annotations

from legato.v1 import geometry_pb2, inference_pb2, task_pb2
from legato_client import CaptionTask, Options, QueryTask, Token, TokenAlternative, TokensDelta

from tests.clients.python.fake_server import events

IMAGE = b"an image"
TOKENS = (
    inference_pb2.Token(
        token_id=9,
        text="hi",
        bytes=b"hi",
        logprob=-0.5,
        alternatives=[inference_pb2.TokenAlternative(token_id=8, bytes=b"\xf0", logprob=-1.0)],
    ),
    inference_pb2.Token(token_id=5, coordinate=0.0),
    inference_pb2.Token(token_id=6, size=geometry_pb2.Size(width=0.5, height=0.25)),
)
SAME = (
    Token(
        9,
        "hi",
        logprob=-0.5,
        alternatives=(TokenAlternative(8, "", -1.0, b"\xf0"),),
        bytes=b"hi",
    ),
    Token(5, "", coordinate=0.0),
    Token(6, "", size=(0.5, 0.25)),
)


def test_tokens_of_an_answer(client, server):
    """Tokens come typed, and an absent value or probability is None, not 0."""
    info = inference_pb2.ResponseInfo(tokens=TOKENS)
    reply = inference_pb2.CaptionResponse(caption="hi", info=info)
    server.script["Caption"].append(reply)
    options = Options(return_tokens=True, top_logprobs=0)
    assert client.caption(IMAGE, options=options).info.tokens == SAME
    asked = server.last("Caption").options
    assert asked.return_tokens
    assert asked.HasField("top_logprobs")
    assert client.caption(IMAGE).info.tokens == ()


def test_tokens_of_a_stream(client, server):
    """Tokens come beside text and thoughts, or in events of their own; the end has all of them."""
    text, *others = TOKENS
    finished = task_pb2.TaskResult(query=task_pb2.QueryResult(answer="hi"))
    rows = events(
        ("reasoning", inference_pb2.ReasoningDelta(text="hi", tokens=[text])),
        ("text", inference_pb2.TextDelta(text="hi", tokens=[text])),
        ("tokens", inference_pb2.TokensDelta(tokens=others)),
        finished=finished,
    )
    rows[-1].finished.info.tokens.extend(TOKENS)
    server.script["Generate"].append(rows)
    *_, thought, words, rest, last = client.generate(IMAGE, QueryTask("?"))
    assert (thought.tokens, words.tokens) == (SAME[:1], SAME[:1])
    assert rest == TokensDelta(SAME[1:])
    assert last.result.info.tokens == SAME


def test_tokens_of_tasks(client, server):
    """Each of several tasks has its own tokens."""
    results = [
        task_pb2.TaskResult(caption=task_pb2.CaptionResult(caption=caption)) for caption in "ab"
    ]
    tokens = [inference_pb2.TaskTokens(tokens=TOKENS), inference_pb2.TaskTokens(tokens=TOKENS[:1])]
    reply = inference_pb2.RunTasksResponse(results=results, tokens=tokens)
    server.script["RunTasks"].append(reply)
    first, second = client.run_tasks(IMAGE, [CaptionTask(), CaptionTask()])
    assert (first.info.tokens, second.info.tokens) == (SAME, SAME[:1])
