"""The steps of an image in a bare folder, and a server from it, without a container engine.

The folder takes the place of the root of an image: namespaces of the kernel make the rest of the
file system read-only and the server the first process, as an engine would.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from legato_service import probe

from tests.deploy.containerfile import environment, last, stages
from tests.deploy.manifests import ROOT
from tests.e2e.server import until

pytestmark = [pytest.mark.deploy, pytest.mark.slow]

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
