"""`legato chat`."""

from __future__ import annotations

import io
import json
from typing import Any

import grpc
import pytest
from legato.v1 import task_pb2
from legato_client.cli import main
from PIL import Image

from tests.clients.python.failures import failure


@pytest.fixture
def talk(server, monkeypatch, capsys):
    """Run `legato chat` on lines of standard input: exit code, standard output, standard error."""
    monkeypatch.setenv("LEGATO_SERVER", server.target)

    def run(lines: list[str], *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def said(server: Any) -> list[list[tuple[int, str]]]:
    """The text of each message of each question that the server got."""
    return [
        [(m.role, "".join(part.text for part in m.parts)) for m in request.task.query.messages]
        for name, request, *_ in server.requests
        if name == "Generate"
    ]


def test_a_question_is_asked_after_what_was_said(talk, server):
    """Each question comes with those before it and their answers, which are streamed."""
    code, out, err = talk(["how many?", "", "sure?"], "--system", "Be brief.")
    assert (code, err) == (0, "")
    assert out.count("two cats") == 2
    system, user, assistant = (
        task_pb2.CHAT_ROLE_SYSTEM,
        task_pb2.CHAT_ROLE_USER,
        task_pb2.CHAT_ROLE_ASSISTANT,
    )
    first = [(system, "Be brief."), (user, "how many?")]
    assert said(server) == [first, [*first, (assistant, "two cats"), (user, "sure?")]]


def test_commands(talk, server, tmp_path):
    """Each of them begins the conversation again; /quit ends it."""
    image = tmp_path / "a.png"
    Image.new("RGB", (20, 10)).save(image)
    lines = ["one", "/reset", "two", f"/image {image}", "three", "four", "/system Be kind.", "five"]
    assert talk([*lines, "/help", "/quit", "six"])[0] == 0
    asked = [request for name, request, *_ in server.requests if name == "Generate"]
    assert [[text for _, text in each] for each in said(server)] == [
        ["one"],
        ["two"],
        ["three"],
        ["three", "two cats", "four"],
        ["Be kind.", "five"],
    ]
    assert [bool(each.image.encoded.data) for each in asked] == [False, False, True, True, True]


def test_json_and_errors(talk, server):
    """One document an answer; without a person at the keyboard an error ends the run."""
    code, out, _ = talk(["how many?", "sure?"], "--json")
    assert [json.loads(line)["answer"] for line in out.splitlines()] == ["two cats"] * 2
    assert code == 0
    server.script["Generate"].append(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    asked = len(said(server))
    code, _, err = talk(["how many?", "sure?"])
    assert code == 6
    assert "QUEUE_FULL" in err
    assert len(said(server)) == asked + 1
    assert talk(["/dance"])[0] == 2
    assert talk(["/image /no/such/file"])[0] == 2


def test_a_person_is_told_and_asked_again(talk, server, monkeypatch):
    """An error does not end a conversation at a terminal, and its question is forgotten."""
    typed = iter(["one", "two"])

    def ask(_prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", Screen())
    monkeypatch.setattr("sys.stdout", screen)
    server.script["Generate"].append(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    assert main(["chat"]) == 0
    assert "QUEUE_FULL" in screen.getvalue()
    assert "two cats" in screen.getvalue()
    assert [[text for _, text in each] for each in said(server)] == [["one"], ["two"]]
