"""Conversations, as both faces of the client send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from legato.v1 import task_pb2
from legato_client import CachedImage, Client, Finished, Message, QueryTask, Sampling

IMAGE = CachedImage("i-7")
TALK = (
    Message("system", "Be short."),
    Message("user", (IMAGE, "What ", "is it?")),
    Message("assistant", "A cup."),
    Message("user", "Of what colour?"),
)


def told(messages):
    """What a server reads of them: roles, and texts with an image as None."""
    return [
        (message.role, [part.text if part.HasField("text") else None for part in message.parts])
        for message in messages
    ]


SAME = [
    (task_pb2.CHAT_ROLE_SYSTEM, ["Be short."]),
    (task_pb2.CHAT_ROLE_USER, [None, "What ", "is it?"]),
    (task_pb2.CHAT_ROLE_ASSISTANT, ["A cup."]),
    (task_pb2.CHAT_ROLE_USER, ["Of what colour?"]),
]


def test_chat(client, server):
    """Messages go in order, and the image that one of them shows is the request's."""
    answer = client.chat(TALK, reasoning=True, sampling=Sampling(max_tokens=5))
    assert answer.answer == "two cats"
    asked = server.last("Query")
    assert told(asked.messages) == SAME
    assert asked.image.image_id == "i-7"
    assert (asked.question, asked.reasoning, asked.sampling.max_tokens) == ("", True, 5)


def test_chat_without_a_image(client, server):
    """A conversation of words alone has no image."""
    client.chat([Message("user", "Hi")])
    assert not server.last("Query").HasField("image")


def test_chat_streams(client, server):
    """A conversation is a task of `generate`, with its image inside or beside it."""
    task = QueryTask(messages=TALK)
    assert isinstance(client.generate(None, task)[-1], Finished)
    asked = server.last("Generate")
    assert told(asked.task.query.messages) == SAME
    assert asked.image.image_id == "i-7"
    client.generate(IMAGE, QueryTask(messages=(Message("user", "Hi"),)))
    assert server.last("Generate").image.image_id == "i-7"


def test_chat_reads_a_file(client, server, tmp_path):
    """A path is an image; a string is text even if a file is called so."""
    path = tmp_path / "picture"
    path.write_bytes(b"bytes")
    client.chat([Message("user", [Path(path), str(path)])])
    asked = server.last("Query")
    assert asked.image.encoded.data == b"bytes"
    assert told(asked.messages) == [(task_pb2.CHAT_ROLE_USER, [None, str(path)])]


def test_one_image_a_conversation(client, server):
    """A second image is refused before anything is sent, as is an unknown role."""
    twice = (*TALK, Message("assistant", "Red."), Message("user", (IMAGE, "And this?")))
    with pytest.raises(ValueError, match="one image"):
        client.chat(twice)
    with pytest.raises(ValueError, match="one image"):
        client.generate(IMAGE, QueryTask(messages=TALK))
    nobody: Any = "judge"
    with pytest.raises(ValueError, match="role"):
        client.chat([Message(nobody, "Hi")])
    assert not server.requests


def test_a_shared_image_is_not_inside_a_message(client, server):
    """Where several tasks share an image, one inside a message is refused, not lost."""
    with pytest.raises(ValueError, match="beside the tasks"):
        client.run_tasks(None, [QueryTask(messages=TALK)])
    with (
        Client(server.target) as blocking,
        pytest.raises(ValueError, match="beside the tasks"),
    ):
        blocking.session([QueryTask(messages=TALK)]).__enter__()
    client.run_tasks(IMAGE, [QueryTask(messages=TALK[2:])])
    assert len(server.last("RunTasks").tasks[0].query.messages) == 2


def test_a_string_is_a_conversation(client, server):
    """`chat("Hi")` asks that one question."""
    assert client.chat("Hi").answer
    assert told(server.last("Query").messages) == [(task_pb2.CHAT_ROLE_USER, ["Hi"])]
