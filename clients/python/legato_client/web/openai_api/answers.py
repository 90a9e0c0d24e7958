"""What OpenAI's chat completions give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from legato_client._errors import Preempted
from legato_client._values import results
from legato_client.web.moondream_api.answers import GroundedSpan, spans_of

FinishReason = Literal["stop", "length"]


class TopLogprob(Struct):
    """One of the likeliest tokens in a place; the chosen one may be among them."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """A token of the answer.

    `token` has bytes that are no whole character as escapes, `bytes` as they are; null for a token
    that carries no text.
    """

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class Logprobs(Struct):
    """Of all tokens of a piece of the answer."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptTokens(Struct):
    """Of the prompt's tokens, those of the prefix cache and those of the picture."""

    cached_tokens: int
    image_tokens: int


class CompletionTokens(Struct):
    """Of the answer's tokens, those of its reasoning."""

    reasoning_tokens: int


class Usage(Struct):
    """In tokens; a picture counts as its positions in the prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class ReasoningDetails(Struct):
    """Places that the reasoning speaks of, as Moondream's endpoint tells them."""

    grounding: list[GroundedSpan]


class ChatAnswer(Struct):
    """The answer as a message that can be sent back."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_details: ReasoningDetails | UnsetType = UNSET


class Choice(Struct):
    """The only one."""

    message: ChatAnswer
    finish_reason: FinishReason
    logprobs: Logprobs | None = None
    index: int = 0


class ChatCompletion(Struct, kw_only=True):
    """Of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Delta(Struct):
    """A piece of the answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChunkChoice(Struct):
    """The only one."""

    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    index: int = 0


class ChatChunk(Struct, kw_only=True):
    """An event of the stream; the last, of the usage if asked for, has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Struct, kw_only=True):
    """A served model. `tasks` are Legato's names of what it can do; when it was made is unknown."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "legato"
    tasks: list[str]
    context_length: int


class ModelList(Struct, kw_only=True):
    """Of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


def completion_id(request_id: str) -> str:
    return f"chatcmpl-{request_id}"


def finish_reason(info: results.ResponseInfo) -> FinishReason:
    """Raises Preempted for an answer that an operator cut, which no reason of this API tells."""
    if info.finish_reason == "cancelled":
        raise Preempted(
            "an operator stopped the request", reason="PREEMPTED", request_id=info.request_id
        )
    return "length" if info.finish_reason == "length" else "stop"


def usage_of(info: results.ResponseInfo) -> Usage | None:
    used = info.usage
    if used is None:
        return None
    return Usage(
        prompt_tokens=used.input_tokens,
        completion_tokens=used.output_tokens,
        total_tokens=used.input_tokens + used.output_tokens,
        prompt_tokens_details=PromptTokens(used.cached_tokens or 0, used.image_tokens or 0),
        completion_tokens_details=CompletionTokens(used.reasoning_tokens or 0),
    )


def logprobs_of(tokens: Iterable[results.Token]) -> Logprobs:
    return Logprobs([_token(each) for each in tokens])


def completion(
    result: results.QueryResult, tokens: Iterable[results.Token] | None, created: int
) -> ChatCompletion:
    """`tokens` are those of the answer, None where the request does not ask."""
    said = ChatAnswer(content=result.answer)
    if result.reasoning is not None:
        said.reasoning = result.reasoning.text
        said.reasoning_details = ReasoningDetails(spans_of(result.reasoning))
    logprobs = None if tokens is None else logprobs_of(tokens)
    return ChatCompletion(
        id=completion_id(result.info.request_id),
        created=created,
        model=result.info.model,
        choices=[Choice(said, finish_reason(result.info), logprobs)],
        usage=usage_of(result.info),
    )


def _token(token: results.Token) -> TokenLogprob:
    logprob = 0.0 if token.logprob is None else token.logprob
    likeliest = [
        TopLogprob(_written(each.bytes), each.logprob, list(each.bytes) or None)
        for each in token.alternatives
    ]
    return TokenLogprob(_written(token.bytes), logprob, list(token.bytes) or None, likeliest)


def _written(piece: bytes) -> str:
    return piece.decode("utf-8", "backslashreplace")
