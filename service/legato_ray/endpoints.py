"""The way of a server's address: from its replica to the file that tells Envoy (EDS)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato_ray.unit import serves

log = logging.getLogger(__name__)

_ANSWER = 1.0  # seconds for a health check
_PROBES = 16  # at a time

# ---------------------------------------------------------------- directory

MAX_AGE = 5.0
"""Seconds after which a replica that says nothing more is not listed."""


@dataclass(frozen=True)
class _Entry:
    health_address: str
    time: float  # of the clock


class Directory:
    """An actor of this class is where replicas and writers of endpoints meet.

    It may lose everything: replicas repeat themselves, and a writer drops no server that serves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def put(self, address: str, health_address: str) -> None:
        """List a serving server. To be repeated more often than every `MAX_AGE`."""
        self._entries[address] = _Entry(health_address, self._clock())

    def drop(self, address: str) -> None:
        """Remove a server that is about to stop, or does not serve."""
        self._entries.pop(address, None)

    def servers(self) -> Mapping[str, str]:
        """Health addresses by address."""
        oldest = self._clock() - MAX_AGE
        self._entries = {a: e for a, e in self._entries.items() if e.time >= oldest}
        return {address: entry.health_address for address, entry in self._entries.items()}


# ---------------------------------------------------------------- membership


class Membership:
    """A server comes when it is listed, and leaves `lame_duck` seconds after it said NOT_SERVING.

    By then Envoy, which checks health more often, sends it nothing. The last one never leaves.
    """

    def __init__(self, published: Collection[str], *, lame_duck: float) -> None:
        """Start with `published`, the addresses of an earlier writer."""
        self._lame_duck = lame_duck
        self._health_addresses = {address: address for address in published}
        self._silent_since: dict[str, float] = {}

    @property
    def published(self) -> frozenset[str]:
        return frozenset(self._health_addresses)

    def unlisted(self, listed: Collection[str]) -> dict[str, str]:
        """Return published servers whose health decides, with their health addresses."""
        return {a: h for a, h in self._health_addresses.items() if a not in listed}

    def update(
        self, now: float, listed: Mapping[str, str], not_serving: Collection[str]
    ) -> frozenset[str]:
        """Return the addresses to publish.

        `listed` has health addresses by address; `not_serving` are those of `unlisted` that did not
        say SERVING.
        """
        self._health_addresses |= listed
        for address in self._health_addresses:
            if address in not_serving and address not in listed:
                self._silent_since.setdefault(address, now)
            else:
                self._silent_since.pop(address, None)
        gone = {a for a, since in self._silent_since.items() if now - since >= self._lame_duck}
        if gone >= self.published:
            gone = set()
        for address in gone:
            del self._health_addresses[address], self._silent_since[address]
        return self.published


# ---------------------------------------------------------------- file

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
    return [_join(socket["address"], socket["port_value"]) for socket in sockets]


def _join(host: str, port: int) -> str:
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


# ---------------------------------------------------------------- writer


class EndpointWriter:
    """One for each Envoy, on its host. `step` is to be repeated."""

    def __init__(
        self, folder: Path, servers: Callable[[], Mapping[str, str]], *, lame_duck: float
    ) -> None:
        """`servers` gives health addresses by address, and may raise; `lame_duck` is in seconds."""
        self._file = EndpointFile(folder)
        self._servers = servers
        self._membership = Membership(self._file.read(), lame_duck=lame_duck)
        self._pool = ThreadPoolExecutor(_PROBES, thread_name_prefix="health")

    def step(self) -> None:
        """Write the file if servers changed. Raises OSError if it cannot be written."""
        try:
            listed = self._servers()
        except Exception:  # Ray's are many; health decides meanwhile
            log.exception("the directory does not answer")
            listed = {}
        unlisted = self._membership.unlisted(listed)
        answers = self._pool.map(lambda address: serves(address, _ANSWER), unlisted.values())
        not_serving = {
            address for address, is_serving in zip(unlisted, answers, strict=True) if not is_serving
        }
        addresses = self._membership.update(time.monotonic(), listed, not_serving)
        if addresses and self._file.write(addresses):
            log.info("endpoints: %s", ", ".join(sorted(addresses)))
