"""Chat messages to a question with its history."""

from __future__ import annotations

import itertools
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
    """Convert messages: system's, if any, then user and assistant in turns, user last.

    Messages of one role in a row are one turn.

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
    is_system = [message.role == _SYSTEM for message in messages]
    num_system = (*is_system, False).index(False)
    _check_roles(messages, num_system, field)
    texts = [
        _text(message, f"{field}[{index}]", takes_image=index == num_system)
        for index, message in enumerate(messages)
    ]
    fields.check_text_size(texts, field)
    spoken = itertools.groupby(range(num_system, len(messages)), lambda at: messages[at].role)
    turns = [_joined([texts[at] for at in group]) for _, group in spoken]
    return Conversation(
        system=_joined(texts[:num_system]),
        history=tuple(
            Turn(question=question, answer=answer)
            for question, answer in zip(turns[:-1:2], turns[1::2], strict=True)
        ),
        question=turns[-1],
        shows_image=any(part.HasField("image") for part in messages[num_system].parts),
    )


def _check_roles(messages: Sequence[task_pb2.ChatMessage], num_system: int, field: str) -> None:
    for index, message in enumerate(messages[num_system:], num_system):
        expected = (_USER,) if index == num_system else (_USER, _ASSISTANT)
        if message.role not in expected:
            names = " or ".join(map(task_pb2.ChatRole.Name, expected))
            raise InvalidField(
                f"{names} expected: messages of the system come first, then one of the user",
                field=f"{field}[{index}].role",
            )
    if len(messages) == num_system or messages[-1].role != _USER:
        raise InvalidField("the last message must be the user's", field=field)


def _joined(texts: Sequence[str]) -> str:
    """Join the texts of a turn by blank lines, without empty ones."""
    return texts[0] if len(texts) == 1 else "\n\n".join(filter(str.strip, texts))


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
