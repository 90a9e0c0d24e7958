"""Who calls, as quotas of memory count callers."""

from __future__ import annotations

from legato_service.rpc import call
from legato_service.rpc.context import Context


def caller(context: Context) -> str:
    """The tenant that the call names, else the peer's host; the two are never the same."""
    tenant = call.current().tenant
    return f"tenant:{tenant}" if tenant else f"peer:{_host(context.peer())}"


def _host(peer: str) -> str:
    """`ipv4:10.0.0.7:5000` and `ipv6:[::1]:5000` without their ports; a socket's path as it is."""
    kind, _, address = peer.partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
