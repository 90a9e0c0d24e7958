"""Addresses that a server listens on."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from pathlib import Path

import grpc

UNIX = "unix:"


def check(option: str, address: str, *, unix: bool) -> None:
    """Check the form of an address.

    Raises:
        ValueError: malformed.
    """
    if unix and address.startswith(UNIX):
        if address == UNIX:
            raise ValueError(f"{option} takes unix:PATH, and the path is missing")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{option} takes HOST:PORT, not {address!r}")


def host_of(address: str) -> str:
    """Return the host of HOST:PORT, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_local(address: str) -> bool:
    """Return whether no other machine can reach the address."""
    host = host_of(address)
    if address.startswith(UNIX) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Have `server` listen; return the address with its real port.

    A unix socket has no TLS, and is accessible to its owner only: nothing else protects it.

    Raises:
        OSError: the address cannot be bound.
    """
    if address.startswith(UNIX):
        return _bind_socket(server, address)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}{_reason(address)}") from error
    return f"{address.rpartition(':')[0]}:{port}"


def _reason(address: str) -> str:
    """Return why the kernel refuses the address, which gRPC omits; "" if it no longer does."""
    host, port = host_of(address), int(address.rpartition(":")[2])
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(name)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return ": in use by another process (`ss -ltnp` names it); stop it or take another port"
        return f": {error.strerror}"
    return ""


def _bind_socket(server: grpc.aio.Server, address: str) -> str:
    """Bind a Unix socket; the umask, not a later chmod, keeps others out from the first moment."""
    path = Path(address.removeprefix(UNIX))
    if _is_served(path):  # gRPC would take the path away from the other server
        raise OSError(f"cannot listen on {address}: in use by another server")
    umask = os.umask(0o177)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    finally:
        os.umask(umask)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise OSError(f"cannot listen on {address}: its folder ignores the umask")
    return address


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def remove_socket(address: str) -> None:
    """Remove the file of a listener that was closed, if gRPC has not."""
    if address.startswith(UNIX):
        Path(address.removeprefix(UNIX)).unlink(missing_ok=True)


def admin_socket(port: int) -> str:
    """Return the address of the operator's socket of the server on `port`; make its folder.

    Clients look for it in the same places.

    Raises:
        OSError: there is no folder that only this user can enter.
    """
    folder = _admin_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise OSError(f"others can enter {folder}")
    return f"{UNIX}{folder}/admin-{port}.sock"


def _admin_folder() -> Path:
    user = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    if runtime.is_dir() and os.access(runtime, os.W_OK):
        return runtime / "legato"
    return Path(f"/tmp/legato-{user}")
