"""The probe of containers: its exit codes, with and without TLS."""

import asyncio
from typing import Any

import pytest
from legato_engine.client.monitor import EngineState
from legato_service import probe

from tests.service.access.certificates import HOST, Authority, Files
from tests.service.fakes import FakeEngine
from tests.service.harness import running

INFERENCE = "legato.v1.InferenceService"


def probed(*options):
    """Its exit code, from another thread, because the server runs in this one."""
    return asyncio.to_thread(probe.main, ["--timeout", "20", *options])


async def test_exit_codes_follow_the_health(capsys):
    """0 for SERVING, 1 for NOT_SERVING or an unknown service; the process is alive throughout."""
    engine = FakeEngine()
    async with running(engine) as server:
        for state, expected in ((EngineState.READY, 0), (EngineState.LOST, 1)):
            engine.become(state)
            ready = await probed("--address", f"127.0.0.1:{server.port}", "--service", INFERENCE)
            alive = await probed("--address", f"127.0.0.1:{server.port}")
            assert (ready, alive) == (expected, 0)
        assert await probed("--address", f"127.0.0.1:{server.port}", "--service", "nobody") == 1
    assert "\nNOT_SERVING\n" in capsys.readouterr().out


async def test_no_answer_is_a_failure_of_its_own(capsys):
    """A closed port is 3, and the output names the address."""
    assert await asyncio.to_thread(probe.main, ["--address", "127.0.0.1:9", "--timeout", "1"]) == 3
    assert "127.0.0.1:9" in capsys.readouterr().out


async def test_a_listener_with_tls_and_certificates_of_clients(tmp_path):
    """With its files a probe is answered; without TLS, or a certificate of its own, it is not."""
    authority = Authority()
    files = Files(tmp_path, authority.server(), authority.pem)
    own = authority.client("probe.example")
    (tmp_path / "own.pem").write_bytes(own.chain)
    (tmp_path / "own.key").write_bytes(own.key)
    settings: dict[str, Any] = {**files.settings}
    async with running(**settings) as server:
        trusting = ["--address", f"127.0.0.1:{server.port}", "--ca", str(files.ca)]
        certified = ["--cert", str(tmp_path / "own.pem"), "--key", str(tmp_path / "own.key")]
        assert await probed(*trusting, *certified, "--server-name", HOST) == 0
        assert await probed(*trusting[:2], "--timeout", "1") == 3
        assert await probed(*trusting, "--timeout", "1") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "here"], "--address takes HOST:PORT"),
        (["--cert", "cert.pem"], "--cert and --key"),
        (["--timeout", "0"], "--timeout must be positive"),
        (["--ca", "missing.pem"], "missing.pem"),
    ],
)
def test_wrong_options(options, message, capsys):
    """They are exit code 2 and name the option or the file."""
    with pytest.raises(SystemExit) as caught:
        probe.main(options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
