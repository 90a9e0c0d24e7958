"""The credentials file: TOML, one `[[credential]]` for each token or certificate.

    [[credential]]
    id = "hall-3"
    tenant = "robots"
    scopes = ["infer", "upload"]
    sha256 = "<SHA-256 of the token's secret, in hex>"

A token is `legato_<id>_<secret>`. Its secret has 256 random bits, so that a plain SHA-256 is
enough: there is nothing to guess, and a slow hash protects guessable passwords only. Instead of
`sha256`, or beside it, `san` names a client certificate.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import re
import tomllib
from typing import Annotated, Literal

import msgspec

from legato_service.access.files import FileRejected
from legato_service.access.identifiers import IDENTIFIER
from legato_service.access.principal import Quotas

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
    """One credential; limits that are absent are the server's defaults."""

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
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)

    @property
    def certificates(self) -> tuple[str, ...]:
        return (self.san,) if isinstance(self.san, str) else self.san

    @property
    def expires_at(self) -> float:
        """In `time.time()` seconds."""
        return math.inf if self.expires is None else self.expires.timestamp()

    @property
    def identity(self) -> object:
        """The part that a reload must leave unchanged for open calls to go on."""
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
