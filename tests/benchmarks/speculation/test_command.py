"""The benchmark of speculation, from its options to its figures."""

import pytest
from legato_engine.errors import InvalidField

from benchmarks.provenance import ALLOW_DIRTY
from benchmarks.speculation import command, comparison
from benchmarks.speculation.workloads import PROFILES, REAL, synthetic_requests

OPTIONS: tuple[str, ...] = ("--model", "random-tiny", "--device", "cpu", "--threads", "1")
OPTIONS += ("--length", "12", "--repeats", "1")


def figures(*options):
    """What a run with these options measures."""
    return command.measured(command.parse([*OPTIONS, *options]))


WORKLOADS = (REAL, "0.8", "0.4", "near the end")


def test_every_setting(monkeypatch):
    """Every setting is compared with plain decoding: the same tokens, its own figures."""
    monkeypatch.setattr(comparison, "sample_images", lambda assembly: [])
    profile = PROFILES["0.4"]
    monkeypatch.setattr(
        comparison,
        "real_requests",
        lambda assembly, _: synthetic_requests(assembly, profile, length=9, fewest=1),
    )
    options = ("--streams", "4", "--requests", "1", "--workloads", ",".join(WORKLOADS))
    rows = figures(*options)["rows"]
    settings = ("off", *comparison.SETTINGS)
    assert [(row["workload"], row["setting"]) for row in rows] == [
        (workload, setting) for workload in WORKLOADS for setting in settings
    ]
    assert all(row["identical"] for row in rows)
    for row in rows:
        assert min(row["tokens_per_second"], row["forward_ms"], row["tick_us"]) > 0
        assert row["gap_ms"]["p50"] <= row["gap_ms"]["p95"] <= row["gap_ms"]["p99"]
        is_plain = row["setting"] == "off"
        assert (row["tokens_per_verify"] == 1.0) == (is_plain or row["acceptance"] == 0.0)
        series = row["series"]["blocks"]
        assert is_plain == (not any(series)) == (not row["settled_blocks"])
        assert all(
            block <= 8 and 0 <= average <= 1 for line in series for _, block, average in line
        )
        assert max(use for _, use in row["series"]["kv_use"]) == row["kv_peak"] < 0.5
    right, wrong = (
        next(r for r in rows if (r["workload"], r["setting"]) == (rate, "fixed:8"))
        for rate in ("0.8", "0.4")
    )
    assert right["tokens_per_verify"] > wrong["tokens_per_verify"]
    assert right["num_steps"] < wrong["num_steps"]
    short = next(r for r in rows if (r["workload"], r["setting"]) == ("near the end", "fixed:8"))
    assert short["num_tokens"] < right["num_tokens"]
    assert short["mean_block_size"] < right["mean_block_size"]


def test_settings_under_pressure():
    """With too few pages requests preempt each other, and results stay the same."""
    options = ("--streams", "4", "--length", "48", "--settings", "fixed:8,seed")
    rows = figures(*options, "--workloads", "under pressure")["rows"]
    assert all(row["identical"] for row in rows)
    assert all(row["kv_peak"] > 0.85 and row["kv_hit_rate"] > 0.3 for row in rows)
    assert all(row["preemptions"] > 0 for row in rows)
    assert all(row["fragmentation"] > 0 for row in rows if row["setting"] != "off")


def test_the_command_prints_its_tables(tmp_path, monkeypatch, capsys):
    """The record's tables go to the terminal too."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    options = ("--streams", "1", "--settings", "fixed:2", "--requests", "1", "--workloads", "0.6")
    assert command.main([*OPTIONS, *options]) == 0
    assert "Tokens are the same as without speculation." in capsys.readouterr().out


def test_an_unknown_workload_is_refused():
    """The error names the workload."""
    with pytest.raises(InvalidField, match=r"unknown workload '0\.5'"):
        figures("--streams", "1", "--settings", "fixed:2", "--workloads", "0.5")


def test_real_prompts(tmp_path):
    """Prompts of files are workloads by the files' names; answers end at the given length."""
    for name, prompts in {"talk": ["Hello?", "Why?"], "code": ["Write a loop."]}.items():
        (tmp_path / f"{name}.toml").write_text(f"prompts = {prompts}")
    options = ("--texts", str(tmp_path), "--settings", "fixed:2", "--streams", "2")
    rows = figures(*options, "--draft", "lookup")["rows"]
    names = [(row["workload"], row["setting"]) for row in rows]
    assert names == [(each, of) for each in ("code", "talk") for of in ("off", "fixed:2")]
    (row, _) = figures(*options, "--draft", "lookup", "--workloads", "code")["rows"]
    assert row["workload"] == "code"
    assert all(row["identical"] and 0 < row["num_tokens"] <= 24 for row in rows)
