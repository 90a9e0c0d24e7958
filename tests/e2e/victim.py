"""A client program to be killed: `python -m tests.e2e.victim ADDRESS RPC`, the request on stdin."""

from __future__ import annotations

import sys

import grpc
from legato.v1 import inference_pb2, inference_pb2_grpc


def main() -> None:
    """Call, and read whatever comes."""
    address, rpc = sys.argv[1:]
    data = sys.stdin.buffer.read()
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        if rpc == "Query":
            stub.Query(inference_pb2.QueryRequest.FromString(data))
        else:
            for _ in stub.Generate(inference_pb2.GenerateRequest.FromString(data)):
                pass


if __name__ == "__main__":
    main()
