"""Log lines are batched and ordered; a file that takes none delays and fails no caller."""

import contextlib
import json
import os
import re
import select
import subprocess
import sys

import pytest
from legato_engine import log_sink
from legato_engine.log_sink import LogSink

LINE = b"x" * 500


class Pipe:
    """A pipe whose reading end a test holds."""

    def __init__(self):
        self.reading, self.writing = os.pipe()

    def read(self, size=1 << 20):
        """What is in the pipe, at most `size` bytes."""
        return os.read(self.reading, size)


@pytest.fixture
def pipe():
    """An empty pipe."""
    made = Pipe()
    yield made
    for descriptor in (made.reading, made.writing):
        os.close(descriptor)


def sink_to(descriptor, **options):
    """A sink whose report is `dropped N`."""
    return LogSink(descriptor, lambda count: b"dropped %d" % count, **options)


def test_lines_are_written_in_order(pipe):
    """Those of an instant together, a warning after those before it."""
    sink = sink_to(pipe.writing)
    for index in range(100):
        sink.info(b"%d" % index)
    sink.warning(b"trouble")
    assert sink.flush(10)
    assert pipe.read().split() == [*(b"%d" % index for index in range(100)), b"trouble"]


def test_a_line_needs_no_warning_and_no_flush(pipe):
    """The thread writes it soon."""
    sink_to(pipe.writing).info(b"alone")
    assert pipe.read() == b"alone\n"


def test_writes_are_atomic_on_a_pipe(monkeypatch, pipe):
    """No write exceeds PIPE_BUF, so that lines of other processes do not interleave."""
    sizes = []
    write = os.write

    def recorded(descriptor, data):
        if descriptor == pipe.writing:
            sizes.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", recorded)
    sink = sink_to(pipe.writing)
    sink.now(*[LINE] * 100)
    assert sink.flush(10)
    assert pipe.read() == (LINE + b"\n") * 100
    assert len(sizes) == 13
    assert max(sizes) <= select.PIPE_BUF


def test_a_pipe_that_nothing_reads_delays_no_caller(pipe):
    """Lines over the capacity are dropped and counted; read, the pipe tells how many."""
    before = log_sink.lines_dropped()
    sink = sink_to(pipe.writing, capacity=100_000)
    for _ in range(5000):
        sink.error(LINE)
    dropped = log_sink.lines_dropped() - before
    assert dropped > 4000
    assert not sink.flush(0.1)
    text = b""
    while sum(map(int, re.findall(rb"dropped ([0-9]+)\n", text))) < dropped:
        text += pipe.read()
    assert sum(map(int, re.findall(rb"dropped ([0-9]+)\n", text))) == dropped
    sink.info(b"after")
    while b"after" not in text:
        text += pipe.read()
    assert text.count(LINE) == 5000 - dropped


def test_a_file_that_refuses_lines_fails_no_caller():
    """Each line to a full device is dropped and counted."""
    before = log_sink.lines_dropped()
    descriptor = os.open("/dev/full", os.O_WRONLY)
    sink = sink_to(descriptor)
    for _ in range(10):
        sink.error(b"line")
    assert sink.flush(10)
    os.close(descriptor)
    assert log_sink.lines_dropped() - before == 10


def test_a_pipe_without_a_reader_fails_no_caller():
    """A broken pipe drops lines."""
    reading, writing = os.pipe()
    os.close(reading)
    sink = sink_to(writing)
    sink.error(b"line")
    assert sink.flush(10)
    os.close(writing)


def test_a_non_blocking_pipe_loses_nothing(pipe):
    """Another process with the same file may have made it non-blocking."""
    os.set_blocking(pipe.writing, False)
    sink = sink_to(pipe.writing)
    sink.now(*[LINE] * 1000)
    text = b""
    while text.count(LINE) < 1000:
        text += pipe.read()
    assert text == (LINE + b"\n") * 1000


PROGRAM = """
import structlog
{configure}
log = structlog.get_logger()
log.debug("hidden")
log.info("first", value=1.5, odd=(1).__class__)
try:
    raise ValueError("why")
except ValueError:
    log.exception("second")
log.info("third")
__import__("logging").getLogger("library").warning("fourth")
"""
SERVICE = "from legato_service import logs as c; c.configure('info', terminal={})"
ENGINE = "from legato_engine.core.process import configure_logging; configure_logging()"
CONFIGURED = {
    "service": SERVICE.format(False),
    "terminal": SERVICE.format(True),
    "engine": ENGINE,
}


def run(configure, **streams):
    """Run a program that logs and exits."""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    program = PROGRAM.format(configure=configure)
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, timeout=200, **streams
    )


@pytest.mark.parametrize("process", ["service", "engine"])
def test_every_line_is_json_and_none_is_lost_at_the_end(process):
    """Times, levels, errors and records of libraries are all written when the process exits."""
    done = run(CONFIGURED[process], stderr=subprocess.PIPE)
    lines = {line["event"]: line for line in map(json.loads, done.stderr.splitlines())}
    assert set(lines) - {"hidden"} == {"first", "second", "third", "fourth"}
    assert (lines["first"]["value"], lines["first"]["level"]) == (1.5, "info")
    assert lines["first"]["timestamp"].endswith("Z")
    assert "ValueError: why" in lines["second"]["exception"]


@pytest.mark.parametrize("configure", CONFIGURED.values(), ids=CONFIGURED)
def test_a_process_exits_whatever_its_standard_error_is(configure):
    """A full pipe, a full device and a closed descriptor end no process and keep none alive."""
    with open("/dev/full", "wb") as full:
        run(configure, stderr=full)
    run(configure, preexec_fn=lambda: os.close(2))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    run(configure, stderr=writing)
    os.close(reading)
    os.close(writing)
