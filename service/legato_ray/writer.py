"""Keeps Envoy's file of endpoints in step with a directory of servers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from legato_ray import health
from legato_ray.endpoints import EndpointFile
from legato_ray.membership import Membership

log = logging.getLogger(__name__)

_ANSWER = 1.0  # seconds for a health check
_PROBES = 16  # at a time


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
        answers = self._pool.map(_serves, unlisted.values())
        not_serving = {
            address for address, serves in zip(unlisted, answers, strict=True) if not serves
        }
        addresses = self._membership.update(time.monotonic(), listed, not_serving)
        if addresses and self._file.write(addresses):
            log.info("endpoints: %s", ", ".join(sorted(addresses)))


def _serves(health_address: str) -> bool:
    return health.serves(health_address, health.INFERENCE, _ANSWER)
