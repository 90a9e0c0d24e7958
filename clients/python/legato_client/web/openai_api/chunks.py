"""A stream of chat completions, made of the events of Generate."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator

import msgspec

from legato_client._values.events import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    TokensDelta,
)
from legato_client._values.results import QueryResult, ResponseInfo, Token
from legato_client.web.openai_api import answers
from legato_client.web.openai_api.answers import ChatChunk, ChunkChoice, Delta

DONE = b"[DONE]"


class AnswerTokens:
    """Which tokens are of the answer: those of its text, and the parts of its characters.

    Parts come before the text that they complete; the last token of all ends the answer, and
    completes nothing.
    """

    def __init__(self) -> None:
        self._parts: list[Token] = []

    def of(self, event: Event) -> list[Token]:
        match event:
            case TextDelta():
                parts, self._parts = self._parts, []
                return [*parts, *event.tokens]
            case TokensDelta():
                self._parts += event.tokens
            case ReasoningDelta():
                self._parts.clear()
        return []


class Chunks:
    """The chunks of one answer."""

    def __init__(self, request_id: str, created: int, *, logprobs: bool, usage: bool) -> None:
        self._id = answers.completion_id(request_id)
        self._created = created
        self._logprobs = logprobs
        self._tells_usage = usage
        self._model = ""
        self._tokens = AnswerTokens()

    def of(self, event: Event) -> Iterator[ChatChunk]:
        tokens = self._tokens.of(event)
        match event:
            case Started():
                self._model = event.model
                yield self._chunk(Delta(role="assistant", content=""))
            case ReasoningDelta(text) if text:
                yield self._chunk(Delta(reasoning=text))
            case TextDelta():
                yield self._chunk(Delta(content=event.text), tokens)
            case Finished(QueryResult() as result):
                yield self._last(result.info)
                if self._tells_usage:
                    yield self._make([], answers.usage_of(result.info))

    def _chunk(self, delta: Delta, tokens: list[Token] | None = None) -> ChatChunk:
        told = answers.logprobs_of(tokens) if self._logprobs and tokens else None
        return self._make([ChunkChoice(delta, logprobs=told)])

    def _last(self, info: ResponseInfo) -> ChatChunk:
        self._model = info.model
        return self._make([ChunkChoice(Delta(), answers.finish_reason(info))])

    def _make(self, choices: list[ChunkChoice], usage: answers.Usage | None = None) -> ChatChunk:
        """With `usage` in each chunk, empty but in the last, where it is asked for."""
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage if self._tells_usage else msgspec.UNSET,
        )


async def documents(
    events: AsyncGenerator[Event, None], chunks: Chunks
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            for chunk in chunks.of(event):
                yield msgspec.json.encode(chunk)
    yield DONE
