"""W3C trace contexts."""

from __future__ import annotations

import re
from typing import NamedTuple

KEY = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1  # flag


class TraceParent(NamedTuple):
    """The caller's span; ids are hex digits."""

    trace_id: str
    parent_id: str
    sampled: bool


def parse(traceparent: str) -> TraceParent | None:
    """Return None when `traceparent` is malformed.

    Versions above 00 may have more parts; version ff and all-zero ids are invalid.
    """
    match = _FORM.fullmatch(traceparent)
    if match is None or not _is_valid(match):
        return None
    return TraceParent(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))


def trace_id(traceparent: str) -> str:
    """Empty when `traceparent` is malformed."""
    parent = parse(traceparent)
    return parent.trace_id if parent is not None else ""


def _is_valid(match: re.Match[str]) -> bool:
    version, trace, span, _, rest = match.groups()
    known = version != "00" or rest is None
    return known and version != "ff" and trace.strip("0") != "" and span.strip("0") != ""
