"""Shared-memory blobs."""

import stat

import pytest
from legato_engine.blobs import BlobStore, blob_folder, new_namespace, take_blob
from legato_engine.core import BlobRef
from legato_engine.errors import InternalError


@pytest.fixture
def store():
    """A store that must leave nothing behind."""
    store = BlobStore(new_namespace())
    yield store
    store.close()
    assert left(store) == []


def left(store):
    """Files of the store's namespace."""
    return list(blob_folder().glob(f"{store.namespace}*"))


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_round_trip(store, data):
    """A taken blob reads as written and has left the folder already."""
    view = take_blob(store.put(data), store.namespace)
    assert bytes(view) == data
    assert left(store) == []


def test_private(store):
    """A blob is readable by its owner alone."""
    ref = store.put(b"secret")
    assert stat.S_IMODE((blob_folder() / ref.name).stat().st_mode) == 0o600


def test_discard_after_take(store):
    """Discarding a taken blob, or twice, does nothing."""
    ref = store.put(b"x")
    take_blob(ref, store.namespace)
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


def test_a_draft_is_published_as_often_as_one_likes(store):
    """Pieces become one blob; each published name is taken alone, and none goes with the draft."""
    draft = store.draft()
    pieces = [b"ab", b"", bytes(5 << 20), b"c"]
    for piece in pieces:
        draft.write(piece)
    assert draft.size == len(b"".join(pieces))
    refs = [draft.publish(), draft.publish()]
    draft.close()
    for ref in refs:
        assert bytes(take_blob(ref, store.namespace)) == b"".join(pieces)


def test_a_draft_copies_from_a_file(store, tmp_path):
    """A copy takes the bytes asked for and says how many there were."""
    (tmp_path / "file").write_bytes(b"0123456789")
    draft = store.draft()
    with (tmp_path / "file").open("rb") as file:
        assert draft.copy(file.fileno(), 2, 4) == 4
        assert draft.copy(file.fileno(), 8, 4) == 2
    assert bytes(draft.view()) == draft.head(100) == b"234589"


@pytest.mark.parametrize(
    "end", [lambda drafts: drafts.pop().close(), lambda drafts: drafts.clear()]
)
def test_a_draft_leaves_nothing(store, end):
    """A draft's memory goes when it is closed, or with the last reference to it."""
    drafts = [store.draft()]
    drafts[0].write(b"x")
    assert len(left(store)) == len(store) == 1
    end(drafts)
    assert left(store) == []
    assert len(store) == 0


def test_a_closed_draft_takes_no_bytes(store):
    """Whoever still writes is told, and no other file gets the bytes."""
    draft = store.draft()
    draft.close()
    draft.close()
    with pytest.raises(ValueError, match="closed"):
        draft.write(b"x")


@pytest.mark.parametrize(
    "name", ["passwd", "../etc/passwd", "/etc/passwd", "{}-../../etc/passwd", "{}", "{}x-1"]
)
def test_names_outside_the_namespace_are_refused(store, name):
    """The engine opens nothing but plain names within its namespace."""
    with pytest.raises(InternalError):
        take_blob(BlobRef(name=name.format(store.namespace), size=1), store.namespace)


def test_links_are_not_followed(store):
    """A symbolic link in place of a blob is refused."""
    name = f"{store.namespace}-link"
    (blob_folder() / name).symlink_to("/etc/passwd")
    with pytest.raises(InternalError):
        take_blob(BlobRef(name=name, size=1), store.namespace)


def test_short_blob_is_refused(store):
    """A blob shorter than its reference says is never mapped."""
    ref = store.put(b"abc")
    with pytest.raises(InternalError):
        take_blob(BlobRef(name=ref.name, size=4), store.namespace)


def test_take_twice(store):
    """A blob can be taken once."""
    ref = store.put(b"abc")
    take_blob(ref, store.namespace)
    with pytest.raises(InternalError):
        take_blob(ref, store.namespace)
