"""The owner that quotas of image memory count for."""

from __future__ import annotations

from legato_service.rpc import call
from legato_service.rpc.context import Context


def quota_owner(context: Context) -> str:
    """Return the call's tenant, else the client's host."""
    tenant = call.current().tenant
    return f"tenant:{tenant}" if tenant else f"peer:{_host(context.peer())}"


def _host(peer: str) -> str:
    """Remove the port of `ipv4:10.0.0.7:5000` or `ipv6:[::1]:5000`; keep any other address."""
    kind, _, address = peer.partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
