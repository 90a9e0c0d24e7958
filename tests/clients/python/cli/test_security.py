"""The command line over TLS, with tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from legato_client.cli import main
from PIL import Image

from tests.clients.python.fake_server import FakeServer
from tests.clients.python.secure_server import GOOD, Certificates, TokenCheck


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Certificates of one authority."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tokens():
    """A check that accepts one token."""
    return TokenCheck(GOOD)


@pytest.fixture
def server(certificates, tokens):
    """A scripted server with TLS that asks for a token."""
    with FakeServer(certificates.server_credentials(), (tokens,)) as fake:
        yield fake


@pytest.fixture
def token_file(tmp_path):
    """A file with the good token."""
    path = tmp_path / "token"
    path.write_text(GOOD + "\n")
    return str(path)


@pytest.fixture
def legato(capsys):
    """Run `legato`: exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_commands_speak_tls_and_send_a_token(
    legato, server, certificates, token_file, tmp_path, tokens
):
    """A skill, `info` and the load, with the token of a file."""
    image = tmp_path / "a.png"
    Image.new("RGB", (20, 10)).save(image)
    options = ["--server", server.target, "--ca", str(certificates.ca), "--token-file", token_file]
    assert legato("detect", str(image), "cat", *options)[0] == 0
    code, out, _ = legato("info", *options)
    assert code == 0
    assert "connection: TLS, as credential robot-7" in out
    load = ["--rate", "20", "--seconds", "0.4", "--warm-up", "0", "--json"]
    code, out, _ = legato("load", *options, *load)
    assert code == 0
    counters = json.loads(out)
    assert counters["plan"]["security"]["encrypted"]
    assert counters["latency_ms"]["count"] == counters["due"] > 0
    assert GOOD not in out
    assert set(tokens.seen) == {f"Bearer {GOOD}"}


def test_info_tells_how_it_is_connected(legato, server, certificates, monkeypatch):
    """One JSON document says so for machines, with the environment's token."""
    monkeypatch.setenv("LEGATO_TOKEN", GOOD)
    own = ["--cert", str(certificates.client_cert), "--key", str(certificates.client_key)]
    ca = ["--ca", str(certificates.ca)]
    code, out, _ = legato("info", "--server", server.target, *ca, *own, "--json")
    assert code == 0
    assert json.loads(out)["connection"] == {
        "encrypted": True,
        "client_certificate": True,
        "token": True,
        "credential": "robot-7",
    }
    assert GOOD not in out
    monkeypatch.delenv("LEGATO_TOKEN")
    with FakeServer() as plain:
        assert "connection: not encrypted\n" in legato("info", "--server", plain.target)[1]


def test_a_server_with_tls_and_a_client_without(legato, server):
    """The message says what to add."""
    code, _, err = legato("info", "--server", server.target)
    assert code == 4
    assert "if it speaks TLS, add --tls or --ca" in err


def test_a_client_with_tls_and_a_server_without(legato, certificates):
    """The message says what to leave out."""
    with FakeServer() as plain:
        code, _, err = legato("info", "--server", plain.target, "--ca", str(certificates.ca))
    assert code == 4
    assert "the server does not speak TLS" in err


def test_an_unknown_authority(legato, server):
    """The message says how to name it."""
    code, _, err = legato("info", "--server", server.target, "--tls")
    assert code == 4
    assert "authority that is not known here: name its PEM file with --ca" in err


def test_no_line_of_grpc_is_beside_the_error(server):
    """A program prints what went wrong once, in its own words."""
    command = [sys.executable, "-m", "legato_client.cli", "info", "--server", server.target]
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*command, "--tls"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 4
    assert "authority that is not known here" in done.stderr
    assert "ssl_transport_security" not in done.stderr


def test_a_certificate_for_another_name(legato, tmp_path):
    """The message says so."""
    elsewhere = Certificates.make(tmp_path, "robots.example")
    with FakeServer(elsewhere.server_credentials()) as server:
        code, _, err = legato("info", "--server", server.target, "--ca", str(elsewhere.ca))
    assert code == 4
    assert "for another name or address" in err


@pytest.mark.parametrize("token", ["", "legato_robot-7_expired"])
def test_a_token_that_is_not_valid(legato, server, certificates, token, monkeypatch):
    """The message says where a token comes from, and does not repeat it."""
    monkeypatch.setenv("LEGATO_TOKEN", token)
    code, _, err = legato("info", "--server", server.target, "--ca", str(certificates.ca))
    assert code == 1
    assert "--token-file" in err
    assert "expired" not in err


@pytest.mark.parametrize(
    ("options", "problem", "code"),
    [
        (["--ca", "/no/such/file"], "cannot read /no/such/file", 2),
        (["--cert", "/dev/null"], "both cert and key", 2),
        (["--ca", "/dev/null"], "not in PEM form", 2),
        (["--token-file", "/no/such/file"], "cannot read the token file /no/such/file", 1),
    ],
)
def test_options_that_make_no_connection(legato, options, problem, code):
    """They are usage errors by name."""
    for command in (["info"], ["load"]):
        exit_code, _, err = legato(*command, *options)
        assert (exit_code, problem in err) == (code, True)


def test_a_token_is_not_sent_unencrypted_elsewhere(legato, token_file):
    """The refusal names TLS, and needs no connection."""
    for command in (["info"], ["load"]):
        code, _, err = legato(*command, "--server", "robots.example:1", "--token-file", token_file)
        assert code == 1
        assert "without TLS" in err
