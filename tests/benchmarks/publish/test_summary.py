"""The summary of a run's records."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from benchmarks.publish import summary
from benchmarks.publish.summary import DRAFTED

FACTS = {
    "command": "python -m benchmarks decode",
    "date": "2026-11-21T10:00:00+00:00",
    "commit": "abc1234",
    "torch": "2.11.0",
    "gpu": "NVIDIA H200, 580.1, 1980 MHz, 3201 MHz",
}


def record(**figures: Any) -> dict[str, Any]:
    """A benchmark's record."""
    return {"title": "", "surroundings": FACTS, "figures": figures}


def step(task: str, streams: int, period: float) -> dict[str, Any]:
    """A row of the decode benchmark; `period` in ms."""
    cost = {"period": period, "idle": 0.01}
    return {
        "task": task,
        "streams": streams,
        "pipelined": cost,
        "predicted": 1.12,
        "observed": 1.1,
    }


def answered(workload: str, callers: int, tokens: int, **figures: float) -> dict[str, Any]:
    """A row of the end-to-end benchmark."""
    return {"workload": workload, "callers": callers, "tokens": tokens, "calls": 9, **figures}


def portable(weights: str, rows: int, milliseconds: float) -> dict[str, object]:
    """A row of the benchmark of weight formats."""
    return {"weights": weights, "rows": rows, "ms": milliseconds, "GiB": 3.75}


RECORDS = {
    "decode": record(
        rows=[step(task, n, n * 0.1) for task in ("detect", "query") for n in (1, 8, 32)],
        detect_over_text=[{"detect_over_text": ratio} for ratio in (1.01, 1.04, 1.02)],
    ),
    "tick": record(
        rows=[
            {"tasks": task, "streams": 32, "median_us": cost}
            for task, cost in (("free", 20.0), ("detect", 31.0), (f"free, seed, 2{DRAFTED}", 90.0))
        ]
    ),
    "loops": record(
        rows=[
            {"streams": 1, "loop": {"ms": 0.7}, "resident": {"ms": 0.8}},
            {"streams": 8, "loop": {"ms": 1.0}, "resident": {"ms": 1.2}},
            {"streams": 32, "loop": {"ms": 2.2}},
        ]
    ),
    "e2e": record(
        rows=[
            answered("new", 1, 3, p50=18.0, per_second=50.0),
            answered("new", 64, 3, p50=900.0, per_second=70.0),
            answered("cached", 1, 3, p50=5.0, per_second=180.0),
            answered("mix", 64, 30, p50=900.0, per_second=60.0),
            answered("mix", 64, 3, p50=700.0, per_second=110.0),
        ]
    ),
    "e2e_photos": record(
        rows=[
            answered("new", 1, 3, p50=17.0, per_second=55.0),
            answered("new", 64, 3, p50=800.0, per_second=75.0),
            answered("mix", 64, 3, p50=600.0, per_second=115.0),
        ]
    ),
    "portable": record(rows=[portable("bf16", n, 1.0 + n) for n in (1, 8, 32)]),
    "portable_formats": record(
        rows=[portable(w, n, 0.5 + n) for w in ("packed", "fp8") for n in (1, 8, 32)]
    ),
    "portable_formats_kv8": record(
        rows=[portable(w, n, 0.4 + n) for w in ("fp8", "int4") for n in (1, 8, 32)]
    ),
    "hop": record(
        rows=[
            {
                "picture": kind,
                "tokens": tokens,
                "hop_ms": tokens + (kind == "id") * 10,
                "hop_blocking_ms": tokens + (kind == "id") * 10 - 0.5,
            }
            for kind in ("id", "bytes")
            for tokens in (1, 3)
        ]
    ),
}


def test_every_figure_comes_from_its_record() -> None:
    """The summary of complete records lacks no figure and takes each from its record."""
    result = summary.summarise(RECORDS)
    assert summary.missing(result) == []
    assert result["decode_ms"] == pytest.approx({"1": 0.1, "8": 0.8, "32": 3.2})
    assert result["loop_ms"] == {"1": 0.7, "8": 1.0, "32": 2.2}
    assert result["resident_ms"] == {"1": 0.8, "8": 1.2}
    assert result["gain_predicted"]["8"] == pytest.approx(0.12)
    assert result["gain_observed"]["32"] == pytest.approx(0.1)
    assert (result["tick_cpu_us_32"], result["detect_over_text"]) == (31.0, 1.04)
    assert (result["e2e_p50_ms_new"], result["e2e_p50_ms_cached"]) == (18.0, 5.0)
    assert (result["req_per_s_64_new"], result["req_per_s_64_mix"]) == (70.0, 110.0)
    photos = ("e2e_p50_ms_new_photo", "req_per_s_64_new_photo", "req_per_s_64_mix_photo")
    assert tuple(result[name] for name in photos) == (17.0, 75.0, 115.0)
    assert (result["hop_ms"], result["hop_ms_asyncio"]) == (2.5, 3)
    assert result["portable_ms"] == {"1": 2.0, "8": 9.0, "32": 33.0}
    assert result["int4_kv8_ms"]["8"] == result["fp8_kv8_ms"]["8"] == 8.4
    assert (result["fp8_ms"]["1"], result["device_memory_gib"]) == (1.5, 3.75)
    assert (result["driver"], result["commit"]) == ("580.1", "abc1234")
    figures = set(result) - {"commit", "date", "torch", "driver", "commands", "sources"}
    assert set(result["sources"]) == figures, "each figure names its record"


def test_missing_figures_are_null_and_listed() -> None:
    """Missing records and missing rows become null and are listed."""
    partial = {"decode": record(rows=[step("query", 1, 0.8)])}
    result = summary.summarise(partial)
    assert result["decode_ms"] == {"1": 0.8, "8": None, "32": None}
    gaps = summary.missing(result)
    assert {"decode_ms.8", "gpu_idle_ms.32", "hop_ms", "tick_cpu_us_32"} <= set(gaps)
    assert "decode_ms.1" not in gaps
    assert summary.summarise({})["date"] is None


def test_an_unanswered_cell_is_missing_and_not_zero() -> None:
    """A cell in which every call failed gives no figure."""
    empty = {"e2e": record(rows=[answered("new", 1, 3, p50=0.0) | {"calls": 0}])}
    assert summary.summarise(empty)["e2e_p50_ms_new"] is None


def test_a_folder_becomes_a_file(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reads records, not its own output, and prints missing figures."""
    (tmp_path / "decode.json").write_text(json.dumps(RECORDS["decode"]))
    for _ in range(2):
        assert summary.main([str(tmp_path)]) == 0
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["decode_ms"]["8"] == pytest.approx(0.8)
    assert written["commands"] == [FACTS["command"]]
    assert "hop_ms" in capsys.readouterr().out


def test_figures_of_two_commits_are_distinguished(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with records of two commits names both, and the commit of each figure."""
    other = RECORDS["tick"] | {"surroundings": FACTS | {"commit": "def5678"}}
    (tmp_path / "decode.json").write_text(json.dumps(RECORDS["decode"]))
    (tmp_path / "tick.json").write_text(json.dumps(other))
    summary.main([str(tmp_path)])
    assert "abc1234,def5678" in capsys.readouterr().out
    sources = json.loads((tmp_path / "summary.json").read_text())["sources"]
    assert sources["decode_ms"]["commit"] == "abc1234"
    assert sources["tick_cpu_us_32"] == {"record": "tick"} | {
        name: other["surroundings"][name] for name in ("commit", "date")
    }
