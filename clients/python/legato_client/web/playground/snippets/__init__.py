"""A request of the page as code to copy: Python, Go, and grpcurl in a shell."""

from __future__ import annotations

import dataclasses
import re

from legato_client._values.tasks import Options, Task
from legato_client.web.playground.snippets import golang, grpcurl, python
from legato_client.web.playground.snippets.connection import Connection

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """Programs that make one request."""

    python: str
    go: str
    grpcurl: str


def code(connection: Connection, picture: str | None, task: Task, options: Options) -> Code:
    """`picture` is a file's name, taken if it needs no quotes anywhere; None is no picture."""
    name = picture
    if picture is not None and not _FILE_NAME.fullmatch(picture):
        name = "picture.jpg"
    return Code(
        python.program(connection, name, task, options),
        golang.program(connection, name, task, options),
        grpcurl.command(connection, name, task, options),
    )
