"""Servers placed by Ray: their number, their endpoints, their membership and their settings."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_client import Client
from legato_ray.autoscaling import QueueSecondsPolicy, replicas_needed
from legato_ray.endpoints import (
    MAX_AGE,
    Directory,
    EmptyEndpoints,
    EndpointFile,
    EndpointWriter,
    Membership,
)
from legato_ray.settings import InvalidSettings, Settings
from legato_ray.unit import StartFailed, Unit, serves

from tests.deploy.mesh import Envoy, traffic
from tests.e2e.scenes import two_shapes
from tests.e2e.server import ENVIRONMENT, exists, until

# ---------------------------------------------------------------- one server

HOST = "127.0.0.1"


def unit(*options: str) -> Unit:
    return Unit(options, host=HOST, max_running=4, drain_delay=0.5, drain_grace=5)


@pytest.fixture
def started() -> Iterator[Unit]:
    one = unit("--model", "null")
    try:
        one.wait_until_serving(60)
        yield one
    finally:
        one.kill()


def test_a_unit_from_its_start_to_its_end(started: Unit, tmp_path: Path) -> None:
    """It answers, tells its load, is written for Envoy, and leaves by a drain."""
    with grpc.insecure_channel(started.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert stub.Query(inference_pb2.QueryRequest(question="How many?")).answer
    assert started.is_alive()
    assert started.load()["queue_seconds"] == 0
    assert 0 <= started.load()["busy"] <= 1
    answers = iter([{started.address: started.health_address}])
    writer = EndpointWriter(tmp_path, lambda: next(answers), lame_duck=0)
    for _ in range(2):  # the directory fails the second time, and health decides
        writer.step()
        assert EndpointFile(tmp_path).read() == {started.address}
    started.stop()
    assert not exists(started.pid)
    assert not started.is_alive()
    started.stop()


@pytest.mark.slow
def test_a_hanging_unit_is_not_alive_and_is_killed(started: Unit) -> None:
    """A drain would wait for it in vain."""
    os.kill(started.pid, signal.SIGSTOP)
    assert not started.is_alive()
    started.stop()
    assert not exists(started.pid)


def test_a_unit_leaves_with_its_replica(started: Unit) -> None:
    """The end of the pipe between them drains it, as when Ray kills the replica."""
    assert started._process.stdin is not None
    started._process.stdin.close()
    until(lambda: not serves(started.health_address, 1))
    assert exists(started.pid), "it serves on for a while"
    until(lambda: started._process.poll() is not None)
    assert started._process.returncode == 0


def test_a_unit_that_cannot_start_says_so() -> None:
    """With the exit code of the server, whose log has the reason."""
    with pytest.raises(StartFailed, match="ended with"):
        unit("--no-such-option").wait_until_serving(60)


# ---------------------------------------------------------------- membership
# Which servers Envoy is told of.

A, B, C = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"
HEALTH = {A: "10.0.0.1:2", B: "10.0.0.2:2", C: "10.0.0.3:2"}


def listed(*addresses: str) -> dict[str, str]:
    return {address: HEALTH[address] for address in addresses}


def test_a_server_that_serves_is_published_at_once() -> None:
    """And asked about at its health address when it is no longer listed."""
    membership = Membership([], lame_duck=2)
    assert membership.update(0, listed(A, B), ()) == {A, B}
    assert membership.unlisted([A]) == {B: HEALTH[B]}


def test_a_server_leaves_after_its_lame_duck() -> None:
    """Two seconds of NOT_SERVING, and not sooner."""
    membership = Membership([], lame_duck=2)
    membership.update(0, listed(A, B), ())
    assert membership.update(1, listed(A), [B]) == {A, B}
    assert membership.update(2.9, listed(A), [B]) == {A, B}
    assert membership.update(3, listed(A), [B]) == {A}


def test_a_server_that_serves_again_stays() -> None:
    """The lame duck begins anew, by its own word and by its replica's."""
    membership = Membership([], lame_duck=2)
    membership.update(0, listed(A, B), ())
    membership.update(1, listed(A), [B])
    membership.update(2, listed(A), [])
    assert membership.update(3.5, listed(A), [B]) == {A, B}
    membership.update(4, listed(A, B), [])
    assert membership.update(5.5, listed(A), [B]) == {A, B}


