"""Service settings: frozen, built once in `__main__`, handed down narrow."""

from __future__ import annotations

import msgspec
from legato_engine.config import HIGHEST_ADAPTER_RANK, EngineConfig

from legato_service import addresses

_POSITIVE = (
    "unary_deadline",
    "stream_deadline",
    "stall_timeout",
    "max_request_bytes",
    "max_image_bytes",
    "image_ttl",
    "max_sessions",
    "max_session_age",
)


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the service process is told at its start. Times are seconds, sizes bytes."""

    listen: str = "127.0.0.1:50051"  # host:port; port 0 takes any free one
    admin_listen: str = ""  # host:port or unix:path for AdminService alone; empty: see `admin_on`
    insecure: bool = False  # allow a listener beyond loopback although nothing protects it
    processes: int = 1  # that speak gRPC, before one engine
    engine: EngineConfig = EngineConfig()
    max_request_bytes: int = 16 * 1024 * 1024
    max_image_bytes: int = 64 * 1024 * 1024  # of a picture that does not come in its request
    shared_images: bool = False  # read pictures from regions of shared memory that clients name
    image_ttl: float = 600.0  # how long an uploaded picture is held unless its caller says
    image_max_ttl: float = 3600.0
    unary_deadline: float = 60.0  # for calls that bring none
    stream_deadline: float = 600.0
    stall_timeout: float = 30.0  # how long a peer may take no message of its stream
    max_sessions: int = 1000
    max_session_age: float = 3600.0  # then it is told to go away
    session_open_timeout: float = 10.0  # how long a session may be silent before it opens
    stuck_after: float = 30.0  # pending work without a step for so long: not serving
    silent_after: float = 5.0  # no heartbeat for so long: not serving
    health_interval: float = 0.25
    drain_grace: float = 30.0
    keepalive_time: float = 20.0
    keepalive_timeout: float = 5.0
    min_client_ping_interval: float = 10.0
    log_level: str = "info"

    @property
    def admin_on(self) -> str:
        """The address that AdminService is on; empty: on none.

        Its own, else the main one, unless other machines reach that: nothing protects it there.
        """
        return self.admin_listen or (self.listen if addresses.is_local(self.listen) else "")


def check(config: ServiceConfig) -> None:
    """Raises `ValueError` for settings that no server should start with."""
    addresses.check("--listen", config.listen, insecure=config.insecure, unix=False)
    if config.admin_listen:
        addresses.check("--admin-listen", config.admin_listen, insecure=config.insecure, unix=True)
    for name in _POSITIVE:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be positive")
    if config.image_ttl > config.image_max_ttl:
        raise ValueError("image_ttl must not be longer than image_max_ttl")
    if config.processes < 1:
        raise ValueError("processes must be at least 1")
    if config.engine.max_adapter_rank > HIGHEST_ADAPTER_RANK:
        raise ValueError(f"max_adapter_rank must be at most {HIGHEST_ADAPTER_RANK}")
    if config.drain_grace < 0:
        raise ValueError("drain_grace must not be negative")
