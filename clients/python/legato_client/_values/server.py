"""What a server says about itself."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass
from typing import Any

from legato_client._errors import ClientTooOld, SharedMemoryRefused
from legato_client._version import CONTRACT_REVISION


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server accepts; `default_deadline` is in seconds, 0 when it has none."""

    max_request_bytes: int
    max_image_pixels: int
    max_context_tokens: int
    max_output_tokens: int
    max_running: int
    max_waiting: int
    max_sessions: int
    default_deadline: float


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Identity, contract revision and limits of a server.

    `shm_namespace` names its host's shared memory; empty where it reads none.
    """

    name: str
    version: str
    instance_id: str
    contract_revision: int
    minimum_client_revision: int
    limits: Limits
    capabilities: tuple[str, ...]
    shm_namespace: str = ""


@dataclass(frozen=True, slots=True)
class ConfidenceInfo:
    """Tasks whose results have a confidence, and those of them whose confidences were fitted.

    The others order objects and say no more. `fitted_on` is empty and `fitted_at` None where there
    is no calibration.
    """

    tasks: tuple[str, ...]
    calibrated_tasks: tuple[str, ...] = ()
    fitted_on: str = ""
    fitted_at: datetime.datetime | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model and what it can do; `confidence` is None where no result has one."""

    name: str
    aliases: tuple[str, ...]
    tasks: tuple[str, ...]
    streaming_regions: bool
    max_context_tokens: int
    confidence: ConfidenceInfo | None = None


def model_document(model: ModelInfo) -> dict[str, Any]:
    """Its fields as JSON has them, the time in ISO 8601."""
    document = dataclasses.asdict(model)
    if model.confidence is not None and model.confidence.fitted_at is not None:
        document["confidence"]["fitted_at"] = model.confidence.fitted_at.isoformat()
    return document


UNKNOWN = ServerInfo("", "", "", 0, 0, Limits(0, 0, 0, 0, 0, 0, 0, 0.0), ())
"""A server that does not speak of itself."""


def check_client(info: ServerInfo) -> None:
    """Raise ClientTooOld if the server no longer accepts this contract revision."""
    if info.minimum_client_revision > CONTRACT_REVISION:
        raise ClientTooOld(
            f"the server needs clients of contract revision {info.minimum_client_revision} or "
            f"newer, this one knows {CONTRACT_REVISION}: upgrade the package legato",
            metadata={
                "limit": str(info.minimum_client_revision),
                "actual": str(CONTRACT_REVISION),
            },
        )


def check_shared_memory(info: ServerInfo, own_namespace: str) -> None:
    """Raise SharedMemoryRefused where the server cannot read this host's shared memory."""
    if info.shm_namespace == own_namespace:
        return
    if info.shm_namespace:
        why = f"the server's shared memory is {info.shm_namespace}, this host's is {own_namespace}"
    else:
        why = "the server reads no shared memory"
    raise SharedMemoryRefused(f"{why}: send the bytes", reason="SHM_REFUSED")
