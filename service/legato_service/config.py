"""Service settings."""

from __future__ import annotations

import msgspec
from legato_engine.config import MAX_ADAPTER_RANK, EngineConfig

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
    """All settings of the service processes, in seconds and bytes."""

    listen: str = "127.0.0.1:50051"  # host:port; port 0: any free port
    admin_listen: str = ""  # host:port or unix:path for AdminService alone; empty: see `admin_on`
    insecure: bool = False  # allow an unprotected listener beyond loopback
    processes: int = 1
    engine: EngineConfig = EngineConfig()
    max_request_bytes: int = 16 * 1024 * 1024
    max_image_bytes: int = 64 * 1024 * 1024  # of an uploaded or shared image
    shared_images: bool = False  # read images from shared memory that clients name
    image_ttl: float = 600.0  # of uploaded images, by default
    image_max_ttl: float = 3600.0
    unary_deadline: float = 60.0  # for calls without one
    stream_deadline: float = 600.0
    stall_timeout: float = 30.0  # a peer may leave its stream unread for so long
    max_sessions: int = 1000
    max_session_age: float = 3600.0  # then its client is asked to close it
    session_open_timeout: float = 10.0  # from the call to its `open` message
    drain_grace: float = 30.0
    keepalive_time: float = 20.0
    keepalive_timeout: float = 5.0
    min_client_ping_interval: float = 10.0
    log_level: str = "info"

    @property
    def admin_on(self) -> str:
        """The address of AdminService; empty: it is off.

        By default the main address, unless other machines can reach it: nothing protects it there.
        """
        return self.admin_listen or (self.listen if addresses.is_local(self.listen) else "")


def check(config: ServiceConfig) -> None:
    """Check the settings.

    Raises:
        ValueError: a setting is out of range or unsafe.
    """
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
    if config.engine.max_adapter_rank > MAX_ADAPTER_RANK:
        raise ValueError(f"max_adapter_rank must be at most {MAX_ADAPTER_RANK}")
    if config.drain_grace < 0:
        raise ValueError("drain_grace must not be negative")
