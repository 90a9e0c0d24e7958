"""Shared-memory blobs."""

import contextlib
import errno
import mmap
import os
import stat
import struct
from random import Random

import msgspec
import numpy as np
import pytest
from legato_engine.core import BlobRef
from legato_engine.errors import InternalError, QueueFull
from legato_engine.shm.blob_reader import BlobReader
from legato_engine.shm.blob_store import BlobStore, blob_folder, new_namespace
from legato_engine.shm.segment_pool import LARGEST, RELEASED, SMALLEST, SegmentPool


@pytest.fixture
def store():
    """A store that must leave nothing behind."""
    store = BlobStore(new_namespace())
    yield store
    store.close()
    assert left(store) == []


@pytest.fixture
def reader(store):
    """The engine's side."""
    return BlobReader(store.namespace)


def left(store):
    """Files of the store's namespace."""
    return list(blob_folder().glob(f"{store.namespace}*"))


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_round_trip(store, reader, data):
    """A taken blob reads as written and has left the folder already."""
    view = reader.take(store.put(data))
    assert bytes(view) == data
    assert left(store) == []


def test_private(store):
    """A blob is readable by its owner alone."""
    ref = store.put(b"secret")
    assert stat.S_IMODE((blob_folder() / ref.name).stat().st_mode) == 0o600


def test_discard_after_take(store, reader):
    """Discarding a taken blob, or twice, does nothing."""
    ref = store.put(b"x")
    reader.take(ref)
    store.discard(ref)
    store.discard(ref)
    assert len(store) == 0


def test_close_unlinks_what_was_not_taken(store):
    """Blobs of a dead engine go with the store."""
    for _ in range(3):
        store.put(b"x")
    assert len(left(store)) == 3
    store.close()
    assert left(store) == []


def test_a_draft_is_published_as_often_as_one_likes(store, reader):
    """Pieces become one blob; each published name is taken alone, and none goes with the writer."""
    writer = store.open_writer()
    pieces = [b"ab", b"", bytes(5 << 20), b"c"]
    for piece in pieces:
        writer.write(piece)
    assert writer.size == len(b"".join(pieces))
    refs = [writer.publish(), writer.publish()]
    writer.close()
    for ref in refs:
        assert bytes(reader.take(ref)) == b"".join(pieces)


def test_a_draft_copies_from_a_file(store, tmp_path):
    """A copy takes the bytes asked for and says how many there were."""
    (tmp_path / "file").write_bytes(b"0123456789")
    writer = store.open_writer()
    with (tmp_path / "file").open("rb") as file:
        assert writer.copy(file.fileno(), 2, 4) == 4
        assert writer.copy(file.fileno(), 8, 4) == 2
    assert bytes(writer.view()) == writer.head(100) == b"234589"


@pytest.mark.parametrize(
    "end", [lambda writers: writers.pop().close(), lambda writers: writers.clear()]
)
def test_a_draft_leaves_nothing(store, end):
    """A writer's memory goes when it is closed, or with the last reference to it."""
    writers = [store.open_writer()]
    writers[0].write(b"x")
    assert len(left(store)) == len(store) == 1
    end(writers)
    assert left(store) == []
    assert len(store) == 0


def test_a_closed_draft_takes_no_bytes(store):
    """Whoever still writes is told, and no other file gets the bytes."""
    writer = store.open_writer()
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"x")


@pytest.mark.parametrize(
    "name", ["passwd", "../etc/passwd", "/etc/passwd", "{}-../../etc/passwd", "{}", "{}x-1"]
)
def test_names_outside_the_namespace_are_refused(store, reader, name):
    """The engine opens nothing but plain names within its namespace."""
    with pytest.raises(InternalError):
        reader.take(BlobRef(name=name.format(store.namespace), size=1))


def test_links_are_not_followed(store, reader):
    """A symbolic link in place of a blob is refused."""
    name = f"{store.namespace}-link"
    (blob_folder() / name).symlink_to("/etc/passwd")
    with pytest.raises(InternalError):
        reader.take(BlobRef(name=name, size=1))


@pytest.mark.parametrize("size", [3, LARGEST])
def test_short_blob_is_refused(store, reader, size):
    """No more of a blob is read than was written."""
    ref = store.put(bytes(size))
    with pytest.raises(InternalError):
        reader.take(msgspec.structs.replace(ref, size=size + 1))


