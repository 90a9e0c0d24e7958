"""TLS, tokens, certificates and tenants from every client to a real server of several processes."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.resources
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, server_pb2, server_pb2_grpc
from legato_client import (
    AsyncClient,
    CaptionTask,
    Client,
    DetectTask,
    ImageNotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from legato_client.cli import main

from tests.clients.python.secure_server import Certificates
from tests.conformance import programs
from tests.e2e.server import ENVIRONMENT, PATIENCE, Server, ServerLog, children, until
from tests.service.access.credentials import HOST, Authority, Files, Token, write

STREET = (importlib.resources.files("legato_tiny") / "samples" / "street.jpg").read_bytes()
PAGE = (programs.ROOT / "docs" / "quickstart-shell.md").read_text()
ACME = Token("acme-1", ["infer", "upload"], tenant="acme")
RIVAL = Token("rival-1", ["infer", "upload"], tenant="rival")
READER = Token("reader-1", ["upload"], tenant="acme")
EXPIRED = Token("old-1", ["infer"], tenant="acme", expires="2020-01-01T00:00:00Z")
CERTIFICATE = (
    '[[credential]]\nid = "robot-7"\ntenant = "acme"\nscopes = ["infer"]\nsan = "robot-7"\n'
)


@dataclasses.dataclass(frozen=True)
class Secured:
    """A server with TLS and tokens that also asks for certificates, and its files."""

    address: str
    files: Certificates
    token_file: Path

    @property
    def own(self):
        """The client's certificate as settings of a Python client."""
        return {"cert": self.files.client_cert, "key": self.files.client_key}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Certificates of one authority."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def serve(folder, certificates, *options):
    """Start a server with TLS and tokens."""
    trusted = grpc.ssl_channel_credentials(
        certificates.ca.read_bytes(),
        certificates.client_key.read_bytes(),
        certificates.client_cert.read_bytes(),
    )
    tokens = write(folder / "tokens.toml", ACME, RIVAL, READER, EXPIRED)
    with open(tokens, "a") as file:
        file.write(CERTIFICATE)
    tls = ["--tls-cert", str(certificates.cert), "--tls-key", str(certificates.key)]
    return Server(
        folder, "--model", "null", "--tokens", tokens, *tls, *options, credentials=trusted
    )


@pytest.fixture(scope="module")
def secured(certificates, tmp_path_factory):
    """A server with TLS and tokens."""
    folder = tmp_path_factory.mktemp("secured")
    token_file = folder / "token"
    token_file.write_text(ACME.text + "\n")
    with serve(folder, certificates) as running:
        yield Secured(running.address, certificates, token_file)


@pytest.fixture(scope="module")
def mutual(certificates, tmp_path_factory):
    """A server that also needs a certificate of its authority."""
    folder = tmp_path_factory.mktemp("mutual")
    token_file = folder / "token"
    token_file.write_text(ACME.text + "\n")
    with serve(folder, certificates, "--tls-client-ca", str(certificates.ca)) as running:
        yield Secured(running.address, certificates, token_file)


# ---------------------------------------------------------------- Python


@pytest.mark.timeout(2 * programs.PATIENCE)
def test_the_blocking_client(secured):
    """Unary calls, streams, uploads and sessions, with the token of a file."""
    settings = {"ca": secured.files.ca, "token": secured.token_file}
    with Client(secured.address, **settings) as client:
        assert client.models()
        assert client.detect(STREET, "cup").info.request_id
        assert list(client.generate(STREET, CaptionTask()))
        client.delete_image(client.put_image(STREET))
        with client.session([DetectTask("cup")]) as session:
            assert session.terms.session_id


@pytest.mark.timeout(2 * programs.PATIENCE)
def test_the_asyncio_client(secured):
    """The same."""

    async def use():
        settings = {"ca": secured.files.ca, "token": lambda: ACME.text}
        async with AsyncClient(secured.address, **settings) as client:
            assert await client.models()
            assert (await client.detect(STREET, "cup")).info.request_id
            assert [event async for event in client.generate(STREET, CaptionTask())]
            await client.delete_image(await client.put_image(STREET))
            async with client.session([DetectTask("cup")]) as session:
                assert session.terms.session_id

    asyncio.run(use())


