"""Health checks of servers."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

INFERENCE = "legato.v1.InferenceService"
LIVENESS = ""  # SERVING while the service process answers


def serves(address: str, service: str, timeout: float) -> bool:
    """Whether the server at HOST:PORT says SERVING within `timeout` seconds."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),  # so that an old connection says nothing
        ("grpc.enable_http_proxy", 0),
    ]
    with grpc.insecure_channel(address, options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = stub.Check(request, timeout=timeout)
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
