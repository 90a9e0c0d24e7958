"""Models of decoder families, served: one of text, and one with images between its tokens."""

from __future__ import annotations

import functools
from typing import Any

import grpc
import pytest
import torch
from legato.v1 import inference_pb2, media_pb2, server_pb2, server_pb2_grpc, task_pb2
from legato_client import (
    Client,
    ClipFrame,
    Detection,
    DetectTask,
    FailedPrecondition,
    InvalidArgument,
    Message,
    NotFound,
    Options,
    PointedObject,
    PointTask,
    QueryTask,
    Sampling,
    TextDelta,
)
from legato_engine.kernels.cpu.library import library
from legato_engine.models import quantise
from legato_engine.models.registry import resolve

from tests.adapters import PeftAdapter
from tests.e2e.scenes import two_shapes
from tests.e2e.server import Server, until
from tests.engine.models import hub_folder
from tests.engine.models.against_transformers import theirs
from tests.engine.models.gguf import gguf_files
from tests.grammar import Grammar, check
from tests.hostile_images import file, smooth

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


@pytest.mark.parametrize("form", ["quantised folder", "stored blocks"])
def test_codes_are_served(tmp_path, form):
    """Answers of a quantised folder and of a GGUF file's blocks are those of their numbers."""
    if library("auto") is None:
        pytest.skip("this machine has no library of kernels")
    from transformers import AutoConfig  # takes seconds, not needed by most

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=hub_folder.VOCABULARY, **sizes, **heads)
    plain, codes = tmp_path / "plain", tmp_path / "codes"
    network = hub_folder.write(plain, config, chat=hub_folder.CHAT)
    if form == "stored blocks":
        codes = tmp_path / "model.gguf"
        gguf_files.write(codes, network, kind="Q4_1", chat=hub_folder.CHAT)
        ways = (("--weight-dtype", "stored"), ("--weight-dtype", "model"))
    else:
        command = ["--model", "llama", "--weights", str(plain), "--output", str(codes)]
        assert quantise.main([*command, "--weight-dtype", "int4"]) == 0
        ways = (("--weight-dtype", "int4"), ("--cpu-kernels", "torch"))
    answers = []
    for way in ways:
        options = ("--model", "llama", "--weights", str(codes), "--max-context", "200", *way)
        with Server(tmp_path, *options) as running, Client(running.address) as connected:
            asked = ("why?", "why is the sky blue?", "what is it?", "a cup of tea")
            results = [connected.query(None, each, sampling=GREEDY) for each in asked]
            answers.append([each.answer for each in results])
    assert answers[0] == answers[1]
    assert any(answers[0])


# ---------------------------------------------------------------- images between the tokens

SHORT = Sampling(temperature=0.0, max_tokens=8)
LONG = task_pb2.Sampling(temperature=1.0, seed=3, max_tokens=600)
ENDLESS = task_pb2.ResponseFormat(regex="[a-z]{600}")
FIRST, SECOND = file(smooth(70, 90), "PNG"), file(smooth(90, 70), "PNG")
LARGE = file(smooth(400, 400), "PNG")
"""It takes as many tokens as an image may."""


@pytest.fixture(scope="module")
def visual_server(tmp_path_factory):
    """A server of a tiny random Qwen3-VL with adapters, whose engine may be killed."""
    folder = tmp_path_factory.mktemp("visual")
    (folder / "adapters").mkdir()
    bundle: Any = resolve("random-tiny-vl")
    with torch.device("meta"):
        targets = bundle.family.network(bundle.config).adapter_targets()
    PeftAdapter.fitting(targets, rank=6).write(folder / "adapters" / "tuned")
    PeftAdapter.fitting(targets, rank=9).write(folder / "adapters" / "large")
    options = ("--model", "random-tiny-vl", "--adapters", str(folder / "adapters"))
    with Server(folder, *options, "--max-adapter-rank", "8") as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def visual_client(visual_server):
    """The client of this package."""
    with Client(visual_server.address) as connected:
        yield connected


