"""An engine of the published model, without its process."""

from __future__ import annotations

from legato_engine.core.requests import make_sequence
from legato_engine.types import QueryTask, Request, RequestKey, SamplingParams, Turn

from tests.engine.models import against_transformers as same
from tests.published.reference import TOKENS


def engine(weights, **settings):
    """Of the file alone: its model, tokenizer and template."""
    return same.Engine("legato-tiny", weights, max_context=1024, max_waiting=64, **settings)


def task(talk):
    """A conversation as a request's task."""
    has_system = talk[0]["role"] == "system"
    said = [each["content"] for each in talk[has_system:]]
    pairs = zip(said[:-1:2], said[1:-1:2], strict=True)
    return QueryTask(
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
