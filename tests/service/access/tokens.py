"""Credentials of tests, and the calls that need them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from legato_client._grpc.transport import ServerStatus

from tests.service.harness import refusal

CONTRACT = (
    "legato.v1.InferenceService",
    "legato.v1.SessionService",
    "legato.v1.ImageService",
    "legato.v1.ServerService",
    "legato.v1.AdminService",
    "inference.GRPCInferenceService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
)


class Token:
    """A token, its record, and the metadata that brings it."""

    def __init__(self, name: str, scopes: Sequence[str], tenant: str = "t", **fields: str) -> None:
        self.name = name
        self.secret = secrets.token_urlsafe(32)
        quoted = ", ".join(f'"{scope}"' for scope in scopes)
        lines = [
            "[[credential]]",
            f'id = "{name}"',
            f'tenant = "{tenant}"',
            f"scopes = [{quoted}]",
            f'sha256 = "{hashlib.sha256(self.secret.encode()).hexdigest()}"',
            *(f"{key} = {value}" for key, value in fields.items()),
        ]
        self.record = "\n".join(lines) + "\n"

    @property
    def text(self) -> str:
        return f"legato_{self.name}_{self.secret}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return bearer(self.text)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def write(path: Path, *tokens: Token) -> str:
    """Replace the file as an operator should: by a rename."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(token.record for token in tokens) or "credential = []\n")
    fresh.chmod(0o600)
    fresh.rename(path)
    return str(path)


def methods() -> dict[str, Any]:
    """The paths of all methods of all services, with their descriptors."""
    pool = descriptor_pool.Default()
    found = {}
    for name in CONTRACT:
        for method in pool.FindServiceByName(name).methods:
            found[f"/{name}/{method.name}"] = method
            if name.startswith("grpc.reflection"):  # the same file under its later name
                found[f"/{name.replace('v1alpha', 'v1')}/{method.name}"] = method
    return found


async def call_empty(channel: grpc.aio.Channel, path: str, metadata: Any) -> Any:
    """The `Refusal` of a call with empty messages; None: it succeeded."""
    method = methods().get(path)
    client, server = (
        (False, False) if method is None else (method.client_streaming, method.server_streaming)
    )
    kind = f"{'stream' if client else 'unary'}_{'stream' if server else 'unary'}"
    stub: Any = getattr(channel, kind)(path)
    call = stub(iter([b""]) if client else b"", metadata=metadata)

    status = ServerStatus(call)

    async def outcome() -> object:
        return await (call.read() if server else call)

    try:
        return await refusal(outcome(), status)
    except AssertionError:
        return None
    finally:
        call.cancel()
