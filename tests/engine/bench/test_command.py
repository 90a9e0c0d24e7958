"""The benchmark command."""

import json
import subprocess
import sys

import pytest
from legato_engine.bench import command
from structlog.testing import capture_logs

OPTIONS = ["--model", "random-tiny", "--device", "cpu", "--threads", "1"]
OPTIONS += ["--length", "12", "--repeats", "1"]


def figures(capsys, *options):
    """Run the command; return its JSON."""
    with capture_logs():  # the process logs to stderr; these tests share one stdout with the log
        assert command.main([*OPTIONS, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("task", ["query", "caption", "detect"])
def test_json(capsys, task):
    """There is a row for each requested number of streams, with the figures of both depths."""
    (row,) = figures(capsys, "--task", task, "--streams", "2")["rows"]
    assert (row["task"], row["streams"], row["length"]) == (task, 2, 12)
    for depth in ("blocking", "pipelined"):
        assert min(row[depth]["period"], row[depth]["forward"], row[depth]["sampling"]) > 0
    assert set(row["tokens_per_second"]) == {"1", "2"}
    assert min(row["predicted"], row["observed"]) > 0


def test_context(capsys):
    """Steps are measured at the requested context."""
    (row,) = figures(capsys, "--streams", "1", "--context", "150")["rows"]
    assert row["context"] == 150


def test_compared_tasks_share_batch_and_context(capsys):
    """Detection and JSON are compared with text at one context, once per number of streams."""
    told = figures(capsys, "--streams", "1,2", "--compare-tasks")
    assert {(row["task"], row["streams"]) for row in told["rows"]} == {
        (task, streams) for task in ("query", "detect", "json") for streams in (1, 2)
    }
    assert len({row["context"] for row in told["rows"]}) == 1
    periods = {(row["task"], row["streams"]): row["pipelined"]["period"] for row in told["rows"]}
    assert [row["streams"] for row in told["detect_over_text"]] == [1, 2]
    for row in told["detect_over_text"]:
        for task in ("detect", "json"):
            ratio = periods[task, row["streams"]] / periods["query", row["streams"]]
            assert row[f"{task}_over_text"] == pytest.approx(ratio)


def test_log_lines_are_no_figures():
    """Standard output is JSON, whatever the engine logs."""
    program = "import structlog; from legato_engine.bench import command; command.log_to_stderr()"
    program += "; structlog.get_logger().info('pictures of a launch')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b""
    assert b"pictures of a launch" in done.stderr


def test_tables(capsys):
    """Without --json the figures come as tables; Photon's two have its columns."""
    assert command.main([*OPTIONS, "--streams", "1,2", "--table", "photon"]) == 0
    printed = capsys.readouterr().out
    for words in ("forward (ms)", "sampling (ms)", "period (ms)", "blocking (ms)", "2 streams"):
        assert words in printed
    assert command.main([*OPTIONS, "--streams", "2", "--compare-tasks"]) == 0
    printed = capsys.readouterr().out
    for words in ("tick ms", "observed", "detect over text"):
        assert words in printed


def test_too_short(capsys):
    """Requests too short for two full steps are refused before a model is loaded."""
    with pytest.raises(SystemExit):
        command.main([*OPTIONS, "--length", "3"])
    assert "--length is at least" in capsys.readouterr().err
