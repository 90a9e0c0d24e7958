"""Scripted servers that speak TLS and ask for tokens; certificates of a test's own authority."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import trustme
from google.rpc import error_details_pb2

from tests.clients.python.fake_server import Failure

GOOD = "legato_robot-7_Zm9vYmFyYmF6cXV4cXV1eA"
"""A token that `TokenCheck` accepts first."""


class TokenCheck(grpc.ServerInterceptor):
    """Refuses calls without one of the `accepted` tokens, as Legato servers do."""

    def __init__(self, *accepted: str) -> None:
        self.accepted = set(accepted)
        self.seen: list[str] = []

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Answer with the handler, or with a refusal of its kind."""
        handler = continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata)
        given = str(metadata.get("authorization", ""))
        self.seen.append(given)
        if given.removeprefix("Bearer ") in self.accepted:
            return handler
        info = error_details_pb2.ErrorInfo(reason="UNAUTHENTICATED", domain="legato")
        refusal = Failure(grpc.StatusCode.UNAUTHENTICATED, "the credential is not valid", (info,))

        def refuse(_: Any, context: grpc.ServicerContext) -> Any:
            refusal.abort(context)

        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(refuse)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


@dataclasses.dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, and the certificates and keys of a server and a client."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path

    @classmethod
    def make(cls, folder: Path, *names: str) -> Certificates:
        """Write certificates for a server of these names, by default of the loopback."""
        authority = trustme.CA()
        server = authority.issue_cert(*(names or ("localhost", "127.0.0.1")))
        client = authority.issue_cert("robot-7")
        made = cls(
            *(folder / f"{name}.pem" for name in ("ca", "cert", "key", "client_cert", "client_key"))
        )
        authority.cert_pem.write_to_path(made.ca)
        for issued, cert, key in (
            (server, made.cert, made.key),
            (client, made.client_cert, made.client_key),
        ):
            cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
            issued.private_key_pem.write_to_path(key)
        return made

    def server_credentials(self, *, asks_client: bool = False) -> grpc.ServerCredentials:
        """Credentials of the server; with `asks_client` it needs a client's certificate."""
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.cert.read_bytes())],
            self.ca.read_bytes() if asks_client else None,
            asks_client,
        )
