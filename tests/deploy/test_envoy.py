"""Envoy with the shipped configuration in front of two servers without a model."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from legato_client import Client

from tests.deploy.envoy import Envoy
from tests.deploy.servers import servers
from tests.deploy.traffic import traffic
from tests.e2e.server import until
from tests.service.harness import image_bytes


def test_envoy_accepts_the_configuration(tmp_path: Path) -> None:
    """The shipped configuration is valid, by Envoy's own word."""
    result = Envoy(tmp_path, "127.0.0.1:1").validate()
    assert result.returncode == 0, result.stderr
    assert "OK" in result.stdout + result.stderr


def test_no_call_fails_when_servers_are_killed_and_stopped(tmp_path: Path) -> None:
    """Calls are answered, streams finish and sessions move while servers come and go."""
    with (
        servers(tmp_path, 3) as (one, other, third),
        Envoy(tmp_path, one.address, other.address) as envoy,
    ):
        with traffic(envoy.address, streams=2) as seen:
            seen.wait_for(50)
            one.process.kill()
            seen.wait_for(50)
            until(lambda: envoy.healthy() == {other.address})
        with traffic(envoy.address, streams=2, sessions=1) as later:
            until(lambda: later.frames)  # its session is with the server that will drain
            envoy.file.write([other.address, third.address])
            until(lambda: envoy.healthy() == {other.address, third.address})
            other.process.send_signal(signal.SIGTERM)
            assert other.process.wait(20) == 0
            envoy.file.write([third.address])
            later.wait_for(50)
        assert seen.failures + later.failures == []
        assert seen.stream_failures + later.stream_failures == []
        assert len(seen.answers | later.answers) == 1, "resumed streams say the same"
        assert later.finished
        assert later.session_failures == []
        assert later.moved == 1, "the session was told to go away once"


@pytest.mark.slow
def test_a_long_request_is_asked_again(tmp_path: Path) -> None:
    """More than a stream's window of 4 MiB, read by a server that is then killed."""
    paced = ("--null-step-ms", "400")  # a call takes 6 s
    with (
        servers(tmp_path, 2, *paced) as both,
        Envoy(tmp_path, *(each.address for each in both)) as envoy,
        Client(envoy.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(client.query, image_bytes() + bytes(15 << 20), "How many?")
        until(lambda: any(each.load().running for each in both))
        (holder,) = (each for each in both if each.load().running)
        holder.process.kill()
        assert call.result().answer


@pytest.mark.slow
def test_no_call_fails_when_a_server_hangs(tmp_path: Path) -> None:
    """What a stopped process holds is asked again elsewhere, and streams go on there."""
    with servers(tmp_path) as (one, other), Envoy(tmp_path, one.address, other.address) as envoy:
        try:
            with traffic(envoy.address, streams=4) as seen:
                seen.wait_for(50)
                one.process.send_signal(signal.SIGSTOP)
                until(lambda: envoy.healthy() == {other.address})
                seen.wait_for(50)
        finally:
            one.process.send_signal(signal.SIGCONT)
        assert seen.failures + seen.stream_failures == []
        assert seen.slowest > 1, "no call was in the stopped process"
        assert seen.resumed
        assert len(seen.answers) == 1
