"""OpenAI's chat completions and models, and what they share with its Responses API."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from legato_client._errors import NotFound, Preempted
from legato_client._images.sources import ImageInput
from legato_client._types import results
from legato_client._types.results import (
    Event,
    Finished,
    QueryResult,
    ReasoningDelta,
    Started,
    TextDelta,
    Token,
)
from legato_client._types.server import ModelInfo
from legato_client._types.tasks import Message, QueryTask, ResponseFormat, Role, Sampling
from legato_client.web import bodies, streams
from legato_client.web.errors import RejectedRequest
from legato_client.web.moondream_api import GroundedSpan, spans_of
from legato_client.web.operations import (
    MAX_COUNT,
    AnswerTokens,
    OperationRoute,
    answered,
    options_of,
    respond,
    sampling_of,
    timeout_of,
)
from legato_client.web.server import backend_of

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Stop = str | list[str] | None


def null() -> Raw:
    """Return the default of a field that stays raw: at most a short value is inspected."""
    return Raw(b"null")


# ---------------------------------------------------------------- request model


class DataUrl(NamedTuple):
    """An image in a message, and its place in the body."""

    url: str
    field: str


@dataclasses.dataclass(slots=True)
class ChatTurn:
    """A message of a conversation in either wire form; `where` is its place in the body."""

    where: str
    role: Role
    said: str | list[str | DataUrl]

    @property
    def images(self) -> list[DataUrl]:
        return [part for part in self.said if isinstance(part, DataUrl)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request in either wire form.

    `top_logprobs` is None without log-probabilities. `token_limit` and `schema` are the body's
    names of `max_tokens` and of the JSON schema of `response_format`.
    """

    turns: Sequence[ChatTurn]
    model: str | None
    sampling: Sampling
    reasoning: bool
    top_logprobs: int | None
    stream: bool
    token_limit: str
    response_format: ResponseFormat | None
    schema: str
    form: streams.WireForm

    @property
    def _images(self) -> list[str]:
        return [image.field for turn in self.turns for image in turn.images]

    @property
    def members(self) -> dict[str, str]:
        """Return the body's names of what the contract calls otherwise, before `task`."""
        places = {f"messages[{i}]": each.where for i, each in enumerate(self.turns)}
        images = {f"images[{i}]": field for i, field in enumerate(self._images)}
        return {
            **places,
            **images,
            "images": images.get("images[1]", "messages"),
            "max_tokens": self.token_limit,
            "response_format.json_schema": self.schema,
        }

    async def task(self) -> QueryTask:
        """Build the task; the server checks messages and images.

        A single image in the user's first message stands before its words, as models of one image
        need it.
        """
        first = next((each for each in self.turns if each.role == "user"), None)
        if first is not None and len(self._images) == 1 and first.images:
            first.said = [*first.images, *(part for part in first.said if isinstance(part, str))]
        messages = [await _message(each) for each in self.turns]
        return QueryTask(
            reasoning=self.reasoning,
            sampling=self.sampling,
            messages=tuple(messages),
            response_format=self.response_format,
        )


async def _message(turn: ChatTurn) -> Message:
    if isinstance(turn.said, str):
        return Message(turn.role, turn.said)
    parts: list[str | ImageInput] = []
    while turn.said:
        part = turn.said.pop(0)  # the image takes its memory's place
        parts.append(await bodies.decoded(*part) if isinstance(part, DataUrl) else part)
    return Message(turn.role, tuple(parts))


ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def short_value(value: object) -> object:
    """Return the value of a raw field if its text is short, else the text."""
    if isinstance(value, Raw) and len(memoryview(value)) <= _SHORT:
        return msgspec.json.decode(value)
    return value


_SHORT = 32  # bytes: values that ask for nothing are shorter


class Unserved:
    """Mark of a field that would change the answer, unless it is null or one of `no_ops`."""

    def __init__(self, *no_ops: object, instead: str = "leave it out") -> None:
        self.no_ops = (None, *no_ops)
        self.instead = instead


_hints_of = functools.cache(functools.partial(get_type_hints, include_extras=True))


