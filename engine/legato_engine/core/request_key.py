"""The identity of a request in all processes."""

from __future__ import annotations

import hashlib

import msgspec


class RequestKey(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, cache_hash=True
):
    """The identity of a request in all processes."""

    caller_id: str
    """Given by the caller, else made up by the service; unique within its tenant."""

    tenant: str = ""
    part: str = ""  # of a call of several: "2" of RunTasks, frame and task "7.0" of a session
    worker: int = 0  # number of the service process

    @property
    def name(self) -> str:
        """The same from every service process; seeds derive from it."""
        name = f"{self.tenant}/{self.caller_id}" if self.tenant else self.caller_id
        return f"{name}#{self.part}" if self.part else name

    @property
    def seed(self) -> int:
        """Of a request that gives none: a retried request samples the same tokens. 63 bits."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8]) >> 1

    @property
    def call(self) -> RequestKey:
        return self.with_part("")

    def with_part(self, part: str) -> RequestKey:
        return RequestKey(self.caller_id, self.tenant, part, self.worker)

    def matches(self, target: RequestKey) -> bool:
        """Without a tenant, `target` matches the requests of all tenants."""
        return self.caller_id == target.caller_id and target.tenant in ("", self.tenant)
