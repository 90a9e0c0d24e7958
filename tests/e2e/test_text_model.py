"""A text model from a Hugging Face folder, served: questions, conversations, what it refuses."""

from __future__ import annotations

import grpc
import pytest
from legato.v1 import inference_pb2, server_pb2, server_pb2_grpc, task_pb2
from legato_client import (
    Client,
    FailedPrecondition,
    InvalidArgument,
    Message,
    NotFound,
    Options,
    QueryTask,
    Sampling,
    TextDelta,
)

from tests.e2e.scenes import two_shapes
from tests.e2e.server import Server
from tests.engine.models import hub_folder
from tests.engine.models.decoder.asking import theirs
from tests.grammar import check

SCENE = two_shapes()
GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Phi with a chat template."""
    made = tmp_path_factory.mktemp("phi")
    hub_folder.write(made, hub_folder.phi(), chat=hub_folder.CHAT)
    return made


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """A server of it."""
    options = ("--model", "phi", "--weights", str(folder), "--max-context", "200")
    with Server(tmp_path_factory.mktemp("server"), *options) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def client(server):
    """The client of this package."""
    with Client(server.address) as connected:
        yield connected


def stream_of(question, **sampling):
    """A request for a stream of text."""
    return inference_pb2.GenerateRequest(
        task=task_pb2.Task(
            query=task_pb2.QueryTask(question=question), sampling=task_pb2.Sampling(**sampling)
        ),
        options=inference_pb2.RequestOptions(return_tokens=True),
    )


def test_a_question_is_answered(client):
    """The same each time, and the answer says what it cost."""
    first, again = (client.query(None, "why is the sky blue?", sampling=GREEDY) for _ in range(2))
    assert first.answer == again.answer != ""
    usage = first.info.usage
    assert (first.info.model, first.info.image) == ("phi", None)
    assert 1 <= usage.output_tokens <= 12
    assert (usage.image_tokens, usage.cached_tokens) == (0, 0)
    assert usage.input_tokens > 5


def test_a_stream_says_what_a_call_says(server, client):
    """Word by word, in the order of the contract; a late reader gets several words at once."""
    long = Sampling(temperature=0.0, max_tokens=60)
    asked = stream_of("why is the sky blue?", temperature=0.0, max_tokens=60)
    grammar = check(server.inference.Generate(asked), ok=True)
    text = "".join(event.text.text for event in grammar.of("text"))
    assert text == client.query(None, "why is the sky blue?", sampling=long).answer
    assert len(grammar.of("text")) > 5
    (finished,) = grammar.of("finished")
    assert finished.finished.result.query.answer == text


def test_streams_of_many_are_those_of_one(server):
    """Eight at once answer as each alone does."""
    asked = [stream_of(f"{n} cats?", temperature=1.0, seed=n, max_tokens=20) for n in range(8)]
    streams = [server.inference.Generate(request) for request in asked]
    together = [check(stream, ok=True).events[-1].finished.result.query for stream in streams]
    for request, answer in zip(asked, together, strict=True):
        (alone,) = check(server.inference.Generate(request), ok=True).of("finished")
        assert alone.finished.result.query == answer


def test_a_conversation_is_answered(folder, client):
    """All that was said is in the prompt, and a call says what a stream says."""
    talk = (
        Message("system", "be brief"),
        Message("user", "why?"),
        Message("assistant", "air"),
        Message("user", "and at night?"),
    )
    result = client.chat(talk, sampling=GREEDY)
    expected = theirs(folder).apply_chat_template(
        [{"role": said.role, "content": said.content} for said in talk],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert result.info.usage.input_tokens == len(expected)
    (*_, finished) = client.generate(None, QueryTask(sampling=GREEDY, messages=talk))
    assert finished.result.answer == result.answer != ""


def test_every_stop_string_cuts_a_call_and_a_stream_alike(client):
    """Whatever part of an answer is the stop string, the text ends before it, and so do deltas."""
    question, longer = "why is the sky blue?", Sampling(temperature=0.0, max_tokens=30)
    whole = client.query(None, question, sampling=longer).answer
    stops = {whole[at : at + length] for length in (1, 2, 5) for at in range(len(whole) - length)}
    assert len(stops) > 20
    for stop in sorted(stops)[::2]:
        sampling = Sampling(temperature=0.0, max_tokens=30, stop=("never", stop))
        result = client.query(None, question, sampling=sampling)
        expected = whole[: whole.index(stop)]
        assert (result.answer, result.info.finish_reason) == (expected, "stop")
        events = list(client.generate(None, QueryTask(question, sampling=sampling)))
        assert "".join(each.text for each in events if isinstance(each, TextDelta)) == expected


def test_tokens_are_told_with_their_probabilities(client):
    """Their texts join to the answer, and a request that did not ask for tokens gets none."""
    options = Options(return_tokens=True, top_logprobs=0)
    result = client.query(None, "why is the sky blue?", sampling=GREEDY, options=options)
    tokens = result.info.tokens
    assert len(tokens) == result.info.usage.output_tokens
    assert "".join(token.text for token in tokens).lstrip() == result.answer
    told = b"".join(token.bytes for token in tokens)
    assert told.decode(errors="ignore").lstrip() == result.answer
    assert all(token.logprob <= 0.0 for token in tokens)
    assert client.query(None, "why is the sky blue?", sampling=GREEDY).info.tokens == ()


def test_there_are_no_adapters(client):
    """Whatever name is asked for, in a call and in a stream."""
    asked = QueryTask("why?", sampling=GREEDY)
    for ask in (
        lambda: client.query(None, "why?", options=Options(adapter="cups")),
        lambda: list(client.generate(None, asked, options=Options(adapter="cups"))),
    ):
        with pytest.raises(NotFound) as caught:
            ask()
        assert caught.value.reason == "ADAPTER_NOT_FOUND"


def test_skills_that_need_images_are_unsupported(client):
    """So is a question about one; nothing is made up."""
    for ask in (
        lambda: client.detect(SCENE.image, "cat"),
        lambda: client.caption(SCENE.image),
        lambda: client.query(SCENE.image, "what is it?"),
        lambda: client.query(None, "why?", reasoning=True),
    ):
        with pytest.raises(FailedPrecondition) as caught:
            ask()
        assert caught.value.reason == "TASK_UNSUPPORTED"


def test_images_are_not_held(client):
    """An upload is refused before it is prepared."""
    with pytest.raises(FailedPrecondition):
        client.put_image(SCENE.image)


def test_a_prompt_that_is_too_long_names_the_limit(client):
    """The context that the server was started with."""
    with pytest.raises(InvalidArgument, match="200") as caught:
        client.query(None, "cat " * 300, options=Options(request_id="long"))
    assert caught.value.reason == "PROMPT_TOO_LONG"


def test_the_server_says_what_it_serves(server):
    """One skill, and how long a sequence may be."""
    with grpc.insecure_channel(server.address) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        (model,) = stub.ListModels(server_pb2.ListModelsRequest()).models
    assert model.name == "phi"
    assert list(model.tasks) == ["query"]
