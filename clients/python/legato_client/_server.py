"""What a server says about itself."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Identity, contract revision and limits of a server."""

    name: str
    version: str
    instance_id: str
    contract_revision: int
    minimum_client_revision: int
    limits: Limits
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model and what it can do."""

    name: str
    aliases: tuple[str, ...]
    tasks: tuple[str, ...]
    streaming_regions: bool
    max_context_tokens: int
