"""Every option of the gRPC server, each with its reason.

gRPC ignores option names that it does not know, so each is held by a test of what it does.
"""

from __future__ import annotations

from legato_service.config import ServiceConfig

TRANSPORT_FACTOR = 2
"""The transport takes messages this much larger than the limit: up to there a refusal carries
details, beyond it gRPC answers RESOURCE_EXHAUSTED by itself and without any."""


def server_options(config: ServiceConfig, *, shared: bool = False) -> list[tuple[str, int]]:
    """Options for `grpc.aio.server`; `shared` when other processes of it listen on its port."""
    keepalive_timeout_ms = round(config.keepalive_timeout * 1000)
    max_message = config.max_request_bytes * TRANSPORT_FACTOR
    return [
        # A second server on the same port is a mistake to report, not a silent half of the load;
        # several processes of one server share theirs, which `port` has seen to.
        ("grpc.so_reuseport", int(shared)),
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        # Find peers that are gone: probe a silent connection, end it when no answer comes.
        ("grpc.keepalive_time_ms", round(config.keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        # A frozen process still acknowledges TCP; only the timeout of the ping itself finds it.
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may probe idle connections as often as this before they are sent away.
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            round(config.min_client_ping_interval * 1000),
        ),
        # Pictures are megabytes: larger frames and a window that need not grow first halve their
        # time on the wire.
        ("grpc.http2.max_frame_size", 4 * 1024 * 1024),
        ("grpc.http2.lookahead_bytes", 16 * 1024 * 1024),
        ("grpc.http2.bdp_probe", 0),
    ]
