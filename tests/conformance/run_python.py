"""The conformance list by grpcio and the committed stubs: see README.md for its arguments.

Run as `python -m tests.conformance.run_python`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # noqa: F401 - the details' types
from grpc_health.v1 import health_pb2  # noqa: F401 - a service of the list
from legato.v1 import (  # noqa: F401 - likewise
    admin_pb2,
    image_pb2,
    inference_pb2,
    server_pb2,
    session_pb2,
)

from tests.conformance.check import Case, Json, Step, fill, load

DETAILS = "grpc-status-details-bin"


def run_case(channel: grpc.Channel, case: Case, images: Path) -> list[Step]:
    """Return what was seen in each step."""
    seen: list[Step] = []
    for step in case["steps"]:
        messages = fill(step["send"], images, seen)
        seen.append(call(channel, step, messages))
    return seen


def call(channel: grpc.Channel, step: Step, messages: list[Json]) -> Step:
    """Make one call; on the wire every kind of call is bidirectional."""
    service, name = step["call"].split("/")
    method = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
    start: Any = channel.stream_stream(
        f"/{step['call']}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    running = start(
        requests(method, messages),
        timeout=step.get("timeout", 60),
        metadata=tuple(step.get("metadata", {}).items()),
    )
    received: list[Json] = []
    try:
        for message in running:
            received.append(json_format.MessageToDict(message))
            if len(received) == step.get("cancelAfter"):
                running.cancel()
    except grpc.RpcError:
        pass  # its code is reported
    return {
        "code": running.code().name,
        "messages": received,
        "details": [json_format.MessageToDict(detail) for detail in details(running)],
    }


def requests(method: MethodDescriptor, messages: list[Json]) -> Iterator[Message]:
    """Return the typed messages."""
    kind = message_factory.GetMessageClass(method.input_type)
    for message in messages:
        yield json_format.ParseDict(message, kind())


def details(running: Any) -> list[Message]:
    """Return the details of a call's status."""
    for key, value in running.trailing_metadata() or ():
        if key == DETAILS:
            return list(status_pb2.Status.FromString(value).details)
    return []


def main(address: str, cases: str, images: str, *names: str) -> None:
    """Run the named cases."""
    with grpc.insecure_channel(address) as channel:
        for case in load(Path(cases)):
            if case["name"] in names:
                steps = run_case(channel, case, Path(images))
                sys.stdout.write(json.dumps({"case": case["name"], "steps": steps}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
