"""Log lines are batched and ordered, and none is lost."""

import asyncio
import io
import json
import select
import subprocess
import sys

from legato_service.logs.writer import LogWriter

PROGRAM = """
import asyncio, sys
from legato_service.logs import configuration as logs
import structlog
async def main():
    logs.configure("info", terminal=False)
    log = structlog.get_logger()
    log.debug("hidden")
    log.info("first", value=1.5, odd={1, 2}.__class__)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("second")
    log.info("third")
    __import__("logging").getLogger("library").warning("fourth")
asyncio.run(main())
"""


class Recorder(io.BytesIO):
    """A file that records the number of its writes, and of those that end with a line."""

    writes = ends_of_lines = largest = 0

    def write(self, data):
        """Record, then write."""
        self.writes += 1
        self.ends_of_lines += data.endswith(b"\n")
        self.largest = max(self.largest, len(data))
        return super().write(data)


async def test_lines_of_an_instant_are_written_together():
    """One write for all of them, soon and in order."""
    file = Recorder()
    lines = LogWriter(file)
    for index in range(100):
        lines.info(b"%d" % index)
    assert file.writes == 0
    while not file.getvalue():  # noqa: ASYNC110 - a timer of the loop's own
        await asyncio.sleep(0.01)
    assert file.writes == 1
    assert file.getvalue().split() == [b"%d" % index for index in range(100)]
    lines.info(b"later")
    while b"later" not in file.getvalue():  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)


async def test_writes_are_atomic_on_a_pipe():
    """No write exceeds PIPE_BUF, so that lines of other processes do not interleave."""
    file = Recorder()
    lines = LogWriter(file)
    for _ in range(100):
        lines.info(b"x" * 500)
    lines.flush()
    assert file.getvalue() == (b"x" * 500 + b"\n") * 100
    assert file.ends_of_lines == file.writes == 13
    assert file.largest <= select.PIPE_BUF


async def test_a_warning_is_written_at_once():
    """After the buffered lines, so that the log of a crash is complete."""
    file = Recorder()
    lines = LogWriter(file)
    lines.info(b"before")
    lines.warning(b"trouble")
    assert file.getvalue() == b"before\ntrouble\n"


def test_lines_without_a_loop_are_written_at_once():
    """There is no timer to flush them."""
    file = Recorder()
    LogWriter(file).info(b"alone")
    assert file.getvalue() == b"alone\n"


def test_every_line_is_json_and_none_is_lost_at_the_end():
    """Times, levels, errors and records of libraries are all written when the process exits."""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, env=environment, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["event"] for line in lines} == {"first", "second", "third", "fourth"}
    first = next(line for line in lines if line["event"] == "first")
    assert (first["value"], first["odd"], first["level"]) == (1.5, "<class 'set'>", "info")
    assert first["timestamp"].endswith("Z")
    second = next(line for line in lines if line["event"] == "second")
    assert "ValueError: why" in second["exception"]
