"""Tables, drawings and summaries made of records."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import publish
from benchmarks.publish import records, summary, tables
from benchmarks.publish.records import Records
from benchmarks.publish.summary import DRAFTED, SOURCES
from benchmarks.publish.tables import peers

ROOT = publish.ROOT
OUTPUTS = publish.outputs(ROOT)
SUMMARISED = set(SOURCES.values())
RECORD = re.compile(r"\]\(([^)\s]*benchmarks/results/[^)\s]+\.(?:md|json))\)")

# Records from before the rule that a record names a commit; the page says so beside their links.
WITHOUT_COMMIT = {
    "reference_moondream2_full_h200_2026-11-21": "not recorded",
    "reference_moondream2_tiny_2026-11-21": "of a branch that was rewritten",
}


def cited() -> list[str]:
    """Return the names of all records that README.md and docs/performance.md link to."""
    names = set()
    for document in publish.DOCUMENTS:
        for link in RECORD.findall((ROOT / document).read_text()):
            names.add(link.partition("benchmarks/results/")[2].rpartition(".")[0])
    return sorted(names)


def commits(name: str) -> set[str]:
    """Return the commits that a record names."""
    document = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    members = [document] if "surroundings" in document else document.values()
    return {member["surroundings"].get("commit") or "" for member in members}


def git(*command: str) -> subprocess.CompletedProcess[str]:
    """Run git in the repository."""
    return subprocess.run(
        ("git", "-C", str(ROOT), *command), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("path", OUTPUTS, ids=lambda path: path.name)
def test_tables_and_drawings_are_current(path: Path) -> None:
    """`make bench-tables` would change nothing."""
    assert path.read_text() == OUTPUTS[path], "run make bench-tables"


def test_every_table_is_shown() -> None:
    """Each table is in a document."""
    texts = "".join((ROOT / name).read_text() for name in publish.DOCUMENTS)
    assert set(re.findall(r"<!-- table: (\w+) -->", texts)) == set(tables.TABLES)


@pytest.mark.parametrize("name", cited())
def test_records_name_a_commit_of_this_repository(name: str) -> None:
    """Each record that the documents cite exists, and so does its commit."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history: this is a shallow clone, or there is no git")
    known = all(
        git("cat-file", "-e", f"{each}^{{commit}}").returncode == 0 for each in commits(name)
    )
    assert known != (name in WITHOUT_COMMIT), f"{name}: {commits(name)}"


def test_a_row_of_another_commit_is_marked() -> None:
    """A table that joins commits says so, and one that does not, does not."""
    records = Records(ROOT)
    for name, make in tables.TABLES.items():
        text = make(records)
        found = {c for link in RECORD.findall(text) for c in commits(_name(link))}
        assert ("different commits" in text) == (len(found) > 1), name


def _name(link: str) -> str:
    return link.partition("benchmarks/results/")[2].rpartition(".")[0]


@pytest.mark.parametrize("path", [p for p in OUTPUTS if p.suffix == ".svg"], ids=lambda p: p.name)
def test_drawings_are_well_formed(path: Path) -> None:
    """Each drawing is XML with a title that a screen reader can tell."""
    root = ElementTree.fromstring(OUTPUTS[path])
    assert root.findtext("{http://www.w3.org/2000/svg}title")


def test_an_absent_peer_is_marked(tmp_path: Path) -> None:
    """A peer's earlier figures are marked as not of the record's run, with the latest date."""
    peer = {"peer": "vllm", "name": "vLLM", "versions": {}, "rows": []}
    earlier = [{"streams": 1, "step_ms": 1.65, "version": "0.24.0"}]
    document = {
        "surroundings": {"date": "2026-11-21T12:00:00+00:00", "commit": "abc1234"},
        "figures": {"peers": [peer | {"not_of_this_run": earlier}, peer | {"not_of_this_run": []}]},
    }
    path = tmp_path / "benchmarks" / "results" / "h200" / "peers.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    ((name, steps, source),) = peers(Records(tmp_path))
    assert name == "vLLM 0.24.0, another H200, by 2026-11-21, **not of this run**"
    assert (steps, source) == (["1.65", "-", "-"], "none")


