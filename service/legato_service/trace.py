"""W3C trace context, as far as logs need it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from legato_engine.errors import InvalidField

KEY = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def trace_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The trace id of the caller's `traceparent`, empty without one.

    Raises `InvalidField` naming the metadata key when it is malformed. Versions above 00 may carry
    more parts; ff is not a version, and all-zero ids name nothing.
    """
    values = [value for key, value in metadata or () if key == KEY]
    if not values:
        return ""
    match = _FORM.fullmatch(values[0]) if isinstance(values[0], str) else None
    if len(values) > 1 or match is None or not _names_something(match):
        raise InvalidField(f"metadata {KEY} is not a W3C trace context", field=f"metadata.{KEY}")
    return match[2]


def _names_something(match: re.Match[str]) -> bool:
    version, trace, span, _, rest = match.groups()
    known = version != "00" or rest is None
    return known and version != "ff" and trace.strip("0") != "" and span.strip("0") != ""
