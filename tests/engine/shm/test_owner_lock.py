"""What a dead owner left is removed, and nothing of a live one's."""

import os
import re
import subprocess
import sys

import pytest
from legato_engine.shm import OwnerLock, sweep_files, sweep_folders

HOLDER = """
import pathlib, sys, time
from legato_engine.shm import OwnerLock
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


LOCK = re.compile(r"\.(ns\d)\.lock")
FOLDER = re.compile(r"legato-[a-z]")
FILES = ("requests", "vitals")


def make(path):
    """Make a file as this package makes its files."""
    path.touch(0o600)


def abandoned(path):
    """Make a lock whose owner was killed."""
    lock = OwnerLock(path)
    os.close(lock._descriptor)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def sweep(folder):
    """The folders that are removed."""
    return sweep_folders(folder, FOLDER, "lock", FILES)


def test_files_of_a_killed_owner_are_swept(tmp_path, holder):
    """Those of its namespace and of namespaces below; others stay."""
    for name in ("ns1-a", "ns1-1-b", ".ns1-c", "ns2-a", "ns1x-a"):
        make(tmp_path / name)
    first, _ = holder(tmp_path / ".ns1.lock"), holder(tmp_path / ".ns2.lock")
    assert sweep_files(tmp_path, LOCK) == 0
    first.kill()
    first.wait()
    assert sweep_files(tmp_path, LOCK) == 3
    assert names(tmp_path) == [".ns2.lock", "ns1x-a", "ns2-a"]


def test_a_folder_of_a_killed_owner_is_swept(tmp_path, holder):
    """A folder without a lock file may be another program's."""
    for name in ("legato-a", "legato-b", "legato-c"):
        (tmp_path / name).mkdir(0o700)
        (tmp_path / name / "requests").touch()
    first, _ = holder(tmp_path / "legato-a" / "lock"), holder(tmp_path / "legato-b" / "lock")
    assert sweep(tmp_path) == 0
    first.kill()
    first.wait()
    assert sweep(tmp_path) == 1
    assert names(tmp_path) == ["legato-b", "legato-c"]


def test_files_of_other_programs_stay(tmp_path):
    """Another name, an empty lock, another mode or a folder: nothing of that is provably ours."""
    for name in (".app.lock", "app-data", ".ns1.lock", "ns1-data"):
        make(tmp_path / name)
    abandoned(tmp_path / ".ns2.lock")
    (tmp_path / ".ns2.lock").chmod(0o644)
    make(tmp_path / "ns2-data")
    abandoned(tmp_path / ".ns3.lock")
    (tmp_path / "ns3-shared").touch(0o644)
    (tmp_path / "ns3-folder").mkdir()
    (tmp_path / "ns3-link").symlink_to(tmp_path / "app-data")
    before = names(tmp_path)
    assert sweep_files(tmp_path, LOCK) == 0
    assert names(tmp_path) == [name for name in before if name != ".ns3.lock"]


@pytest.mark.parametrize("other", ["name", "marker", "mode", "file", "link"])
def test_folders_of_other_programs_stay(tmp_path, other):
    """A folder that looks like one of ours is removed only if all of it is ours."""
    folder = tmp_path / ("legato-cache" if other == "name" else "legato-a")
    folder.mkdir(0o755 if other == "mode" else 0o700)
    make(folder / "requests")
    if other == "marker":
        make(folder / "lock")
    else:
        abandoned(folder / "lock")
    if other == "file":
        (folder / "thesis.tex").touch()
    if other == "link":
        folder.rename(tmp_path / "target")
        folder.symlink_to(tmp_path / "target")
    before = sorted(tmp_path.rglob("*"))
    assert sweep(tmp_path) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_read_is_passed_over(tmp_path):
    """It stops no start."""
    assert sweep_files(tmp_path / "none", LOCK) == 0
    assert sweep(tmp_path / "none") == 0


def test_a_held_lock_protects_from_its_own_process(tmp_path):
    """Several servers may run in one process."""
    make(tmp_path / "ns1-a")
    lock = OwnerLock(tmp_path / ".ns1.lock")
    assert sweep_files(tmp_path, LOCK) == 0
    lock.release()
    lock.release()
    assert names(tmp_path) == ["ns1-a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
@pytest.mark.parametrize("theirs", [".ns1.lock", "ns1-a"])
def test_another_users_files_stay(tmp_path, theirs):
    """Root could remove them."""
    abandoned(tmp_path / ".ns1.lock")
    make(tmp_path / "ns1-a")
    os.chown(tmp_path / theirs, 12345, 12345)
    assert sweep_files(tmp_path, LOCK) == 0
    assert (tmp_path / "ns1-a").exists()


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path):
    """The folder may be one that all users can write to."""
    abandoned(tmp_path / "other")
    (tmp_path / ".ns1.lock").symlink_to(tmp_path / "other")
    make(tmp_path / "ns1-a")
    assert sweep_files(tmp_path, LOCK) == 0
    assert (tmp_path / "ns1-a").exists()
