"""The image without a model, built by a container engine from deploy/Containerfile and run by it.

Needs podman and buildah, root, and the base image: one that is there, one that can be pulled, or
one that debootstrap makes of Debian's packages. LEGATO_BUILD_OPTIONS has more options for
`buildah build`, for example a volume with the certificates of a proxy.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from legato_client import Client

from tests.deploy.containerfile import FILE
from tests.deploy.manifests import ROOT
from tests.e2e.server import until

pytestmark = [pytest.mark.deploy, pytest.mark.slow]

IMAGE, NAME = "localhost/legato:null-test", "legato-container-test"
INFERENCE = "legato.v1.InferenceService"
PACKAGES = "python3,python3-venv,ca-certificates"  # of a base that debootstrap makes
# A namespace of its own would need the plugins of a network; limits, a shell that may raise them.
RUN = ("--network", "host", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
HARDENED = ("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges")
WRITABLE = ("--tmpfs", "/tmp", "--shm-size", "256m")
PYTHON = "/opt/legato/bin/python"
LEAVE_ORPHAN = "(sleep 0.2 &)"
FIND_ENGINE = (
    "for each in /proc/[0-9]*; do "
    "tr '\\0' ' ' < $each/cmdline | grep -q legato_engine && basename $each; done"
)


def podman(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """With cgroupfs and runc it works without systemd, and with either version of cgroups."""
    runtime = ("--runtime", "runc") if shutil.which("runc") else ()
    return subprocess.run(
        ("podman", *runtime, "--cgroup-manager", "cgroupfs", *arguments),
        check=check,
        capture_output=True,
        text=True,
    )


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def base() -> str:
    """The image that the Containerfile begins with."""
    (tag,) = re.findall(r"^ARG PYTHON=(\S+)$", FILE.read_text(), re.MULTILINE)
    return f"docker.io/library/python:{tag}"


def provide_base(name: str) -> None:
    if podman("image", "exists", name, check=False).returncode == 0:
        return
    if podman("pull", "--quiet", name, check=False).returncode == 0:
        return
    if shutil.which("debootstrap") is None:
        pytest.skip(f"{name} cannot be pulled, and there is no debootstrap to make one like it")
    release = name.rpartition("-")[2]
    with tempfile.TemporaryDirectory(prefix="legato-base-") as folder:
        root = Path(folder) / "root"
        command = ("debootstrap", "--variant=minbase", f"--include={PACKAGES}", release, str(root))
        subprocess.run(command, check=True, capture_output=True)
        archive = f"{folder}/root.tar"
        subprocess.run(("tar", "-C", str(root), "-cf", archive, "."), check=True)
        podman("import", "--quiet", archive, name)


@pytest.fixture(scope="module")
def image() -> str:
    if os.geteuid() != 0 or not (shutil.which("podman") and shutil.which("buildah")):
        pytest.skip("needs root, podman and buildah")
    provide_base(base())
    more = shlex.split(os.environ.get("LEGATO_BUILD_OPTIONS", ""))
    build = ("buildah", "build", "--isolation", "chroot", "--network", "host", *more)
    subprocess.run(
        (*build, "-f", str(FILE), "--target", "null", "-t", IMAGE, str(ROOT)), check=True
    )
    return IMAGE


class Running:
    """A container of the image."""

    def __init__(self, image: str) -> None:
        self.target, self.health = (f"127.0.0.1:{port}" for port in free_ports(2))
        podman("rm", "--force", NAME, check=False)
        server = ("--model", "null", "--listen", self.target, "--health-listen", self.health)
        podman("run", "--detach", "--name", NAME, *RUN, *HARDENED, *WRITABLE, image, *server)

    def events(self, name: str) -> list[dict[str, str]]:
        logged = podman("logs", NAME)
        lines = [line for line in (logged.stdout + logged.stderr).splitlines() if line[:1] == "{"]
        return [each for line in lines if (each := json.loads(line)).get("event") == name]

    def shell(self, script: str) -> "subprocess.CompletedProcess[str]":
        return podman("exec", NAME, "sh", "-c", script, check=False)

    def states(self) -> list[str]:
        """Of its processes: R, S, Z and so on."""
        lines = self.shell("cat /proc/[0-9]*/stat").stdout.splitlines()
        states = [line.rpartition(")")[2].split()[0] for line in lines]
        assert states, "there is the first process at least"
        return states

    def probe(self) -> "subprocess.CompletedProcess[str]":
        options = ("--address", self.health, "--service", INFERENCE, "--timeout", "30")
        return podman("exec", NAME, PYTHON, "-m", "legato_service.probe", *options, check=False)


@pytest.fixture
def running(image: str) -> Iterator[Running]:
    container = Running(image)
    try:
        until(lambda: container.events("ready"))
        yield container
    finally:
        podman("rm", "--force", NAME, check=False)


def test_a_container_serves_without_privileges(running: Running) -> None:
    """SERVING by the probe and answers, as a user without rights on a root that is read-only."""
    probed = running.probe()
    assert (probed.stdout, probed.returncode) == ("SERVING\n", 0), probed.stderr
    assert running.shell("id -u").stdout == "10001\n"
    assert running.shell("touch /new").returncode != 0
    assert running.shell("touch /opt/legato/new").returncode != 0
    assert "python" in running.shell("cat /proc/1/cmdline").stdout
    with Client(running.target) as client:
        assert client.query(None, "Is anything there?").answer


def test_a_container_restarts_its_engine(running: Running) -> None:
    """A killed engine is followed by another one; it and orphans are reaped by the server."""
    (engine,) = running.shell(FIND_ENGINE).stdout.split()[:1]
    before = len(running.events("engine_ready"))
    assert running.shell(f"kill -9 {engine}").returncode == 0
    until(lambda: len(running.events("engine_ready")) >= before + 2)  # both processes say so
    with Client(running.target) as client:
        assert client.query(None, "Is anything there?").answer
    running.shell(LEAVE_ORPHAN)
    until(lambda: "Z" not in running.states())


def test_a_container_drains_when_it_is_stopped(running: Running) -> None:
    """SIGTERM ends it well before the engine would be killed."""
    podman("stop", "--time", "30", NAME)
    assert podman("inspect", "--format", "{{.State.ExitCode}}", NAME).stdout == "0\n"
    assert running.events("drain_begun")
    assert running.events("stopped")
