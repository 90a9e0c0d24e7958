"""`legato http` as a process, and its options."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import urllib.request

import grpc
import pytest
from legato_client.cli import main

from tests.clients.python.failures import failure
from tests.e2e.server import ENVIRONMENT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it(number):
    """It tells its URL when it serves, and ends with exit code 0 and a silent standard error."""
    command = [sys.executable, "-m", "legato_client.cli", "http", "--json", "--listen"]
    with subprocess.Popen(
        [*command, "127.0.0.1:0", "--server", "127.0.0.1:1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            with urllib.request.urlopen(f"{said['url']}/healthz") as reply:
                assert json.load(reply) == {"status": "ok"}
            process.send_signal(number)
            _, errors = process.communicate()
            assert (process.returncode, errors) == (0, b"")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--listen", "0.0.0.0:0"], "others can reach 0.0.0.0:0"),
        (["--listen", "8080"], "HOST:PORT"),
        (["--tls-cert", "a.pem"], "need each other"),
        (["--tls-cert", "no.pem", "--tls-key", "no.pem"], "cannot read no.pem"),
        (["--alias", "gpt"], "NAME=MODEL"),
        (["--token-file", "no.token"], "no.token"),
    ],
)
def test_wrong_options(options, problem, capsys):
    """A wrong option ends the command with a sentence that names it."""
    assert main(["http", *options]) in (1, 2)
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def test_the_extra_is_missing(monkeypatch, capsys):
    """Without what the extra brings, one sentence says what to install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "starlette" else find(name)
    )
    assert main(["http"]) == 1
    said = capsys.readouterr().err
    assert "`legato http` needs starlette: pip install" in said
    assert "[web]" in said


def test_required_tokens_must_matter(server, capsys):
    """--require-token is refused where the server takes calls without one, or does not answer."""
    assert main(["http", "--require-token", "--server", server.target]) == 2
    assert "takes calls without a token" in capsys.readouterr().err
    for _ in range(10):
        server.script["GetServerInfo"].append(failure(grpc.StatusCode.UNAVAILABLE, "DRAINING"))
    assert main(["http", "--require-token", "--server", server.target]) == 4
    assert "cannot tell whether" in capsys.readouterr().err


def test_a_token_does_not_leave_this_host_unencrypted(monkeypatch, capsys):
    """With a server elsewhere and no TLS, this process' own token is an error, not sent."""
    monkeypatch.setenv("LEGATO_TOKEN", "legato_a_b")
    assert main(["http", "--server", "a.example:1", "--listen", "127.0.0.1:0"]) == 1
    assert "is not sent to a.example:1 without TLS" in capsys.readouterr().err
