"""Which test sees which part of the contract filled: what `filled.json` is written from.

    pytest -p tests.contract.recording --record-contract FILE tests/service tests/e2e ...

Messages are looked at where a channel of gRPC serialises or parses them, so both sides of a call
are seen: fields of requests that a test sends, and of responses that it gets. Values of enums count
where a field has them. The file keeps the first test that sees a part.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from google.protobuf.message import Message

WORDS = ("GetServerInfoResponse.capabilities", "Model.tasks")
"""Lists whose comments name the words that they may hold."""

SEEN: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file to write."""
    parser.addoption("--record-contract", type=Path, required=True)


def pytest_configure() -> None:
    """Wrap what makes calls, of both kinds of channel."""
    from grpc import _channel
    from grpc.aio import _channel as aio_channel

    for kind in (_channel.Channel, aio_channel.Channel):
        for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            setattr(kind, name, _recording(getattr(kind, name)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Merge with what the file has."""
    path = session.config.getoption("--record-contract")
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(dict(sorted({**SEEN, **known}.items())), indent=1) + "\n")


def _recording(make):
    def wrapped(self, method, request_serializer=None, response_deserializer=None, **options):
        def serialise(message):
            look(message)
            return request_serializer(message)

        def parse(data):
            message = response_deserializer(data)
            look(message)
            return message

        if request_serializer is None or response_deserializer is None:
            return make(self, method, request_serializer, response_deserializer, **options)
        return make(self, method, serialise, parse, **options)

    return wrapped


def look(message: Message) -> None:
    """Note everything that is set in a message."""
    for field, value in message.ListFields():
        own = message.DESCRIPTOR.file.package == "legato.v1"
        if own:
            _note(f"{message.DESCRIPTOR.name}.{field.name}")
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        for each in value if field.is_repeated else [value]:
            if isinstance(each, Message):
                look(each)
            elif own and field.enum_type is not None:
                value_of = field.enum_type.values_by_number.get(each)  # None: sent on purpose
                if value_of is not None and not value_of.name.endswith("_UNSPECIFIED"):
                    _note(value_of.name)
            elif f"{message.DESCRIPTOR.name}.{field.name}" in WORDS:
                _note(f"{message.DESCRIPTOR.name}.{field.name}: {each}")


def _note(part: str) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test:
        SEEN.setdefault(part, test.partition("[")[0])
