"""Attackers beside other callers: a short run of `make attack`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.faults.attacks import attackers, harm, watch

ATTACKERS = 2
QUICK = (
    "empty parts",
    "empty standing tasks",
    "unknown fields",
    "incomplete messages of 33 MB",
    "resets",
)


@pytest.mark.timeout(300)
def test_attacks_do_not_reach_other_callers(tmp_path: Path) -> None:
    """No call of others fails, and memory stays, while each attack goes on."""
    with Server(tmp_path, "--model", "null") as server:
        watch(server.address, server.process.pid, 0.5)
        for name in QUICK:
            with attackers(server.address, name, ATTACKERS):
                figures = watch(server.address, server.process.pid, 1.0)
            assert harm(name, figures) == []
            assert figures.calls > 2