def check_unserved(body: Struct, place: str = "") -> None:
    """Raise RejectedRequest for a field that asks for what is not served."""
    for name, hint in _hints_of(type(body)).items():
        value, field = getattr(body, name), f"{place}{name}"
        if isinstance(value, Struct):
            check_unserved(value, f"{field}.")
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Unserved) and short_value(value) not in mark.no_ops:
                problem = f"{field} is not served: {mark.instead}"
                raise RejectedRequest(problem, field=field, code="unsupported")


# ---------------------------------------------------------------- chat's request


class ImageUrl(Struct):
    """A data URL; `detail` is left to the model."""

    url: str
    detail: str | None = None


class TextPart(Struct, tag_field="type", tag="text"):
    """Words."""

    text: str


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """Refusal of an OpenAI assistant."""

    refusal: str


class ChatMessage(Struct):
    """Chat message. Fields that an answer of this API has may be sent back with it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart | ImagePart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: Raw = msgspec.field(default_factory=null)
    function_call: Raw = msgspec.field(default_factory=null)
    audio: Raw = msgspec.field(default_factory=null)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`include_obfuscation` is for OpenAI's own network."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PlainText(Struct, tag_field="type", tag="text"):
    """An answer of any text."""

    def wanted(self) -> None:
        return None


class AnyObject(Struct, tag_field="type", tag="json_object"):
    """An answer that is some JSON object."""

    def wanted(self) -> ResponseFormat:
        return ResponseFormat(json_schema='{"type":"object"}')


class NamedSchema(Struct):
    """JSON schema; name, description and `strict` have no effect: an answer always matches."""

    schema: Raw = msgspec.field(default_factory=lambda: Raw(b"{}"))
    name: str = ""
    description: str | None = None
    strict: bool | None = None

    def wanted(self) -> ResponseFormat:
        return ResponseFormat(json_schema=bytes(self.schema).decode())


class ChatSchema(Struct, tag_field="type", tag="json_schema"):
    """An answer that matches a schema."""

    json_schema: NamedSchema

    def wanted(self) -> ResponseFormat:
        return self.json_schema.wanted()


class ChatBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/chat/completions`; `reasoning` and `top_k` are extensions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning: bool | None = None
    response_format: PlainText | AnyObject | ChatSchema | None = None

    # Served where they ask for nothing.
    n: Annotated[int | None, Unserved(1, instead="ask once for each answer")] = None
    frequency_penalty: Annotated[float | None, Unserved(0)] = None
    presence_penalty: Annotated[float | None, Unserved(0)] = None
    logit_bias: Annotated[Raw, Unserved({})] = msgspec.field(default_factory=null)
    tools: Annotated[Raw, Unserved([])] = msgspec.field(default_factory=null)
    tool_choice: Annotated[Raw, Unserved("none", "auto")] = msgspec.field(default_factory=null)
    functions: Annotated[Raw, Unserved([])] = msgspec.field(default_factory=null)
    function_call: Annotated[Raw, Unserved("none", "auto")] = msgspec.field(default_factory=null)
    audio: Annotated[Raw, Unserved()] = msgspec.field(default_factory=null)
    modalities: Annotated[list[str] | None, Unserved(["text"])] = None
    prediction: Annotated[Raw, Unserved()] = msgspec.field(default_factory=null)
    reasoning_effort: Annotated[
        str | None, Unserved("none", instead="reasoning=true thinks first, without degrees")
    ] = None
    web_search_options: Annotated[Raw, Unserved()] = msgspec.field(default_factory=null)
    store: Annotated[bool | None, Unserved(False)] = None

    # These have no effect on the answer.
    metadata: Raw = msgspec.field(default_factory=null)
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    verbosity: Annotated[str | None, Unserved("medium")] = None

    def asked(self) -> Conversation:
        self.metadata = null()  # a raw field keeps the bytes of the whole body
        check_unserved(self)
        if self.top_logprobs and not self.logprobs:
            raise RejectedRequest("top_logprobs needs logprobs=true", field="top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise RejectedRequest("max_tokens and max_completion_tokens differ", field="max_tokens")
        stop, most = () if self.stop is None else self.stop, self.max_completion_tokens
        return Conversation(
            turns=[_turn(each, f"messages[{i}]") for i, each in enumerate(self.messages)],
            model=self.model,
            sampling=sampling_of(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                max_tokens=self.max_tokens if most is None else most,
                seed=self.seed,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ),
            reasoning=bool(self.reasoning),
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            stream=bool(self.stream),
            token_limit="max_tokens" if self.max_tokens else "max_completion_tokens",
            response_format=self.response_format.wanted() if self.response_format else None,
            schema="response_format.json_schema.schema",
            form=ChatForm(
                logprobs=bool(self.logprobs),
                usage=bool(self.stream_options and self.stream_options.include_usage),
            ),
        )


def _turn(message: ChatMessage, where: str) -> ChatTurn:
    for name in ("tool_calls", "function_call", "audio"):
        if short_value(getattr(message, name)):
            raise RejectedRequest("tools and audio are not served", field=f"{where}.{name}")
    content, role = message.content, ROLES[message.role]
    if content is None or isinstance(content, str):
        return ChatTurn(where, role, content or "")
    said: list[str | DataUrl] = []
    for index, part in enumerate(content):
        match part:
            case ImagePart(ImageUrl(url) as shown):
                said.append(DataUrl(url, f"{where}.content[{index}].image_url.url"))
                shown.url = ""  # only the turn holds its memory
            case TextPart(text) | RefusalPart(text):
                said.append(text)
    return ChatTurn(where, role, said)


# ---------------------------------------------------------------- answers

FinishReason = Literal["stop", "length"]


class TopLogprob(Struct):
    """Likely token at a position; the chosen one may be among them."""

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
    """Log-probabilities of the tokens in a piece of the answer."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptTokens(Struct):
    """Prompt tokens from the prefix cache and from the image."""

    cached_tokens: int
    image_tokens: int


