"""Callers: required scopes, rate limits, quotas."""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from legato.v1 import admin_pb2, inference_pb2
from legato_engine.errors import QuotaExceeded

from legato_service.errors import CredentialRejected


class Need(enum.StrEnum):
    """The scope that a method needs; `NOTHING` and `CREDENTIAL` are no scopes of a credential."""

    NOTHING = "nothing"  # open to all
    CREDENTIAL = "credential"  # any that is valid
    INFER = "infer"
    UPLOAD = "upload"
    ADMIN = "admin"
    REFUSED = "refused"  # to all


SHARED_IMAGES = "shared_images"
"""The scope to name regions of shared memory, whichever client wrote them."""

UNKNOWN_METHOD = "(unknown)"
"""Placeholder for all unknown methods, which any credential may call, to learn so."""

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
"""All are inference: each runs a model for its caller."""
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name

_NEEDS: dict[str, Mapping[str, Need]] = {
    "legato.v1.InferenceService": dict.fromkeys(_INFERENCE, Need.INFER),
    "legato.v1.SessionService": {"Session": Need.INFER},
    "legato.v1.ImageService": {"PutImage": Need.UPLOAD, "DeleteImage": Need.UPLOAD},
    "legato.v1.ServerService": {
        "GetServerInfo": Need.CREDENTIAL,
        "ListModels": Need.CREDENTIAL,
    },
    "legato.v1.AdminService": dict.fromkeys(_ADMIN, Need.ADMIN),
    "inference.GRPCInferenceService": {
        "ServerLive": Need.NOTHING,
        "ServerReady": Need.NOTHING,
        "ModelReady": Need.CREDENTIAL,
        "ServerMetadata": Need.CREDENTIAL,
        "ModelMetadata": Need.CREDENTIAL,
        "ModelInfer": Need.INFER,
        "ModelStreamInfer": Need.INFER,
    },
    # Load balancers probe without credentials, and learn no more than that the server serves.
    "grpc.health.v1.Health": {
        "Check": Need.NOTHING,
        "List": Need.NOTHING,
        "Watch": Need.NOTHING,
    },
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": Need.CREDENTIAL},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Need.CREDENTIAL},
}

NEEDS = {
    f"/{service}/{method}": need
    for service, methods in _NEEDS.items()
    for method, need in methods.items()
} | {UNKNOWN_METHOD: Need.CREDENTIAL}
"""Needs by method path."""

COUNTED = frozenset({Need.INFER, Need.UPLOAD})
"""Methods with these needs count against the requests of a credential."""


# ---------------------------------------------------------------- rate limit

WINDOW = 1.0  # seconds' worth of the rate that may come at once


_ROUNDING = 1e-6  # seconds


class RateLimit:
    """Token bucket: `rate` units a second, bursts of `WINDOW` seconds.

    More units than that are taken at once after a pause, and paid for by a longer one: a large
    image passes under a small rate. It is the virtual scheduling form of a token bucket, which
    keeps one number: the time at which everything that was taken is paid for.
    """

    def __init__(
        self, quota: str, rate: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quota = quota
        self.rate = rate
        self._clock = clock
        self._paid_at = 0.0

    def take(self, amount: float, credential: str) -> None:
        """Spend units.

        Raises:
            QuotaExceeded: the rate is exceeded; it says after how long this would be possible.
        """
        now = self._clock()
        cost = amount / self.rate
        wait = self._paid_at - now - max(0.0, WINDOW - cost)
        if wait > _ROUNDING:
            raise QuotaExceeded(
                f"a credential may take {self.rate:g} {self.quota.replace('_', ' ')}",
                quota=self.quota,
                credential=credential,
                limit=f"{self.rate:g}",
                actual=f"{amount:g}",
                retry_after_ms=max(1, round(wait * 1000)),
            )
        self._paid_at = max(self._paid_at, now) + cost


# ---------------------------------------------------------------- principal

REQUESTS = "requests_per_second"
PIXELS = "pixels_per_second"


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one credential; 0 is no limit, for `image_bytes` the server's own."""

    requests_per_second: float = 0
    pixels_per_second: float = 0  # budget for new images
    image_bytes: int = 0  # quota of held images
    sessions: int = 0  # open at a time

    def shared_by(self, processes: int) -> Quotas:
        """Return the limits that each of several service processes enforces.

        The engine counts held images for all of them.
        """
        return Quotas(
            requests_per_second=self.requests_per_second / processes,
            pixels_per_second=self.pixels_per_second / processes,
            image_bytes=self.image_bytes,
            sessions=math.ceil(self.sessions / processes),
        )


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Principal:
    """A credential in use, with its tenant, its scopes and what is left of its quotas.

    `identity` is the part of a credential that a reload must leave unchanged for open calls to go
    on. `expires` is in `time.time()` seconds.
    """

    credential: str
    tenant: str
    scopes: frozenset[str]
    quotas: Quotas
    expires: float = math.inf
    identity: object = None
    _num_sessions: int = dataclasses.field(default=0, init=False)
    _requests: RateLimit | None = dataclasses.field(init=False)
    _pixels: RateLimit | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.limit(self.quotas)

    def limit(self, quotas: Quotas) -> None:
        """Set the limits; those that changed start unused."""
        self.quotas = quotas
        self._requests = _limit(REQUESTS, quotas.requests_per_second)
        self._pixels = _limit(PIXELS, quotas.pixels_per_second)

    def check(self) -> None:
        """Check the principal, for every call and for every message of a stream.

        Raises:
            CredentialRejected: the credential has expired or was removed.
        """
        if self.expires <= time.time():
            raise CredentialRejected("the credential is not valid any more")

    def revoke(self) -> None:
        self.expires = 0.0

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
