"""Conversations: the image that a message shows, and their protobuf form. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legato.v1 import task_pb2

from legato_client._images.sources import ImageInput
from legato_client._values.tasks import Message, QueryTask, Task

_ROLES: dict[str, task_pb2.ChatRole.ValueType] = {
    "system": task_pb2.CHAT_ROLE_SYSTEM,
    "user": task_pb2.CHAT_ROLE_USER,
    "assistant": task_pb2.CHAT_ROLE_ASSISTANT,
}


def image_of(task: Task, image: ImageInput | None) -> ImageInput | None:
    """The image of a call: `image`, or the one that a message of the task shows.

    Raises ValueError for several.
    """
    shown = _shown(task)
    if len(shown) + (image is not None) > 1:
        raise ValueError("one image in a conversation, given once")
    return shown[0] if shown else image


def refuse_images(task: Task) -> None:
    """ValueError for an image in a message, where the call's image is that of several tasks."""
    if _shown(task):
        raise ValueError("this call is given its image beside the tasks, not inside a message")


def to_messages(messages: Iterable[Message]) -> list[task_pb2.ChatMessage]:
    """The contract's messages, an image's place being marked; ValueError for an unknown role."""
    return [_to_message(message) for message in messages]


def _to_message(message: Message) -> task_pb2.ChatMessage:
    if message.role not in _ROLES:
        raise ValueError(f"a role is one of {sorted(_ROLES)}, got {message.role!r}")
    parts = [
        task_pb2.ChatPart(text=part)
        if isinstance(part, str)
        else task_pb2.ChatPart(image=task_pb2.ImagePart())
        for part in _parts(message)
    ]
    return task_pb2.ChatMessage(role=_ROLES[message.role], parts=parts)


def _shown(task: Task) -> list[ImageInput]:
    if not isinstance(task, QueryTask):
        return []
    parts = [part for message in task.messages for part in _parts(message)]
    return [part for part in parts if not isinstance(part, str)]


def _parts(message: Message) -> Sequence[str | ImageInput]:
    return (message.content,) if isinstance(message.content, str) else message.content