class CompletionTokens(Struct):
    """Reasoning tokens of the answer."""

    reasoning_tokens: int


class ChatUsage(Struct):
    """Token usage; an image counts as its positions in the prompt."""

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
    """Single choice of an answer."""

    message: ChatAnswer
    finish_reason: FinishReason
    logprobs: Logprobs | None = None
    index: int = 0


class ChatCompletion(Struct, kw_only=True):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage | None = None


class Delta(Struct):
    """A piece of the answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChunkChoice(Struct):
    """Single choice of a chunk."""

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
    usage: ChatUsage | UnsetType | None = UNSET


class ModelEntry(Struct, kw_only=True):
    """A served model. `tasks` are Legato's names of what it can do; when it was made is unknown.

    `max_model_len` is vLLM's name of the context length, which Frigate reads.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "legato"
    tasks: list[str]
    context_length: int
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """Answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


def completion_id(request_id: str) -> str:
    return f"chatcmpl-{request_id}"


def finish_reason(info: results.ResponseInfo) -> FinishReason:
    """Return the finish reason. Raises Preempted for an operator's abort, which has none here."""
    if info.finish_reason == "cancelled":
        raise Preempted(
            "an operator stopped the request", reason="PREEMPTED", request_id=info.request_id
        )
    return "length" if info.finish_reason == "length" else "stop"


def usage_of(info: results.ResponseInfo) -> ChatUsage | None:
    used = info.usage
    if used is None:
        return None
    return ChatUsage(
        prompt_tokens=used.input_tokens,
        completion_tokens=used.output_tokens,
        total_tokens=used.input_tokens + used.output_tokens,
        prompt_tokens_details=PromptTokens(used.cached_tokens or 0, used.image_tokens or 0),
        completion_tokens_details=CompletionTokens(used.reasoning_tokens or 0),
    )


def logprobs_of(tokens: Iterable[results.Token]) -> Logprobs:
    return Logprobs([_token(each) for each in tokens])


def _token(token: results.Token) -> TokenLogprob:
    logprob = 0.0 if token.logprob is None else token.logprob
    likeliest = [
        TopLogprob(_written(each.bytes), each.logprob, list(each.bytes) or None)
        for each in token.alternatives
    ]
    return TokenLogprob(_written(token.bytes), logprob, list(token.bytes) or None, likeliest)


def _written(piece: bytes) -> str:
    return piece.decode("utf-8", "backslashreplace")