def image(data):
    """An image file as a request carries it."""
    return media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))


def endless(*images, request_id="", adapter=""):
    """A stream of 600 characters about images, whatever the model wants to say."""
    shown = [task_pb2.QueryImage(image=each) for each in images]
    query = task_pb2.QueryTask(question="What?", images=shown, response_format=ENDLESS)
    return inference_pb2.GenerateRequest(
        task=task_pb2.Task(query=query, sampling=LONG),
        options=inference_pb2.RequestOptions(request_id=request_id, adapter=adapter),
    )


def test_several_images_are_those_of_messages(visual_client):
    """All are told in order and cost what they cost alone; where they stand counts."""
    alone = [visual_client.query(each, "Which?", sampling=SHORT).info for each in (FIRST, SECOND)]
    both = visual_client.query([FIRST, SECOND], "Which?", sampling=SHORT).info
    assert [each.image_id for each in both.images] == [each.image.image_id for each in alone]
    assert both.usage.image_tokens == sum(each.usage.image_tokens for each in alone) > 0
    said = (Message("user", (FIRST, SECOND, "Which?")),)
    same = visual_client.chat(said, sampling=SHORT).info.usage
    assert same.input_tokens == both.usage.input_tokens
    assert same.cached_tokens > both.usage.image_tokens
    apart = visual_client.chat(
        [Message("user", (FIRST, "Which?", SECOND))], sampling=SHORT
    ).info.usage
    assert apart.image_tokens == both.usage.image_tokens
    assert apart.cached_tokens < same.cached_tokens


def test_an_image_is_cached_within_a_tenant(visual_server):
    """A second question about it computes its own words only, that of another tenant all."""
    shown = file(smooth(110, 50), "PNG")

    def cached(tenant, question):
        request = inference_pb2.QueryRequest(image=image(shown), question=question)
        metadata = (("legato-tenant", tenant),)
        usage = visual_server.inference.Query(request, metadata=metadata).info.usage
        return usage.cached_tokens, usage.image_tokens

    assert cached("one", "What?")[0] == 0
    hit, tokens = cached("one", "Why?")
    assert hit > tokens > 0
    assert cached("two", "Why?")[0] == 0


def test_a_clip_has_times(visual_client):
    """Pairs of frames share tokens; a frame that is not later is refused by its field."""
    frames = [ClipFrame(FIRST, 0.0), ClipFrame(FIRST, 0.5)]
    clip = visual_client.query(frames, "What moves?", sampling=SHORT).info.usage
    images = visual_client.query([FIRST, FIRST], "What moves?", sampling=SHORT).info.usage
    assert 0 < clip.image_tokens == images.image_tokens // 2
    later = [ClipFrame(FIRST, 4.0), ClipFrame(FIRST, 5.5)]
    assert visual_client.query(later, "What moves?", sampling=SHORT).info.usage.cached_tokens < (
        visual_client.query(frames, "What moves?", sampling=SHORT).info.usage.cached_tokens
    )
    with pytest.raises(InvalidArgument) as caught:
        visual_client.query(frames[::-1], "What moves?")
    assert caught.value.field_violations[0].field == "images[1].time"


@pytest.mark.parametrize(("skill", "kind"), [(DetectTask, Detection), (PointTask, PointedObject)])
def test_places_are_streamed(visual_client, skill, kind):
    """Each as soon as its brackets close: the result repeats them, and a call says the same."""
    sampling = Sampling(temperature=1.0, seed=5)
    *events, finished = visual_client.generate(FIRST, skill("cup", 3, sampling=sampling))
    found = [each for each in events if isinstance(each, kind)]
    result = finished.result
    assert found == list(result.objects if kind is Detection else result.points) != []
    assert {(each.label, each.confidence) for each in found} == {("cup", None)}
    (again,) = visual_client.run_tasks(FIRST, [skill("cup", 3, sampling=sampling)])
    assert found == list(again.objects if kind is Detection else again.points)


