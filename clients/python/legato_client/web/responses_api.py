"""OpenAI's Responses API: the same conversations as chat completions in another form."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from legato_client._errors import LegatoError
from legato_client._types import results
from legato_client.web import openai_api, streams
from legato_client.web.errors import RejectedRequest, document_of
from legato_client.web.openai_api import (
    ROLES,
    AnyObject,
    ChatTurn,
    Conversation,
    Count,
    DataUrl,
    NamedSchema,
    PlainText,
    TokenLogprob,
    Unserved,
    check_unserved,
    finish_reason,
    logprobs_of,
    null,
)
from legato_client.web.operations import AnswerTokens, OperationRoute, sampling_of

LOGPROBS = "message.output_text.logprobs"
"""The one value of `include` that is served."""


# ---------------------------------------------------------------- request


class InputText(Struct, tag_field="type", tag="input_text"):
    """Words of the caller."""

    text: str


class AnswerText(Struct, tag_field="type", tag="output_text"):
    """Words of an earlier answer."""

    text: str


class AnswerRefusal(Struct, tag_field="type", tag="refusal"):
    """Refusal of an OpenAI assistant."""

    refusal: str


class Thought(Struct, tag_field="type", tag="reasoning_text"):
    """Words of a reasoning item, which are not sent to the model again."""

    text: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    """An image as a data URL; `detail` is left to the model."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class InputItem(Struct):
    """A message, or a reasoning item of an earlier answer. Its other fields are ignored."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputText | InputImage | AnswerText | AnswerRefusal | Thought] | None = None

    def turn(self, where: str) -> ChatTurn | None:
        """Return the message, None for reasoning. Raises RejectedRequest for other items."""
        if self.type == "reasoning":
            return None
        if self.type != "message":
            raise RejectedRequest(
                f"items of type {self.type!r} are not served",
                field=f"{where}.type",
                code="unsupported",
            )
        if self.role is None:
            raise RejectedRequest("a message needs its role", field=f"{where}.role")
        if not isinstance(self.content, list):
            return ChatTurn(where, ROLES[self.role], self.content or "")
        said: list[str | DataUrl] = []
        for index, part in enumerate(self.content):
            field = f"{where}.content[{index}]"
            match part:
                case InputImage(str(url), None):
                    said.append(DataUrl(url, f"{field}.image_url"))
                    part.image_url = None  # only the turn holds its memory
                case InputImage():
                    member = "image_url" if part.file_id is None else "file_id"
                    raise RejectedRequest(
                        "an image is a data URL in image_url; files are not served",
                        field=f"{field}.{member}",
                    )
                case InputText(text) | AnswerText(text) | AnswerRefusal(text):
                    said.append(text)
        return ChatTurn(where, ROLES[self.role], said)


class ResponsesSchema(NamedSchema, tag_field="type", tag="json_schema"):
    """An answer that matches a schema."""


class TextOptions(Struct, forbid_unknown_fields=True):
    """Form of the answer's text; only medium verbosity is served."""

    format: PlainText | AnyObject | ResponsesSchema | None = None
    verbosity: Annotated[str | None, Unserved("medium")] = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """Degree of reasoning: `medium` is on, and there are no others."""

    effort: Annotated[
        str | None,
        Unserved(
            "none",
            "medium",
            instead="medium thinks first, none does not; there are no other degrees",
        ),
    ] = None
    summary: Annotated[str | None, Unserved()] = None
    generate_summary: Annotated[str | None, Unserved()] = None
    context: Annotated[str | None, Unserved()] = None
    mode: Annotated[str | None, Unserved()] = None


class ResponsesStreamOptions(Struct, forbid_unknown_fields=True):
    """`include_obfuscation` is for OpenAI's own network."""

    include_obfuscation: bool | None = None


_NOT_KEPT = "nothing is kept here, so send the whole conversation as input"


class ResponsesBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None

    # Served where they ask for nothing.
    background: Annotated[bool | None, Unserved(False)] = None
    background_options: Annotated[Raw, Unserved()] = msgspec.field(default_factory=null)
    context_management: Annotated[Raw, Unserved([])] = msgspec.field(default_factory=null)
    conversation: Annotated[Raw, Unserved(instead=_NOT_KEPT)] = msgspec.field(default_factory=null)
    image: Annotated[Raw, Unserved()] = msgspec.field(default_factory=null)
    moderation: Annotated[Raw, Unserved()] = msgspec.field(default_factory=null)
    previous_response_id: Annotated[str | None, Unserved(instead=_NOT_KEPT)] = None
    prompt: Annotated[Raw, Unserved()] = msgspec.field(default_factory=null)
    store: Annotated[
        bool | None, Unserved(False, instead="nothing is kept here, so leave it out or false")
    ] = None
    tools: Annotated[Raw, Unserved([])] = msgspec.field(default_factory=null)
    tool_choice: Annotated[Raw, Unserved("none", "auto")] = msgspec.field(default_factory=null)
    truncation: Annotated[
        str | None, Unserved("disabled", instead="a conversation that is too long is refused")
    ] = None

    # These have no effect on the answer.
    access_programs: Raw = msgspec.field(default_factory=null)
    max_tool_calls: int | None = None
    metadata: Raw = msgspec.field(default_factory=null)
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Raw = msgspec.field(default_factory=null)
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    def asked(self) -> Conversation:
        # Raw fields keep the bytes of the whole body.
        self.metadata = self.access_programs = self.prompt_cache_options = null()
        check_unserved(self)
        for index, each in enumerate(self.include or ()):
            if each != LOGPROBS:
                raise RejectedRequest(
                    f"only {LOGPROBS} is served", field=f"include[{index}]", code="unsupported"
                )
        if self.top_logprobs and not self.include:
            raise RejectedRequest(
                f"top_logprobs needs include=[{LOGPROBS!r}]", field="top_logprobs"
            )
        turns = [ChatTurn("instructions", "system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            turns.append(ChatTurn("input", "user", self.input))
        else:
            said = (each.turn(f"input[{index}]") for index, each in enumerate(self.input))
            turns += (each for each in said if each is not None)
        wanted = self.text.format if self.text else None
        template = ResponseObject(
            created_at=int(time.time()),
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
        )
        return Conversation(
            turns=turns,
            model=self.model,
            sampling=sampling_of(
                temperature=self.temperature,
                top_p=self.top_p,
                max_tokens=self.max_output_tokens,
            ),
            reasoning=bool(self.reasoning and self.reasoning.effort == "medium"),
            top_logprobs=(self.top_logprobs or 0) if self.include else None,
            stream=bool(self.stream),
            token_limit="max_output_tokens",
            response_format=wanted.wanted() if wanted else None,
            schema="text.format.schema",
            form=ResponsesForm(template, logprobs=bool(self.include)),
        )


# ---------------------------------------------------------------- answer

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The answer's text."""

    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The thoughts."""

    text: str


class OutputItem(Struct, kw_only=True, omit_defaults=True):
    """The reasoning, which has a `summary`, or the message, which has a `role`."""

    id: str
    type: Literal["reasoning", "message"]
    status: Status
    content: list[OutputText | ReasoningText]
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[str] | UnsetType = UNSET


class CachedTokens(Struct):
    """Input tokens from the prefix cache, and from the image."""

    cached_tokens: int
    image_tokens: int
    cache_write_tokens: int = 0


class OutputTokens(Struct):
    """Reasoning tokens of the answer."""

    reasoning_tokens: int


class ResponsesUsage(Struct):
    """Token usage; an image counts as its positions in the prompt."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class IncompleteDetails(Struct):
    """Reason of an incomplete response: the token limit was reached."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(Struct):
    """Failure of a response that had begun."""

    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    """Answer of `/v1/responses`. Nothing of it is stored."""

    id: str = ""
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    model: str = ""
    output: list[OutputItem] = []
    usage: ResponsesUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = False
    store: bool = False
    tools: list[str] = []
    tool_choice: Literal["none"] = "none"


class ResponseEvent(Struct, kw_only=True):
    """An event of the stream, as OpenAI names them in `type`; each has some of these fields."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


def _usage(info: results.ResponseInfo) -> ResponsesUsage | None:
    used = info.usage
    if used is None:
        return None
    return ResponsesUsage(
        used.input_tokens,
        CachedTokens(used.cached_tokens or 0, used.image_tokens or 0),
        used.output_tokens,
        OutputTokens(used.reasoning_tokens or 0),
        used.input_tokens + used.output_tokens,
    )


class ResponsesForm(streams.WireForm):
    """Responses' form of one answer; `template` has the fields that are known before it."""

    def __init__(self, template: ResponseObject, *, logprobs: bool) -> None:
        self._response = template
        self._tells_logprobs = logprobs
        self._request_id = ""
        self._tokens = AnswerTokens()
        self._logprobs: list[TokenLogprob] = []
        self._texts: list[str] = []  # of the open item
        self._open: OutputItem | None = None
        self._done: list[OutputItem] = []
        self._num_events = 0

    def answer(
        self, result: results.QueryResult, tokens: Iterable[results.Token] | None
    ) -> ResponseObject:
        self._request_id = result.info.request_id
        if result.reasoning is not None:
            self._done.append(self._item("reasoning", result.reasoning.text, "completed"))
        self._logprobs = logprobs_of(tokens or ()).content
        return self._ended(result)

    def frames(self, event: results.Event) -> Iterator[bytes]:
        """Return the events of one event: those of an item are within those of its response."""
        fresh = logprobs_of(self._tokens.of(event)).content if self._tells_logprobs else []
        self._logprobs += fresh
        match event:
            case results.Started():
                self._request_id = event.request_id
                begun = msgspec.structs.replace(
                    self._response, id=f"resp_{event.request_id}", model=event.model
                )
                yield self._frame("response.created", response=begun)
                yield self._frame("response.in_progress", response=begun)
            case results.ReasoningDelta(text) if text:
                yield from self._delta("reasoning", text, [])
            case results.TextDelta():
                yield from self._delta("message", event.text, fresh)
            case results.Finished(results.QueryResult() as result):
                if fresh or not (self._open and self._open.type == "message"):
                    yield from self._delta("message", "", fresh)
                yield from self._close(_status(result))
                ended = self._ended(result)
                yield self._frame(f"response.{ended.status}", response=ended)

    def failure(self, error: LegatoError) -> bytes:
        told = document_of(error).error
        return self._frame("error", code=told.code, message=told.message, param=told.param)

    def _delta(self, kind: str, text: str, logprobs: list[TokenLogprob]) -> Iterator[bytes]:
        """Return the events of a piece of text, and those of its item's beginning."""
        if self._open is None or self._open.type != kind:
            yield from self._close("completed")
            self._open = msgspec.structs.replace(self._item(kind, "", "in_progress"), content=[])
            yield self._frame(
                "response.output_item.added", item=self._open, output_index=len(self._done)
            )
            yield self._frame(
                "response.content_part.added", part=_content(kind, "", []), **self._place()
            )
        self._texts.append(text)
        more = {"logprobs": logprobs} if kind == "message" else {}
        yield self._frame(f"{_TEXTS[kind]}.delta", delta=text, **self._place(), **more)

    def _close(self, status: Status) -> Iterator[bytes]:
        if self._open is None:
            return
        kind, text = self._open.type, "".join(self._texts)
        item = self._item(kind, text, status)
        more = {"logprobs": self._logprobs} if kind == "message" else {}
        yield self._frame(f"{_TEXTS[kind]}.done", text=text, **self._place(), **more)
        yield self._frame("response.content_part.done", part=item.content[0], **self._place())
        yield self._frame("response.output_item.done", item=item, output_index=len(self._done))
        self._texts, self._open = [], None
        self._done.append(item)

    def _item(self, kind: str, text: str, status: Status) -> OutputItem:
        content = [_content(kind, text, self._logprobs)]
        if kind == "message":
            name = f"msg_{self._request_id}"
            return OutputItem(
                id=name, type="message", status=status, content=content, role="assistant"
            )
        name = f"rs_{self._request_id}"
        return OutputItem(id=name, type="reasoning", status=status, content=content, summary=[])

    def _ended(self, result: results.QueryResult) -> ResponseObject:
        """Return the whole response; the message is added unless a stream has ended it."""
        status = _status(result)
        if not (self._done and self._done[-1].type == "message"):
            self._done.append(self._item("message", result.answer, status))
        return msgspec.structs.replace(
            self._response,
            id=f"resp_{result.info.request_id}",
            status=status,
            model=result.info.model,
            output=self._done,
            usage=_usage(result.info),
            incomplete_details=None if status == "completed" else IncompleteDetails(),
        )

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "an item is open"
        return {"item_id": self._open.id, "output_index": len(self._done), "content_index": 0}

    def _frame(self, kind: str, **fields: Any) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return streams.frame(msgspec.json.encode(event), kind)


_TEXTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def _content(kind: str, text: str, logprobs: list[TokenLogprob]) -> OutputText | ReasoningText:
    if kind == "message":
        return OutputText(text=text, logprobs=logprobs)
    return ReasoningText(text=text)


def _status(result: results.QueryResult) -> Status:
    return "completed" if finish_reason(result.info) == "stop" else "incomplete"


def routes() -> list[OperationRoute]:
    return [
        OperationRoute(
            "/v1/responses",
            responses,
            tag="OpenAI",
            body=ResponsesBody,
            answer=ResponseObject,
            event=ResponseEvent,
        )
    ]


async def responses(request: Request) -> ASGIApp:
    """Answer the last message of the input, about an image if one is shown."""
    return await openai_api.answer(request, ResponsesBody)
