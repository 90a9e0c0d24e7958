"""A conversation in OpenAI's form as a task of Legato."""

from __future__ import annotations

from collections.abc import Sequence

from legato_client._values.tasks import Message, QueryTask, Role
from legato_client.web import pictures
from legato_client.web.errors import Refused
from legato_client.web.openai_api.bodies import (
    ChatBody,
    ImagePart,
    RefusalPart,
    TextPart,
    short_value,
)
from legato_client.web.openai_api.bodies import Message as ChatMessage
from legato_client.web.operations import sampling_of

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


async def task_of(body: ChatBody) -> QueryTask:
    """The order of the messages is for the server to check.

    Raises:
        Refused: it has tools, several pictures, or one outside of the user's first message.
    """
    first = next((i for i, each in enumerate(body.messages) if each.role == "user"), -1)
    messages = [
        await _message(each, f"messages[{index}]", may_show=index == first)
        for index, each in enumerate(body.messages)
    ]
    return QueryTask(
        reasoning=bool(body.reasoning),
        sampling=sampling_of(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            max_tokens=body.most_tokens,
            seed=body.seed,
            stop=body.stop_strings,
        ),
        messages=tuple(messages),
    )


async def _message(message: ChatMessage, where: str, *, may_show: bool) -> Message:
    for name in ("tool_calls", "function_call", "audio"):
        if short_value(getattr(message, name)):
            raise Refused("tools and audio are not served", field=f"{where}.{name}")
    content = message.content
    if content is None or isinstance(content, str):
        return Message(_ROLES[message.role], content or "")
    texts = _texts(content)
    shown = [index for index, part in enumerate(content) if isinstance(part, ImagePart)]
    if not shown:
        return Message(_ROLES[message.role], texts)
    field = f"{where}.content[{shown[-1]}].image_url.url"
    if len(shown) > 1 or not may_show:
        raise Refused("a conversation has one picture, in the user's first message", field=field)
    part = content[shown[0]]
    assert isinstance(part, ImagePart), "these indices are of pictures"
    image = await pictures.decoded(part.image_url.url, field)
    part.image_url.url = ""  # the picture has taken its memory's place
    # The model sees the picture before the words of its message, wherever it stood among them.
    return Message(_ROLES[message.role], (image, *texts))


def _texts(content: Sequence[TextPart | ImagePart | RefusalPart]) -> tuple[str, ...]:
    said = [part for part in content if not isinstance(part, ImagePart)]
    return tuple(part.text if isinstance(part, TextPart) else part.refusal for part in said)
