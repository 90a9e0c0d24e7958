"""Bearer tokens, and where they may be sent."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from legato_client._errors import InvalidArgument, Unauthenticated, UnencryptedToken

BearerToken = str | os.PathLike[str] | Callable[[], str]
"""A token, the path of a file with one, or a function that returns the current one ("": none)."""

VARIABLE = "LEGATO_TOKEN"
"""The environment variable with the token of clients that are given none."""

_FORM = re.compile(r"[\x21-\x7e]{1,8192}")
_CREDENTIAL = re.compile(r"legato_([A-Za-z0-9.-]+)_[A-Za-z0-9_-]+")
_LOCAL_SCHEMES = ("unix", "unix-abstract")
_NAME_SCHEMES = ("dns", "ipv4", "ipv6")


class TokenSource:
    """The current token of a client. Its text is in no repr and in no error.

    A file is read again when it changes, so a token is replaced by renaming another file over it. A
    function is called for every call, in the event loop of an `AsyncClient`.
    """

    __slots__ = ("_file", "_function", "_stamp", "_token")

    def __init__(self, token: BearerToken) -> None:
        self._token = ""
        self._file = ""
        self._function: Callable[[], str] | None = None
        self._stamp: tuple[int, int, int] | None = None
        if isinstance(token, str):
            self._token = _checked(token)
        elif callable(token):
            self._function = token
        else:
            self._file = os.fspath(token)
            self.read()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def read(self) -> str:
        """Return the current token; "" where a function says that there is none.

        Raises:
            Unauthenticated: the file cannot be read.
            InvalidArgument: the text cannot be a token.
        """
        if self._function is not None:
            current = self._function()
            return _checked(current) if current else ""
        if self._file:
            self._read_changed(self._file)
        return self._token

    @property
    def credential(self) -> str:
        """The public id in a Legato server's token, else empty."""
        match = _CREDENTIAL.fullmatch(self.read())
        return "" if match is None else match.group(1)

    def _read_changed(self, path: str) -> None:
        try:
            status = os.stat(path)  # a Path's own costs several times as much
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
                self._token = _checked(data.decode("ascii").strip())
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or "it holds more than ASCII text"
            raise Unauthenticated(f"cannot read the token file {path}: {problem}") from None


def source_of(token: BearerToken | None) -> TokenSource | None:
    """None for an empty text, or for None without the environment's token."""
    given = os.environ.get(VARIABLE, "") if token is None else token
    return TokenSource(given) if given else None


def check_target(target: str) -> None:
    """Check that a connection to `target` without TLS stays on this host.

    Raises:
        UnencryptedToken: it may leave the host.
    """
    if not is_local(target):
        raise UnencryptedToken(
            f"a token is not sent to {target} without TLS, where others could read it; use TLS "
            f"(tls, ca), or leave out the token, also that of {VARIABLE}"
        )


def is_local(target: str) -> bool:
    """Whether all addresses of a gRPC name are certain to be on this host."""
    scheme, separator, rest = target.partition(":")
    if separator and scheme in _LOCAL_SCHEMES:
        return True
    if scheme in _NAME_SCHEMES:
        # "dns://server/name" asks a server of its own, which may say anything of localhost.
        names = rest.removeprefix("///")
        return "/" not in names and _are_loopback(names)
    return _are_loopback(target)


def _are_loopback(names: str) -> bool:
    return all(_is_loopback(name) for name in names.split(","))


def _is_loopback(name: str) -> bool:
    """`host`, `host:port`, `[address]:port` or an IPv6 address alone."""
    host, port = name, ""
    if name.startswith("["):
        host, _, port = name[1:].partition("]")
        port = port.removeprefix(":")
    elif name.count(":") == 1:
        host, _, port = name.partition(":")
    if port and not port.isdecimal():
        return False
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _checked(token: str) -> str:
    # gRPC's own error would show the token.
    if _FORM.fullmatch(token) is None:
        raise InvalidArgument("a token is 1 to 8192 printable ASCII characters without spaces")
    return token