def test_a_directory_that_forgot_everything_costs_no_server() -> None:
    """Servers that say SERVING stay for as long as they do."""
    membership = Membership([], lame_duck=2)
    membership.update(0, listed(A, B), ())
    assert membership.update(100, {}, []) == {A, B}


def test_the_last_servers_never_leave() -> None:
    """Not one by one, and not all at once; they leave when another has come."""
    membership = Membership([], lame_duck=2)
    membership.update(0, listed(A, B), ())
    membership.update(1, {}, [A, B])
    assert membership.update(9, {}, [A, B]) == {A, B}
    assert membership.update(10, listed(C), [A, B]) == {C}


def test_a_new_writer_goes_on() -> None:
    """What another has published is asked at its own address until a replica names another."""
    membership = Membership([A], lame_duck=2)
    assert membership.unlisted([]) == {A: A}
    membership.update(0, listed(A), [])
    assert membership.unlisted([]) == {A: HEALTH[A]}


def test_no_history_publishes_an_empty_set_or_drops_a_server_that_serves() -> None:
    """Random listings and healths; one that leaves was silent for its whole lame duck."""
    generator = random.Random(11)
    for _ in range(200):
        membership = Membership([], lame_duck=2)
        before = membership.update(0, listed(A), ())
        silent: dict[str, int] = {}
        for now in range(1, 40):
            names = [a for a in HEALTH if generator.random() < 0.4]
            not_serving = [a for a in membership.unlisted(names) if generator.random() < 0.7]
            silent = {a: silent.get(a, now) for a in not_serving}
            after = membership.update(now, listed(*names), not_serving)
            assert after
            assert after >= set(names)
            assert all(now - silent[a] >= 2 for a in before - after)
            before = after


# ---------------------------------------------------------------- endpoints


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Another writer of the folder goes on with the addresses of the last one."""
    addresses = {"10.0.0.1:50051", "[fd00::1]:50051"}
    assert EndpointFile(tmp_path).write(addresses)
    assert EndpointFile(tmp_path).read() == addresses


def test_equal_sets_are_written_once(tmp_path: Path) -> None:
    """Envoy is told of changes only."""
    file = EndpointFile(tmp_path)
    assert file.write(["10.0.0.1:1", "10.0.0.2:1"])
    assert not file.write(["10.0.0.2:1", "10.0.0.1:1"])
    assert not EndpointFile(tmp_path).write(["10.0.0.2:1", "10.0.0.1:1"])


def test_an_empty_set_is_never_written(tmp_path: Path) -> None:
    """It raises, and the last addresses stay."""
    file = EndpointFile(tmp_path)
    file.write(["10.0.0.1:1"])
    with pytest.raises(EmptyEndpoints):
        file.write([])
    assert file.read() == {"10.0.0.1:1"}


@pytest.mark.parametrize("address", ["host", ":1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536"])
def test_a_bad_address_leaves_the_file(tmp_path: Path, address: str) -> None:
    """It is named in the error, and nothing of the set is written."""
    file = EndpointFile(tmp_path)
    file.write(["10.0.0.1:1"])
    with pytest.raises(ValueError, match="HOST:PORT"):
        file.write(["10.0.0.2:1", address])
    assert EndpointFile(tmp_path).read() == {"10.0.0.1:1"}


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    """Whatever moment the file is read in, it is one of the sets that were written."""
    file = EndpointFile(tmp_path)
    sets = [{f"10.0.0.{host}:1" for host in range(1, count)} for count in (2, 250)]
    file.write(sets[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for addresses in sets:
                file.write(addresses)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            json.loads(file.path.read_bytes())
            assert EndpointFile(tmp_path).read() in sets
    finally:
        stop.set()
        writer.join()
    assert list(tmp_path.iterdir()) == [file.path]


def test_a_file_of_another_program_counts_as_none(tmp_path: Path) -> None:
    """It is replaced by the first set."""
    (tmp_path / "endpoints.json").write_text('{"resources": []}')
    file = EndpointFile(tmp_path)
    assert file.read() == frozenset()
    assert file.write(["10.0.0.1:1"])


# ---------------------------------------------------------------- directory


def test_replicas_have_to_repeat_themselves() -> None:
    """One that says nothing more is not listed, and neither is one that was dropped."""
    now = 0.0
    directory = Directory(lambda: now)
    directory.put("a", "a-health")
    directory.put("b", "b-health")
    now = MAX_AGE
    directory.put("b", "b-health")
    assert directory.servers() == {"a": "a-health", "b": "b-health"}
    now = MAX_AGE + 0.1
    assert directory.servers() == {"b": "b-health"}
    directory.drop("b")
    directory.drop("never there")
    assert directory.servers() == {}


# ---------------------------------------------------------------- autoscaling
# The number of servers for a load.


@pytest.mark.parametrize(
    ("queues", "busy", "current", "needed"),
    [
        ([0.0], [0.0], 1, 1),  # idle
        ([3.0], [1.0], 1, 3),  # three seconds of work, one is accepted
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 3, 3),  # as accepted
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 3, 3),  # full without a queue: kept, none added
        ([0.0, 0.0, 0.0], [0.3, 0.3, 0.3], 3, 2),  # two have room for what runs
        ([0.0, 0.0, 0.0], [0.0, 0.1, 0.0], 3, 1),
    ],
)
def test_what_a_load_needs(
    queues: list[float], busy: list[float], current: int, needed: int
) -> None:
    """Queues add servers; only idle rows let one go."""
    found = replicas_needed(
        dict(enumerate(queues)), dict(enumerate(busy)), target=1.0, current=current
    )
    assert found == needed


def context(metrics: Any) -> Any:
    return SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)


def test_without_figures_nothing_changes() -> None:
    """Replicas that have just started say nothing yet."""
    policy = QueueSecondsPolicy(target=0.5)
    assert policy(context({}))[0] == 2
    assert policy(context({"queue_seconds": {}}))[0] == 2


def test_the_policy_reads_what_replicas_record() -> None:
    """Queue seconds beyond the target ask for more."""
    metrics = {"queue_seconds": {"a": 1.0, "b": 1.0}, "busy": {"a": 1.0, "b": 1.0}}
    assert QueueSecondsPolicy(target=0.5)(context(metrics))[0] == 4


# ---------------------------------------------------------------- settings
# The settings of the Ray application.


def test_words_and_values_are_read() -> None:
    """As `serve run` gives them, and as a configuration file does."""
    words = {"serve_options": "--model null", "num_replicas": "2", "queue_seconds": "0.5"}
    values = {"serve_options": ["--model", "null"], "num_replicas": 2, "queue_seconds": 0.5}
    assert Settings.of(words) == Settings.of(values)
    assert Settings.of(words).max_replicas == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 2}, "no setting 'replicas'"),
        ({"num_replicas": "two"}, "num_replicas must be of type int, got 'two'"),
        ({"num_replicas": 0}, "num_replicas must be positive, got 0"),
        ({"queue_seconds": -1}, "queue_seconds must be positive"),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas 2 is below num_replicas 3"),
        ({"serve_options": "--listen 1.2.3.4:5"}, "must leave out --listen"),
        ({"serve_options": "--drain-grace=5"}, "must leave out --drain-grace"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, object], message: str) -> None:
    """With the name of the setting."""
    with pytest.raises(InvalidSettings, match=message):
        Settings.of(values)


# ---------------------------------------------------------------- cluster
# Servers placed by a real Ray behind a real Envoy, and what callers see while they come and go.


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
