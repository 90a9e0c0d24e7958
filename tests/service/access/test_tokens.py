"""Tokens: tenants, rotation, their secrets, and `legato token new`."""

from __future__ import annotations

import json
import os
import time

import pytest
import structlog
from legato.v1 import admin_pb2, inference_pb2, task_pb2
from legato_client.cli.arguments import admin_target
from legato_client.cli.main import main
from legato_service import addresses
from legato_service import logs as configuration
from legato_service.access import credentials
from legato_service.access.credentials import Credentials, FileRejected, parse
from legato_service.access.principal import Quotas

from tests.service.access.credentials import Token, bearer, call_empty, write
from tests.service.fakes import FakeEngine, answer, begin, hold
from tests.service.harness import refusal, running, until
from tests.service.session.client import SessionClient, opening

QUESTION = inference_pb2.QueryRequest(question="How many?")
STREAM = inference_pb2.GenerateRequest(
    task=task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))
)
INFO = "/legato.v1.ServerService/GetServerInfo"
INTERVAL = 0.01
A = Token("a", ["infer", "upload"], tenant="robots")
B = Token("b", ["infer"], tenant="others")
OPERATOR = Token("op", ["admin"], tenant="")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.toml"


def served(path, *tokens, engine=None, **settings):
    """A server with these tokens, which reads changes at once."""
    tokens_file = write(path, *tokens)
    return running(engine, tokens=tokens_file, access_interval=INTERVAL, **settings)


# ------------------------------------------------------------ tenants


async def test_the_tenant_is_the_credentials(path):
    """Whatever the request says."""
    async with served(path, A, B) as server:
        await server.inference.Query(QUESTION, metadata=A.metadata)
        await server.inference.Query(QUESTION, metadata=B.metadata)
        own = (("legato-tenant", "robots"), *A.metadata)
        await server.inference.Query(QUESTION, metadata=own)
        tenants = [request.request_id.tenant for request in server.engine.requests]
        assert tenants == ["robots", "others", "robots"]


@pytest.mark.parametrize("position", ["before", "after"])
async def test_another_tenant_is_refused(path, position):
    """It is not silently replaced: the caller may rely on it."""
    spoofed = (("legato-tenant", "others"),)
    metadata = spoofed + A.metadata if position == "before" else A.metadata + spoofed
    async with served(path, A, B) as server:
        failed = await refusal(server.inference.Query(QUESTION, metadata=metadata))
        assert failed.reason == "FORBIDDEN"
        assert failed.details["ErrorInfo"].metadata["field"] == "metadata.legato-tenant"
        assert not server.engine.requests


async def test_without_credentials_the_tenant_is_a_label():
    """As before: no protection, and documented so."""
    async with running() as server:
        await server.inference.Query(QUESTION, metadata=(("legato-tenant", "anyone"),))
        assert server.engine.requests[0].request_id.tenant == "anyone"


async def test_an_operator_names_the_tenant_whose_request_is_meant(path):
    """The operator's own tenant, if any, does not narrow what is aborted."""
    both = Token("both", ["infer", "admin"], tenant="staff")
    engine = FakeEngine(hold)
    async with served(path, A, OPERATOR, both, engine=engine) as server:
        request = inference_pb2.QueryRequest(question="?")
        request.options.request_id = "mine"
        calls = [server.inference.Query(request, metadata=A.metadata)]
        await until(lambda: len(engine.requests) == 1)
        target = admin_pb2.AbortRequest(request_id="mine")
        of_others = (("legato-tenant", "others"),)
        for token in (OPERATOR, both):
            aborted = await server.admin.Abort(target, metadata=token.metadata + of_others)
            assert aborted.aborted == 0
        aborted = await server.admin.Abort(target, metadata=both.metadata)
        assert aborted.aborted == 1
        for call in calls:
            call.cancel()


# ------------------------------------------------------------ rotation


async def test_tokens_are_added_and_removed_while_the_server_runs(path):
    """A removed token is refused by the next call; the others are not disturbed."""
    async with served(path, A) as server:
        assert await call_empty(server.channel, INFO, A.metadata) is None
        assert (await call_empty(server.channel, INFO, B.metadata)).reason == "UNAUTHENTICATED"
        write(path, A, B)
        while await call_empty(server.channel, INFO, B.metadata) is not None:
            pass
        write(path, B)
        while await call_empty(server.channel, INFO, A.metadata) is None:
            pass
        assert await call_empty(server.channel, INFO, B.metadata) is None


