"""The base of requests, results and their parts: frozen, without torch or transport."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of values sent between processes; the class name is the tag."""
