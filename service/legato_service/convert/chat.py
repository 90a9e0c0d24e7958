"""A conversation as protobuf messages, read as `core` values. Pure.

Raises `InvalidField` or `PromptTooLong` naming the offending field by its path from the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from legato.v1 import task_pb2
from legato_engine import core
from legato_engine.errors import InvalidField, PromptTooLong

MAX_MESSAGES = 256
MAX_CHARACTERS = 32_768  # of all messages together: as for a question alone

_SYSTEM, _USER, _ASSISTANT = (
    task_pb2.CHAT_ROLE_SYSTEM,
    task_pb2.CHAT_ROLE_USER,
    task_pb2.CHAT_ROLE_ASSISTANT,
)


class Conversation(NamedTuple):
    """What was said, and the question that is to be answered.

    `shows_image` says that a part stands for the request's picture.
    """

    system: str
    history: tuple[core.Turn, ...]
    question: str
    shows_image: bool


def conversation(messages: Sequence[task_pb2.ChatMessage], field: str) -> Conversation:
    """The system first or not at all, then user and assistant by turns, the user last."""
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
        _text(message, f"{field}[{at}]", takes_image=at == num_system)
        for at, message in enumerate(messages)
    ]
    _check_length(sum(map(len, texts)), field)
    turns = texts[num_system:]
    return Conversation(
        system="".join(texts[:num_system]),
        history=tuple(
            core.Turn(question=question, answer=answer)
            for question, answer in zip(turns[:-1:2], turns[1::2], strict=True)
        ),
        question=turns[-1],
        shows_image=any(part.HasField("image") for part in messages[num_system].parts),
    )


def _check_roles(messages: Sequence[task_pb2.ChatMessage], num_system: int, field: str) -> None:
    for at, message in enumerate(messages[num_system:], num_system):
        expected = _ASSISTANT if (at - num_system) % 2 else _USER
        if message.role != expected:
            name = task_pb2.ChatRole.Name(expected)
            raise InvalidField(
                f"the system may speak first, then user and assistant take turns: {name} is next",
                field=f"{field}[{at}].role",
            )
    if len(messages) == num_system or messages[-1].role != _USER:
        raise InvalidField("the last message is the user's", field=field)


def _text(message: task_pb2.ChatMessage, field: str, *, takes_image: bool) -> str:
    for at, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            raise InvalidField("a part is a text or an image", field=f"{field}.parts[{at}]")
        if kind == "image" and not (takes_image and at == 0):
            raise InvalidField(
                "one picture, at the beginning of the user's first message",
                field=f"{field}.parts[{at}].image",
            )
    text = "".join(part.text for part in message.parts)
    if not text.strip():
        raise InvalidField("a message needs some text", field=f"{field}.parts")
    return text


def _check_length(actual: int, field: str) -> None:
    if actual > MAX_CHARACTERS:
        raise PromptTooLong(
            f"{actual} characters, the limit is {MAX_CHARACTERS}",
            field=field,
            limit=MAX_CHARACTERS,
            actual=actual,
        )