async def test_a_secret_is_replaced_under_its_id(path):
    fresh = Token("a", ["infer", "upload"], tenant="robots")
    async with served(path, A) as server:
        write(path, fresh)
        while await call_empty(server.channel, INFO, fresh.metadata) is not None:
            pass
        assert (await call_empty(server.channel, INFO, A.metadata)).reason == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    "broken",
    ["", "[[credential]", "[[credential]]\nid = 'a'\n", "[[token]]\n", "credential = 1", "\xff"],
)
async def test_a_broken_file_leaves_the_tokens_as_they_are(path, broken):
    """It is logged once and counted."""
    with structlog.testing.capture_logs() as logs:
        async with served(path, A) as server:
            access = server.server.listeners.access
            path.write_bytes(broken.encode("latin-1"))
            await until(lambda: access.num_failed_reloads == 1)
            assert await call_empty(server.channel, INFO, A.metadata) is None
            for _ in range(10):
                access.reload_changed()
            assert access.num_failed_reloads == 1
            told = server.server.metrics.snapshot().named("legato_access_reload_failures")
            assert {each.labels: each.values for each in told} == {
                ("tls",): [0],
                ("credentials",): [1],
            }
    (failure,) = [line for line in logs if line["event"] == "credentials_reload_failed"]
    assert failure["file"] == str(path)
    assert failure["error"].startswith(f"{path}: malformed")


async def test_a_removed_file_leaves_the_tokens_as_they_are(path):
    async with served(path, A) as server:
        path.unlink()
        await until(lambda: server.server.listeners.access.num_failed_reloads == 1)
        assert await call_empty(server.channel, INFO, A.metadata) is None


async def test_all_tokens_can_be_removed(path):
    """By a file that says so, which an empty one does not."""
    async with served(path, A) as server:
        write(path)
        while await call_empty(server.channel, INFO, A.metadata) is None:
            pass


async def test_an_open_session_ends_when_its_token_is_removed(path):
    """At its next message; that of another token goes on."""
    async with served(path, A, B) as server:
        of_a = SessionClient(server.sessions.Session(metadata=A.metadata))
        of_b = SessionClient(server.sessions.Session(metadata=B.metadata))
        for client in (of_a, of_b):
            await client.send(open=opening())
            await client.frame(1)
            await client.outcome(1)
        write(path, B)
        while await call_empty(server.channel, INFO, A.metadata) is None:
            pass
        await of_a.frame(2)
        assert (await of_a.failure()).reason == "UNAUTHENTICATED"
        await of_b.frame(2)
        await of_b.outcome(2)
        await of_b.done()
        await of_b.end()


async def test_an_open_stream_ends_when_its_token_is_removed(path):
    """Before the next event is sent."""
    engine = FakeEngine(begin)
    async with served(path, A, engine=engine) as server:
        stream = server.inference.Generate(STREAM, metadata=A.metadata)
        assert (await stream.read()).HasField("started")
        write(path)
        while await call_empty(server.channel, INFO, A.metadata) is None:
            pass
        (key,) = engine.streams
        answer(engine, engine.streams[key])
        assert (await refusal(stream.read())).reason == "UNAUTHENTICATED"


async def test_a_change_of_quotas_disturbs_no_session(path):
    """Only what a credential is and may do ends its open calls."""
    async with served(path, A) as server:
        client = SessionClient(server.sessions.Session(metadata=A.metadata))
        await client.send(open=opening())
        await client.frame(1)
        await client.outcome(1)
        record = A.record + "sessions = 1\n"
        with structlog.testing.capture_logs() as logs:
            path.write_text(record)
            await until(lambda: [each["event"] for each in logs] == ["credentials_reloaded"])
        second = SessionClient(server.sessions.Session(metadata=A.metadata))
        await second.send(open=opening())
        assert (await second.failure()).reason == "QUOTA_EXCEEDED"
        await client.frame(2)
        await client.outcome(2)
        await client.done()
        await client.end()


async def test_a_token_expires_while_the_server_runs(path, monkeypatch):
    """By the wall clock, as its record says."""
    soon = Token("soon", ["infer"], expires="2100-01-01T00:00:00Z")
    async with served(path, soon) as server:
        assert await call_empty(server.channel, INFO, soon.metadata) is None
        monkeypatch.setattr(time, "time", lambda: 4102444800.0)
        assert (await call_empty(server.channel, INFO, soon.metadata)).reason == "UNAUTHENTICATED"


@pytest.mark.parametrize(("mode", "exposed"), [(0o600, False), (0o640, False), (0o644, True)])
async def test_a_file_that_others_read_is_warned_of(path, mode, exposed):
    write(path, A)
    path.chmod(mode)
    with structlog.testing.capture_logs() as logs:
        async with running(tokens=str(path)):
            pass
    assert any(line["event"] == "credentials_file_exposed" for line in logs) == exposed


