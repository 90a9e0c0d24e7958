"""TLS before Envoy and behind it, as deploy/envoy/render.py writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from legato_client import Client, Finished, QueryTask, Unavailable

from tests.deploy.envoy import Envoy, render
from tests.deploy.servers import NULL
from tests.e2e.server import Server
from tests.service.access.certificates import Authority, Files


class Sides:
    """Certificates of clients and of servers, each of an authority of its own."""

    def __init__(self, folder: Path) -> None:
        outside, self._inside = Authority(), Authority()
        self.outside = outside
        self.inside_pem = self._inside.pem
        self.front = Files(_made(folder / "front"), outside.server(), outside.pem)
        self.server = Files(_made(folder / "server"), self._inside.server(), self._inside.pem)
        self.envoy = Files(
            _made(folder / "envoy"), self._inside.client("envoy.internal"), self._inside.pem
        )

    @property
    def options(self) -> list[str]:
        """Of render.py."""
        front, envoy = self.front, self.envoy
        words = ["--tls-cert", front.cert, "--tls-key", front.key, "--client-ca", front.ca]
        words += ["--upstream-ca", envoy.ca, "--upstream-name", "localhost"]
        words += ["--upstream-cert", envoy.cert, "--upstream-key", envoy.key]
        return [str(word) for word in words]

    def start(self, folder: Path) -> Server:
        """A server that asks Envoy for a certificate."""
        files, own = self.server, self.envoy
        tls = ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
        credentials = grpc.ssl_channel_credentials(
            self.inside_pem, own.key.read_bytes(), own.cert.read_bytes()
        )
        folder.mkdir()
        more = [*tls, "--tls-client-ca", str(files.ca)]
        return Server(folder, *NULL, *more, credentials=credentials)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_envoy_accepts_the_configuration(tmp_path: Path) -> None:
    """With TLS on both sides and certificates of both."""
    result = Envoy(tmp_path, "127.0.0.1:1", options=Sides(tmp_path).options).validate()
    assert result.returncode == 0, result.stderr


def test_without_the_options_nothing_of_it_counts(tmp_path: Path) -> None:
    """The lines are comments, and half a pair of files is refused."""
    lines = [line.split("#")[0] for line in render(tmp_path).splitlines()]
    assert not any("tls" in line for line in lines)
    with pytest.raises(Exception, match="returned non-zero"):
        render(tmp_path, "--tls-cert", "server.crt")


@pytest.mark.slow
def test_calls_pass_both_sides(tmp_path: Path) -> None:
    """Unary calls and streams, with certificates; without one, or without TLS, none."""
    sides = Sides(tmp_path)
    one, other = (sides.start(tmp_path / name) for name in ("one", "two"))
    client = sides.outside.client("robot-1")
    own: dict[str, Any] = {"ca": sides.outside.pem, "cert": client.chain, "key": client.key}
    with one, other, Envoy(tmp_path, one.address, other.address, options=sides.options) as envoy:
        name = envoy.address.replace("127.0.0.1", "localhost")
        with Client(name, **own) as robot:
            assert robot.query(None, "How many?").answer
            (*_, last) = robot.generate(None, QueryTask("How many?"))
            assert isinstance(last, Finished)
            one.process.kill()
            assert all(robot.query(None, "How many?").answer for _ in range(20))
        strangers: list[dict[str, Any]] = [{"ca": sides.outside.pem}, {}]
        for settings in strangers:
            with Client(name, **settings) as stranger, pytest.raises(Unavailable):
                stranger.query(None, "How many?", timeout=20)
        assert envoy.counter("cluster.legato.ssl.handshake") > 0
