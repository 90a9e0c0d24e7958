"""Credentials and certificates of tests, and the calls that need them."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import trustme
from google.protobuf import descriptor_pool
from legato_client._grpc.transport import ServerStatus

from tests.service.harness import refusal

# ---------------------------------------------------------------- certificates

HOST = "localhost"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A chain and its key, as PEM."""

    chain: bytes
    key: bytes


class Authority:
    """Issues certificates for servers and clients."""

    def __init__(self) -> None:
        self._ca = trustme.CA()
        self.pem = self._ca.cert_pem.bytes()

    def server(self) -> Pair:
        return _pair(self._ca.issue_cert(HOST, "127.0.0.1"))

    def client(self, *names: str, common_name: str | None = None) -> Pair:
        return _pair(self._ca.issue_cert(*names, common_name=common_name))


def _pair(leaf: trustme.LeafCert) -> Pair:
    chain = b"".join(each.bytes() for each in leaf.cert_chain_pems)
    return Pair(chain, leaf.private_key_pem.bytes())


def replace(path: Path, data: bytes) -> None:
    """Rename a complete file into its place."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.chmod(0o600)
    fresh.rename(path)


class Files:
    """The files of a server in a folder, and the settings that name them."""

    def __init__(self, folder: Path, pair: Pair, client_ca: bytes = b"") -> None:
        self.cert, self.key, self.ca = (folder / name for name in ("cert", "key", "ca"))
        self.write(pair)
        self.settings = {"tls_cert": str(self.cert), "tls_key": str(self.key)}
        if client_ca:
            replace(self.ca, client_ca)
            self.settings["tls_client_ca"] = str(self.ca)

    def write(self, pair: Pair) -> None:
        replace(self.cert, pair.chain)
        replace(self.key, pair.key)


def channel(port: int, root: bytes, client: Pair | None = None) -> grpc.aio.Channel:
    """A connection of its own that trusts `root`."""
    pair = (client.key, client.chain) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(root, *pair)
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options)


# ---------------------------------------------------------------- tokens
# Credentials of tests, and the calls that need them.

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
