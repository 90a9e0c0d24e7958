"""A client program to be killed: `python -m tests.e2e.victim ADDRESS RPC TIMEOUT`.

It writes `READY` once it is loaded. The request comes on stdin; a timeout of 0 is none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import grpc
from legato.v1 import inference_pb2, inference_pb2_grpc, session_pb2_grpc

from tests.e2e.scenes import session_of

READY = b"ready\n"


def main() -> None:
    """Call, and read whatever comes."""
    address, rpc, seconds = sys.argv[1:]
    timeout = float(seconds) or None
    sys.stdout.buffer.write(READY)
    sys.stdout.close()
    data = sys.stdin.buffer.read()
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        if rpc == "Query":
            stub.Query(inference_pb2.QueryRequest.FromString(data), timeout=timeout)
            return
        asked = inference_pb2.GenerateRequest.FromString(data)
        stream: Iterable[object]
        if rpc == "Generate":
            stream = stub.Generate(asked, timeout=timeout)
        else:
            stream = session_pb2_grpc.SessionServiceStub(channel).Session(
                iter(session_of(asked)), timeout=timeout
            )
        for _ in stream:
            pass


if __name__ == "__main__":
    main()
