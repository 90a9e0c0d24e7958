"""Chat messages to a question with its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from legato.v1 import task_pb2
from legato_engine.core.task_specs import Turn
from legato_engine.errors import InvalidField

from legato_service.convert import fields

MAX_MESSAGES = 256

_SYSTEM, _USER, _ASSISTANT = (
    task_pb2.CHAT_ROLE_SYSTEM,
    task_pb2.CHAT_ROLE_USER,
    task_pb2.CHAT_ROLE_ASSISTANT,
)


class Conversation(NamedTuple):
    """A question and the messages before it."""

    system: str
    history: tuple[Turn, ...]
    question: str
    shows_image: bool


def conversation(messages: Sequence[task_pb2.ChatMessage], field: str) -> Conversation:
    """Convert messages: an optional system message, then user and assistant in turns, user last.

    Raises:
        InvalidField: the messages are malformed.
        PromptTooLong: the messages have too much text together.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidField(
            f"at most {MAX_MESSAGES} messages",
            field=field,
            limit=MAX_MESSAGES,
            actual=len(messages),
        )
    num_system = int(messages[0].role == _SYSTEM)
    _check_roles(messages, num_system, field)
    texts = [
        _text(message, f"{field}[{index}]", takes_image=index == num_system)
        for index, message in enumerate(messages)
    ]
    fields.check_text_size(texts, field)
    turns = texts[num_system:]
    return Conversation(
        system="".join(texts[:num_system]),
        history=tuple(
            Turn(question=question, answer=answer)
            for question, answer in zip(turns[:-1:2], turns[1::2], strict=True)
        ),
        question=turns[-1],
        shows_image=any(part.HasField("image") for part in messages[num_system].parts),
    )


def _check_roles(messages: Sequence[task_pb2.ChatMessage], num_system: int, field: str) -> None:
    for index, message in enumerate(messages[num_system:], num_system):
        expected = _ASSISTANT if (index - num_system) % 2 else _USER
        if message.role != expected:
            name = task_pb2.ChatRole.Name(expected)
            raise InvalidField(
                f"{name} expected: user and assistant take turns, after an optional system message",
                field=f"{field}[{index}].role",
            )
    if len(messages) == num_system or messages[-1].role != _USER:
        raise InvalidField("the last message must be the user's", field=field)


def _text(message: task_pb2.ChatMessage, field: str, *, takes_image: bool) -> str:
    for index, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            raise InvalidField("a part needs a text or an image", field=f"{field}.parts[{index}]")
        if kind == "image" and not (takes_image and index == 0):
            raise InvalidField(
                "only one image, at the beginning of the user's first message",
                field=f"{field}.parts[{index}].image",
            )
    text = "".join(part.text for part in message.parts)
    shows_image = any(part.HasField("image") for part in message.parts)
    if message.role == _USER and not text.strip() and not shows_image:
        raise InvalidField("a user's message needs text or the image", field=f"{field}.parts")
    return text
