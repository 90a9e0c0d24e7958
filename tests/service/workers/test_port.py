"""A port that the processes of a server share."""

import socket

import pytest
from legato_service.workers.processes import reserved


def listening(port, *, shared):
    """A listening socket, with or without SO_REUSEPORT."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def port_of(listen):
    """The port in host:port."""
    return int(listen.rpartition(":")[2])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_only_sharing_sockets_can_listen(host):
    """Port 0 becomes a real port, on which only sockets with SO_REUSEPORT can listen."""
    with reserved(f"{host}:0") as listen:
        port = port_of(listen)
        assert listen == f"{host}:{port}"
        assert port
        with listening(port, shared=True), listening(port, shared=True):
            pass
        with pytest.raises(OSError, match="in use"):
            listening(port, shared=False)
        with pytest.raises(OSError, match="in use"), reserved(listen):
            pass
    with listening(port, shared=False):
        pass


@pytest.mark.parametrize("shared", [True, False])
def test_a_port_in_use_is_refused(shared):
    """Also when the other server set SO_REUSEPORT."""
    with listening(0, shared=shared) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"), reserved(f"127.0.0.1:{port}"):
            pass


def test_a_host_without_an_address_is_refused():
    """An unknown host name raises OSError."""
    with pytest.raises(OSError, match=r"known|resolution"), reserved("no-such-host.invalid:0"):
        pass
