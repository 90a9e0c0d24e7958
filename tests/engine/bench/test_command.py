"""The benchmark of pipelining, as a command."""

import json
import subprocess
import sys

import pytest
from legato_engine.bench import command, speculation
from legato_engine.bench.speculation_loads import PROFILES, REAL, synthetic_requests
from legato_engine.errors import InvalidField

OPTIONS = ["--model", "random-tiny", "--device", "cpu", "--threads", "1"]
OPTIONS += ["--length", "12", "--repeats", "1"]


def figures(capsys, *options):
    """What it prints as JSON."""
    assert command.main([*OPTIONS, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("task", ["query", "caption", "detect"])
def test_json(capsys, task):
    """Only the numbers of streams that were asked for are rows, with both depths' raw figures."""
    (row,) = figures(capsys, "--task", task, "--streams", "2")["rows"]
    assert (row["task"], row["streams"], row["length"]) == (task, 2, 12)
    for depth in ("blocking", "pipelined"):
        assert min(row[depth]["period"], row[depth]["forward"], row[depth]["sampling"]) > 0
    assert set(row["tokens_per_second"]) == {"1", "2"}
    assert min(row["predicted"], row["observed"]) > 0


def test_context(capsys):
    """The steps are measured at the context that was asked for."""
    (row,) = figures(capsys, "--streams", "1", "--context", "150")["rows"]
    assert row["context"] == 150


def test_compared_tasks_share_batch_and_context(capsys):
    """Detection is set against text of the same context, once per number of streams."""
    told = figures(capsys, "--streams", "1,2", "--compare-tasks")
    assert {(row["task"], row["streams"]) for row in told["rows"]} == {
        (task, streams) for task in ("query", "detect") for streams in (1, 2)
    }
    assert len({row["context"] for row in told["rows"]}) == 1
    periods = {(row["task"], row["streams"]): row["pipelined"]["period"] for row in told["rows"]}
    assert [row["streams"] for row in told["detect_over_text"]] == [1, 2]
    for row in told["detect_over_text"]:
        ratio = periods["detect", row["streams"]] / periods["query", row["streams"]]
        assert row["detect_over_text"] == pytest.approx(ratio)


def test_log_lines_are_no_figures():
    """The command's standard output can be read as JSON whatever the engine logs."""
    program = "import structlog; from legato_engine.bench import command; command.log_to_stderr()"
    program += "; structlog.get_logger().info('pictures of a launch')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b""
    assert b"pictures of a launch" in done.stderr


def test_tables(capsys):
    """Without --json the same figures come as tables, Photon's two with its own columns."""
    assert command.main([*OPTIONS, "--streams", "1,2", "--table", "photon"]) == 0
    printed = capsys.readouterr().out
    for words in ("forward (ms)", "sampling (ms)", "period (ms)", "blocking (ms)", "2 streams"):
        assert words in printed
    assert command.main([*OPTIONS, "--streams", "2", "--compare-tasks"]) == 0
    printed = capsys.readouterr().out
    for words in ("tick ms", "observed", "detect over text"):
        assert words in printed


WORKLOADS = (REAL, "0.8", "0.4", "near the end")


def test_speculation(capsys, monkeypatch):
    """Every setting stands beside plain decoding, with the same tokens and its own figures."""
    monkeypatch.setattr(speculation, "sample_pictures", lambda assembly: [])
    profile = PROFILES["0.4"]
    monkeypatch.setattr(
        speculation,
        "real_requests",
        lambda assembly, _: synthetic_requests(assembly, profile, length=9, fewest=1),
    )
    options = ("--streams", "4", "--requests", "1", "--workloads", ",".join(WORKLOADS))
    rows = figures(capsys, "--speculation", *options)["rows"]
    settings = ("off", *speculation.SETTINGS)
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


def test_speculation_under_pressure(capsys):
    """With pages for a part of the requests they give way to each other, and answers stay."""
    options = ("--streams", "4", "--length", "48", "--settings", "fixed:8,seed")
    rows = figures(capsys, "--speculation", *options, "--workloads", "under pressure")["rows"]
    assert all(row["identical"] for row in rows)
    assert all(row["kv_peak"] > 0.85 and row["kv_hit_rate"] > 0.3 for row in rows)
    assert sum(row["preemptions"] for row in rows) > 0
    assert all(row["fragmentation"] > 0 for row in rows if row["setting"] != "off")


def test_tables_of_speculation(capsys):
    """Without --json the figures come as a table; what is not there is said by name."""
    options = (
        *OPTIONS,
        "--speculation",
        "--streams",
        "1",
        "--settings",
        "fixed:2",
        "--requests",
        "1",
    )
    assert command.main([*options, "--workloads", "0.6"]) == 0
    assert "same tokens" in capsys.readouterr().out
    with pytest.raises(InvalidField, match=r"no 0\.5"):
        command.main([*options, "--workloads", "0.5"])


def test_too_short(capsys):
    """Requests without two full steps between them are refused before anything is loaded."""
    with pytest.raises(SystemExit):
        command.main([*OPTIONS, "--length", "3"])
    assert "--length is at least" in capsys.readouterr().err
