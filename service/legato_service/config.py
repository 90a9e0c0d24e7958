"""Service settings."""

from __future__ import annotations

import msgspec
from legato_engine.config import MAX_ADAPTER_RANK, EngineConfig

from legato_service import addresses

ADMIN_SAME = "same"
"""AdminService on the main listener."""
ADMIN_OFF = "off"


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the service processes, in seconds and bytes."""

    listen: str = "127.0.0.1:50051"  # host:port; port 0: any free port
    admin_listen: str = ""  # host:port, unix:path, "same" or "off"; empty: this user's socket
    health_listen: str = ""  # host:port for health alone, without TLS; empty: none
    metrics_listen: str = ""  # host:port of HTTP scrapes; empty: none
    metrics: bool = False  # record RPC metrics also without `metrics_listen`
    metrics_tenants: int = 10  # tenants with a label of their own
    vllm_metrics: bool = True  # repeat metrics under vLLM's names
    otlp_endpoint: str = ""  # URL of a collector for spans; empty: none are made
    trace_ratio: float = 1.0  # fraction of the calls without a sampling decision
    tls_cert: str = ""  # file of the certificate chain; empty: no TLS
    tls_key: str = ""
    tls_client_ca: str = ""  # file of the authority that client certificates must have
    tokens: str = ""  # file of credentials
    access_interval: float = 0.25  # polling interval of the files above
    quota_requests: float = 0  # a second, of a credential; 0: unlimited, as the next two
    quota_pixels: float = 0  # a second, of new images
    quota_sessions: int = 0
    insecure: bool = False  # allow an unprotected listener beyond loopback
    processes: int = 1
    devices: str = ""  # comma-separated, or "all"; empty: one engine on engine.device
    affinity: bool = True  # prefer the engine that holds what a request needs
    depth_switch: bool = False  # an operator may set the pipeline's depth
    engine: EngineConfig = EngineConfig()
    max_request_bytes: int = 16 * 1024 * 1024
    max_image_bytes: int = 64 * 1024 * 1024  # per uploaded or shared image
    shared_images: bool = False  # read images from shared memory that clients name
    image_ttl: float = 600.0  # default of uploaded images
    image_max_ttl: float = 3600.0
    unary_deadline: float = 60.0  # for calls without one
    stream_deadline: float = 600.0
    stall_timeout: float = 30.0  # a peer may leave its stream unread for so long
    max_sessions: int = 1000
    max_session_age: float = 3600.0  # then its client is asked to close it
    session_open_timeout: float = 10.0  # from the call to its `open` message
    drain_delay: float = 0.0  # from SIGTERM to the drain: serving, but not ready
    drain_grace: float = 30.0
    keepalive_time: float = 20.0
    keepalive_timeout: float = 5.0
    min_client_ping_interval: float = 10.0
    handshake_timeout: float = 10.0  # per connection
    idle_timeout: float = 600.0  # per connection without calls
    log_level: str = "info"

    @property
    def has_credentials(self) -> bool:
        return bool(self.tokens or self.tls_client_ca)

    @property
    def admin_on_main(self) -> bool:
        """Return whether AdminService is on the main listener: with credentials, or on request."""
        same = self.admin_listen == ADMIN_SAME
        return same or (self.has_credentials and self.admin_listen != ADMIN_OFF)

    @property
    def has_own_admin(self) -> bool:
        return self.admin_listen not in (ADMIN_OFF, ADMIN_SAME)


def check(config: ServiceConfig) -> None:
    """Check what the types of the options do not: addresses, and settings that belong together.

    Raises:
        ValueError: a setting is malformed or unsafe.
    """
    _check_listeners(config)
    if config.metrics_listen:  # nothing but counts; a scraper is mostly another machine
        addresses.check("--metrics-listen", config.metrics_listen, unix=False)
    if config.image_ttl > config.image_max_ttl:
        raise ValueError(
            f"--image-ttl must be at most --image-max-ttl, {config.image_max_ttl:g} s, and is "
            f"{config.image_ttl:g} s"
        )
    if (rank := config.engine.max_adapter_rank) > MAX_ADAPTER_RANK:
        raise ValueError(f"--max-adapter-rank must be at most {MAX_ADAPTER_RANK}, and is {rank}")


def _check_listeners(config: ServiceConfig) -> None:
    addresses.check("--listen", config.listen, unix=False)
    if config.health_listen:
        addresses.check("--health-listen", config.health_listen, unix=False)
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ValueError("--tls-cert and --tls-key are needed together")
    if config.tls_client_ca and not config.tls_cert:
        raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
    listeners = [config.listen]
    if config.admin_listen and config.has_own_admin:
        addresses.check("--admin-listen", config.admin_listen, unix=True)
        listeners.append(config.admin_listen)
    if config.insecure and config.admin_listen != ADMIN_SAME:
        return
    for address in listeners:
        is_protected = config.tls_cert and config.has_credentials
        if not (addresses.is_local(address) or is_protected):
            allow = "" if config.admin_listen == ADMIN_SAME else ", or allow it with --insecure"
            raise ValueError(
                f"{addresses.host_of(address)} is reachable from other machines: that needs "
                f"--tls-cert, --tls-key, and --tokens or --tls-client-ca{allow}"
            )
