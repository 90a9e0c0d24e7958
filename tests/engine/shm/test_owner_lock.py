"""What a dead owner left is removed, and nothing of a live one's."""

import os
import subprocess
import sys

import pytest
from legato_engine.shm.owner_lock import OwnerLock, sweep_files, sweep_folders

HOLDER = """
import pathlib, sys, time
from legato_engine.shm.owner_lock import OwnerLock
held = OwnerLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def holder(child_python_path):
    """Start a process that holds a lock."""
    started = []

    def start(path):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_files_of_a_killed_owner_are_swept(tmp_path, holder):
    """Those of its namespace and of namespaces below; others stay."""
    for name in ("ns1-a", "ns1-1-b", "ns2-a", "ns1x-a"):
        (tmp_path / name).touch()
    first, _ = holder(tmp_path / ".ns1.lock"), holder(tmp_path / ".ns2.lock")
    assert sweep_files(tmp_path, ".*.lock") == 0
    first.kill()
    first.wait()
    assert sweep_files(tmp_path, ".*.lock") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ns2.lock", "ns1x-a", "ns2-a"]


def test_a_folder_of_a_killed_owner_is_swept(tmp_path, holder):
    """A folder without a lock file may be another program's."""
    for name in ("legato-a", "legato-b", "legato-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "requests").touch()
    first, _ = holder(tmp_path / "legato-a" / "lock"), holder(tmp_path / "legato-b" / "lock")
    assert sweep_folders(tmp_path, "legato-*", "lock") == 0
    first.kill()
    first.wait()
    assert sweep_folders(tmp_path, "legato-*", "lock") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["legato-b", "legato-c"]


def test_a_held_lock_protects_from_its_own_process(tmp_path):
    """Several servers may run in one process."""
    (tmp_path / "ns-a").touch()
    lock = OwnerLock(tmp_path / ".ns.lock")
    assert sweep_files(tmp_path, ".*.lock") == 0
    lock.release()
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == ["ns-a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_files_stay(tmp_path):
    """Root could remove them."""
    for name in (".ns.lock", "ns-a"):
        (tmp_path / name).touch()
        os.chown(tmp_path / name, 12345, 12345)
    assert sweep_files(tmp_path, ".*.lock") == 0
    assert (tmp_path / "ns-a").exists()


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path):
    """The folder may be one that all users can write to."""
    (tmp_path / "other").touch()
    (tmp_path / ".ns.lock").symlink_to(tmp_path / "other")
    (tmp_path / "ns-a").touch()
    assert sweep_files(tmp_path, ".*.lock") == 0
    assert (tmp_path / "ns-a").exists()
