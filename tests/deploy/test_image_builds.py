"""Images of deploy/Containerfile, built in a bare folder and by a container engine."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from legato_client import Client
from legato_service import probe

from tests.deploy.manifests import FILE, ROOT, environment, last, stages
from tests.e2e.server import until

pytestmark = [pytest.mark.deploy, pytest.mark.slow]


# ---------------------------------------------------------------- in a bare folder
# The steps of an image in a bare folder, and a server from it, without a container engine.
#
# The folder takes the place of the root of an image: namespaces of the kernel make the rest of
# the
# file system read-only and the server the first process, as an engine would.

INFERENCE = "legato.v1.InferenceService"
PREFIX = "/opt/legato"

# /opt is that of the image, and what a pod may write are new file systems. The interpreter is the
# host's, and may be in the home of root, which is closed to others.
CONTAINER = """
set -eu
mount -t tmpfs tmpfs /opt
mkdir /opt/python {prefix}
mount --bind {python} /opt/python
mount -t tmpfs -o mode=755 tmpfs /root
mkdir -p {python}
mount --bind /opt/python {python}
mount --bind {built} {prefix}
mount -o remount,bind,ro {prefix}
mount -t tmpfs -o mode=755,uid={user},gid={group} tmpfs /var/cache
mkdir -m 700 /var/cache/legato
chown {user}:{group} /var/cache/legato
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -o remount,bind,ro /
cd /
exec setpriv --reuid {user} --regid {group} --clear-groups --no-new-privs --bounding-set -all \
    env -i {environment} {command}
"""


@pytest.fixture(scope="module")
def built():
    """What the build stage of the image without a model makes."""
    (run,) = (step for step in stages()["build-null"] if step.instruction == "RUN")
    script, target, prefix = run.arguments.split()
    assert (target, prefix) == ("null", PREFIX)
    folder = Path(tempfile.mkdtemp(prefix="legato-image-"))
    folder.chmod(0o755)  # the server is another user
    try:
        subprocess.run([str(ROOT / script), target, str(folder / "legato")], check=True, cwd="/")
        yield folder / "legato"
    finally:
        shutil.rmtree(folder)


class Container:
    """A server from the built folder, and its first process."""

    def __init__(self, built: Path, log: Path, *options: str) -> None:
        user, _, group = last("null", "USER").arguments.partition(":")
        variables = {**environment("null"), "PATH": "/usr/bin:/bin"}
        script = CONTAINER.format(
            built=built,
            prefix=PREFIX,
            python=sys.base_prefix,
            user=user,
            group=group,
            environment=shlex.join(f"{name}={value}" for name, value in variables.items()),
            command=shlex.join([*last("null", "ENTRYPOINT").words, *options]),
        )
        unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*unshare, "sh", "-c", script], stdin=subprocess.DEVNULL, stderr=sink
            )

    def events(self, name: str) -> list[dict[str, str]]:
        lines = [line for line in self._log.read_bytes().splitlines() if line.startswith(b"{")]
        return [each for line in lines if (each := json.loads(line)).get("event") == name]

    def event(self, name: str) -> dict[str, str]:
        """Wait for its log line of this name."""

        def seen() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            return bool(self.events(name))

        until(seen)
        return self.events(name)[0]

    @property
    def first_pid(self) -> int:
        """Of the server, as this namespace numbers it."""
        (pid,) = children(self.process.pid)
        return pid


def children(pid: int) -> list[int]:
    """Zombies included."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces everywhere")
def test_the_image_serves_as_nobody_from_a_read_only_root(built, tmp_path):
    """SERVING by the probe; the first process, which reaps orphans; gone after SIGTERM."""
    options = ("--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0", "--model", "null")
    container = Container(built, tmp_path / "server.log", *options)
    try:
        container.event("ready")
        address = container.event("health_listening")["address"]
        assert probe.main(["--address", address, "--service", INFERENCE, "--timeout", "30"]) == 0
        inside = probe_inside(container, address)
        assert (inside.stdout, inside.returncode) == ("SERVING\n", 0)
        assert container.event("admin_listening")["address"].startswith("unix:/tmp/")
        status = Path(f"/proc/{container.first_pid}/status").read_text()
        assert "\nNSpid:\t" in status
        assert status.partition("NSpid:")[2].split()[1] == "1"
        assert status.partition("Uid:")[2].split()[:4] == ["10001"] * 4
        assert int(status.partition("CapEff:")[2].split()[0], 16) == 0
        leave_orphan(container)
        os.kill(container.first_pid, signal.SIGTERM)
        assert container.process.wait(60) == 0
    finally:
        container.process.kill()
        container.process.wait()


def within(container: Container, *command: str) -> "subprocess.CompletedProcess[str]":
    enter = ["nsenter", "--target", str(container.first_pid), "--mount", "--pid", *command]
    return subprocess.run(enter, stdout=subprocess.PIPE, check=False, text=True)


def probe_inside(container: Container, address: str) -> "subprocess.CompletedProcess[str]":
    """As the health check of the compose file does; writing to the root fails there."""
    assert within(container, "touch", "/opt/legato/new").returncode != 0
    assert within(container, "touch", "/usr/new").returncode != 0
    python = f"{PREFIX}/bin/python"
    arguments = ["--address", address, "--service", INFERENCE, "--timeout", "30"]
    return within(container, python, "-m", "legato_service.probe", *arguments)


def leave_orphan(container: Container) -> None:
    """Have a process of the container lose its parent, and wait until it is gone for good."""
    before = set(children(container.first_pid))
    within(container, "sh", "-c", "sleep 1 &")
    (orphan,) = set(children(container.first_pid)) - before
    until(lambda: orphan not in children(container.first_pid))


# ---------------------------------------------------------------- by a container engine
# The image without a model, built by a container engine from deploy/Containerfile and run by it.
#
# Needs podman and buildah, root, and the base image: one that is there, one that can be pulled,
# or
# one that debootstrap makes of Debian's packages. LEGATO_BUILD_OPTIONS has more options for
# `buildah build`, for example a volume with the certificates of a proxy.

IMAGE, NAME = "localhost/legato:null-test", "legato-container-test"
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