# ------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (('id = "a"', 'id = "a_b"'), "regex"),
        (('tenant = "robots"', 'tenant = "a b"'), "regex"),
        (('tenant = "robots"', 'tenant = ""'), "tenant is needed"),
        (('scopes = ["infer", "upload"]', "scopes = []"), "scope is needed"),
        (('"upload"', '"root"'), "enum"),
        (("sha256", "sha-256"), "unknown field"),
        (("sha256 = ", "sha256 = 5 # "), "Expected `str`"),
        (('sha256 = "', 'sha256 = "" # "'), "sha256 or san"),
    ],
)
def test_a_malformed_record_is_refused(change, text):
    """The text names what is wrong."""
    assert change[0] in A.record
    with pytest.raises(FileRejected, match=text):
        credentials.parse(A.record.replace(*change).encode())


def test_a_file_of_credentials_may_begin_with_a_mark():
    """Some editors put one before UTF-8."""
    record = A.record.encode()
    assert credentials.parse(b"\xef\xbb\xbf" + record) == credentials.parse(record)


def test_ids_and_names_are_unique():
    with pytest.raises(FileRejected, match="not unique"):
        credentials.parse((A.record * 2).encode())
    one, other = (Token(name, ["infer"], san='"x.example"') for name in "cd")
    with pytest.raises(FileRejected, match="same san"):
        credentials.parse((one.record + other.record).encode())


def test_a_secret_in_the_place_of_its_hash_is_not_shown():
    """An operator may paste the token itself."""
    for text in (
        A.record.replace("sha256 = ", f'sha256 = "{A.text}" #'),
        A.record + A.text,
        A.record + f"{A.text} = 1\n",
        A.record.replace('"a"', f'"{A.text}"'),
    ):
        with pytest.raises(FileRejected) as caught:
            credentials.parse(text.encode())
        assert A.secret not in str(caught.value)


def test_a_weak_secret_cannot_be_used():
    """A plain hash is enough for 256 random bits only, so that nothing shorter is accepted."""
    record = A.record.replace(
        A.record.split('sha256 = "')[1][:64], credentials.digest("password").hex()
    )
    known = Credentials(Quotas(), 1, credentials.parse(record.encode()))
    assert known.of_token(bearer("legato_a_password")[0][1]) is None


# ------------------------------------------------------------ secrets


async def test_no_log_record_has_a_secret(path):
    """At the level debug, of calls that succeed, are refused, and fail by a bug."""

    def fail(*_):
        raise RuntimeError("a bug")

    with structlog.testing.capture_logs() as logs:
        async with served(path, A, engine=FakeEngine(fail)) as server:
            await refusal(server.inference.Query(QUESTION, metadata=A.metadata))
            await call_empty(server.channel, INFO, A.metadata)
            await call_empty(server.channel, INFO, B.metadata)
            await call_empty(server.channel, "/no.such/Method", A.metadata)
            await server.server.stop()
    assert any(line["event"] == "uncaught_exception" for line in logs)
    ended = [line for line in logs if line["event"] == "rpc_ended"]
    assert any(line.get("credential") == "a" for line in ended)
    for secret in (A.secret, B.secret):
        assert secret not in repr(logs)


def test_tracebacks_on_a_terminal_show_no_local_variables(monkeypatch):
    """The usual ones do, and locals of a call are its metadata."""
    reading, writing = os.pipe()
    monkeypatch.setattr(configuration, "standard_error", lambda: writing)
    before = structlog.get_config()
    try:
        configuration.configure("info", terminal=True)
        secret = "hunter" + "2"
        try:
            raise RuntimeError(f"a bug of length {len(secret)}")
        except RuntimeError:
            structlog.get_logger().error("uncaught_exception", exc_info=True)
        assert structlog.get_config()["logger_factory"]().flush(10)
    finally:
        structlog.configure(**before)
    shown = os.read(reading, 1 << 16).decode()
    os.close(reading)
    assert "a bug of length 7" in shown
    assert "hunter2" not in shown


# ---------------------------------------------------------------- token command
# What `legato token new` prints is what the server reads.


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
            assert admin_target(f"{host}:{server.port}") == server.server.listeners.admin_address
        assert admin_target(f"other.example:{server.port}") == f"other.example:{server.port}"
    assert admin_target("127.0.0.1:1") == "127.0.0.1:1"


def test_without_a_runtime_folder_both_use_the_same_one(tmp_path, monkeypatch):
    """A folder of /tmp that belongs to the user."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    address = addresses.admin_socket(1)
    assert address.startswith("unix:/tmp/legato-")
    assert admin_target("localhost:1") == "localhost:1", "nothing listens there"


async def test_a_socket_in_a_folder_of_others_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with running(admin_listen="") as server:
        (tmp_path / "legato").chmod(0o755)
        assert admin_target(f"localhost:{server.port}") == f"localhost:{server.port}"
        (tmp_path / "legato").chmod(0o700)
