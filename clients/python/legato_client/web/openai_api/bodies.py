"""What OpenAI's chat completions take: what is understood, and what is refused."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from legato_client.web.errors import Refused
from legato_client.web.operations import MAX_COUNT

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Stop = str | list[str] | None


def _null() -> Raw:
    """The default of a field that is not read into objects: at most a short value is looked at."""
    return Raw(b"null")


class ImageUrl(Struct):
    """A data URL; `detail` is left to the model."""

    url: str
    detail: str | None = None


class TextPart(Struct, tag_field="type", tag="text"):
    """Words."""

    text: str


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """A picture."""

    image_url: ImageUrl


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """What an assistant of OpenAI's said instead of an answer."""

    refusal: str


class Message(Struct):
    """One message. Fields that an answer of this API has may be sent back with it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart | ImagePart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: Raw = msgspec.field(default_factory=_null)
    function_call: Raw = msgspec.field(default_factory=_null)
    audio: Raw = msgspec.field(default_factory=_null)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`include_obfuscation` is for OpenAI's own network."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(Struct):
    """Only `text` is served."""

    type: str


class ChatBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Of `/v1/chat/completions`. `reasoning` and `top_k` are additions of Moondream and Legato."""

    messages: Annotated[list[Message], Meta(min_length=1)]
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

    # Served where they ask for nothing.
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Raw = msgspec.field(default_factory=_null)
    response_format: ResponseFormat | None = None
    tools: Raw = msgspec.field(default_factory=_null)
    tool_choice: Raw = msgspec.field(default_factory=_null)
    functions: Raw = msgspec.field(default_factory=_null)
    function_call: Raw = msgspec.field(default_factory=_null)
    audio: Raw = msgspec.field(default_factory=_null)
    modalities: list[str] | None = None
    prediction: Raw = msgspec.field(default_factory=_null)
    reasoning_effort: str | None = None
    web_search_options: Raw = msgspec.field(default_factory=_null)
    store: bool | None = None

    # Of no effect on the answer.
    metadata: Raw = msgspec.field(default_factory=_null)
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    verbosity: str | None = None

    def check(self) -> None:
        """Raise Refused for what would change the answer and is not served."""
        self.metadata = _null()  # a raw field keeps the bytes of the whole body
        for name, values in _ASKING_NOTHING.items():
            if short_value(getattr(self, name)) not in values:
                hint = _INSTEAD.get(name, "leave it out")
                raise Refused(f"{name} is not served: {hint}", field=name, code="unsupported")
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs needs logprobs=true", field="top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise Refused("max_tokens and max_completion_tokens differ", field="max_tokens")

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def tells_usage(self) -> bool:
        """Whether the stream ends with an event of its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


def short_value(value: object) -> object:
    """The value of a raw field if its text is short, else the text."""
    if isinstance(value, Raw) and len(memoryview(value)) <= _SHORT:
        return msgspec.json.decode(value)
    return value


_SHORT = 32  # bytes: values that ask for nothing are shorter

_INSTEAD = {
    "n": "ask once for each answer",
    "reasoning_effort": "reasoning=true thinks first, without degrees",
}

_ASKING_NOTHING: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, ResponseFormat("text")),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "web_search_options": (None,),
    "store": (None, False),
    "verbosity": (None, "medium"),
}
"""Of fields that are not served, the values that ask for nothing."""
