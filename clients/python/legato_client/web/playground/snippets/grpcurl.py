"""A request as a command of grpcurl."""

from __future__ import annotations

import json

from google.protobuf import json_format

from legato_client._convert import requests
from legato_client._values.tasks import Options, Task
from legato_client.web.playground.snippets.connection import Connection

_METHOD = "legato.v1.InferenceService/Generate"


def command(connection: Connection, picture: str | None, task: Task, options: Options) -> str:
    """Prints every event of one task as it comes; the server tells grpcurl the contract."""
    request = requests.generate(None, task, options)
    document = json_format.MessageToDict(request, preserving_proto_field_name=True)
    text = _quoted(json.dumps(document, ensure_ascii=False))
    if picture is not None:
        data = f'"$(base64 -w0 {picture})"'
        text = f'{text[:-1]}, "image": {{"encoded": {{"data": {data}}}}}}}'
    words = ["grpcurl", *_security(connection), "-d @", connection.target, _METHOD, "<<JSON"]
    return f"{' '.join(words)}\n{text}\nJSON\n"


def _quoted(text: str) -> str:
    """For a here-document in which the shell expands: a backslash, a dollar and a backquote."""
    return text.replace("\\", "\\\\").replace("$", "\\$").replace("`", "\\`")


def _security(connection: Connection) -> list[str]:
    words = [] if connection.encrypted else ["-plaintext"]
    if connection.authorities:
        words.append("-cacert ca.pem")
    if connection.certificate:
        words.append("-cert client.pem -key client-key.pem")
    if connection.token:
        words.append('-H "authorization: Bearer $LEGATO_TOKEN"')
    return words
