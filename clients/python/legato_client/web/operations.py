"""Routes that declare the types of bodies and answers."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import UnionType

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from legato_client._async_client import ask
from legato_client._types.results import (
    Event,
    Finished,
    ReasoningDelta,
    Result,
    TextDelta,
    Token,
    TokensDelta,
)
from legato_client._types.tasks import Options, Sampling, Task
from legato_client.web import streams
from legato_client.web.errors import RejectedRequest
from legato_client.web.server import backend_of

TIMEOUT = "legato-timeout"
"""Header with the caller's timeout in seconds."""

MAX_COUNT = 2**32 - 1
"""The contract carries counts in 32 bits."""

_OPENAI_TIMEOUT = "x-stainless-read-timeout"  # sent by OpenAI's clients: seconds between two bytes


class OperationRoute(Route):
    """A route with the types of its body, answer and stream events.

    Without a `name` and a `summary` they are those of the handler.
    """

    def __init__(
        self,
        path: str,
        handler: Callable[[Request], Awaitable[ASGIApp]],
        *,
        tag: str,
        name: str | None = None,
        summary: str = "",
        answer: type,
        body: type | None = None,
        event: type | UnionType | None = None,
    ) -> None:
        self.method = "GET" if body is None else "POST"
        super().__init__(path, handler, methods=[self.method], name=name)
        self.tag = tag
        self.summary = summary or (handler.__doc__ or "").partition("\n")[0].rstrip(".")
        self.answer, self.body, self.event = answer, body, event


def sampling_of(
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
) -> Sampling:
    """Convert sampling parameters whose ranges are wider than the contract's.

    `top_p` of 0 leaves the likeliest token. `top_k` and `seed` of -1 are as if absent; other
    negative seeds are seeds, too.
    """
    if top_p == 0:
        top_p, top_k = None, 1
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=None if top_k == -1 else top_k,
        max_tokens=max_tokens,
        seed=None if seed in (None, -1) else seed % 2**64,
        stop=stop,
    )


def answered(value: Struct, request_id: str = "") -> Response:
    headers = {"x-request-id": request_id} if request_id else None
    return Response(msgspec.json.encode(value), 200, headers, "application/json")


class AnswerTokens:
    """Filter of the tokens that carry the answer's text, also those of a last, cut character.

    Tokens that complete no text precede the text that they are a part of. Those of a stop string
    are left out.
    """

    def __init__(self) -> None:
        self._parts: list[Token] = []

    def of(self, event: Event) -> list[Token]:
        match event:
            case TextDelta():
                return self._taken(event.tokens)
            case TokensDelta():
                self._parts += event.tokens
            case ReasoningDelta():
                self._parts.clear()
            case Finished(result):
                ended = result.info.finish_reason == "stop"
                if not (ended and self._parts and self._parts[-1].bytes):  # by a stop string
                    return self._taken(())
        return []

    def _taken(self, tokens: Sequence[Token]) -> list[Token]:
        taken, self._parts = [each for each in (*self._parts, *tokens) if each.bytes], []
        return taken


async def respond(
    request: Request,
    image: bytes | None,
    task: Task,
    options: Options,
    form: streams.WireForm,
    *,
    streaming: bool,
) -> ASGIApp:
    """Run the task; answer at once, or as server-sent events.

    gRPC retries a skill's own call where it may. A conversation has its image among its messages.
    """
    client, seconds = backend_of(request).client, timeout_of(request, streaming=streaming)
    if not streaming and options.top_logprobs is None:
        call = ask(client, image, task, options, seconds)
        result = await streams.cancel_on_disconnect(request.receive, call)
        return answered(form.answer(result, None), result.info.request_id)
    # Only a stream shows which tokens belong to the answer.
    events = client.generate(image, task, options=options, timeout=seconds)
    request_id, begun = await streams.begin(request.receive, events)
    if streaming:
        return streams.ServerSentEvents(begun, form, request_id)
    result, tokens = await streams.cancel_on_disconnect(request.receive, _collected(begun))
    return answered(form.answer(result, tokens), request_id)


async def _collected(events: AsyncGenerator[Event, None]) -> tuple[Result, list[Token]]:
    kept, tokens = AnswerTokens(), []
    async for event in events:
        tokens += kept.of(event)
        if isinstance(event, Finished):
            return event.result, tokens
    raise AssertionError("a stream ends with Finished or raises")


def timeout_of(request: Request, *, streaming: bool) -> float:
    """Return the call's timeout: the caller's, at most this process's limit."""
    longest = backend_of(request).timeout
    given = request.headers.get(TIMEOUT)
    if given is None and not streaming:
        given = request.headers.get(_OPENAI_TIMEOUT)
    if given is None:
        return longest
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise RejectedRequest(f"{TIMEOUT} takes seconds above 0, not {given!r}", field=TIMEOUT)
    return min(seconds, longest)


def options_of(request: Request, model: str | None, *, top_logprobs: int | None = None) -> Options:
    """Return the options; an alias stands for a model, no name for the server's default.

    A name is NAME, or NAME/ADAPTER for a fine-tune.
    """
    given = model or ""
    name, _, adapter = backend_of(request).aliases.get(given, given).partition("/")
    return Options(
        request_id=request.headers.get("x-request-id", ""),
        model=name,
        adapter=adapter,
        top_logprobs=top_logprobs,
    )
