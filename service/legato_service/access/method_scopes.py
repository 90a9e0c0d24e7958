"""What a caller needs for each method. A method without an entry is refused to all callers."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from legato.v1 import inference_pb2


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
"""Stands for all methods that this server lacks: their callers learn so with any credential."""

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
"""All are inference: each runs a model for its caller."""

_NEEDS: dict[str, Mapping[str, Need]] = {
    "legato.v1.InferenceService": dict.fromkeys(_INFERENCE, Need.INFER),
    "legato.v1.SessionService": {"Session": Need.INFER},
    "legato.v1.ImageService": {"PutImage": Need.UPLOAD, "DeleteImage": Need.UPLOAD},
    "legato.v1.ServerService": {
        "GetServerInfo": Need.CREDENTIAL,
        "ListModels": Need.CREDENTIAL,
    },
    "legato.v1.AdminService": {
        "GetLoad": Need.ADMIN,
        "Abort": Need.ADMIN,
        "Drain": Need.ADMIN,
        "GetMetrics": Need.ADMIN,
        "WatchTimeline": Need.ADMIN,
        "SetPipelineDepth": Need.ADMIN,
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
"""By the path of a method."""

COUNTED = frozenset({Need.INFER, Need.UPLOAD})
"""Methods with these needs count against the requests of a credential."""
