"""`legato http` as a process, and its options."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.request

import grpc
import pytest
from legato_client.cli import commands, main, web
from legato_client.cli.terminal import Terminal

from tests.clients.python.failures import failure
from tests.clients.python.fake_server import STREAMS
from tests.clients.python.until import until
from tests.clients.python.web.serving import CHAT, HELLO, connect
from tests.e2e.server import ENVIRONMENT


def test_a_signal_stops_it():
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
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate()
            assert (process.returncode, errors) == (0, b"")
        finally:
            process.kill()


def test_a_signal_lets_a_stream_finish(server):
    """What runs when the signal comes is answered whole, and then the process ends."""
    *told, last = STREAMS["query"]
    going_on = threading.Event()
    server.script["Generate"].append([*told, going_on, last])
    command = [sys.executable, "-m", "legato_client.cli", "http", "--json", "--listen"]
    with subprocess.Popen(
        [*command, "127.0.0.1:0", "--server", server.target],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            request = urllib.request.Request(
                f"{url}{CHAT}",
                json.dumps({"messages": HELLO, "stream": True}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request) as reply:
                begun = reply.readline()
                process.send_signal(signal.SIGTERM)
                until(lambda: not _takes_connections(url))
                going_on.set()
                assert (begun + reply.read()).endswith(b"data: [DONE]\n\n")
            assert process.wait() == 0
        finally:
            going_on.set()
            process.kill()


def _takes_connections(url: str) -> bool:
    try:
        with contextlib.closing(connect(url)) as connection:
            connection.connect()
    except ConnectionError:
        return False
    return True


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
    assert said.startswith("legato: error:")
    assert problem in said


def test_the_extra_is_missing():
    """Without the extra's packages one sentence says what to install; nothing else needs them."""
    program = """
import sys
sys.modules.update(dict.fromkeys(["msgspec", "starlette", "uvicorn"]))  # None: cannot be imported
from legato_client.cli import main
sys.exit(main(["http"]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("legato: error: `legato http` needs msgspec, starlette, uvicorn")
    assert "[web]" in done.stderr
    assert done.stderr.count("\n") == 1


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


@pytest.mark.parametrize(
    ("target", "caller", "lend", "sent"),
    [
        ("127.0.0.1:1", "legato_c_d", True, ["Bearer legato_c_d"]),
        ("127.0.0.1:1", "", True, ["Bearer legato_own_x"]),
        ("127.0.0.1:1", "", False, []),
        ("a.example:1", "legato_c_d", False, []),
    ],
    ids=["the caller's", "lent", "not lent", "not encrypted"],
)
def test_whose_token_is_sent(tmp_path, capsys, target, caller, lend, sent):
    """The caller's own token goes first, and no token leaves this host unencrypted."""
    file = tmp_path / "token"
    file.write_text("legato_own_x")
    words = ["http", "--server", target, "--token-file", str(file)]
    args = commands.make_parser().parse_args(words)
    client = web.connector(args, Terminal(json_output=False), lambda: caller, lend=lend)()
    metadata = client._connection.metadata()
    assert [value for key, value in metadata if key == "authorization"] == sent
    assert ("no token is passed on" in capsys.readouterr().out) == target.startswith("a.")
