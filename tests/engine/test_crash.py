"""What an engine was doing when it ended: recordings, bundles and failpoints."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
from typing import Any, cast

import pytest
from legato_engine import crash, failpoints
from legato_engine import crash as bundles
from legato_engine.config import EngineConfig
from legato_engine.crash import (
    NUM_LAUNCHES,
    STEP_TIMES,
    CrashFiles,
    Death,
    FlightRecorder,
    RowShape,
    read,
)
from legato_engine.scheduler.batch import Launch, LaunchKind, Plan, ScheduledSequence, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes, Step
from legato_engine.sequence import HostInputs, Sequence, VisualInputs, VisualPrompt
from legato_engine.types import (
    DetectSpec,
    ImageProperties,
    PromptToken,
    QuerySpec,
    Request,
    RequestKey,
)

from tests.fakes import lines_run

# ---------------------------------------------------------------- recording
# What an engine was doing is in a file, whatever ends the engine.


class Task:
    """A task without a model."""

    max_tokens = 7


class Prepared:
    """An image without a model."""

    info = ImageProperties(image_id="secret", width=640, height=480, cache_hit=False)


def sequence(seq_id, *, image=True):
    """A sequence of a detection on an image, or of a query."""
    task = DetectSpec(object="secret") if image else QuerySpec(question="secret")
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


def test_the_first_of_several_images_is_recorded(path):
    recorder = FlightRecorder(path)
    shown = sequence(0, image=False)
    visual = VisualInputs(VisualPrompt((), None, 0), [Prepared(), None])
    shown.inputs = HostInputs(visual=visual)
    recorder.submitted(shown)
    (query,) = read(path).requests
    assert (query.task, query.width, query.height) == ("query", 640, 480)


def test_shapes_are_read_back(path):
    """Of requests and launches; ended and committed ones are marked."""
    recorder = FlightRecorder(path)
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
    recorder = FlightRecorder(path)
    each = sequence(0)
    for number in range(NUM_LAUNCHES + 40):
        recorder.launching(launch(number, [each]), number)
    found = [shape.launch_id for shape in read(path).launches]
    assert found == list(range(40, NUM_LAUNCHES + 40))


def test_a_launch_of_many_rows_is_recorded_in_part(path):
    """The count is that of all."""
    recorder = FlightRecorder(path)
    recorder.launching(launch(0, [sequence(number) for number in range(100)]), 0)
    (shape,) = read(path).launches
    assert shape.num_rows == 100
    assert len(shape.rows) == 64


def test_no_content_is_recorded(path):
    """Neither ids nor texts of a request."""
    recorder = FlightRecorder(path)
    recorder.submitted(sequence(0))
    recorder.launching(launch(0, [sequence(0)]), 0)
    assert b"secret" not in path.read_bytes()


def test_a_killed_process_leaves_its_recording(path):
    """Nothing is written at an end."""
    program = (
        "import os, sys, pathlib; from tests.engine import test_crash as t;"
        "r = t.FlightRecorder(pathlib.Path(sys.argv[1])); r.submitted(t.sequence(3));"
        "r.launching(t.launch(0, [t.sequence(3)]), 5); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={"PYTHONPATH": ":".join(each for each in sys.path if each)},
        cwd=pathlib.Path(__file__).parents[2],
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
    recorder = FlightRecorder(path)
    launched = launch(0, [sequence(number) for number in range(16)])
    with lines_run() as count:
        recorder.launching(launched, 0)
    assert count() < 200


# ---------------------------------------------------------------- bundle
# A bundle holds how an engine ended and what it was doing.


@pytest.fixture
def files(tmp_path):
    """Files of an engine with one request in flight."""
    made = CrashFiles(tmp_path / "engine")
    recorder = FlightRecorder(made.recording)
    recorder.submitted(sequence(0))
    recorder.launching(launch(0, [sequence(0)]), 0)
    recorder.add(step(launch(0, [sequence(0)])))
    recorder.launching(launch(1, [sequence(0)]), 0)
    made.stacks.write_text("Thread 1: step")
    return made


def write(files, folder, exit_code=-9, keep=8):
    """Write a bundle."""
    death = Death(pid=4711, exit_code=exit_code, uptime=1.5, restarts=0)
    return bundles.write(files, death, EngineConfig(), folder, keep)


def test_a_bundle_is_read_back(tmp_path, files):
    """Its signal, settings, versions, launches, stacks and times."""
    folder = tmp_path / "crashes"
    path = write(files, folder)
    bundle = bundles.load(path)
    assert bundle == bundles.load(path / "bundle.json")
    assert (bundle.signal, bundle.death.exit_code, bundle.death.pid) == ("SIGKILL", -9, 4711)
    assert bundle.config == EngineConfig()
    assert {"python", "msgspec"} <= set(bundle.versions)
    assert [shape.seq_id for shape in bundle.in_flight] == [0]
    assert [shape.committed for shape in bundle.launches] == [True, False]
    assert (path / "stacks.txt").read_text() == "Thread 1: step"
    assert json.loads((path / "timeline.json").read_text())["traceEvents"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "secret" not in "".join(each.read_text() for each in path.iterdir())


def test_the_newest_are_kept(tmp_path, files):
    """And no other folder's are touched."""
    folder = tmp_path / "crashes"
    folder.mkdir()
    (folder / "other").mkdir()
    paths = [write(files, folder, keep=3) for _ in range(6)]
    assert sorted(folder.iterdir()) == sorted([*paths[3:], folder / "other"])


