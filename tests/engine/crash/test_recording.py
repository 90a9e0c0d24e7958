"""What an engine was doing is in a file, whatever ends the engine."""

import pathlib
import subprocess
import sys
from typing import Any, cast

import pytest
from legato_engine import crash
from legato_engine.crash import NUM_LAUNCHES, STEP_TIMES, Recorder, RowShape, read
from legato_engine.scheduler.batch import Launch, LaunchKind, Plan, ScheduledSequence, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes
from legato_engine.sequence import HostInputs, Sequence
from legato_engine.telemetry import Step
from legato_engine.types import DetectTask, ImageInfo, PromptToken, QueryTask, Request, RequestKey

from tests.work import lines_run


class Task:
    """A task without a model."""

    max_tokens = 7


class Prepared:
    """An image without a model."""

    info = ImageInfo(image_id="secret", width=640, height=480, cache_hit=False)


def sequence(seq_id, *, image=True):
    """A sequence of a detection on an image, or of a query."""
    task = DetectTask(object="secret") if image else QueryTask(question="secret")
    return Sequence(
        seq_id=seq_id,
        request=Request(request_id=RequestKey("secret"), task=task),
        task=cast(Any, Task()),
        prefix_key=None,
        prefix_length=730 if image else 1,
        prompt=tuple(PromptToken(token_id) for token_id in range(5)),
        num_crops=3 if image else 0,
        inputs=HostInputs(Prepared() if image else None),
    )


def launch(number, rows, kind=LaunchKind.DECODE):
    """A launch of these sequences at position 740."""
    scheduled = tuple(ScheduledSequence(each, 740, 1, num_drafts=2, slack=1) for each in rows)
    return Launch(number, number % 2, Plan(kind, scheduled))


def step(launched):
    """A committed launch."""
    times: dict[str, Any] = dict(zip(STEP_TIMES, range(100, 107), strict=False))
    record = StepRecord(launched, **times, commit_end=900, tokens=4)
    return Step(record, LaunchTimes(1, 2, 3, 4, 5))


@pytest.fixture
def path(tmp_path):
    """A recording's path."""
    return tmp_path / "recording"


def test_shapes_are_read_back(path):
    """Of requests and launches; ended and committed ones are marked."""
    recorder = Recorder(path)
    one, two = sequence(0), sequence(1, image=False)
    recorder.submitted(one)
    recorder.submitted(two)
    first, second = launch(0, [one, two]), launch(1, [two])
    recorder.launching(first, 11)
    recorder.launching(second, 22)
    recorder.add(step(first))
    recorder.ended(one)
    found = read(path)
    detect, query = found.requests
    assert (detect.task, detect.width, detect.height, detect.num_crops) == ("detect", 640, 480, 3)
    assert (detect.prefix_length, detect.prompt_tokens, detect.max_tokens) == (730, 5, 7)
    assert (query.task, query.width, query.prefix_length) == ("query", 0, 1)
    assert (detect.in_flight, query.in_flight) == (False, True)
    committed, open_ = found.launches
    assert committed.rows == (RowShape(0, 740, 1, 2, 1), RowShape(1, 740, 1, 2, 1))
    assert (committed.kind, committed.at, committed.num_rows) == ("decode", 11, 2)
    assert (committed.committed, open_.committed) == (True, False)
    (times,) = found.steps
    assert times.times[:8] == (100, 101, 102, 103, 104, 105, 106, 900)
    assert times.times[8:] == (1, 2, 4, 5)
    assert times.tokens == 4


def test_the_latest_launches_stay(path):
    """Older ones are overwritten."""
    recorder = Recorder(path)
    each = sequence(0)
    for number in range(NUM_LAUNCHES + 40):
        recorder.launching(launch(number, [each]), number)
    found = [shape.launch_id for shape in read(path).launches]
    assert found == list(range(40, NUM_LAUNCHES + 40))


def test_a_launch_of_many_rows_is_recorded_in_part(path):
    """The count is that of all."""
    recorder = Recorder(path)
    recorder.launching(launch(0, [sequence(number) for number in range(100)]), 0)
    (shape,) = read(path).launches
    assert shape.num_rows == 100
    assert len(shape.rows) == 64


def test_no_content_is_recorded(path):
    """Neither ids nor texts of a request."""
    recorder = Recorder(path)
    recorder.submitted(sequence(0))
    recorder.launching(launch(0, [sequence(0)]), 0)
    assert b"secret" not in path.read_bytes()


def test_a_killed_process_leaves_its_recording(path):
    """Nothing is written at an end."""
    program = (
        "import os, sys, pathlib; from tests.engine.crash import test_recording as t;"
        "r = t.Recorder(pathlib.Path(sys.argv[1])); r.submitted(t.sequence(3));"
        "r.launching(t.launch(0, [t.sequence(3)]), 5); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={"PYTHONPATH": ":".join(each for each in sys.path if each)},
        cwd=pathlib.Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == -9
    found = read(path)
    assert [shape.seq_id for shape in found.requests] == [3]
    assert len(found.launches) == 1


def test_what_cannot_be_read_is_empty(path):
    """A process may die before it has made the file."""
    assert read(path) == crash.Recording()
    path.write_bytes(b"other")
    assert read(path) == crash.Recording()


def test_a_launch_costs_little(path):
    """Sixteen rows, the default batch, take a few lines of Python each: some microseconds."""
    recorder = Recorder(path)
    launched = launch(0, [sequence(number) for number in range(16)])
    with lines_run() as count:
        recorder.launching(launched, 0)
    assert count() < 200
