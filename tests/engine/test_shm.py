"""Shared-memory blobs, and what a dead owner left."""

import contextlib
import errno
import mmap
import os
import re
import stat
import struct
import subprocess
import sys
from random import Random

import msgspec
import numpy as np
import pytest
from legato_engine.errors import InternalError, QueueFull
from legato_engine.shm import (
    LARGEST,
    RELEASED,
    SMALLEST,
    BlobReader,
    BlobStore,
    OwnerLock,
    SegmentPool,
    blob_folder,
    new_namespace,
    sweep_files,
    sweep_folders,
)
from legato_engine.types import BlobRef

# ---------------------------------------------------------------- blobs


@pytest.fixture
def store():
    """A store that must leave no files."""
    store = BlobStore(new_namespace())
    yield store
    store.close()
    assert left(store) == []


@pytest.fixture
def reader(store):
    """The engine's side."""
    return BlobReader(store.namespace)


def left(store):
    """Files in the store's namespace."""
    return list(blob_folder().glob(f"{store.namespace}*"))


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_round_trip(store, reader, data):
    """A taken blob has the bytes that were written, and its file is unlinked."""
    view = reader.take(store.put(data))
    assert bytes(view) == data
    assert left(store) == []


def test_private(store):
    """Only its owner can read a blob."""
    ref = store.put(b"secret")
    assert stat.S_IMODE((blob_folder() / ref.name).stat().st_mode) == 0o600


def test_discard_after_take(store, reader):
    """Discarding a taken blob, or twice, does nothing."""
    ref = store.put(b"x")
    reader.take(ref)
    store.discard(ref)
    store.discard(ref)
    assert len(store) == 0


def test_closing_unlinks_blobs(store):
    """Blobs of a dead engine are unlinked with the store."""
    for _ in range(3):
        store.put(b"x")
    assert len(left(store)) == 3
    store.close()
    assert left(store) == []


def test_a_writer_publishes_several_blobs(store, reader):
    """Each blob has all pieces, is taken on its own, and stays when the writer is closed."""
    writer = store.open_writer()
    pieces = [b"ab", b"", bytes(5 << 20), b"c"]
    for piece in pieces:
        writer.write(piece)
    assert writer.size == len(b"".join(pieces))
    refs = [writer.publish(store), writer.publish(store)]
    writer.close()
    for ref in refs:
        assert bytes(reader.take(ref)) == b"".join(pieces)


def test_a_writer_copies_from_a_file(store, tmp_path):
    """A copy appends the requested bytes and returns how many there were."""
    (tmp_path / "file").write_bytes(b"0123456789")
    writer = store.open_writer()
    with (tmp_path / "file").open("rb") as file:
        assert writer.copy(file.fileno(), 2, 4) == 4
        assert writer.copy(file.fileno(), 8, 4) == 2
    assert bytes(writer.view()) == writer.head(100) == b"234589"


@pytest.mark.parametrize(
    "end", [lambda writers: writers.pop().close(), lambda writers: writers.clear()]
)
def test_a_writer_leaves_nothing(store, end):
    """Its memory is freed when it is closed, or with the last reference."""
    writers = [store.open_writer()]
    writers[0].write(b"x")
    assert len(left(store)) == len(store) == 1
    end(writers)
    assert left(store) == []
    assert len(store) == 0


def test_a_closed_writer_takes_no_bytes(store):
    """Writing raises, and no other file gets the bytes."""
    writer = store.open_writer()
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"x")


@pytest.mark.parametrize(
    "name", ["passwd", "../etc/passwd", "/etc/passwd", "{}-../../etc/passwd", "{}", "{}x-1"]
)
def test_names_outside_the_namespace_are_refused(store, reader, name):
    """The engine opens only plain names within its namespace."""
    with pytest.raises(InternalError):
        reader.take(BlobRef(name=name.format(store.namespace), size=1))


def test_links_are_not_followed(store, reader):
    """A symbolic link in place of a blob is refused."""
    name = f"{store.namespace}-link"
    (blob_folder() / name).symlink_to("/etc/passwd")
    with pytest.raises(InternalError):
        reader.take(BlobRef(name=name, size=1))


@pytest.mark.parametrize("size", [3, LARGEST])
def test_a_short_blob_is_refused(store, reader, size):
    """A reference cannot name more bytes than were written."""
    ref = store.put(bytes(size))
    with pytest.raises(InternalError):
        reader.take(msgspec.structs.replace(ref, size=size + 1))


def test_take_twice(store, reader):
    """A blob can be taken once."""
    ref = store.put(b"abc")
    reader.take(ref)
    with pytest.raises(InternalError):
        reader.take(ref)


# ---------------------------------------------------------------- pooled segments


def test_segments_are_reused(store, reader):
    """A released segment gets the next blob, still mapped and without a file."""
    names = set()
    for number in range(5):
        ref = store.put(bytes([number]) * 100_000)
        names.add(ref.name)
        assert bytes(reader.take(ref)) == bytes([number]) * 100_000
        store.discard(ref)
        assert left(store) == []
    assert len(names) == len(reader) == 1