@pytest.mark.timeout(2 * programs.PATIENCE)
def test_certificates_of_clients(mutual):
    """A certificate is a credential, a token beside it decides, and without one nothing is sent."""
    with Client(mutual.address, ca=mutual.files.ca, **mutual.own) as client:
        assert client.detect(STREET, "cup").info.request_id
        with pytest.raises(PermissionDenied):
            client.put_image(STREET)
    with Client(mutual.address, ca=mutual.files.ca, token=ACME.text, **mutual.own) as client:
        client.delete_image(client.put_image(STREET))
    alone = Client(mutual.address, ca=mutual.files.ca, token=ACME.text, timeout=5)
    with alone, pytest.raises(Unavailable):
        alone.models()


@pytest.mark.timeout(2 * programs.PATIENCE)
@pytest.mark.parametrize(
    ("token", "error"),
    [
        ("", Unauthenticated),
        (EXPIRED.text, Unauthenticated),
        (ACME.text + "x", Unauthenticated),
        (READER.text, PermissionDenied),
    ],
    ids=["none", "expired", "wrong", "without the scope"],
)
def test_refused_credentials(secured, token, error):
    """The error is typed, and a missing scope is named."""
    client = Client(secured.address, ca=secured.files.ca, token=token)
    with client, pytest.raises(error) as caught:
        client.detect(STREET, "cup")
    if error is PermissionDenied:
        assert caught.value.metadata["scope"] == "infer"
        assert caught.value.reason == "FORBIDDEN"


# ---------------------------------------------------------------- tenants


@pytest.mark.timeout(2 * programs.PATIENCE)
def test_two_tenants_know_nothing_of_each_other(secured):
    """What one holds and showed is unknown to the other, who gets what it would get alone."""
    acme, rival = (
        Client(secured.address, ca=secured.files.ca, token=each.text) for each in (ACME, RIVAL)
    )
    with acme, rival:
        held = acme.put_image(STREET)
        for attempt in (rival.delete_image, rival.caption):
            with pytest.raises(ImageNotFound):
                attempt(held)
        assert hits(rival.caption(STREET)) == (False, False)
        assert hits(rival.caption(STREET)) == (True, True)
        assert hits(acme.caption(held)) == (True, True)
        acme.delete_image(held)
        assert hits(rival.caption(STREET)) == (True, True)


def hits(result):
    """Return whether the image was known, and whether any token was."""
    return result.info.image.cache_hit, result.info.usage.cached_tokens > 0


# ---------------------------------------------------------------- the command line


@pytest.mark.timeout(2 * programs.PATIENCE)
def test_the_commands(secured, mutual, capsys, tmp_path, monkeypatch):
    """A skill, `info` and the load; with a certificate and the environment's token."""
    image = tmp_path / "street.jpg"
    image.write_bytes(STREET)
    ca = ["--ca", str(secured.files.ca)]
    options = ["--server", secured.address, *ca, "--token-file", str(secured.token_file)]
    assert main(["detect", str(image), "cup", *options]) == 0
    load = ["--rate", "20", "--seconds", "1", "--warm-up", "0"]
    assert main(["load", *options, *load]) == 0
    monkeypatch.setenv("LEGATO_TOKEN", ACME.text)
    own = ["--cert", str(mutual.files.client_cert), "--key", str(mutual.files.client_key)]
    assert main(["info", "--server", mutual.address, *ca, *own]) == 0
    out, _ = capsys.readouterr()
    assert "connection: TLS, with a client certificate, as credential acme-1" in out
    assert ACME.secret not in out


