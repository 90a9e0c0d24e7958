"""The options of the service: listeners, access, limits, telemetry."""

from __future__ import annotations

from legato_engine.config import EngineConfig

from legato_service.arguments import values
from legato_service.arguments.values import Add
from legato_service.config import ServiceConfig

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_listeners(add: Add, service: ServiceConfig) -> None:
    add("--listen", metavar="HOST:PORT", default=service.listen, help="where to listen")
    add(
        "--insecure",
        action="store_true",
        help="listen beyond loopback without TLS or without credentials",
    )
    add(
        "--admin-listen",
        metavar="ADDRESS",
        default=service.admin_listen,
        help="of AdminService: HOST:PORT, unix:PATH, same (as --listen) or off; by default a "
        "socket of this user, and with credentials also --listen, for the scope admin",
    )
    add(
        "--health-listen",
        metavar="HOST:PORT",
        default=service.health_listen,
        help="health checks alone, without TLS and credentials",
    )
    add(
        "--processes",
        type=values.positive,
        default=service.processes,
        help="service processes on this port before the engines; more than 1 helps at thousands of "
        "calls a second",
    )


def add_access(add: Add, service: ServiceConfig) -> None:
    add("--tls-cert", metavar="FILE", default=service.tls_cert, help="certificate chain, PEM")
    add("--tls-key", metavar="FILE", default=service.tls_key, help="its private key, PEM")
    add(
        "--tls-client-ca",
        metavar="FILE",
        default=service.tls_client_ca,
        help="authority that every client needs a certificate of, PEM",
    )
    add(
        "--tokens",
        metavar="FILE",
        default=service.tokens,
        help="credentials of callers, TOML: see legato token new",
    )
    add(
        "--quota-requests",
        metavar="RATE",
        type=values.not_negative,
        default=service.quota_requests,
        help="calls and frames a second with one credential; 0: unlimited",
    )
    add(
        "--quota-pixels",
        metavar="RATE",
        type=values.not_negative,
        default=service.quota_pixels,
        help="pixels of new images a second with one credential; 0: unlimited",
    )
    add(
        "--quota-sessions",
        metavar="N",
        type=values.whole,
        default=service.quota_sessions,
        help="open sessions with one credential; 0: unlimited",
    )


def add_limits(add: Add, engine: EngineConfig, service: ServiceConfig) -> None:
    add("--max-image-pixels", type=values.positive, default=engine.max_image_pixels)
    add("--max-request-bytes", type=values.positive, default=service.max_request_bytes)
    add("--max-sessions", type=values.positive, default=service.max_sessions, help="open at a time")
    add(
        "--max-session-age",
        metavar="SECONDS",
        type=values.above_zero,
        default=service.max_session_age,
        help="after which the client is asked to close a session",
    )
    add(
        "--max-image-bytes",
        type=values.positive,
        default=service.max_image_bytes,
        help="of an image that is uploaded or in shared memory",
    )
    add(
        "--shared-images",
        action="store_true",
        help="read images from shared memory: any client can name regions of this user",
    )
    add(
        "--image-ttl",
        metavar="SECONDS",
        type=values.above_zero,
        default=service.image_ttl,
        help="how long an uploaded image is held by default",
    )
    add(
        "--image-max-ttl",
        metavar="SECONDS",
        type=values.above_zero,
        default=service.image_max_ttl,
        help="how long a client may have an image held",
    )
    add(
        "--image-quota-bytes",
        type=values.positive,
        default=engine.image_quota_bytes,
        help="of prepared images that the engine holds for one client",
    )
    add(
        "--image-hold-bytes",
        type=values.positive,
        default=engine.image_hold_bytes,
        help="of prepared images that the engine holds for all clients",
    )
    add(
        "--drain-delay",
        metavar="SECONDS",
        type=values.not_negative,
        default=service.drain_delay,
        help="how long the server still serves after SIGTERM, reported as not ready, before it "
        "begins to drain",
    )
    add(
        "--drain-grace",
        metavar="SECONDS",
        type=values.not_negative,
        default=service.drain_grace,
        help="how long running requests may go on after the drain began",
    )


def add_telemetry(add: Add, service: ServiceConfig) -> None:
    add(
        "--metrics-listen",
        metavar="HOST:PORT",
        default=service.metrics_listen,
        help="where Prometheus scrapes /metrics over HTTP, without TLS; by default nowhere",
    )
    add(
        "--metrics",
        action="store_true",
        help="record metrics of calls for AdminService.GetMetrics; --metrics-listen implies it",
    )
    add(
        "--metrics-tenants",
        type=values.whole,
        default=service.metrics_tenants,
        help="tenants with a label of their own, the first that come; the others are `other`",
    )
    add(
        "--no-vllm-metrics",
        dest="vllm_metrics",
        action="store_false",
        help="without the metrics that repeat others under vLLM's names",
    )
    add(
        "--otlp-endpoint",
        metavar="URL",
        default=service.otlp_endpoint,
        help="OpenTelemetry collector that gets spans of calls by gRPC; by default none",
    )
    add(
        "--trace-ratio",
        type=values.share,
        default=service.trace_ratio,
        help="share of calls that are traced; a call with a traceparent brings its own decision",
    )
