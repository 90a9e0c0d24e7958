"""The record of the KV cache benchmark, from a run of the smallest model."""

import json

from benchmarks.decode import kv
from benchmarks.provenance import ALLOW_DIRTY

MODEL = ("--model", "random-tiny", "--device", "cpu", "--threads", "1", "--repeats", "1")


def test_what_is_found_comes_sooner(tmp_path, monkeypatch, capsys):
    """Followers find what their leader computed, words or image, and pages come back whole."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    assert kv.main([*MODEL, "--shared", "120", "--positions", "150"]) == 0
    figures = json.loads((tmp_path / "kv.json").read_text())["figures"]
    words, picture = figures["sharing"]
    assert words["positions"] >= 120
    assert picture["positions"] > 1
    assert figures["swapping"]["megabytes"] > 0
    assert all(value > 0 for value in figures["swapping"].values())