def test_there_are_no_outlines(visual_client):
    """The model says so before it is asked, and when it is."""
    (model,) = visual_client.models()
    assert "segment" not in model.tasks
    assert model.max_images > 1
    with pytest.raises(FailedPrecondition) as caught:
        visual_client.segment(FIRST, "cup")
    assert caught.value.reason == "TASK_UNSUPPORTED"


def test_too_many_tokens_are_refused_before_anything_is_decoded(visual_client):
    """A broken image among the images does not hide it; with fewer it is the complaint."""
    broken = LARGE[:-400]
    with pytest.raises(InvalidArgument) as caught:
        visual_client.query([LARGE, broken, *[LARGE] * 14], "Which?")
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert int(caught.value.metadata["limit"]) == visual_client.models()[0].max_context_tokens
    with pytest.raises(InvalidArgument) as caught:
        visual_client.query([FIRST, broken], "Which?")
    assert caught.value.reason == "IMAGE_UNDECODABLE"
    assert caught.value.field_violations[0].field == "images"


def is_aborted(visual_client, request_id):
    """Abort a request; False while the server does not know it."""
    return visual_client.abort(request_id=request_id).aborted > 0


@pytest.mark.parametrize("ends", ["cancelled", "aborted"])
def test_nothing_is_left_of_images_that_are_not_prepared(visual_server, visual_client, ends):
    """Requests that end while their images are decoded; one that was stopped has an end."""
    others = [file(smooth(1500, 1500 + number), "PNG") for number in range(3)]
    for number in range(3):
        name = f"{ends}-{number}"
        stream = visual_server.inference.Generate(endless(*map(image, others), request_id=name))
        if ends == "cancelled":
            stream.cancel()
            continue
        until(functools.partial(is_aborted, visual_client, name))
        grammar = Grammar()
        for event in stream:
            grammar.feed(event)
        grammar.end(ok=True)
    visual_server.settle()
    assert visual_client.query([FIRST, SECOND], "Which?", sampling=SHORT).info.images


def test_an_adapter_changes_answers_and_shares_no_prefix(visual_client):
    """The server tells the capability; an adapter that does not fit is refused by its field."""
    assert "adapters" in visual_client.server_info().capabilities
    query, asked = visual_client.query, ([FIRST, SECOND], "Who is it?")
    tuned = Options(adapter="tuned")
    plain = query(*asked, sampling=SHORT)
    adapted = query(*asked, sampling=SHORT, options=tuned)
    assert adapted.answer != plain.answer
    assert adapted.info.usage.cached_tokens == 0
    again = query(*asked, sampling=SHORT, options=tuned)
    assert again.answer == adapted.answer
    assert again.info.usage.cached_tokens > again.info.usage.image_tokens
    assert query(*asked, sampling=SHORT).answer == plain.answer
    with pytest.raises(InvalidArgument, match="r is 9, this server takes 1 to 8") as caught:
        query(*asked, options=Options(adapter="large"))
    assert caught.value.metadata["field"] == "options.adapter"


@pytest.mark.parametrize(("by", "adapter"), [("bytes", "tuned"), ("id", "")])
def test_an_answer_about_two_images_outlives_its_engine(visual_server, visual_client, by, adapter):
    """It goes on with the next engine, and its text is what an engine that lives says."""
    shown = [image(FIRST), image(SECOND)]
    if by == "id":
        held = [visual_client.put_image(each).image_id for each in (FIRST, SECOND)]
        shown = [media_pb2.Image(image_id=each) for each in held]
    asked = endless(*shown, adapter=adapter)
    whole = list(visual_server.inference.Generate(asked))[-1].finished.result.query.answer
    stream, grammar = visual_server.inference.Generate(asked), Grammar()
    for _ in range(4):
        grammar.feed(next(stream))
    visual_server.kill_engine()
    for event in stream:
        grammar.feed(event)
    grammar.end(ok=True)
    finished = grammar.events[-1].finished
    assert finished.info.resumptions == 1
    assert len(finished.info.images) == 2
    assert finished.result.query.answer == whole
    assert len(whole) == 600
