"""A stream of chat completions, made of the events of Generate."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

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
    """Selects the tokens that carry the answer's text, also those of a last, cut character.

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
                if self._logprobs and tokens:
                    yield self._chunk(Delta(content=""), tokens)
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
