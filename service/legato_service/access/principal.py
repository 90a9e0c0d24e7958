"""The caller that a credential stands for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from legato_engine.errors import QuotaExceeded

from legato_service.access.rate_limit import RateLimit
from legato_service.errors import Unauthenticated

REQUESTS = "requests_per_second"
PIXELS = "pixels_per_second"


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one credential; 0 is no limit, for `image_bytes` the server's own."""

    requests_per_second: float = 0
    pixels_per_second: float = 0  # of new images
    image_bytes: int = 0  # of held images
    sessions: int = 0  # open at a time

    def shared_by(self, processes: int) -> Quotas:
        """The limits that each of several service processes enforces.

        The engine counts held images for all of them.
        """
        return Quotas(
            requests_per_second=self.requests_per_second / processes,
            pixels_per_second=self.pixels_per_second / processes,
            image_bytes=self.image_bytes,
            sessions=math.ceil(self.sessions / processes),
        )


class Principal:
    """A credential in use, with its tenant, its scopes and what is left of its quotas.

    `identity` is the part of a credential that a reload must leave unchanged for open calls to go
    on. `expires` is in `time.time()` seconds.
    """

    __slots__ = (
        "_expires",
        "_num_sessions",
        "_pixels",
        "_requests",
        "credential",
        "identity",
        "quotas",
        "scopes",
        "tenant",
    )

    def __init__(
        self,
        credential: str,
        tenant: str,
        scopes: frozenset[str],
        *,
        quotas: Quotas,
        expires: float = math.inf,
        identity: object = None,
    ) -> None:
        self.credential = credential
        self.tenant = tenant
        self.scopes = scopes
        self.identity = identity
        self._expires = expires
        self._num_sessions = 0
        self.limit(quotas)

    def limit(self, quotas: Quotas) -> None:
        """Set the limits; those that changed start unused."""
        self.quotas = quotas
        self._requests = _limit(REQUESTS, quotas.requests_per_second)
        self._pixels = _limit(PIXELS, quotas.pixels_per_second)

    def check(self) -> None:
        """Called for every call and for every message of a stream.

        Raises:
            Unauthenticated: the credential has expired or was removed.
        """
        if self._expires <= time.time():
            raise Unauthenticated("the credential is not valid any more")

    def revoke(self) -> None:
        self._expires = 0.0

    def take_request(self) -> None:
        """Count a call or a frame of a session.

        Raises:
            QuotaExceeded: there were too many.
        """
        if self._requests is not None:
            self._requests.take(1, self.credential)

    def take_pixels(self, count: int) -> None:
        """Count the pixels of a new image.

        Raises:
            QuotaExceeded: there were too many.
        """
        if self._pixels is not None:
            self._pixels.take(count, self.credential)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count a session for the length of the block.

        Raises:
            QuotaExceeded: too many are open.
        """
        limit = self.quotas.sessions
        if limit and self._num_sessions >= limit:
            raise QuotaExceeded(
                f"a credential may have {limit} open sessions",
                quota="sessions",
                credential=self.credential,
                limit=limit,
                actual=self._num_sessions + 1,
            )
        self._num_sessions += 1
        try:
            yield
        finally:
            self._num_sessions -= 1


def _limit(quota: str, rate: float) -> RateLimit | None:
    return RateLimit(quota, rate) if rate else None