def test_viewed_memory_is_not_overwritten(store, reader):
    """A view that outlives its request keeps its bytes; so does a view of a view."""
    kept = []
    for number in range(4):
        ref = store.put(bytes([number]) * 100)
        kept.append(np.frombuffer(memoryview(reader.take(ref))[50:], np.uint8))
        store.discard(ref)
    assert [set(each) for each in kept] == [{0}, {1}, {2}, {3}]


def test_discarded_unread_memory_is_not_overwritten(store, reader):
    """An engine that takes a discarded blob late gets its bytes or an error."""
    first = store.put(b"0")
    reader.take(first)
    store.discard(first)
    late = store.put(b"1")  # in the same segment
    store.discard(late)
    other = store.put(b"2")
    assert (late.name == first.name, other.name == first.name) == (True, False)
    assert bytes(reader.take(late)) == b"1"
    store.discard(other)
    assert store.put(b"3").name == first.name  # released by now


def test_discarding_twice_frees_once(store, reader):
    """The second call does not free the next content of the segment."""
    first = store.put(b"1")
    reader.take(first)
    store.discard(first)
    second = store.put(b"2")
    assert second.name == first.name
    store.discard(first)
    assert len(store) == 1
    assert store.put(b"3").name != second.name
    assert bytes(reader.take(second)) == b"2"


def test_an_old_reference_reads_nothing(store, reader):
    """A reference gives only its own generation, and once."""
    first = store.put(b"1")
    reader.take(first)
    store.discard(first)
    second = store.put(b"2")
    for stale in (first, BlobRef(name=second.name, size=1, generation=9)):
        with pytest.raises(InternalError):
            reader.take(stale)
    with pytest.raises(InternalError):
        reader.take(BlobRef(name=second.name, size=1 << 20, generation=second.generation))
    assert bytes(reader.take(second)) == b"2"


def test_the_pool_is_bounded(tmp_path):
    """Unused segments are evicted for others; beyond the limit there are none."""
    pool = SegmentPool(tmp_path, limit=4 * SMALLEST)
    refs = [pool.put(b"x", f"ns-{number}") for number in range(4)]
    assert all(refs)
    assert pool.put(b"x", "ns-4") is None
    for ref in refs[:2]:
        read_and_discard(pool, ref, tmp_path)
    assert pool.put(bytes(SMALLEST), "ns-5") is not None  # as large as two
    assert len(pool) == 3
    pool.clear()
    assert len(pool) == 0
    assert list(tmp_path.iterdir()) == []
    assert pool.put(b"x", "ns-6") is not None


def read_and_discard(pool, ref, folder):
    """Take and discard a blob, as the engine and then the service do."""
    with (folder / ref.name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        struct.pack_into("Q", mapping, 8 * RELEASED, ref.generation)
    pool.discard(ref)


def test_retired_segments_are_unmapped(store, reader):
    """The reader unmaps them when it maps the next segment."""
    refs = [store.put(b"x") for _ in range(3)]
    for ref in refs:
        reader.take(ref)
    assert len(reader) == 3
    store.retire_segments()
    reader.take(store.put(b"y"))
    assert len(reader) == 1


def test_forgetting_a_service_unmaps_its_segments(store, reader):
    """Its memory is unmapped with the last view; that of other services stays."""
    other = BlobStore(f"{store.namespace}-1")
    view = reader.take(other.put(b"other"))
    reader.take(store.put(b"x"))
    reader.forget(store.namespace)
    assert len(reader) == 1
    reader.forget(other.namespace)
    assert len(reader) == 0
    assert bytes(view) == b"other"
    other.close()


def test_a_large_blob_is_a_file_of_its_own(store, reader):
    """It is unlinked when it is taken or discarded, and not pooled."""
    ref = store.put(bytes(LARGEST))
    assert len(reader.take(ref)) == LARGEST
    assert len(reader) == 0
    assert left(store) == []


def test_full_memory_raises(store, monkeypatch):
    """Without space a blob is refused; the process gets no SIGBUS."""

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(QueueFull):
        store.put(b"x")
    assert len(store) == 0
    assert left(store) == []


@pytest.mark.parametrize("seed", range(8))
def test_random_sequences(store, reader, seed):
    """In any order of put, take, release and discard, each blob is read as it was written."""
    random = Random(seed)
    waiting: list[tuple[BlobRef, bytes]] = []  # not taken
    views: list[tuple[memoryview, bytes]] = []
    known: list[BlobRef] = []  # not discarded
    for step in range(600):
        match random.choice(("put", "take", "let go", "discard")):
            case "put" if len(known) < 12:
                content = step.to_bytes(4) * random.choice((1, 5000, 40_000))
                ref = store.put(content)
                waiting.append((ref, content))
                known.append(ref)
            case "take" if waiting:
                ref, content = waiting.pop(random.randrange(len(waiting)))
                if ref in known:
                    views.append((reader.take(ref), content))
                else:  # discarded before: all of it, or nothing
                    with contextlib.suppress(InternalError):
                        views.append((reader.take(ref), content))
            case "let go" if views:
                views.pop(random.randrange(len(views)))
            case "discard" if known:
                store.discard(known.pop(random.randrange(len(known))))
        assert all(view == content for view, content in views)
    for ref in known:
        store.discard(ref)
    assert len(store) == 0
    assert left(store) == []


# ---------------------------------------------------------------- owner lock
# What a dead owner left is removed, and nothing of a live one's.

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
