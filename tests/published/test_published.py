"""A published model, SmolLM2-135M-Instruct, beside transformers on the same weights.

`make tools` fetches the weights. `smollm2.json` has the answers of transformers; `python -m
tests.published.reference` writes it, and a slow test compares it with transformers again.
"""

from __future__ import annotations

import hashlib
import json
import math

import pytest
import torch
from legato_client import Client, Message, NotFound, Options, Sampling
from legato_client import QueryTask as ClientQueryTask
from legato_engine.core.requests import make_sequence
from legato_engine.types import QuerySpec, Request, RequestKey, SamplingParams, Turn

from benchmarks.cpu.rounding import text_cost
from tests.e2e.server import Server
from tests.engine.models import against_transformers as same
from tests.published import reference
from tests.published.reference import PROMPTS, TOKENS

# ---------------------------------------------------------------- an engine of the model


def engine(weights, **settings):
    """Of the file alone: its model, tokenizer and template."""
    return same.Engine("legato-tiny", weights, max_context=1024, max_waiting=64, **settings)


def task(talk):
    """A conversation as a request's task."""
    has_system = talk[0]["role"] == "system"
    said = [each["content"] for each in talk[has_system:]]
    pairs = zip(said[:-1:2], said[1:-1:2], strict=True)
    return QuerySpec(
        question=said[-1],
        system=talk[0]["content"] if has_system else "",
        history=tuple(Turn(question, answer) for question, answer in pairs),
    )


def prompt(engine, talk):
    """Token ids of a conversation's prompt."""
    request = Request(request_id=RequestKey("p"), task=task(talk))
    made = engine.assembly.frontend.make_task(request)
    return [token.token_id for token in made.prompt]


def tokens(engine, talks, count=TOKENS):
    """Greedy answers to all conversations at once, as token ids."""
    answers = same.Answers()
    scheduler = engine.assembly.scheduler(answers, pipeline_depth=2)
    for index, talk in enumerate(talks):
        request = Request(
            request_id=RequestKey(str(index)),
            task=task(talk),
            sampling=SamplingParams(temperature=0.0, max_tokens=count),
            return_tokens=True,
        )
        scheduler.submit(make_sequence(engine.assembly.frontend, request, None))
    scheduler.drain()
    return [answers.tokens[str(index)] for index in range(len(talks))]


# ---------------------------------------------------------------- six conversations

_CHOSEN = (0, 5, 7, 18, 23, 28)  # words, code, digits, JSON, a special token's text, several turns
_TOKENS = 12


def test_answers_are_those_of_transformers(weights, recorded):
    """Blocks, tokenizer and chat template of the published file."""
    talks = [PROMPTS[at] for at in _CHOSEN]
    with engine(weights) as running:
        for at, talk in zip(_CHOSEN, talks, strict=True):
            assert prompt(running, talk) == recorded[at]["prompt"], talk
        found = tokens(running, talks, _TOKENS)
    assert found == [recorded[at]["tokens"][:_TOKENS] for at in _CHOSEN]


# ---------------------------------------------------------------- thirty conversations

GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def words(weights):
    """The tokenizer as its authors publish it."""
    return reference.tokenizer()


