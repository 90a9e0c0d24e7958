"""A bundle holds how an engine ended and what it was doing."""

import json
import os
import stat

import pytest
from legato_engine import crash as bundles
from legato_engine.config import EngineConfig
from legato_engine.crash import CrashFiles, Death, Recorder

from tests.engine.crash.test_recording import launch, sequence, step


@pytest.fixture
def files(tmp_path):
    """Files of an engine with one request in flight."""
    made = CrashFiles(tmp_path / "engine")
    recorder = Recorder(made.recording)
    recorder.submitted(sequence(0))
    recorder.launching(launch(0, [sequence(0)]), 0)
    recorder.add(step(launch(0, [sequence(0)])))
    recorder.launching(launch(1, [sequence(0)]), 0)
    made.stacks.write_text("Thread 1: step")
    return made


def write(files, folder, exit_code=-9, keep=8):
    """Write a bundle."""
    death = Death(pid=4711, exit_code=exit_code, uptime=1.5, restarts=0)
    return bundles.write(files, death, EngineConfig(), folder, keep)


def test_a_bundle_is_read_back(tmp_path, files):
    """Its signal, settings, versions, launches, stacks and times."""
    folder = tmp_path / "crashes"
    path = write(files, folder)
    bundle = bundles.load(path)
    assert bundle == bundles.load(path / "bundle.json")
    assert (bundle.signal, bundle.death.exit_code, bundle.death.pid) == ("SIGKILL", -9, 4711)
    assert bundle.config == EngineConfig()
    assert {"python", "msgspec"} <= set(bundle.versions)
    assert [shape.seq_id for shape in bundle.in_flight] == [0]
    assert [shape.committed for shape in bundle.launches] == [True, False]
    assert (path / "stacks.txt").read_text() == "Thread 1: step"
    assert json.loads((path / "timeline.json").read_text())["traceEvents"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "secret" not in "".join(each.read_text() for each in path.iterdir())


def test_the_newest_are_kept(tmp_path, files):
    """And no other folder's are touched."""
    folder = tmp_path / "crashes"
    folder.mkdir()
    (folder / "other").mkdir()
    paths = [write(files, folder, keep=3) for _ in range(6)]
    assert sorted(folder.iterdir()) == sorted([*paths[3:], folder / "other"])


def test_an_engine_that_wrote_nothing_has_a_bundle(tmp_path):
    """It may have died before it could."""
    path = write(CrashFiles(tmp_path / "none"), tmp_path / "crashes", exit_code=1)
    bundle = bundles.load(path)
    assert (bundle.signal, bundle.launches, bundle.requests) == ("", (), ())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_not_used(tmp_path, files):
    """The default folder's name can be guessed."""
    folder = tmp_path / "crashes"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError):
        write(files, folder)


def test_stacks_are_private(tmp_path):
    """Both files of a running engine have mode 0600, whatever the umask says."""
    crash_files = CrashFiles(tmp_path / ".ns-1")
    before = os.umask(0o022)
    try:
        with crash_files.open_stacks() as stacks:
            stacks.write("first")
        with crash_files.open_stacks() as stacks:
            stacks.write(" second")
    finally:
        os.umask(before)
    assert crash_files.stacks.read_text() == "first second"
    assert stat.S_IMODE(crash_files.stacks.stat().st_mode) == 0o600
    crash_files.remove()
    crash_files.stacks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        crash_files.open_stacks()
