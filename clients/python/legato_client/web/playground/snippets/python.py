"""A request as a program in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from legato_client._values.tasks import Options, Task
from legato_client.web.playground.snippets.connection import Connection

_WIDTH = 88


def program(connection: Connection, picture: str | None, task: Task, options: Options) -> str:
    """Prints every event of one task as it comes."""
    names = sorted({"Client", *_names(task), *_names(options)} - _unused(options))
    asked = [expression(picture), "task"]
    if options != Options():
        asked.append(f"options={expression(options)}")
    lines = [
        f"from legato_client import {', '.join(names)}",
        "",
        f"task = {expression(task)}",
        f"with Client({', '.join(_arguments(connection))}) as client:",
        f"    for event in client.generate({', '.join(asked)}):",
        "        print(event)",
    ]
    note = ["# the token is taken from the environment: LEGATO_TOKEN"] if connection.token else []
    return "\n".join((*note, *lines)) + "\n"


def expression(value: object, indent: int = 0) -> str:
    """What makes a value of the client, without arguments that are defaults."""
    if isinstance(value, tuple):
        items = [expression(each, indent + 4) for each in value]
        return _call("(", items, ",)" if len(items) == 1 else ")", indent)
    if isinstance(value, str):
        return _text(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    arguments, by_name = [], False
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if given == field.default:
            by_name = True  # what follows an omitted argument must be named
            continue
        shown = expression(given, indent + 4)
        arguments.append(f"{field.name}={shown}" if by_name else shown)
    return _call(f"{type(value).__name__}(", arguments, ")", indent)


def _text(value: str) -> str:
    """With double quotes, unless it has some."""
    shown = repr(value)
    if shown[0] == '"' or '"' in shown:
        return shown
    return f'"{shown[1:-1]}"'


def _call(head: str, items: list[str], tail: str, indent: int) -> str:
    line = f"{head}{', '.join(items)}{tail}"
    if len(line) + indent <= _WIDTH or not items:
        return line
    margin = " " * indent
    body = "".join(f"\n{margin}    {each}," for each in items)
    return f"{head}{body}\n{margin}{tail.lstrip(',')}"


def _names(value: object) -> Iterator[str]:
    if isinstance(value, tuple):
        for each in value:
            yield from _names(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__
        for field in dataclasses.fields(value):
            if getattr(value, field.name) != field.default:
                yield from _names(getattr(value, field.name))


def _unused(options: Options) -> set[str]:
    return {"Options"} if options == Options() else set()


def _arguments(connection: Connection) -> Iterator[str]:
    yield _text(connection.target)
    if connection.authorities:
        yield 'ca="ca.pem"'
    if connection.certificate:
        yield 'cert="client.pem", key="client-key.pem"'
    if connection.encrypted and not (connection.authorities or connection.certificate):
        yield "tls=True"
