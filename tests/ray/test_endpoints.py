"""The file of Envoy's endpoints."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from legato_ray.endpoints import EmptyEndpoints, EndpointFile


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Another writer of the folder goes on with the addresses of the last one."""
    addresses = {"10.0.0.1:50051", "[fd00::1]:50051"}
    assert EndpointFile(tmp_path).write(addresses)
    assert EndpointFile(tmp_path).read() == addresses


def test_equal_sets_are_written_once(tmp_path: Path) -> None:
    """Envoy is told of changes only."""
    file = EndpointFile(tmp_path)
    assert file.write(["10.0.0.1:1", "10.0.0.2:1"])
    assert not file.write(["10.0.0.2:1", "10.0.0.1:1"])
    assert not EndpointFile(tmp_path).write(["10.0.0.2:1", "10.0.0.1:1"])


def test_an_empty_set_is_never_written(tmp_path: Path) -> None:
    """It raises, and the last addresses stay."""
    file = EndpointFile(tmp_path)
    file.write(["10.0.0.1:1"])
    with pytest.raises(EmptyEndpoints):
        file.write([])
    assert file.read() == {"10.0.0.1:1"}


@pytest.mark.parametrize("address", ["host", ":1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536"])
def test_a_bad_address_leaves_the_file(tmp_path: Path, address: str) -> None:
    """It is named in the error, and nothing of the set is written."""
    file = EndpointFile(tmp_path)
    file.write(["10.0.0.1:1"])
    with pytest.raises(ValueError, match="HOST:PORT"):
        file.write(["10.0.0.2:1", address])
    assert EndpointFile(tmp_path).read() == {"10.0.0.1:1"}


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    """Whatever moment the file is read in, it is one of the sets that were written."""
    file = EndpointFile(tmp_path)
    sets = [{f"10.0.0.{host}:1" for host in range(1, count)} for count in (2, 250)]
    file.write(sets[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for addresses in sets:
                file.write(addresses)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            json.loads(file.path.read_bytes())
            assert EndpointFile(tmp_path).read() in sets
    finally:
        stop.set()
        writer.join()
    assert list(tmp_path.iterdir()) == [file.path]


def test_a_file_of_another_program_counts_as_none(tmp_path: Path) -> None:
    """It is replaced by the first set."""
    (tmp_path / "endpoints.json").write_text('{"resources": []}')
    file = EndpointFile(tmp_path)
    assert file.read() == frozenset()
    assert file.write(["10.0.0.1:1"])
