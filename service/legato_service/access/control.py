"""Access control: checks every call, refuses by default."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import structlog

from legato_service.access import credentials
from legato_service.access.credentials import (
    Credentials,
    FileRejected,
    Peer,
    WatchedFiles,
    is_exposed,
)
from legato_service.access.principal import COUNTED, NEEDS, Need, Principal, Quotas
from legato_service.config import ServiceConfig
from legato_service.errors import CredentialRejected, Forbidden

log = structlog.get_logger("legato.access")

AUTHORIZATION = "authorization"


class AccessControl:
    """The credentials of a server, read again when their file changes.

    Raises:
        FileRejected: the file cannot be used.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._path = config.tokens
        self._files = WatchedFiles([config.tokens])
        self._reads_certificates = bool(config.tls_client_ca)
        defaults = Quotas(
            requests_per_second=config.quota_requests,
            pixels_per_second=config.quota_pixels,
            sessions=config.quota_sessions,
        )
        records = self._read() if config.tokens else None
        self._credentials = Credentials(defaults, config.processes, records)
        self.num_failed_reloads = 0

    def authorize(
        self,
        method: str,
        metadata: Iterable[tuple[str, str | bytes]],
        peer: Callable[[], Peer],
    ) -> Principal | None:
        """Check a call; return its principal, or None where the method is open to all.

        A token decides when there is one, else the certificate of the connection.

        Raises:
            CredentialRejected: no credential, or none that is valid.
            Forbidden: the credential lacks the method's scope.
            QuotaExceeded: the credential has sent too many requests.
        """
        need = NEEDS.get(method, Need.REFUSED)
        if need is Need.NOTHING:
            return None
        principal = self._principal(metadata, peer)
        principal.check()
        if need not in principal.scopes:
            raise Forbidden(f"the credential lacks the scope {need}", scope=need)
        if need in COUNTED:
            principal.take_request()
        return principal

    def _principal(
        self, metadata: Iterable[tuple[str, str | bytes]], peer: Callable[[], Peer]
    ) -> Principal:
        given = [value for key, value in metadata if key == AUTHORIZATION]
        principal = None
        if len(given) == 1 and isinstance(given[0], str):
            principal = self._credentials.of_token(given[0])
        elif not given and self._reads_certificates:
            principal = self._credentials.of_certificate(peer())
        if principal is None:
            # The same words for an unknown id and a wrong secret.
            raise CredentialRejected(
                "the credential is not valid" if given else "this server needs a credential"
            )
        return principal

    def reload_changed(self) -> None:
        """Read the file again if it changed. One that is malformed changes nothing."""
        if not (self._path and self._files.have_changed()):
            return
        try:
            revoked = self._credentials.replace(self._read())
        except FileRejected as error:
            self.num_failed_reloads += 1
            log.error("credentials_reload_failed", file=self._path, error=str(error))
        else:
            log.info("credentials_reloaded", count=len(self._credentials), revoked=revoked)

    def _read(self) -> tuple[credentials.Record, ...]:
        (data,) = self._files.read()
        with contextlib.suppress(OSError):
            if is_exposed(self._path):
                log.warning("credentials_file_exposed", file=self._path)
        try:
            return credentials.parse(data)
        except FileRejected as error:
            raise FileRejected(f"{self._path}: {error}") from None