def test_an_engine_that_wrote_nothing_has_a_bundle(tmp_path):
    """It may have died before it could."""
    path = write(CrashFiles(tmp_path / "none"), tmp_path / "crashes", exit_code=1)
    bundle = bundles.load(path)
    assert (bundle.signal, bundle.launches, bundle.requests) == ("", (), ())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_not_used(tmp_path, files):
    """The default folder's name can be guessed."""
    folder = tmp_path / "crashes"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError):
        write(files, folder)


def test_stacks_are_private(tmp_path):
    """Both files of a running engine have mode 0600, whatever the umask says."""
    crash_files = CrashFiles(tmp_path / ".ns-1")
    before = os.umask(0o022)
    try:
        with crash_files.open_stacks() as stacks:
            stacks.write("first")
        with crash_files.open_stacks() as stacks:
            stacks.write(" second")
    finally:
        os.umask(before)
    assert crash_files.stacks.read_text() == "first second"
    assert stat.S_IMODE(crash_files.stacks.stat().st_mode) == 0o600
    crash_files.remove()
    crash_files.stacks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        crash_files.open_stacks()


# ---------------------------------------------------------------- failpoints


def run(text: str, code: str) -> subprocess.CompletedProcess[str]:
    script = f"from legato_engine import failpoints\n{code}"
    environment = {**os.environ, failpoints.VARIABLE: text}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )


def test_without_the_variable_nothing_happens():
    assert run("", "print(failpoints.ACTIVE, failpoints.hit('a'))").stdout == "False False\n"


def test_only_the_numbered_hit_raises():
    code = "failpoints.hit('a.b'); failpoints.hit('a.b')"
    assert "InjectedFault: a.b" in run("a.b=raise@2", code).stderr
    assert run("a.b=raise@3", code).returncode == 0


@pytest.mark.parametrize(
    ("action", "code"), [("exit", failpoints.EXIT_CODE), ("kill", -signal.SIGKILL)]
)
def test_the_process_ends(action: str, code: int) -> None:
    assert run(f"a={action}", "failpoints.hit('a')").returncode == code


def test_corruption_is_left_to_the_site():
    assert run("a=corrupt", "print(failpoints.hit('a'), failpoints.hit('b'))").stdout == (
        "True False\n"
    )


def test_a_share_of_the_hits():
    code = "print(sum(failpoints.hit('a') for _ in range(10000)))"
    assert 2500 < int(run("a=corrupt%30", code).stdout) < 3500


def test_only_hits_on_the_subject_count() -> None:
    code = "print([failpoints.hit('a', each) for each in ('is xy', 'is z', 'xyz')])"
    assert run("a[xy]=corrupt@2", code).stdout == "[False, False, True]\n"


def test_malformed_entries_are_refused():
    assert "malformed entry 'a=explode'" in run("a=explode", "").stderr
