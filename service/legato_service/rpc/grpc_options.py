"""The options of the gRPC server.

gRPC ignores unknown names, so a test covers the effect of each.
"""

from __future__ import annotations

import resource

from legato_service.config import ServiceConfig

TRANSPORT_EXTRA = 1024 * 1024
"""The transport takes messages of so many bytes above the limit, which are refused with details.
Beyond it gRPC itself responds with RESOURCE_EXHAUSTED, without details, before it receives them."""

MAX_CONNECTIONS = 4096
"""Of a listener, and no more than three quarters of the descriptors that the process may open."""

MAX_CALLS_PER_CONNECTION = 256
"""Open calls. The others wait in the client, whose deadlines and cancellations apply at once."""

MAX_PENDING_CALLS = 16_384
"""Calls that gRPC has received and this process has not accepted: those of 64 connections."""


def server_options(config: ServiceConfig, *, shared: bool = False) -> list[tuple[str, int]]:
    keepalive_timeout_ms = round(config.keepalive_timeout * 1000)
    max_message = config.max_request_bytes + TRANSPORT_EXTRA
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = MAX_CONNECTIONS * 2
    return [
        # A second server on the port is an error to report, and must not get half of the load.
        ("grpc.so_reuseport", int(shared)),
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        # This protection also counts calls that are answered and not cleaned up yet. It refused a
        # fifth of the calls of 300 callers that share a connection.
        ("grpc.http.overload_protection", 0),
        # Beyond these gRPC cancels new calls at random, without a status.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
        ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, descriptors * 3 // 4)),
        # For TLS and the beginning of HTTP/2.
        ("grpc.server_handshake_timeout_ms", round(config.handshake_timeout * 1000)),
        # Connections without calls; clients open another one when they need it.
        ("grpc.max_connection_idle_ms", round(config.idle_timeout * 1000)),
        # Find dead peers.
        ("grpc.keepalive_time_ms", round(config.keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        # A frozen process still acknowledges TCP; only the ping's own timeout detects it.
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients that ping idle connections more often are disconnected.
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            round(config.min_client_ping_interval * 1000),
        ),
        # Images are megabytes: larger frames and a large first window halve their time on the wire.
        # A peer may send so much of each call before anything reads it.
        ("grpc.http2.max_frame_size", 4 * 1024 * 1024),
        ("grpc.http2.lookahead_bytes", 1024 * 1024),
        ("grpc.http2.bdp_probe", 0),
    ]
