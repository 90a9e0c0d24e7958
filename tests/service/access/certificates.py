"""Certificates of tests' own authorities."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
import trustme

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
