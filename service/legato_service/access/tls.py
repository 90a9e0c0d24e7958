"""The server's certificate, and the authority of its clients'."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any

import grpc
import structlog

from legato_service.access.credentials import FileRejected, WatchedFiles, is_exposed

log = structlog.get_logger("legato.access")


class ServerCertificate:
    """A certificate chain and its key, read again when their files change.

    With `client_ca` every client must have a certificate of that authority. Files that cannot be
    used leave the certificate as it is. New connections get the new one, open ones stay.

    Raises:
        FileRejected: the files cannot be used.
    """

    def __init__(self, cert: str, key: str, client_ca: str = "") -> None:
        self._paths = [cert, key, client_ca] if client_ca else [cert, key]
        self._files = WatchedFiles(self._paths)
        self._key = key
        self.num_failed_reloads = 0
        self._configuration = self._load()

    def credentials(self) -> grpc.ServerCredentials:
        """Return a listener's credentials; gRPC asks before each handshake, on its own threads."""
        latest = self._configuration

        def changed() -> Any:  # None, which grpc's annotation lacks, is no change
            nonlocal latest
            if latest is self._configuration:
                return None
            latest = self._configuration
            return latest

        needs_client_certificate = len(self._paths) > 2
        return grpc.dynamic_ssl_server_credentials(latest, changed, needs_client_certificate)

    def reload_changed(self) -> None:
        if not self._files.have_changed():
            return
        try:
            self._configuration = self._load()
        except FileRejected as error:
            self.num_failed_reloads += 1
            log.error("tls_reload_failed", files=self._paths, error=str(error))
        else:
            log.info("tls_reloaded", files=self._paths)

    def _load(self) -> grpc.ServerCertificateConfiguration:
        cert, key, *authorities = self._files.read()
        with contextlib.suppress(OSError):
            if is_exposed(self._key):
                log.warning("tls_key_exposed", file=self._key)
        _check(self._paths, authorities)
        return grpc.ssl_server_certificate_configuration(
            [(key, cert)], authorities[0] if authorities else None
        )


def _check(paths: list[str], authorities: list[bytes]) -> None:
    """Check the files, as gRPC only logs unusable ones.

    The library of `ssl` reads the files once more; `WatchedFiles` notices when they changed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key would ask for its password on the terminal.
        context.load_cert_chain(paths[0], paths[1], password=lambda: b"")
    except (OSError, ValueError) as error:
        raise FileRejected(f"{paths[0]} and {paths[1]}: {_reason(error)}") from None
    for authority in authorities:
        try:
            context.load_verify_locations(cadata=authority.decode("ascii", "replace"))
        except (OSError, ValueError) as error:
            raise FileRejected(f"{paths[2]}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
