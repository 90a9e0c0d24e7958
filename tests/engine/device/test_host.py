"""The host's memory as the kernel tells it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from legato_engine.device.host import available_memory, return_freed_memory

MIB = 2**20


@pytest.fixture
def proc(tmp_path):
    """A machine with 1000 MiB available."""
    (tmp_path / "meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable:    1024000 kB\n")
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 1000), (str(500 * MIB), 400), (str(250 * MIB), 150), ("1", 0)]
)
def test_the_groups_limit_counts(proc, tmp_path, limit, expected):
    """A group may have what its limit leaves, and what of its file cache can be dropped."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    stat = f"anon 5\nactive_file {150 * MIB}\ninactive_file {50 * MIB}\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert available_memory(proc, tmp_path) == expected * MIB


def test_without_a_group_the_machine_counts(proc, tmp_path):
    """Where no group limits memory there is what the machine has."""
    assert available_memory(proc, tmp_path / "none") == 1000 * MIB
    assert available_memory() > 0


def anonymous():
    """Bytes of this process's own memory."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_freed_memory_goes_back_to_the_system():
    """Also what lies below memory that is still used, where glibc would keep it."""
    blocks = [b"x" * 2**16 for _ in range(100 * 16)]
    before, blocks[:-1] = anonymous(), []
    return_freed_memory()
    assert anonymous() < before - 80 * MIB
    assert blocks
