"""Addresses that a server listens on."""

from __future__ import annotations

import ipaddress
import os

import grpc

UNIX = "unix:"


def check(option: str, address: str, *, insecure: bool, unix: bool) -> None:
    """Raises `ValueError` for what is no address, or one that needs `insecure` and lacks it.

    `unix` says whether a unix socket is an address here.
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
    """The host part of HOST:PORT, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_local(address: str) -> bool:
    """Whether only this machine reaches it."""
    host = host_of(address)
    if address.startswith(UNIX) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(server: grpc.aio.Server, address: str) -> str:
    """Have `server` listen; the address with the port it got. Raises `OSError`.

    A unix socket is for its owner alone: nothing else guards it.
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