def kept(found, recorded):
    """Answers as far as transformers' are clear; a whole answer has no more tokens."""
    return [
        answer if wanted["whole"] else answer[: len(wanted["tokens"])]
        for answer, wanted in zip(found, recorded, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_record_is_what_transformers_answers(weights, recorded):
    """Prompts, tokens, and which of them are clear."""
    found = reference.answers()
    assert [each["prompt"] for each in found] == [each["prompt"] for each in recorded]
    for ours, theirs in zip(found, recorded, strict=True):  # what is clear depends on the processor
        both = min(len(ours["tokens"]), len(theirs["tokens"]))
        assert ours["tokens"][:both] == theirs["tokens"][:both]
        assert both >= len(theirs["tokens"]) - 8
    assert len(recorded) == len(PROMPTS) == 30
    assert sum(len(each["tokens"]) for each in recorded) > 900
    assert sum(each["whole"] for each in recorded) >= 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("speculation", ["off", "fixed:8", "budget", "seed"])
def test_all_answers_are_those_of_transformers(weights, recorded, speculation):
    """Whatever is speculated, with draft tokens looked up in the prompt."""
    draft = "" if speculation == "off" else "lookup"
    with engine(weights, speculation=speculation, draft=draft) as running:
        assert [prompt(running, talk) for talk in PROMPTS] == [a["prompt"] for a in recorded]
        found = tokens(running, PROMPTS)
    assert kept(found, recorded) == [each["tokens"] for each in recorded]


@pytest.fixture(scope="module")
def client(weights, tmp_path_factory):
    """A client of a server that speculates."""
    options: tuple[str, ...] = ("--weights", str(weights), "--max-context", "1024")
    options += ("--speculation", "budget", "--draft", "lookup")
    with (
        Server(tmp_path_factory.mktemp("server"), *options) as running,
        Client(running.address) as connected,
    ):
        yield connected
        running.settle()


def said(talk):
    """A conversation as the client takes it."""
    return [Message(each["role"], each["content"]) for each in talk]


def text_of(words, ids):
    """Tokens as text, without special ones."""
    return words.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("at", range(len(PROMPTS)))
def test_calls_and_streams_say_it(client, words, recorded, at):
    """Through gRPC, as one result and word by word."""
    expected = text_of(words, recorded[at]["tokens"]).strip()
    whole = client.chat(said(PROMPTS[at]), sampling=GREEDY).answer
    task = ClientQueryTask(sampling=GREEDY, messages=tuple(said(PROMPTS[at])))
    *events, finished = client.generate(None, task)
    assert finished.result.answer == whole
    assert (
        "".join(event.text for event in events if hasattr(event, "text")).strip() == whole.strip()
    )
    clear = expected.removesuffix("\ufffd")  # the record may end within a character
    assert whole.strip() == clear if recorded[at]["whole"] else whole.strip().startswith(clear)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stop_string_ends_an_answer(client, words, recorded):
    """Before its first occurrence in what transformers says."""
    expected = text_of(words, recorded[3]["tokens"])
    stop = expected[20:24]
    sampling = Sampling(temperature=0.0, max_tokens=TOKENS, stop=(stop,))
    answer = client.chat(said(PROMPTS[3]), sampling=sampling).answer
    assert answer.strip() == expected[: expected.index(stop)].strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_logprobs_are_those_of_transformers(client, words, recorded):
    """Of every token of an answer, within float32's rounding."""
    wanted = recorded[5]
    options = Options(return_tokens=True, top_logprobs=0)
    told = client.chat(said(PROMPTS[5]), sampling=GREEDY, options=options).info.tokens
    with torch.inference_mode():
        logits_TV = reference.model()(torch.tensor([wanted["prompt"] + wanted["tokens"]])).logits[0]
    start = len(wanted["prompt"]) - 1
    logprobs_TV = logits_TV[start:-1].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logprobs_TV, wanted["tokens"], strict=True)]
    assert len(told) == len(expected)
    for token, logprob in zip(told, expected, strict=True):
        assert math.isclose(token.logprob, logprob, abs_tol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_are_refused(client):
    """A text model has none, whatever the name."""
    with pytest.raises(NotFound) as caught:
        client.query(None, "Hello", options=Options(adapter="cups"))
    assert caught.value.reason == "ADAPTER_NOT_FOUND"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("form", "most_perplexity", "least_agreement"),
    [("fp8", 16.8, 0.91), ("int8", 16.2, 0.95), ("int4", 24.0, 0.72)],
)
def test_a_gpu_s_rounded_weights_stay_near(weights, form, most_perplexity, least_agreement):
    """Perplexity of the licence is 15.95 in float32, whose answers all are the likeliest.

    Four bits cost a model of this size much, in groups of 64 inputs with no minimum.
    """
    cost = text_cost(weights, form)
    assert 15.8 < cost.perplexity < most_perplexity
    assert cost.agreement > least_agreement


_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="session")
def weights():
    """The file, whole and of the known content."""
    if not reference.WEIGHTS.is_file():
        pytest.skip("no SmolLM2: `make tools` fetches it, where the package index has it")
    with reference.WEIGHTS.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == _SHA256
    return reference.WEIGHTS


@pytest.fixture(scope="session")
def recorded():
    """Prompts and tokens of transformers, as `reference.answers` returns them."""
    return json.loads(reference.ANSWERS.read_text())
