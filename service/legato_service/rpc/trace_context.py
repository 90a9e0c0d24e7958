"""The trace id of a W3C trace context, for logs."""

from __future__ import annotations

import re

KEY = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def trace_id(traceparent: str) -> str:
    """Return the trace id of a `traceparent`, empty when it is malformed.

    Versions above 00 may have more parts; version ff and all-zero ids are invalid.
    """
    match = _FORM.fullmatch(traceparent)
    return match[2] if match is not None and _is_valid(match) else ""


def _is_valid(match: re.Match[str]) -> bool:
    version, trace, span, _, rest = match.groups()
    known = version != "00" or rest is None
    return known and version != "ff" and trace.strip("0") != "" and span.strip("0") != ""