@pytest.mark.timeout(2 * programs.PATIENCE)
@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ([], "add --tls or --ca"),
        (["--tls"], "name its PEM file with --ca"),
        (["--ca", "CA"], "--token-file"),
    ],
)
def test_the_commands_say_what_is_missing(secured, options, hint, capsys):
    """TLS, the authority, the token."""
    words = [str(secured.files.ca) if word == "CA" else word for word in options]
    assert main(["info", "--server", secured.address, *words]) != 0
    assert hint in capsys.readouterr().err


# ---------------------------------------------------------------- other languages


def recipes(kind, start=""):
    """Return the blocks of the shell quickstart for a server elsewhere."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [
        part
        for block in blocks
        for part in re.split(r"\n\n(?=grpcurl )", block)
        if "robots.example:50051" in part and part.startswith(start)
    ]


def lay_out(folder: Path, server: Secured) -> dict[str, str]:
    """Put the files beside the recipes that these name; return the environment."""
    for name, source in {
        "ca.pem": server.files.ca,
        "robot.pem": server.files.client_cert,
        "robot-key.pem": server.files.client_key,
        "token": server.token_file,
    }.items():
        shutil.copy(source, folder / name)
    (folder / "street.jpg").write_bytes(STREET)
    return {**os.environ, "PATH": programs.PATH}


@pytest.mark.timeout(2 * programs.PATIENCE)
def test_the_grpcurl_recipes(secured, mutual, tmp_path):
    """A token over TLS lists the models; a certificate alone is a credential as well."""
    if shutil.which("grpcurl", path=programs.PATH) is None:
        pytest.skip("needs grpcurl")
    with_token, with_certificate = recipes("sh", "grpcurl")
    for text, server in ((with_token, secured), (with_certificate, mutual)):
        environment = lay_out(tmp_path, server)
        done = subprocess.run(
            ["bash", "-euc", text.replace("robots.example:50051", server.address)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)


@pytest.mark.timeout(2 * programs.PATIENCE)
def test_the_node_recipe(secured, tmp_path):
    """The program prints what it found, by the client that has TLS and a token."""
    try:
        programs.install_node_packages()
    except programs.Missing as error:
        pytest.skip(str(error))
    plain, secure = re.findall(r"^```js\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    program, replaced = re.subn(
        r"^const client = .*createInsecure.*\n", lambda _: secure, plain, flags=re.MULTILINE
    )
    assert replaced == 1
    environment = lay_out(tmp_path, secured)
    (tmp_path / "proto").symlink_to(programs.ROOT / "proto")
    (tmp_path / "node_modules").symlink_to(programs.NODE / "node_modules")
    path = tmp_path / "detect.js"
    path.write_text(program.replace("robots.example:50051", secured.address))
    done = subprocess.run(
        ["node", str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    label, *box = done.stdout.splitlines()[0].split()
    assert label == "bus"
    assert [0.0 <= float(side) <= 1.0 for side in box] == [True] * 4


@pytest.mark.timeout(2 * programs.PATIENCE)
def test_the_go_client(secured, mutual):
    """Its own test against a server that it is told of by the environment."""
    try:
        programs.fetch_go_modules()
    except programs.Missing as error:
        pytest.skip(str(error))
    for server in (secured, mutual):
        done = subprocess.run(
            [*programs.GO_TEST, "-run", "TestSecuredServer", "./legato"],
            cwd=programs.GO,
            env={
                **programs.ENVIRONMENT,
                "LEGATO_SECURED_SERVER": server.address,
                "LEGATO_SECURED_CA": str(server.files.ca),
                "LEGATO_SECURED_CERT": str(server.files.client_cert),
                "LEGATO_SECURED_KEY": str(server.files.client_key),
                "LEGATO_SECURED_TOKEN_FILE": str(server.token_file),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=programs.PATIENCE,
        )
        events = [json.loads(line) for line in done.stdout.splitlines()]
        ended = {event["Test"]: event["Action"] for event in events if "Test" in event}
        assert ended == {"TestSecuredServer": "pass"}, done.stdout + done.stderr


@pytest.mark.timeout(2 * programs.PATIENCE)
@pytest.mark.slow
def test_the_cpp_client(secured, mutual):
    """Its own test against a server with TLS, and against one that asks for its certificate."""
    try:
        programs.build_cpp("client_test")
    except programs.Missing as error:
        pytest.skip(str(error))
    for server in (secured, mutual):
        files = (server.files.ca, server.files.client_cert, server.files.client_key)
        program = str(programs.CPP_BUILD / "client_test")
        programs.run(program, server.address, *map(str, files), str(server.token_file))


# ---------------------------------------------------------------- access
# Credentials and certificates of a real server with several processes.

INFO = server_pb2.GetServerInfoRequest()
OPERATOR = Token("op", ["admin"], tenant="")
ROBOT = Token("robot", ["infer", "upload"])
CONNECTIONS = 16  # the kernel spreads them over the processes


class SecuredServer(ServerLog):
    """Two service processes with TLS and tokens, on all interfaces."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority()
        self.files = Files(folder, self.authority.server())
        self.tokens = folder / "tokens.toml"
        write(self.tokens, OPERATOR, ROBOT)
        super().__init__(folder / "server.log")
        self._options = [
            *("--model", "null", "--processes", "2", "--log-level", "debug"),
            *("--listen", "0.0.0.0:0", "--health-listen", "127.0.0.1:0"),
            *("--tls-cert", str(self.files.cert), "--tls-key", str(self.files.key)),
            *("--tokens", str(self.tokens)),
        ]
        self.environment = {**ENVIRONMENT, "XDG_RUNTIME_DIR": str(folder)}

    def __enter__(self) -> SecuredServer:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "legato_service", *self._options],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        self.port = int(self.wait_for_address().rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()

    def ask(self, root: bytes, token: Token) -> grpc.StatusCode:
        """The status of a call over a new connection."""
        credentials = grpc.ssl_channel_credentials(root)
        options = (("grpc.use_local_subchannel_pool", 1),)
        with grpc.secure_channel(f"{HOST}:{self.port}", credentials, options) as channel:
            stub = server_pb2_grpc.ServerServiceStub(channel)
            try:
                stub.GetServerInfo(INFO, metadata=token.metadata, timeout=20)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    def statuses(self, root: bytes, token: Token) -> set[grpc.StatusCode]:
        return {self.ask(root, token) for _ in range(CONNECTIONS)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with SecuredServer(tmp_path_factory.mktemp("access")) as running:
        yield running


def test_every_process_asks_for_a_token(server):
    stranger = Token("robot", ["infer"])
    assert server.statuses(server.authority.pem, ROBOT) == {grpc.StatusCode.OK}
    assert server.statuses(server.authority.pem, stranger) == {grpc.StatusCode.UNAUTHENTICATED}
    assert server.statuses(Authority().pem, ROBOT) == {grpc.StatusCode.UNAVAILABLE}
    assert not server.events("unauthenticated_listener")


def test_the_client_brings_a_token_over_tls(server, tmp_path):
    """Our own client, with the authority's file."""
    ca = tmp_path / "ca.pem"
    ca.write_bytes(server.authority.pem)
    with Client(f"{HOST}:{server.port}", ca=ca, token=ROBOT.text) as client:
        assert client.server_info().name == "legato"
        with pytest.raises(PermissionDenied):
            client.load()


def test_probes_need_neither_tls_nor_a_token(server):
    (listening,) = server.wait_for("health_listening")
    with grpc.insecure_channel(listening["address"]) as channel:
        request = health_pb2.HealthCheckRequest(service="legato.v1.InferenceService")
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(request).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_the_user_that_runs_the_server_is_its_operator(server):
    (listening,) = server.wait_for("admin_listening")
    assert listening["address"].startswith("unix:")
    with grpc.insecure_channel(listening["address"]) as channel:
        load = admin_pb2_grpc.AdminServiceStub(channel).GetLoad(admin_pb2.GetLoadRequest())
    assert load.engine_state == "serving"


def test_every_process_takes_over_new_files(server):
    """Certificate and tokens, without a restart."""
    before = server.authority
    server.authority = Authority()
    server.files.write(server.authority.server())
    fresh = Token("fresh", ["infer"])
    write(server.tokens, OPERATOR, fresh)
    until(lambda: server.statuses(server.authority.pem, fresh) == {grpc.StatusCode.OK})
    assert server.statuses(server.authority.pem, ROBOT) == {grpc.StatusCode.UNAUTHENTICATED}
    assert server.statuses(before.pem, fresh) == {grpc.StatusCode.UNAVAILABLE}
    write(server.tokens, OPERATOR, ROBOT)
    until(lambda: server.statuses(server.authority.pem, ROBOT) == {grpc.StatusCode.OK})


def test_no_secret_leaves_the_server(server):
    """Not by its log, its processes' command lines and environments, or their dying stacks."""
    server.ask(server.authority.pem, ROBOT)
    secrets = [ROBOT.secret, OPERATOR.secret, server.files.key.read_text().splitlines()[1]]
    pids = [server.process.pid, *children(server.process.pid)]
    assert len(pids) >= 3, "two processes of the service and the engine"
    for pid in pids:
        command = Path(f"/proc/{pid}/cmdline").read_text()
        environment = Path(f"/proc/{pid}/environ").read_text()
        for secret in secrets:
            assert secret not in command
            assert secret not in environment
    (worker,) = server.worker_pids()
    assert str(server.tokens) in Path(f"/proc/{worker}/cmdline").read_text(), "it gets the path"
    os.kill(worker, signal.SIGABRT)  # writes its stacks
    until(lambda: "most recent call first" in server.log())
    assert server.wait_for("rpc_ended")
    for secret in secrets:
        assert secret not in server.log()
    assert len(server.worker_pids(2)) == 2


# ---------------------------------------------------------------- fair shares
# Two tenants at one server: the greedy one gets what the other leaves.

QUERY = "/legato.v1.InferenceService/Query"
QUESTION = inference_pb2.QueryRequest(question="What is in the image?").SerializeToString()
ASKED = 6


@pytest.fixture
def paced(tmp_path):
    """A server that runs 4 requests at a time, 32 ms or more each, and queues 32."""
    rows = ("--null-step-ms", "2", "--max-running", "4")
    queue = ("--max-waiting", "32", "--priority-seconds", "0.1")
    with Server(tmp_path, "--model", "null", *rows, *queue) as running:
        yield running


async def ask(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> str:
    """The status of a call."""
    query: Any = channel.unary_unary(QUERY)
    try:
        await query(QUESTION, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("greedy_priority", [pytest.param("0", marks=pytest.mark.slow), "1"])
async def test_60_greedy_connections_leave_a_small_tenant_its_answers(paced, greedy_priority):
    """It asks again after each answer, and is answered each time, whatever priority they claim."""
    done = asyncio.Event()
    greedy: Counter[str] = Counter()
    metadata = (("legato-tenant", "greedy"), ("legato-priority", greedy_priority))
    apart = (("grpc.use_local_subchannel_pool", 1),)  # a connection each

    async def connection() -> None:
        async with grpc.aio.insecure_channel(paced.address, apart) as channel:
            while not done.is_set():
                greedy[await ask(channel, *metadata)] += 1

    callers = [asyncio.create_task(connection()) for _ in range(60)]
    while not greedy["RESOURCE_EXHAUSTED"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    async with grpc.aio.insecure_channel(paced.address, apart) as channel:
        small = Counter([await ask(channel, ("legato-tenant", "small")) for _ in range(ASKED)])
    done.set()
    await asyncio.gather(*callers)
    assert small["OK"] == ASKED, small
    assert set(greedy) == {"OK", "RESOURCE_EXHAUSTED"}
