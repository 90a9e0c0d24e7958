"""A forked process is what its command would have been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import ENVIRONMENT, Server, children, exists, until


@pytest.fixture
def server(tmp_path):
    """A server without a model."""
    with Server(tmp_path, "--model", "null", "--processes", "2") as running:
        yield running


def parts(server):
    """Service process, worker, engine."""
    (worker,) = server.worker_pids()
    return server.process.pid, worker, server.engine_pid


def test_every_process_has_its_command_its_parent_and_its_own_files(server):
    """As others see them; the process that forks is no child of the server's."""
    first, worker, engine = parts(server)
    assert set(children(first)) == {worker, engine}
    assert first in children(os.getpid())
    for pid, module in (
        (first, "legato_service"),
        (worker, "legato_service.workers.worker"),
        (engine, "legato_engine.core.process"),
    ):
        words = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
        assert words[:3] == [sys.executable, "-m", module]
        assert Path(f"/proc/{pid}/comm").read_text() == Path("/proc/self/comm").read_text()
        assert "fork" not in " ".join(words)
    assert os.getsid(engine) == engine != os.getsid(first)


def test_all_end_with_the_first(server):
    """Killed, it takes its worker, its engine and what forked them along."""
    everything = [int(path.name) for path in Path("/proc").glob("[0-9]*") if path.name.isdigit()]
    group = [pid for pid in everything if _descends(pid, server.process.pid)]
    assert len(group) >= 4
    server.process.kill()
    assert server.process.wait() == -9
    until(lambda: not any(exists(pid) for pid in group))


def test_a_server_ends_with_its_test_process(tmp_path):
    """Also when that is killed."""
    program = f"""
import pathlib, sys, time
from tests.e2e.server import Server
from tests.fork_server.popen import ForkingStarts
ForkingStarts()
with Server(pathlib.Path({str(tmp_path)!r}), "--model", "null") as server:
    print(server.process.pid, server.engine_pid, flush=True)
    time.sleep(3600)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) as tests:
        assert tests.stdout is not None
        pids = [int(word) for word in tests.stdout.readline().split()]
        tests.kill()
    assert len(pids) == 2
    until(lambda: not any(exists(pid) for pid in pids))


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["legato_service", "--help"], 0, "--weights"),
        (["legato_service", "--no-such-option"], 2, "unrecognized arguments"),
        (["legato_client.cli", "serve", "--max-sessions", "x"], 2, "whole number"),
    ],
)
def test_output_and_exit_code(command, code, said):
    """The caller reads what the command writes, and its exit code.

    `legato serve` becomes the service, so it is forked as such.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=ENVIRONMENT | {"LEGATO_ANYTHING": "x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_another_environment_is_executed(tmp_path):
    """A variable that libraries may read when they are imported is read."""
    (tmp_path / "sitecustomize.py").write_text("import json, os, sys\nprint(json.dumps(sys.path))")
    paths = os.pathsep.join((str(tmp_path), ENVIRONMENT["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "legato_service", "--help"],
        env=ENVIRONMENT | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path) in json.loads(done.stdout.splitlines()[0])


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor
