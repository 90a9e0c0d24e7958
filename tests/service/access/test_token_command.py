"""What `legato token new` prints is what the server reads."""

from __future__ import annotations

import json
import time

import pytest
from legato_client.cli.arguments import admin_target
from legato_client.cli.main import main
from legato_service.access import admin_socket
from legato_service.access.credentials import Credentials, parse
from legato_service.access.principal import Quotas

from tests.service.harness import running


def make(capsys, *options):
    """The token and the record."""
    assert main(["token", "new", *options]) == 0
    printed = capsys.readouterr()
    return printed.err.strip(), printed.out


def test_a_new_token_is_accepted_with_its_record(capsys):
    token, record = make(capsys, "--tenant", "robots", "--scopes", "infer", "--id", "hall-3")
    assert token.startswith("legato_hall-3_")
    assert token not in record
    assert token.rpartition("_")[2] not in record
    known = Credentials(Quotas(), 1, parse(record.encode()))
    principal = known.of_token(f"Bearer {token}")
    assert principal is not None
    assert principal.tenant == "robots"
    assert principal.scopes == {"credential", "infer"}
    assert known.of_token(f"Bearer {token[:-1]}") is None


def test_records_can_be_appended(capsys):
    """Any number, also of certificates and after comments."""
    texts = [make(capsys, "--tenant", f"t{index}")[1] for index in range(3)]
    _, certificate = make(capsys, "--tenant", "t", "--san", "spiffe://a/b", "--san", "c.example")
    _, operator = make(capsys, "--scopes", "admin", "--days", "30")
    records = parse("# robots\n".join((*texts, certificate, operator)).encode())
    assert len({record.id for record in records}) == 5
    assert records[3].certificates == ("spiffe://a/b", "c.example")
    assert not records[3].sha256
    assert records[4].tenant == ""
    assert records[4].expires_at - time.time() == pytest.approx(30 * 86400, abs=3600)


def test_a_certificate_has_no_token(capsys):
    assert make(capsys, "--tenant", "t", "--san", "a.example")[0] == ""


def test_a_document_has_both(capsys):
    assert main(["token", "new", "--tenant", "t", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    known = Credentials(Quotas(), 1, parse(document["record"].encode()))
    assert known.of_token(f"Bearer {document['token']}") is not None


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--tenant", "a b"),
        ("--tenant", "a", "--scopes", "root"),
        ("--tenant", "a", "--scopes", ""),
        ("--tenant", "a", "--id", "a_b"),
        ("--tenant", "a", "--days", "0"),
    ],
)
def test_what_the_server_would_refuse_is_refused(options, capsys):
    assert main(["token", "new", *options]) == 2
    assert capsys.readouterr().out == ""


async def test_the_client_finds_the_servers_socket(tmp_path, monkeypatch):
    """In the folder that both choose; another server's address stays as it is."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with running(admin_listen="") as server:
        for host in ("127.0.0.1", "localhost"):
            assert admin_target(f"{host}:{server.port}") == server.server.admin_address
        assert admin_target(f"other.example:{server.port}") == f"other.example:{server.port}"
    assert admin_target("127.0.0.1:1") == "127.0.0.1:1"


def test_without_a_runtime_folder_both_use_the_same_one(tmp_path, monkeypatch):
    """A folder of /tmp that belongs to the user."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    address = admin_socket.admin_socket(1)
    assert address.startswith("unix:/tmp/legato-")
    assert admin_target("localhost:1") == "localhost:1", "nothing listens there"


async def test_a_socket_in_a_folder_of_others_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with running(admin_listen="") as server:
        (tmp_path / "legato").chmod(0o755)
        assert admin_target(f"localhost:{server.port}") == f"localhost:{server.port}"
        (tmp_path / "legato").chmod(0o700)
