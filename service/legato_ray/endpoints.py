"""The file that tells Envoy the addresses of servers (EDS)."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

FILE_NAME = "endpoints.json"
CLUSTER = "legato"
"""`service_name` in deploy/envoy/envoy.yaml."""

_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


class EmptyEndpoints(ValueError):
    """A set without addresses would make Envoy refuse every call."""


class EndpointFile:
    """Envoy's file in a folder that exists. One writer a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._written = self.read()

    def read(self) -> frozenset[str]:
        """Read the addresses in the file; none if it is missing or another program wrote it."""
        try:
            return frozenset(_addresses(json.loads(self.path.read_bytes())))
        except (OSError, ValueError, LookupError, TypeError):
            return frozenset()

    def write(self, addresses: Collection[str]) -> bool:
        """Replace the file as a whole; return whether anything changed.

        Addresses are HOST:PORT or [HOST]:PORT; a host is an IP address.

        Raises:
            EmptyEndpoints: There are no addresses.
            ValueError: An address is not of that form.
            OSError: The file cannot be written; the old one is whole.
        """
        wanted = frozenset(addresses)
        if not wanted:
            raise EmptyEndpoints("Envoy's endpoints are never an empty set")
        if wanted == self._written:
            return False
        _replace(self.path, json.dumps(_response(sorted(wanted)), indent=1) + "\n")
        self._written = wanted
        return True


def _response(addresses: list[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": {"socket_address": _socket(a)}}} for a in addresses]
    assignment = {
        "@type": _TYPE,
        "cluster_name": CLUSTER,
        "endpoints": [{"lb_endpoints": endpoints}],
    }
    return {"resources": [assignment]}


def _socket(address: str) -> dict[str, Any]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"not an address of the form HOST:PORT: {address!r}")
    return {"address": host, "port_value": int(port)}


def _addresses(response: dict[str, Any]) -> list[str]:
    (assignment,) = response["resources"]
    sockets = [
        one["endpoint"]["address"]["socket_address"]
        for locality in assignment["endpoints"]
        for one in locality["lb_endpoints"]
    ]
    return [join(socket["address"], socket["port_value"]) for socket in sockets]


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _replace(path: Path, text: str) -> None:
    """Write by a rename within the folder: Envoy never sees a part."""
    descriptor, name = tempfile.mkstemp(prefix=".endpoints-", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)  # Envoy may run as another user
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
