"""Peers in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peers import Peer

PEER = Peer("stand_in", "a peer", 5.0)
ROW = """echo noise; echo '{"streams": 1, "step_ms": 2.5}';"""


def run_as(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, seconds: float = 60.0
) -> peers.Outcome:
    """Run a shell's `program` in the place of a peer's module."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{program}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    return peers.run("torch", PEER, [], "", seconds)


def test_rows_are_read_among_other_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peer's lines of JSON are its rows, among any other output."""
    outcome = run_as(monkeypatch, tmp_path, ROW)
    assert (outcome.status, outcome.rows) == ("ok", [{"streams": 1, "step_ms": 2.5}])


def test_a_failing_peer_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rows of a peer before its failure are kept, with the reason."""
    outcome = run_as(monkeypatch, tmp_path, ROW + "echo 'ValueError: no memory' >&2; exit 1")
    assert (outcome.status, outcome.reason) == ("failed", "ValueError: no memory")
    assert len(outcome.rows) == 1


def test_a_hanging_peer_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peer that exceeds its limit is terminated and keeps its rows."""
    outcome = run_as(monkeypatch, tmp_path, ROW + "exec sleep 600", seconds=2.0)
    assert outcome.status == "timeout"
    assert len(outcome.rows) == 1


def test_figures_of_another_run_are_marked() -> None:
    """Where a peer is absent its earlier figures are separate from the rows, and marked."""
    outcome = peers.run("moondream", peers.PEERS["moondream"], [], "", 1.0)
    assert (outcome.status, outcome.rows) == ("absent", [])
    assert outcome.not_of_this_run
    assert peers.table([outcome], [1]).count("not of this run") == 2
