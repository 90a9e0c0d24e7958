"""What a killed server left behind is removed by the next one."""

import pathlib
import signal
import tempfile

import pytest
from legato_engine.shm.blob_store import blob_folder

from tests.e2e.server import Server, children, exists, until


def owned(pid):
    """The lock files that a process holds, and the blobs in shared memory that it named."""
    links = (link.resolve() for link in pathlib.Path(f"/proc/{pid}/fd").iterdir())
    locks = [path for path in links if path.name.endswith("lock")]
    return [*locks, *blob_folder().glob(f"legato-{pid}-*")]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_killed_server_leaves_nothing_for_good(tmp_path, processes):
    """Its blobs and sockets are there until another one starts; a live server's stay."""
    folders = [tmp_path / name for name in ("live", "killed", "next")]
    for folder in folders:
        folder.mkdir()
    options = ("--model", "null", "--processes", processes)
    with Server(folders[0], *options) as live:
        killed = Server(folders[1], *options)
        killed.__enter__()
        found = owned(killed.process.pid)
        assert len(found) == 2  # of the blobs and of the sockets
        namespace = next(path.name for path in found if path.parent == blob_folder())
        blobs = [blob_folder() / f"{namespace[1:-5]}-{part}x" for part in ("", "1-")]
        for blob in blobs:
            blob.write_bytes(b"left")
        started = children(killed.process.pid)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        killed.channel.close()
        until(lambda: not any(exists(pid) for pid in started))
        assert all(path.exists() for path in (*found, *blobs))
        held = owned(live.process.pid)
        with Server(folders[2], *options) as another:
            assert not any(path.exists() for path in (*found, *blobs))
            (told,) = another.events("leftovers_removed")
            assert told["blobs"] >= 2
            assert all(path.exists() for path in held)
            assert live.is_serving()
        folder = next(path.parent for path in found if path.parent != blob_folder())
        assert folder.parent == pathlib.Path(tempfile.gettempdir())
        assert not folder.exists()
    assert not any(path.exists() for path in held)
