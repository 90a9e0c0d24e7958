"""Service settings: frozen, built once in `__main__`, handed down narrow."""

from __future__ import annotations

import ipaddress

import msgspec
from legato_engine.config import EngineConfig


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the service process is told at its start. Times are seconds, sizes bytes."""

    listen: str = "127.0.0.1:50051"  # host:port; port 0 takes any free one
    insecure: bool = False  # allow a listener beyond loopback although nothing protects it
    engine: EngineConfig = EngineConfig()
    max_request_bytes: int = 16 * 1024 * 1024
    unary_deadline: float = 60.0  # for calls that bring none
    stream_deadline: float = 600.0
    stall_timeout: float = 30.0  # how long a peer may take no message of its stream
    stuck_after: float = 30.0  # pending work without a step for so long: not serving
    silent_after: float = 5.0  # no heartbeat for so long: not serving
    health_interval: float = 0.25
    drain_grace: float = 30.0
    keepalive_time: float = 20.0
    keepalive_timeout: float = 5.0
    min_client_ping_interval: float = 10.0
    log_level: str = "info"

    @property
    def host(self) -> str:
        """The host part of `listen`, an IPv6 address without its brackets."""
        return self.listen.rpartition(":")[0].strip("[]")


def check(config: ServiceConfig) -> None:
    """Raises `ValueError` for settings that no server should start with."""
    host, _, port = config.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--listen takes HOST:PORT, not {config.listen!r}")
    if not (config.insecure or _is_loopback(config.host)):
        raise ValueError(
            f"{config.host} is reachable from other machines and this server has no TLS and no "
            "authentication; put it behind a proxy that has, or allow it with --insecure"
        )
    for name in ("unary_deadline", "stream_deadline", "stall_timeout", "max_request_bytes"):
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be positive")
    if config.drain_grace < 0:
        raise ValueError("drain_grace must not be negative")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
