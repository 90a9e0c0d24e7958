"""Credentials and certificates of a real server with several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.v1 import admin_pb2, admin_pb2_grpc, server_pb2, server_pb2_grpc
from legato_client import Client, PermissionDenied

from tests.e2e.server import ENVIRONMENT, PATIENCE, children, until
from tests.service.access.certificates import HOST, Authority, Files
from tests.service.access.tokens import Token, write

INFO = server_pb2.GetServerInfoRequest()
OPERATOR = Token("op", ["admin"], tenant="")
ROBOT = Token("robot", ["infer", "upload"])
CONNECTIONS = 16  # the kernel spreads them over the processes


class SecuredServer:
    """Two service processes with TLS and tokens, on all interfaces."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority()
        self.files = Files(folder, self.authority.server())
        self.tokens = folder / "tokens.toml"
        write(self.tokens, OPERATOR, ROBOT)
        self._log = folder / "server.log"
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
        until(lambda: self.events("ready") or self.process.poll() is not None)
        assert self.process.poll() is None, self.log()
        self.port = int(self.events("ready")[0]["address"].rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()

    def log(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

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
    (listening,) = server.events("health_listening")
    with grpc.insecure_channel(listening["address"]) as channel:
        request = health_pb2.HealthCheckRequest(service="legato.v1.InferenceService")
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(request).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_the_user_that_runs_the_server_is_its_operator(server):
    (listening,) = server.events("admin_listening")
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
    (worker,) = (each["pid"] for each in server.events("worker_ready"))
    assert str(server.tokens) in Path(f"/proc/{worker}/cmdline").read_text(), "it gets the path"
    os.kill(worker, signal.SIGABRT)  # writes its stacks
    until(lambda: "most recent call first" in server.log())
    assert server.events("rpc_ended")
    for secret in secrets:
        assert secret not in server.log()
    until(lambda: len(server.events("worker_ready")) == 2)
