"""Addresses that a server listens on."""

from __future__ import annotations

import ipaddress
import os

import grpc

UNIX = "unix:"


def check(option: str, address: str, *, insecure: bool, unix: bool) -> None:
    """Check an address; `unix` allows unix sockets.

    Raises:
        ValueError: malformed, or reachable from other machines without `insecure`.
    """
    if unix and address.startswith(UNIX):
        if address == UNIX:
            raise ValueError(f"{option} takes unix:PATH, and the path is missing")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{option} takes HOST:PORT, not {address!r}")
    if not (insecure or is_local(address)):
        raise ValueError(
            f"{host_of(address)} is reachable from other machines and this server has no TLS and "
            "no authentication; put it behind a proxy that has, or allow it with --insecure"
        )


def host_of(address: str) -> str:
    """The host of HOST:PORT; an IPv6 address loses its brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_local(address: str) -> bool:
    """Whether only this machine can reach `address`."""
    host = host_of(address)
    if address.startswith(UNIX) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(server: grpc.aio.Server, address: str) -> str:
    """Have `server` listen; return the address with its real port.

    A unix socket is accessible to its owner only, because nothing else protects it.

    Raises:
        OSError: the address cannot be bound.
    """
    umask = os.umask(0o177) if address.startswith(UNIX) else None
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error
    finally:
        if umask is not None:
            os.umask(umask)
    return address if address.startswith(UNIX) else f"{address.rpartition(':')[0]}:{port}"