class ChatForm(streams.WireForm):
    """Chat completions' form of one answer."""

    def __init__(self, *, logprobs: bool, usage: bool) -> None:
        self._id = ""
        self._created = int(time.time())
        self._logprobs = logprobs
        self._tells_usage = usage
        self._model = ""
        self._tokens = AnswerTokens()

    def answer(self, result: QueryResult, tokens: Iterable[Token] | None) -> ChatCompletion:
        said = ChatAnswer(content=result.answer)
        if result.reasoning is not None:
            said.reasoning = result.reasoning.text
            said.reasoning_details = ReasoningDetails(spans_of(result.reasoning))
        logprobs = None if tokens is None else logprobs_of(tokens)
        return ChatCompletion(
            id=completion_id(result.info.request_id),
            created=self._created,
            model=result.info.model,
            choices=[Choice(said, finish_reason(result.info), logprobs)],
            usage=usage_of(result.info),
        )

    def frames(self, event: Event) -> Iterator[bytes]:
        for chunk in self._chunks(event):
            yield streams.frame(msgspec.json.encode(chunk))
        if isinstance(event, Finished):
            yield streams.frame(b"[DONE]")

    def _chunks(self, event: Event) -> Iterator[ChatChunk]:
        tokens = self._tokens.of(event)
        match event:
            case Started():
                self._id, self._model = completion_id(event.request_id), event.model
                yield self._chunk(Delta(role="assistant", content=""))
            case ReasoningDelta(text) if text:
                yield self._chunk(Delta(reasoning=text))
            case TextDelta():
                yield self._chunk(Delta(content=event.text), tokens)
            case Finished(QueryResult() as result):
                if self._logprobs and tokens:
                    yield self._chunk(Delta(content=""), tokens)
                self._model = result.info.model
                yield self._make([ChunkChoice(Delta(), finish_reason(result.info))])
                if self._tells_usage:
                    yield self._make([], usage_of(result.info))

    def _chunk(self, delta: Delta, tokens: list[Token] | None = None) -> ChatChunk:
        logprobs = logprobs_of(tokens) if self._logprobs and tokens else None
        return self._make([ChunkChoice(delta, logprobs=logprobs)])

    def _make(self, choices: list[ChunkChoice], usage: ChatUsage | None = None) -> ChatChunk:
        """Build a chunk; if requested, `usage` is null except in the last."""
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage if self._tells_usage else msgspec.UNSET,
        )


# ---------------------------------------------------------------- endpoints

_TAG = "OpenAI"


def routes() -> list[OperationRoute]:
    return [
        OperationRoute(
            "/v1/chat/completions",
            chat_completions,
            tag=_TAG,
            body=ChatBody,
            answer=ChatCompletion,
            event=ChatChunk,
        ),
        OperationRoute("/v1/models", models, tag=_TAG, answer=ModelList),
        OperationRoute("/v1/models/{name:path}", model, tag=_TAG, answer=ModelEntry),
    ]


async def chat_completions(request: Request) -> ASGIApp:
    """Answer the last message of a conversation, about an image if one is shown."""
    return await answer(request, ChatBody)


class ConversationBody(Protocol):
    """Request body of one API."""

    def asked(self) -> Conversation:
        """Return the request. Raises RejectedRequest for what is not served."""


async def answer(request: Request, kind: type[ConversationBody]) -> ASGIApp:
    """Answer a conversation in the form of its body."""
    async with backend_of(request).bodies.reading(request, kind) as body:
        asked = body.asked()
        request.state.members = asked.members
        task = await asked.task()
        options = options_of(request, asked.model, top_logprobs=asked.top_logprobs)
        return await respond(request, None, task, options, asked.form, streaming=asked.stream)


async def models(request: Request) -> ASGIApp:
    """List the served models."""
    return answered(ModelList(data=[_model(each) for each in await _served(request)]))


async def model(request: Request) -> ASGIApp:
    """Return a served model."""
    name = request.path_params["name"]
    known = backend_of(request).aliases.get(name, name)
    for each in await _served(request):
        if known == each.name or known in each.aliases:
            return answered(_model(each))
    raise NotFound(f"no model is called {name!r}", reason="MODEL_NOT_FOUND")


async def _served(request: Request) -> tuple[ModelInfo, ...]:
    call = backend_of(request).client.models(timeout=timeout_of(request, streaming=False))
    return await streams.cancel_on_disconnect(request.receive, call)


def _model(served: ModelInfo) -> ModelEntry:
    length = served.max_context_tokens
    return ModelEntry(
        id=served.name, tasks=list(served.tasks), context_length=length, max_model_len=length
    )
