"""An engine that dies leaves a bundle, and the bundle can be run again."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import grpc
import pytest

from tests.e2e.scenes import long_stream
from tests.e2e.server import ENVIRONMENT, Server, until

FAULT = "engine.commit=exit@90"


def replay(*words):
    """Run `legato replay`."""
    return subprocess.run(
        [sys.executable, "-m", "legato_client.cli", "replay", *words, "--threads", "2"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crash_is_bundled_and_happens_again_in_a_replay(tmp_path, monkeypatch):
    """With its failpoint; without, the same launches run to their end."""
    monkeypatch.setitem(ENVIRONMENT, "LEGATO_FAILPOINTS", FAULT)
    folder = tmp_path / "crashes"
    with Server(tmp_path, "--crash-folder", str(folder)) as server:
        with pytest.raises(grpc.RpcError):
            list(server.inference.Generate(long_stream()))
        until(lambda: server.events("engine_crash_bundle"))
        path = server.events("engine_crash_bundle")[0]["path"]
    monkeypatch.delitem(ENVIRONMENT, "LEGATO_FAILPOINTS")
    bundle = json.loads((pathlib.Path(path) / "bundle.json").read_text())
    assert bundle["death"]["exit_code"] == 86
    assert bundle["failpoints"] == FAULT
    assert len(bundle["in_flight"]) == 1
    assert [shape["committed"] for shape in bundle["launches"]][-3:] == [True, False, False]
    again = replay(path)
    assert again.returncode == 3, again.stderr
    assert "exited with code 86: the crash happened again" in again.stdout
    without = replay(path, "--no-failpoints")
    assert without.returncode == 0, without.stderr
    assert "The crash did not happen again" in without.stdout


def test_a_killed_engine_leaves_a_bundle_with_its_stacks(tmp_path):
    """SIGABRT writes stacks; the bundle names the signal. An engine that is stopped leaves none."""
    folder = tmp_path / "crashes"
    with Server(tmp_path, "--model", "null", "--crash-folder", str(folder)) as server:
        os.kill(server.engine_pid, signal.SIGABRT)
        until(lambda: server.events("engine_crash_bundle"))
        path = pathlib.Path(server.events("engine_crash_bundle")[0]["path"])
        until(server.is_serving)
    assert json.loads((path / "bundle.json").read_text())["signal"] == "SIGABRT"
    assert "process.py" in (path / "stacks.txt").read_text()
    assert list(folder.iterdir()) == [path]


def test_a_replay_of_no_bundle_says_so(tmp_path):
    """With exit code 2."""
    done = replay(str(tmp_path))
    assert done.returncode == 2
    assert "is no crash bundle" in done.stderr
