"""Remedies for errors."""

from __future__ import annotations

import os

from legato_client import _errors

_CONNECTION_HINTS = (  # part of gRPC's message, and what it means
    (
        "WRONG_VERSION_NUMBER",
        "the server does not speak TLS: leave out --tls, --ca, --cert and --key",
    ),
    (
        "http1.x server",
        "that port speaks HTTP/1, as `legato http` and `legato playground` do: name the gRPC port",
    ),
    (
        "certificate has expired",
        "the server's certificate has expired",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is of an authority that is not known here: name its PEM file "
        "with --ca",
    ),
    (
        "Hostname Verification",
        "the server's certificate is for another name or address than that of --server",
    ),
    (
        "Socket closed",
        "the server closed the connection: if it speaks TLS, add --tls or --ca, and if it asks for "
        "a client's certificate, --cert and --key",
    ),
)
_ANY_CONNECTION = "is the server running? start one with `legato serve`"
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC takes the first that is set
_TOKEN = (
    "name a file with a token that is valid now with --token-file, or set LEGATO_TOKEN; the "
    "server's operator makes tokens"
)


def hint_of(error: _errors.LegatoError) -> str:
    """Return the hint lines to print below the error, each with its line break, or ""."""
    lines = [
        f"{each.field}: {each.description}"
        for each in error.field_violations
        if each.description not in error.message
    ]
    if error.retry_after is not None:
        lines.append(f"try again in {error.retry_after:g} s")
    if isinstance(error, _errors.Unavailable) and not error.reason:
        found = (hint for part, hint in _CONNECTION_HINTS if part in error.message)
        lines.append(next(found, _ANY_CONNECTION))
        if proxy := next((name for name in _PROXIES if os.environ.get(name)), ""):
            lines.append(f"servers on other hosts are reached through {proxy}; see no_proxy")
    elif isinstance(error, _errors.DeadlineExceeded):
        lines.append("--timeout allows more time")
    elif isinstance(error, _errors.Unauthenticated):
        lines.append(_TOKEN)
    elif isinstance(error, _errors.PermissionDenied) and "scope" in error.metadata:
        lines.append(f"the token needs the scope {error.metadata['scope']}")
    return "".join(f"\n  {line}" for line in lines)
