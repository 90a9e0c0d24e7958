"""The record of the speculation benchmark, from a run of the smallest model."""

import json

from benchmarks import speculation
from benchmarks.provenance import ALLOW_DIRTY

MODEL = ("--model", "random-tiny", "--device", "cpu", "--threads", "1", "--repeats", "1")


def test_a_record_has_tables_plots_and_series(tmp_path, monkeypatch, capsys):
    """The record has tables, plots and series, and the plots show the policies' choices."""
    monkeypatch.setenv("LEGATO_RESULTS", str(tmp_path))
    monkeypatch.setenv(ALLOW_DIRTY, "1")
    options = ("--streams", "2", "--length", "24", "--settings", "fixed:2,seed", "--requests", "1")
    assert speculation.main([*MODEL, *options, "--workloads", "0.8,under pressure"]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    plots = {f"speculation_{kind}.svg" for kind in ("blocks", "acceptance", "pressure", "latency")}
    assert names == {"speculation.json", "speculation_series.json", *plots}
    record = json.loads((tmp_path / "speculation.json").read_text())
    assert all(f"({plot})" in "".join(record["tables"]) for plot in plots)
    rows = record["figures"]["rows"]
    assert [row["setting"] for row in rows] == ["off", "fixed:2", "seed"] * 2
    series = json.loads((tmp_path / "speculation_series.json").read_text())
    assert len(series) == len(rows)
    chosen = [block for line in series[2]["blocks"] for _, block, _ in line]
    assert len(chosen) > 0
    assert max(chosen) > 2
    assert "0.8: seed" in (tmp_path / "speculation_blocks.svg").read_text()