def test_take_twice(store, reader):
    """A blob can be taken once."""
    ref = store.put(b"abc")
    reader.take(ref)
    with pytest.raises(InternalError):
        reader.take(ref)


# ---------------------------------------------------------------- memory that is kept


def test_memory_is_written_again(store, reader):
    """What was read and let go takes the next blob, mapped as it is, and no file shows it."""
    names = set()
    for number in range(5):
        ref = store.put(bytes([number]) * 100_000)
        names.add(ref.name)
        assert bytes(reader.take(ref)) == bytes([number]) * 100_000
        store.discard(ref)
        assert left(store) == []
    assert len(names) == len(reader) == 1


def test_what_is_read_is_never_written(store, reader):
    """A view that outlives its request keeps its bytes, also one that was made from a view."""
    kept = []
    for number in range(4):
        ref = store.put(bytes([number]) * 100)
        kept.append(np.frombuffer(memoryview(reader.take(ref))[50:], np.uint8))
        store.discard(ref)
    assert [set(each) for each in kept] == [{0}, {1}, {2}, {3}]


def test_what_may_yet_be_read_is_never_written(store, reader):
    """An engine that comes late for what was discarded reads its bytes or none, never others."""
    first = store.put(b"0")
    reader.take(first)
    store.discard(first)
    late = store.put(b"1")  # in the same memory
    store.discard(late)
    other = store.put(b"2")
    assert (late.name == first.name, other.name == first.name) == (True, False)
    assert bytes(reader.take(late)) == b"1"
    store.discard(other)
    assert store.put(b"3").name == first.name  # read by now


def test_discarding_twice_frees_once(store, reader):
    """Memory that has other content by now is not freed by who had it before."""
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
    """Only the content that a reference speaks of is given for it, and once."""
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


def test_kept_memory_is_bounded(tmp_path):
    """Segments that nobody uses make room for others; beyond the bound there are none."""
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
    """What an engine and then the service do."""
    with (folder / ref.name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        struct.pack_into("Q", mapping, 8 * RELEASED, ref.generation)
    pool.discard(ref)


def test_retired_memory_is_let_go(store, reader):
    """A reader keeps no segment that its service gave up, once the next one comes."""
    refs = [store.put(b"x") for _ in range(3)]
    for ref in refs:
        reader.take(ref)
    assert len(reader) == 3
    store.retire_segments()
    reader.take(store.put(b"y"))
    assert len(reader) == 1


def test_a_service_that_is_gone_is_forgotten(store, reader):
    """Its memory is unmapped with the last view; that of the service next to it is not."""
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
    """It is unlinked when it is taken or discarded, and nothing of it is kept."""
    ref = store.put(bytes(LARGEST))
    assert len(reader.take(ref)) == LARGEST
    assert len(reader) == 0
    assert left(store) == []


def test_full_memory_is_told(store, monkeypatch):
    """A shared memory without room for a blob refuses it instead of tearing the process down."""

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(QueueFull):
        store.put(b"x")
    assert len(store) == 0
    assert left(store) == []


@pytest.mark.parametrize("seed", range(8))
def test_random_lives(store, reader, seed):
    """In whatever order blobs are taken, let go and discarded, each is read as it was written."""
    random = Random(seed)
    waiting: list[tuple[BlobRef, bytes]] = []  # not taken
    views: list[tuple[memoryview, bytes]] = []
    told: list[BlobRef] = []  # not discarded
    for step in range(600):
        match random.choice(("put", "take", "let go", "discard")):
            case "put" if len(told) < 12:
                content = step.to_bytes(4) * random.choice((1, 5000, 40_000))
                ref = store.put(content)
                waiting.append((ref, content))
                told.append(ref)
            case "take" if waiting:
                ref, content = waiting.pop(random.randrange(len(waiting)))
                if ref in told:
                    views.append((reader.take(ref), content))
                else:  # discarded before: all of it, or nothing
                    with contextlib.suppress(InternalError):
                        views.append((reader.take(ref), content))
            case "let go" if views:
                views.pop(random.randrange(len(views)))
            case "discard" if told:
                store.discard(told.pop(random.randrange(len(told))))
        assert all(view == content for view, content in views)
    for ref in told:
        store.discard(ref)
    assert len(store) == 0
    assert left(store) == []
