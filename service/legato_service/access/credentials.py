"""The credentials that a server accepts."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence

from legato_service.access import credentials_file
from legato_service.access.credentials_file import CREDENTIAL_ID, SECRET, TOKEN_PREFIX, Record
from legato_service.access.identifiers import IDENTIFIER
from legato_service.access.method_scopes import Need
from legato_service.access.principal import Principal, Quotas

MAX_CERTIFICATES = 4096
"""Identities of certificates that are remembered while no file names them."""

_BEARER = re.compile(rf"[Bb]earer {TOKEN_PREFIX}_({CREDENTIAL_ID})_({SECRET})")
_IDENTIFIER = re.compile(IDENTIFIER)
_NO_DIGEST = bytes(32)  # of no secret that is known

Peer = Mapping[str, Iterable[bytes]]
"""A connection's properties as gRPC names them."""


class Credentials:
    """The principals of tokens and of certificates.

    Without `records` every certificate of the authority is accepted, each a tenant of its own. Each
    of `processes` enforces its share of the quotas.
    """

    def __init__(self, defaults: Quotas, processes: int, records: Sequence[Record] | None) -> None:
        self._defaults = defaults
        self._processes = processes
        self._open_to_certificates = records is None
        self._principals: dict[str, Principal] = {}  # by id of the credential
        self._tokens: dict[str, tuple[bytes, Principal]] = {}  # by id, with the secret's digest
        self._certificates: dict[str, Principal] = {}
        self.replace(records or ())

    def __len__(self) -> int:
        return len(self._principals)

    def replace(self, records: Sequence[Record]) -> list[str]:
        """Take over the records; return the ids whose open calls must end.

        A credential that is the same but for its quotas keeps its principal.
        """
        before, self._principals = self._principals, {}
        for record in records:
            known = before.get(record.id)
            quotas = record.quotas(self._defaults).shared_by(self._processes)
            if known is not None and known.identity == record.identity:
                if known.quotas != quotas:
                    known.limit(quotas)
                self._principals[record.id] = known
            else:
                self._principals[record.id] = _principal(record, quotas)
        self._tokens = {
            record.id: (record.digest, self._principals[record.id])
            for record in records
            if record.sha256
        }
        self._certificates = {
            name: self._principals[record.id] for record in records for name in record.certificates
        }
        gone = [name for name, each in before.items() if self._principals.get(name) is not each]
        for name in gone:
            before[name].revoke()
        return gone

    def of_token(self, authorization: str) -> Principal | None:
        """The principal of `Bearer legato_<id>_<secret>`.

        The secret's digest is compared in constant time, also when the id is unknown. Nothing
        keeps the secret.
        """
        match = _BEARER.fullmatch(authorization)
        if match is None:
            return None
        name, secret = match.groups()
        expected, principal = self._tokens.get(name, (_NO_DIGEST, None))
        right = hmac.compare_digest(credentials_file.digest(secret), expected)
        return principal if right else None

    def of_certificate(self, peer: Peer) -> Principal | None:
        """The principal of the first of the certificate's names that is known."""
        for name in _names(peer):
            principal = self._certificates.get(name)
            if principal is None and self._open_to_certificates:
                principal = self._own_tenant(name)
            if principal is not None:
                return principal
        return None

    def _own_tenant(self, name: str) -> Principal:
        if len(self._certificates) >= MAX_CERTIFICATES:
            self._certificates.clear()
        tenant = name
        if _IDENTIFIER.fullmatch(name) is None:
            tenant = f"cert:{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        scopes = frozenset({Need.CREDENTIAL, Need.INFER, Need.UPLOAD})
        quotas = self._defaults.shared_by(self._processes)
        principal = Principal(tenant, tenant, scopes, quotas=quotas)
        self._certificates[name] = principal
        return principal


def _principal(record: Record, quotas: Quotas) -> Principal:
    return Principal(
        record.id,
        record.tenant,
        frozenset({Need.CREDENTIAL, *record.scopes}),
        quotas=quotas,
        expires=record.expires_at,
        identity=record.identity,
    )


def _names(peer: Peer) -> list[str]:
    """URIs, then DNS names; else the common name, the only one of old certificates."""
    found = [*peer.get("peer_uri", ()), *peer.get("peer_dns", ())]
    return [name.decode("utf-8", "replace") for name in found or peer.get("x509_common_name", ())]
