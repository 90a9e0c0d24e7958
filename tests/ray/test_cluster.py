"""Servers placed by a real Ray behind a real Envoy, and what callers see while they come and go."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from legato_client import Client

from tests.deploy.mesh import Envoy, traffic
from tests.e2e.scenes import two_shapes
from tests.e2e.server import ENVIRONMENT, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(150),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make mesh"),
]


# ---------------------------------------------------------------- a Ray of this host


class Cluster:
    """What `serve run` would start, from this process, so that a test can look into it."""

    def __init__(self, folder: Path, envoy: Envoy) -> None:
        self.envoy = envoy
        self._folder = folder

    def deploy(self, **settings: Any) -> None:
        """Return once the application runs with these settings."""
        from legato_ray.application import build
        from ray import serve

        own = {"host": "127.0.0.1", "drain_grace": 20.0, "num_cpus": 0.1, "max_surge_percent": 100}
        serve.run(build(own | settings), name="legato", route_prefix=None)

    def published(self) -> frozenset[str]:
        """What the writer has told Envoy."""
        return self.envoy.file.read()

    def wait_for(self, count: int) -> frozenset[str]:
        """Until Envoy has that many servers, all healthy; their addresses."""
        while len(self.published()) != count or self.envoy.healthy() != self.published():
            time.sleep(0.05)
        return self.published()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Envoy starts when the application has written its first endpoints."""
    environment = ENVIRONMENT | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_AUTH_MODE": "token",  # of this cluster only
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    os.environ.update(environment)
    import ray
    from ray import serve

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="legato")
    writer = None
    try:
        serve.start(proxy_location="Disabled")
        envoy = Envoy(folder)
        command = [sys.executable, "-m", "legato_ray", str(envoy.file.path.parent)]
        command += ["--ray-address", ray.get_runtime_context().gcs_address]
        with (folder / "writer.log").open("wb") as log:
            writer = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
        yield Cluster(folder, envoy)
    finally:
        if writer is not None:
            writer.terminate()
            writer.wait()
        serve.shutdown()
        ray.shutdown()


def processes() -> list[int]:
    """The servers that replicas have started on this host."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"legato_ray.lifeline" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found)


# ---------------------------------------------------------------- cluster

NULL = "--model null --null-step-ms 5"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers without a model; each test leaves two."""
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.deploy(serve_options=NULL, num_replicas=2)
        until(lambda: len(started.published()) == 2)
        with started.envoy:
            yield started


def test_a_killed_server_is_replaced(mesh: Cluster) -> None:
    """No unary call fails; Ray starts another server, and Envoy learns of it."""
    before = mesh.wait_for(2)
    with traffic(mesh.envoy.address) as seen:
        seen.wait_for(50)
        os.kill(processes()[0], signal.SIGKILL)
        until(lambda: mesh.published() - before)
        after = mesh.wait_for(2)
        seen.wait_for(50)
    assert seen.failures == []
    assert len(after & before) == 1


def test_a_hanging_server_is_replaced(mesh: Cluster) -> None:
    """No unary call fails, those that the stopped process holds included."""
    before = mesh.wait_for(2)
    with traffic(mesh.envoy.address) as seen:
        seen.wait_for(50)
        os.kill(processes()[0], signal.SIGSTOP)
        until(lambda: mesh.published() - before)
        mesh.wait_for(2)
        seen.wait_for(50)
    assert seen.failures == []


def test_a_killed_replica_is_replaced(mesh: Cluster) -> None:
    """Its server drains and leaves by itself, so that not even a stream is cut."""
    before = mesh.wait_for(2)
    server = processes()[0]
    with traffic(mesh.envoy.address, streams=2, sessions=1) as seen:
        seen.wait_for(50)
        os.kill(int(Path(f"/proc/{server}/stat").read_text().rsplit(")", 1)[1].split()[1]), 9)
        until(lambda: mesh.published() - before)
        mesh.wait_for(2)
        until(lambda: server not in processes())
        seen.wait_for(50)
    assert seen.failures + seen.stream_failures + seen.session_failures == []


def test_a_rolling_update(mesh: Cluster) -> None:
    """No call fails and no stream is cut while all servers are replaced; sessions move."""
    before = mesh.wait_for(2)
    with traffic(mesh.envoy.address, streams=2, sessions=2) as seen:
        seen.wait_for(50)
        mesh.deploy(serve_options=NULL + " --max-waiting 200", num_replicas=2)
        until(lambda: not mesh.published() & before)
        mesh.wait_for(2)
        seen.wait_for(50)
    assert seen.failures + seen.stream_failures + seen.session_failures == []
    assert seen.finished
    assert seen.moved >= 2


def test_scaling_by_predicted_queues(mesh: Cluster) -> None:
    """From one server to three under load, and back, without a failure."""
    slow = "--model null --null-step-ms 100"
    scale = {"queue_seconds": 0.2, "upscale_delay": 1.0, "downscale_delay": 3.0, "max_running": 2}
    with traffic(mesh.envoy.address, callers=1) as seen:
        mesh.deploy(serve_options=slow, num_replicas=1, max_replicas=3, **scale)
        mesh.wait_for(1)
        with traffic(mesh.envoy.address, callers=24) as many:
            mesh.wait_for(3)
            many.wait_for(50)
        mesh.wait_for(1)
        seen.wait_for(5)
    assert seen.failures + many.failures == []
    mesh.deploy(serve_options=NULL, num_replicas=2)
    mesh.wait_for(2)


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_servers_with_a_model(mesh: Cluster, loss: signal.Signals) -> None:
    """Two servers of legato-tiny find what is in an image, while one is lost and replaced."""
    scene = two_shapes().file()
    mesh.deploy(serve_options="--threads 1", num_replicas=2)
    before = mesh.wait_for(2)
    with Client(mesh.envoy.address) as client:
        expected = client.detect(scene, "red circle").objects
        assert expected
        os.kill(processes()[0], loss)
        while not mesh.published() - before:
            assert client.detect(scene, "red circle").objects == expected
    mesh.wait_for(2)
