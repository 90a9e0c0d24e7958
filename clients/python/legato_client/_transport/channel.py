"""The options of a channel: sizes, keep-alive, retries, metadata."""

from __future__ import annotations

import os
import re
import time
from typing import Any

from legato_client._errors import Busy, InvalidArgument
from legato_client._transport import service_config
from legato_client._version import CONTRACT_REVISION, version

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT = 60.0  # seconds, unary
DEFAULT_STREAM_TIMEOUT = 600.0  # seconds, Generate from start to end
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_ATTEMPTS = service_config.max_attempts()
COMMON_REQUEST_BYTES = 4 * 1024 * 1024  # any gRPC server takes this by default

_OTHER_TARGET = re.compile(
    r"(unix|unix-abstract|vsock|ipv4|ipv6|dns|xds|google-c2p):(?!\d+$)|.*:///"
)

Metadata = tuple[tuple[str, str], ...]
ChannelOptions = tuple[tuple[str, Any], ...]


def default_target() -> str:
    return os.environ.get("LEGATO_SERVER") or DEFAULT_TARGET


def full_target(target: str) -> str:
    """A target of gRPC; a host alone has the port of `DEFAULT_TARGET`.

    Raises:
        ValueError: a URL of HTTP, or a port that is no number.
    """
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() in ("http", "https", "grpc", "grpcs"):
        address = rest.rstrip("/")
        raise ValueError(f"a server is HOST:PORT and no URL: {address!r} instead of {target!r}")
    if _OTHER_TARGET.match(target):
        return target
    host, port = _split(target)
    if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"a server is HOST:PORT, not {target!r}")
    return f"{host}:{port}"


def _split(target: str) -> tuple[str, str]:
    """Host and port; an IPv6 address gets its brackets."""
    default = DEFAULT_TARGET.rpartition(":")[2]
    if target.startswith("["):
        host, _, after = target.partition("]")
        return f"{host}]", after.removeprefix(":") if after else default
    if target.count(":") > 1:
        return f"[{target}]", default
    host, separator, port = target.partition(":")
    return host, port if separator else default


def channel_options(max_message_bytes: int, target: str) -> ChannelOptions:
    return (
        ("grpc.service_config", service_config.of_target(target)),
        ("grpc.enable_retries", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A restarted server is found within seconds, not after the default's two minutes.
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # Slower than the fastest ping a Legato server allows (10 s). The ping timeout finds a
        # frozen peer; the keep-alive timeout alone only finds a vanished host.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
    )


def call_metadata(priority: int | None, tenant: str | None, extra: Metadata) -> Metadata:
    """Keys are in lower case, as gRPC demands."""
    own: Metadata = (("legato-client", f"python/{version()}/{CONTRACT_REVISION}"),)
    if priority is not None:
        own += (("legato-priority", str(priority)),)
    if tenant is not None:
        own += (("legato-tenant", tenant),)
    return own + extra


def check_size(num_bytes: int, limit: int) -> None:
    """Check the size of a request. Raises InvalidArgument, which names the way around the limit."""
    if num_bytes > limit:
        raise InvalidArgument(
            f"the request has {num_bytes} bytes, the limit is {limit}: upload the image with "
            "`put_image`, which takes larger ones, and ask about what it returns; or send it as a "
            "JPEG file",
            reason="IMAGE_TOO_LARGE",
            metadata={"limit": str(limit), "actual": str(num_bytes)},
        )


class Deadline:
    """A point in time that all attempts of a call share."""

    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def busy_delay(error: Busy, attempt: int, time_left: float) -> float | None:
    """Seconds until the next attempt, or None when the error must be raised.

    gRPC itself retries UNAVAILABLE; a busy server gets a retry only when it says when.
    """
    if error.retry_after is None:
        return None
    if attempt >= MAX_ATTEMPTS or error.retry_after >= time_left:
        return None
    return error.retry_after
