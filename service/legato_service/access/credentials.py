"""Credentials of callers, from a TOML file that is reloaded when it changes."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from legato_service.access.principal import Need, Principal, Quotas

IDENTIFIER = "[A-Za-z0-9._:-]{1,64}"
"""Regular expression of tenants and request ids."""


# ---------------------------------------------------------------- files

Version = tuple[tuple[int, int, int, int], ...]
"""Inode, size, and times of change in nanoseconds, of each file."""


class FileRejected(Exception):
    """A file of credentials or certificates cannot be used; the text tells why."""


class WatchedFiles:
    """Watcher of files that are written or replaced, also behind symbolic links."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._loaded: Version = ()
        self._seen: Version = ()

    def read(self) -> list[bytes]:
        """Read all files and take their version as the loaded one.

        Raises:
            FileRejected: a file cannot be read, or was written meanwhile.
        """
        self._loaded = self._seen = before = self._version()
        contents = []
        for path in self._paths:
            try:
                with open(path, "rb") as file:
                    contents.append(file.read())
            except OSError as error:
                raise FileRejected(f"{path}: {error.strerror}") from None
        if self._version() != before:
            self._loaded = ()
            raise FileRejected("written while it was read")
        return contents

    def have_changed(self) -> bool:
        """Return whether to reload: files changed, and are stable since the last poll.

        A file that is written in place is seen half way otherwise.
        """
        version, before = self._version(), self._seen
        self._seen = version
        return version == before != self._loaded

    def _version(self) -> Version:
        return tuple(_version(path) for path in self._paths)


def _version(path: str) -> tuple[int, int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_exposed(path: str) -> bool:
    """Return whether other users can read the file or its group can write it."""
    return bool(os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP))


# ---------------------------------------------------------------- credentials file

# The credentials file: TOML, one `[[credential]]` for each token or certificate.
#
#     [[credential]]
#     id = "hall-3"
#     tenant = "robots"
#     scopes = ["infer", "upload"]
#     sha256 = "<SHA-256 of the token's secret, in hex>"
#
# A token is `legato_<id>_<secret>`. Its secret has 256 random bits, so that a plain SHA-256 is
# enough: there is nothing to guess, and a slow hash protects guessable passwords only. Instead of
# `sha256`, or beside it, `san` names a client certificate.

TOKEN_PREFIX = "legato"
CREDENTIAL_ID = r"[A-Za-z0-9-]{1,64}"
SECRET = r"[A-Za-z0-9_-]{43}"
"""256 bits in URL-safe base64."""

_SECRETS = re.compile(r"[A-Za-z0-9_-]{40,}")
"""Secrets and hashes that stand where an error quotes the file."""

_Rate = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stored credential; absent limits are the server's defaults."""

    id: Annotated[str, msgspec.Meta(pattern=f"^{CREDENTIAL_ID}$")]
    scopes: tuple[Literal["infer", "upload", "shared_images", "admin"], ...]
    tenant: Annotated[str, msgspec.Meta(pattern=f"^({IDENTIFIER})?$")] = ""
    sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""
    san: _Name | tuple[_Name, ...] = ()
    expires: Annotated[datetime.datetime, msgspec.Meta(tz=True)] | None = None
    requests_per_second: _Rate | None = None
    pixels_per_second: _Rate | None = None
    image_bytes: _Count | None = None
    sessions: _Count | None = None

    @property
    def certificates(self) -> tuple[str, ...]:
        return (self.san,) if isinstance(self.san, str) else self.san

    @property
    def expires_at(self) -> float:
        """Return the expiry in `time.time()` seconds."""
        return math.inf if self.expires is None else self.expires.timestamp()

    @property
    def identity(self) -> object:
        """Part that a reload must not change for open calls to continue."""
        return self.tenant, self.scopes, self.sha256, self.certificates, self.expires

    def quotas(self, defaults: Quotas) -> Quotas:
        given = {name: getattr(self, name) for name in Quotas.__struct_fields__}
        return msgspec.structs.replace(
            defaults, **{name: value for name, value in given.items() if value is not None}
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    credential: tuple[Record, ...]  # required: an empty file is half of a write


def parse(data: bytes) -> tuple[Record, ...]:
    """Read the records of a file.

    Raises:
        FileRejected: the file is malformed. The text shows no value of a secret.
    """
    try:
        records = msgspec.convert(tomllib.loads(data.decode("utf-8-sig")), _File).credential
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise FileRejected(f"malformed: {_SECRETS.sub('…', str(error))}") from None
    ids: set[str] = set()
    names: set[str] = set()
    for record in records:
        problem = _problem(record, ids, names)
        if problem:
            raise FileRejected(f"credential {record.id}: {problem}")
        ids.add(record.id)
        names.update(record.certificates)
    return records


def _problem(record: Record, ids: set[str], names: set[str]) -> str:
    if record.id in ids:
        return "the id is not unique"
    if not names.isdisjoint(record.certificates):
        return "another credential has the same san"
    if not (record.sha256 or record.certificates):
        return "sha256 or san is needed"
    if not record.scopes:
        return "at least one scope is needed"
    if not record.tenant and record.scopes != ("admin",):
        return "a tenant is needed for scopes other than admin"
    return ""


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


# ---------------------------------------------------------------- credentials

MAX_CERTIFICATES = 4096
"""Maximum remembered certificate identities that no file names."""

_BEARER = re.compile(rf"[Bb]earer {TOKEN_PREFIX}_({CREDENTIAL_ID})_({SECRET})")
_IDENTIFIER = re.compile(IDENTIFIER)
_NO_DIGEST = bytes(32)  # hash that matches no secret

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
            record.id: (bytes.fromhex(record.sha256), self._principals[record.id])
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
        """Return the principal of `Bearer legato_<id>_<secret>`.

        The secret's digest is compared in constant time, also when the id is unknown. Nothing
        keeps the secret.
        """
        match = _BEARER.fullmatch(authorization)
        if match is None:
            return None
        name, secret = match.groups()
        expected, principal = self._tokens.get(name, (_NO_DIGEST, None))
        right = hmac.compare_digest(digest(secret), expected)
        return principal if right else None

    def of_certificate(self, peer: Peer) -> Principal | None:
        """Return the principal of the certificate's first known name."""
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
        principal = Principal(credential=tenant, tenant=tenant, scopes=scopes, quotas=quotas)
        self._certificates[name] = principal
        return principal


def _principal(record: Record, quotas: Quotas) -> Principal:
    return Principal(
        credential=record.id,
        tenant=record.tenant,
        scopes=frozenset({Need.CREDENTIAL, *record.scopes}),
        quotas=quotas,
        expires=record.expires_at,
        identity=record.identity,
    )


def _names(peer: Peer) -> list[str]:
    """Return URIs, then DNS names; else the common name, the only one of old certificates."""
    found = [*peer.get("peer_uri", ()), *peer.get("peer_dns", ())]
    return [name.decode("utf-8", "replace") for name in found or peer.get("x509_common_name", ())]
