"""W3C trace context, as far as logs need it."""

from __future__ import annotations

import re

KEY = "traceparent"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def trace_id(traceparent: str) -> str:
    """The trace id of a `traceparent`, empty when it is malformed.

    Versions above 00 may carry more parts; ff is not a version, and all-zero ids name nothing.
    """
    match = _FORM.fullmatch(traceparent)
    return match[2] if match is not None and _names_something(match) else ""


def _names_something(match: re.Match[str]) -> bool:
    version, trace, span, _, rest = match.groups()
    known = version != "00" or rest is None
    return known and version != "ff" and trace.strip("0") != "" and span.strip("0") != ""
