"""Adapter files by name: found per request, read on other threads, cached while unchanged."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from legato_engine.core.adapters import AdapterStore
from legato_engine.errors import AdapterNotFound, AdapterUnusable
from legato_engine.layers.lora import AdapterWeights, MlpWeights
from legato_engine.models.base import Adapter

MAX_VALUES = 100


class Reader:
    """Returns a file's bytes as an adapter; `gate` delays reads."""

    def __init__(self):
        self.keys = []
        self.threads = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, data, key):
        """Count the read."""
        assert self.gate.wait(10)
        self.keys.append(key)
        self.threads.add(threading.current_thread())
        if data == b"bad":
            raise AdapterUnusable("no adapter")
        none = torch.zeros(0)
        return Adapter(key, 8, AdapterWeights(MlpWeights(none, none, none, none)), len(data))


@pytest.fixture
def reader():
    """A reader whose gate is set."""
    return Reader()


@pytest.fixture
def store(reader, tmp_path):
    """A store over two folders with a cache of ten bytes."""
    folders = (tmp_path / "given", tmp_path / "shipped")
    for folder in folders:
        folder.mkdir()
    made = AdapterStore(reader, folders, max_values=MAX_VALUES, cache_bytes=10)
    yield made
    reader.gate.set()
    made.close()


def get(store, name):
    """Return the adapter."""
    return store.start(name).result(10)


def test_a_file_is_found_once_it_exists(store, reader, tmp_path):
    """A file that appears later is found by the next request, and another thread reads it once."""
    with pytest.raises(AdapterNotFound) as caught:
        get(store, "cups@12")
    assert caught.value.metadata == {"resource": "cups@12"}
    (tmp_path / "given" / "cups@12.safetensors").write_bytes(b"one")
    assert get(store, "cups@12") is get(store, "cups@12")
    assert len(reader.keys) == 1
    assert threading.current_thread() not in reader.threads


def test_the_first_folder_wins(store, tmp_path):
    """A file in the operator's folder hides one of the same name in the model's."""
    (tmp_path / "shipped" / "a.safetensors").write_bytes(b"shipped")
    shipped = get(store, "a")
    (tmp_path / "given" / "a.pt").write_bytes(b"given")
    assert get(store, "a").key != shipped.key


def test_a_replaced_file_is_another_adapter(store, tmp_path):
    """New content under the same name has a new key; the same content has the same key."""
    path = tmp_path / "given" / "a.pt"
    path.write_bytes(b"one")
    first = get(store, "a")
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"two")
    fresh.replace(path)
    second = get(store, "a")
    assert first.key != second.key
    os.utime(path, ns=(1, 1))
    assert get(store, "a").key == second.key
    (tmp_path / "given" / "b.pt").write_bytes(b"two")
    assert get(store, "b").key == second.key, "two names of one content are one adapter"
    path.unlink()
    with pytest.raises(AdapterNotFound):
        get(store, "a")


def test_memory_is_bounded(store, reader, tmp_path):
    """Over `cache_bytes` the least recently used adapter is dropped and read again."""
    for name in "abc":
        (tmp_path / "given" / f"{name}.pt").write_bytes(name.encode() * 4)
    for name in "abacab":
        get(store, name)
    assert len(reader.keys) == 4, "c evicted b, not a"


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "a/b", "/etc/passwd", "x" * 200, "é"])
def test_names_cannot_leave_the_folder(store, tmp_path, name):
    """A name that is no file name is not found, wherever its path leads."""
    (tmp_path / "secret.pt").write_bytes(b"one")
    with pytest.raises(AdapterNotFound):
        get(store, name)


def test_bad_files_are_refused(store, tmp_path):
    """Broken, too large and irregular files are refused each time; others are still read."""
    folder = tmp_path / "given"
    (folder / "bad.pt").write_bytes(b"bad")
    (folder / "folder.pt").mkdir()
    os.mkfifo(folder / "pipe.pt")
    (folder / "large.pt").write_bytes(bytes(4 * MAX_VALUES + 1024 * 1024 + 1))
    for name in ("bad", "bad"):
        with pytest.raises(AdapterUnusable, match="no adapter"):
            get(store, name)
    for name in ("folder", "pipe"):
        with pytest.raises(AdapterNotFound):
            get(store, name)
    with pytest.raises(AdapterUnusable) as caught:
        get(store, "large")
    assert caught.value.metadata["limit"] == str(4 * MAX_VALUES + 1024 * 1024)
    (folder / "good.pt").write_bytes(b"good")
    assert get(store, "good").key


def test_concurrent_requests_share_a_read(store, reader, tmp_path):
    """Concurrent requests for one adapter share a read."""
    (tmp_path / "given" / "a.pt").write_bytes(b"one")
    reader.gate.clear()
    futures = [store.start("a") for _ in range(5)]
    reader.gate.set()
    assert len({id(future.result(10)) for future in futures}) == 1
    assert len(reader.keys) == 1