def test_a_stale_document_is_found(tmp_path: Path) -> None:
    """Only what stands between the markers is replaced."""
    text = "before\n<!-- table: gain -->\nold\n<!-- end of table -->\nafter\n"
    filled = publish.filled(text, Records(ROOT))
    assert filled.startswith("before\n<!-- table: gain -->\n\n| two launches")
    assert filled.endswith("<!-- end of table -->\nafter\n")
    assert "old" not in filled


def unread() -> list[str]:
    """Return the files of results that no page, table, figure, script or test reads."""
    read = {f"{folder}/{name}" for folder in ("h100", "h200") for name in ("summary", *SUMMARISED)}
    with pytest.MonkeyPatch.context() as patch:
        of_name = Records._document

        def noted(own: Records, name: str) -> object:
            read.add(name)
            return of_name(own, name)

        patch.setattr(Records, "_document", noted)
        publish.outputs(ROOT)
        records.check(ROOT)
    files = git("ls-files", "-co", "--exclude-standard").stdout.splitlines()
    results = "benchmarks/results/"
    texts = "".join(
        (ROOT / name).read_text()
        for name in files
        if name.endswith((".md", ".py", ".toml", ".sh")) and not name.startswith(results)
        if (ROOT / name).exists()
    )
    mentioned = set(re.findall(r"results/((?:h\d+/)?[\w-]+)(?:\.(?:md|json|txt|svg))\b", texts))
    mentioned |= {name for name in stems(files) if re.search(rf"[\"'`]{name}[\"'`]", texts)}
    return [
        name
        for name in files
        if name.startswith(results) and (ROOT / name).exists()
        if name.removeprefix(results).rpartition(".")[0] not in read | mentioned
    ]


def stems(files: list[str]) -> set[str]:
    """Return the records of a list of files, as the tables name them."""
    results = "benchmarks/results/"
    names = (name.removeprefix(results) for name in files if name.startswith(results))
    return {name.rpartition(".")[0] for name in names if "/" in name}


def test_every_record_is_read() -> None:
    """`results/` keeps no record that nothing reads; git has the others."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs git")
    assert not unread(), "delete them"


# ---------------------------------------------------------------- summary
# The summary of a run's records.

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
    "e2e_fp8": record(
        rows=[answered(kind, 64, 3, per_second=at) for kind, at in (("new", 80.0), ("mix", 120.0))]
    ),
    "kernels_moondream3": record(
        **{
            f"{model} {rows}x1": {"step": rows * 0.1 + ahead}
            for model, ahead in (("moondream3", 1.0), ("moondream3-e4m3-kv8", 0.5))
            for rows in (1, 8, 32)
        }
    ),
    "adapters": record(
        rows=[
            {
                "model": "moondream2",
                "rank": rank,
                "streams": n,
                "adapters": rank // 8,
                "step_ms": ms,
            }
            for n in (1, 8, 32)
            for rank, ms in ((0, 1.0 * n), (8, 1.25 * n))
        ]
    ),
    "portable_formats_ptx80": record(rows=[portable("packed", n, 1.0 + n) for n in (1, 8, 32)]),
    "portable_formats_hopper": record(
        rows=[portable(w, n, 0.5 + n) for w in ("packed", "fp8") for n in (1, 8, 32)]
    ),
    "portable_formats_kv8_hopper": record(
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
    assert (result["req_per_s_64_new_fp8"], result["req_per_s_64_mix_fp8"]) == (80.0, 120.0)
    assert (result["moondream3_ms"]["8"], result["moondream3_e4m3_ms"]["32"]) == (1.8, 3.7)
    assert result["adapter_ms"] == {"1": 0.25, "8": 2.0, "32": 8.0}
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
