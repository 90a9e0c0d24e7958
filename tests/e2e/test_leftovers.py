"""What a killed server left behind is removed by the next one."""

import os
import pathlib
import shutil
import signal
import tempfile

import pytest

from tests.e2e.server import ENVIRONMENT, Server, children, exists, until

WITHOUT_SHARED_MEMORY = """
import os
access = os.access
os.access = lambda path, mode: str(path) != "/dev/shm" and access(path, mode)
"""


@pytest.fixture
def own_temporary():
    """A temporary folder where these servers keep blobs, too: no other test's server sweeps it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="legato-"))  # short, for the sockets' paths
    (folder / "sitecustomize.py").write_text(WITHOUT_SHARED_MEMORY)
    yield folder
    shutil.rmtree(folder)


def owned(pid, folder):
    """The lock files that a process holds, and the blobs in `folder` that it named."""
    links = (link.resolve() for link in pathlib.Path(f"/proc/{pid}/fd").iterdir())
    locks = [path for path in links if path.name.endswith("lock")]
    return [*locks, *folder.glob(f"legato-{pid}-*")]


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_killed_server_leaves_nothing_for_good(tmp_path, own_temporary, processes):
    """Its blobs and sockets are there until another one starts; a live server's stay."""
    folders = [tmp_path / name for name in ("live", "killed", "next")]
    for folder in folders:
        folder.mkdir()
    options = ("--model", "null", "--processes", processes)
    path = os.pathsep.join((str(own_temporary), ENVIRONMENT["PYTHONPATH"]))
    environment = {"TMPDIR": str(own_temporary), "PYTHONPATH": path}
    with Server(folders[0], *options, environment=environment) as live:
        killed = Server(folders[1], *options, environment=environment)
        killed.__enter__()
        found = owned(killed.process.pid, own_temporary)
        assert len(found) == 2  # of the blobs and of the sockets
        namespace = next(path.name for path in found if path.parent == own_temporary)
        blobs = [own_temporary / f"{namespace[1:-5]}-{part}x" for part in ("", "1-")]
        for blob in blobs:
            blob.write_bytes(b"left")
            blob.chmod(0o600)
        started = children(killed.process.pid)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        killed.channel.close()
        until(lambda: not any(exists(pid) for pid in started))
        assert all(path.exists() for path in (*found, blobs[0]))  # a worker may remove its own
        held = owned(live.process.pid, own_temporary)
        with Server(folders[2], *options, environment=environment) as another:
            assert not any(path.exists() for path in (*found, *blobs))
            (told,) = another.events("leftovers_removed")
            assert told["blobs"] >= 1
            assert all(path.exists() for path in held)
            assert live.is_serving()
        folder = next(path.parent for path in found if path.parent != own_temporary)
        assert folder.parent == own_temporary
        assert not folder.exists()
    assert not any(path.exists() for path in held)
