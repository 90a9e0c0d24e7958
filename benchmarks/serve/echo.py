"""A bare grpc.aio server that answers with given messages: the cost of gRPC alone.

`python -m benchmarks.serve.echo FILE` prints its port and serves until it is terminated. Requests
are parsed and answers serialised as in the real server, on the same event loop and with the same
options; there is nothing between the two. With `--tuned` it also has the real server's settings of
the interpreter and of the kernel.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_engine.ipc import latency_policy
from legato_service import lifecycle
from legato_service.config import ServiceConfig
from legato_service.listeners import server_options


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """The server's answers as bytes: by the name of the unary RPC, and for each Generate task."""

    unary: Mapping[str, bytes]
    streams: Mapping[str, Sequence[bytes]]  # by the kind of the task

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        document = {
            "unary": {name: data.hex() for name, data in self.unary.items()},
            "streams": {kind: [each.hex() for each in all_] for kind, all_ in self.streams.items()},
        }
        path.write_text(json.dumps(document))

    @classmethod
    def load(cls, path: Path) -> Answers:
        """Read a file that `save` wrote."""
        document = json.loads(path.read_text())
        return cls(
            {name: bytes.fromhex(data) for name, data in document["unary"].items()},
            {
                kind: [bytes.fromhex(each) for each in all_]
                for kind, all_ in document["streams"].items()
            },
        )


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    """Answers every request with the answer of its RPC, or every message of its task."""

    def __init__(self, answers: Answers) -> None:
        read = inference_pb2.GenerateResponse.FromString
        self._streams = {
            kind: [read(each) for each in messages] for kind, messages in answers.streams.items()
        }
        for name, data in answers.unary.items():
            response = getattr(inference_pb2, f"{name}Response").FromString(data)
            setattr(self, name, _answering(response))

    async def Generate(  # noqa: N802 - named by the contract
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Send all messages, one after another."""
        for message in self._streams[request.task.WhichOneof("kind") or ""]:
            yield message


def _answering(response: Any) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        return response

    return answer


async def _serve(answers: Answers) -> None:
    server = grpc.aio.server(options=server_options(ServiceConfig()))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        Echo(answers),  # type: ignore[abstract]  # its unary RPCs are set when it is made
        server,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if "--tuned" in sys.argv[2:]:
        lifecycle.tune_process(latency_policy.resolve("auto"))
    uvloop.run(_serve(Answers.load(Path(sys.argv[1]))))
