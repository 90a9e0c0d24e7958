"""OpenAI's chat completions and models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from legato_client._errors import NotFound
from legato_client._values.events import Event, Finished
from legato_client._values.results import QueryResult, Token
from legato_client._values.server import ModelInfo
from legato_client.web import streams
from legato_client.web.model_names import options_of
from legato_client.web.openai_api import answers
from legato_client.web.openai_api.bodies import ChatBody
from legato_client.web.openai_api.chunks import AnswerTokens, Chunks, documents
from legato_client.web.openai_api.conversation import task_of
from legato_client.web.operations import Operation, OperationRoute, answered, timeout_of
from legato_client.web.server import backend_of

_TAG = "OpenAI"


def routes() -> list[BaseRoute]:
    chat = Operation(
        method="POST",
        path="/v1/chat/completions",
        tag=_TAG,
        body=ChatBody,
        answer=answers.ChatCompletion,
        event=answers.ChatChunk,
    )
    listing = Operation(method="GET", path="/v1/models", tag=_TAG, answer=answers.ModelList)
    one = Operation(method="GET", path="/v1/models/{name:path}", tag=_TAG, answer=answers.Model)
    return [
        OperationRoute(chat, chat_completions),
        OperationRoute(listing, models),
        OperationRoute(one, model),
    ]


async def chat_completions(request: Request) -> ASGIApp:
    """Answer the last message of a conversation, about a picture if one is shown."""
    backend = backend_of(request)
    created = int(time.time())
    async with backend.bodies.reading(request, ChatBody) as body:
        body.check()
        task = await task_of(body)
        logprobs, streaming = bool(body.logprobs), bool(body.stream)
        alternatives = (body.top_logprobs or 0) if logprobs else None
        options = options_of(request, body.model, top_logprobs=alternatives)
        seconds = timeout_of(request, streaming=streaming)
        if not (streaming or logprobs):
            call = backend.client.chat(
                task.messages,
                reasoning=task.reasoning,
                sampling=task.sampling,
                options=options,
                timeout=seconds,
            )
            result = await streams.unless_left(request.receive, call)
            return answered(answers.completion(result, None, created), result.info.request_id)
        # Only a stream tells which tokens are of the answer.
        events = backend.client.generate(None, task, options=options, timeout=seconds)
        request_id, begun = await streams.begin(request.receive, events)
        if not streaming:
            result, tokens = await streams.unless_left(request.receive, _collected(begun))
            return answered(answers.completion(result, tokens, created), request_id)
    chunks = Chunks(request_id, created, logprobs=logprobs, usage=body.tells_usage)
    return streams.EventStream(documents(begun, chunks), request_id)


async def models(request: Request) -> ASGIApp:
    """The models that are served."""
    backend = backend_of(request)
    call = backend.client.models(timeout=timeout_of(request, streaming=False))
    served = await streams.unless_left(request.receive, call)
    return answered(answers.ModelList(data=[_model(each) for each in served]))


async def model(request: Request) -> ASGIApp:
    """One model that is served."""
    name = request.path_params["name"]
    backend = backend_of(request)
    call = backend.client.models(timeout=timeout_of(request, streaming=False))
    served = await streams.unless_left(request.receive, call)
    known = backend.aliases.get(name, name)
    for each in served:
        if known == each.name or known in each.aliases:
            return answered(_model(each))
    raise NotFound(f"no model is called {name!r}", reason="MODEL_NOT_FOUND")


async def _collected(
    events: AsyncGenerator[Event, None],
) -> tuple[QueryResult, list[Token]]:
    kept, tokens = AnswerTokens(), []
    async for event in events:
        tokens += kept.of(event)
        if isinstance(event, Finished) and isinstance(event.result, QueryResult):
            return event.result, tokens
    raise AssertionError("a stream ends with Finished or raises")


def _model(served: ModelInfo) -> answers.Model:
    return answers.Model(
        id=served.name, tasks=list(served.tasks), context_length=served.max_context_tokens
    )
