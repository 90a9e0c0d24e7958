"""`legato run`: each image, or frame of a video, is asked about once and kept in the file."""

from __future__ import annotations

import base64
import fractions
import io
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import av
import grpc
import numpy as np
import pytest
from legato.v1 import inference_pb2, task_pb2
from legato_client import CaptionTask, DetectTask, PointTask, QueryTask, Sampling, SegmentTask
from legato_client.batch import video
from legato_client.batch.images import Key, RunError, files
from legato_client.batch.output import Line, Output, encode, file_name
from legato_client.batch.tasks import parse, parse_all
from PIL import Image

from tests.clients.python.conftest import read
from tests.clients.python.fake_server import INFO, FakeServer, failure, retry_info
from tests.e2e.server import until

Code = grpc.StatusCode


def sources(lines):
    return sorted(line["source"] for line in lines)


def test_several_tasks_are_one_request(run, folder, server):
    """The image is sent once, and its line has every task's result under the task's name."""
    code, lines, out, err = run(folder, "--task", "caption", "--task", "segment:cat")
    assert (code, err) == (0, "")
    assert "12 images" in out
    assert server.count("RunTasks") == 12
    assert sources(lines) == [str(folder / f"{number:02}.png") for number in range(12)]
    line = lines[0]
    assert (line["width"], line["height"]) == (200, 100)
    assert list(line["results"]) == ["caption", "segment:cat", "detect:cat"]
    (box,) = line["results"]["detect:cat"]["objects"]
    assert box["box"] == {"x_min": 0.25, "y_min": 0.5, "x_max": 0.75, "y_max": 1.0}
    assert box["box_pixels"] == [50, 50, 150, 100]
    (outline,) = line["results"]["segment:cat"]["segments"]
    assert outline["polygons_pixels"] == [[50, 50, 150, 50, 150, 100]]
    assert line["results"]["caption"] == {
        "caption": "a cat", "finish_reason": "stop", "model": "fake", "request_id": "r-1",
    }  # fmt: skip


def test_nothing_is_asked_twice(run, folder, server):
    """A run that is complete asks nothing; new images are asked when they appear."""
    assert run(folder)[0] == 0
    (folder / "more.jpeg").write_bytes(b"more")
    (folder / "notes.txt").write_bytes(b"no image")
    (folder / ".hidden.png").write_bytes(b"none to show")
    code, lines, out, _ = run(folder, folder / "00.png")
    assert (code, len(lines), server.count("RunTasks")) == (0, 13, 13)
    assert "1 of them new" in out


def test_own_drawings_are_no_images(folder):
    """A folder is searched to its depths, without those that the run writes to."""
    for name in ("drawn", "inner", ".hidden"):
        (folder / name).mkdir()
        (folder / name / "z.WebP").write_bytes(b"")
    found = list(files([str(folder)], [folder / "inner" / ".." / "drawn"], io.BytesIO()))
    assert found[-1] == str(folder / "inner" / "z.WebP")
    assert len(found) == 13


def test_names_on_standard_input(run, folder, monkeypatch):
    """Each line names a file; one that is missing is a line with an error."""
    names = f"{folder}/00.png\n\n{folder}/01.png\r\n{folder}/none.png\n{folder}/00.png\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(os.fsencode(names))))
    code, lines, _, err = run("-")
    assert code == 1
    assert "1 of 3 images failed" in err
    (bad,) = [line for line in lines if "error" in line]
    assert bad["source"].endswith("none.png")
    assert bad["error"]["code"] == "UNREADABLE"
    assert "No such file" in bad["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
def test_lists_of_names_of_other_systems(run, folder, monkeypatch, encoding):
    """With the mark that some editors and PowerShell put before them, in either encoding."""
    mark = "\ufeff" if encoding.startswith("utf-16") else ""
    (folder / "ü.png").write_bytes(b"picture")
    names = f"{mark}{folder}/00.png\r\n{folder}/ü.png\r\n".encode(encoding)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(names)))
    code, lines, _, _ = run("-")
    assert code == 0
    assert sources(lines) == [f"{folder}/00.png", f"{folder}/ü.png"]


def test_names_are_taken_as_they_arrive(folder):
    """A list without an end is not read to its end."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as stdin, open(writing, "wb", buffering=0) as names:
        found = files(["-"], [], stdin)
        for number in range(2):
            names.write(b"%d.png\n" % number)
            assert next(found) == f"{number}.png"


@pytest.mark.timeout(60)
def test_pipes_and_sockets_do_not_block(run, folder, monkeypatch):
    """A folder's are passed over like other files; one that was named is a line with an error."""
    os.mkfifo(folder / "pipe.png")
    os.mkfifo(folder / "pipe.mp4")
    (folder / "broken.png").symlink_to("nowhere")
    (folder / "link.png").symlink_to("00.png")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(folder)
        listening.bind("socket.png")
        assert len(list(files([str(folder)], [], io.BytesIO()))) == 14
        names = f"{folder}/pipe.png\n{folder}/socket.png\n".encode()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(names)))
        code, lines, _, _ = run(folder, folder / "pipe.mp4", "-")
    assert code == 1
    failed = {Path(line["source"]).name: line["error"] for line in lines if "error" in line}
    assert failed.keys() == {"broken.png", "pipe.mp4", "pipe.png", "socket.png"}
    assert all(each["code"] == "UNREADABLE" for each in failed.values())
    assert "not a regular file" in failed["pipe.png"]["message"]
    assert len(lines) == 17


def test_names_that_are_no_text(run, folder, server, tmp_path):
    """Such an image is asked about once and drawn, and COCO's file has its name as bytes too."""
    name = os.fsdecode(b"\xe4\xff.png")
    scene = io.BytesIO()
    Image.new("RGB", (200, 100)).save(scene, "PNG")
    for each in folder.iterdir():
        each.unlink()
    (folder / name).write_bytes(scene.getvalue())
    coco, drawn = tmp_path / "coco.json", tmp_path / "drawn"
    for _ in range(2):
        code, (line,), _, _ = run(folder, "--coco", coco, "--annotate", drawn)
        assert code == 0
    assert server.count("RunTasks") == 1
    assert line["source"] == f"{folder}/\ufffd\ufffd.png"
    assert base64.b64decode(line["source_base64"]) == os.fsencode(folder / name)
    (image,) = json.loads(coco.read_text("utf-8"))["images"]
    assert image["file_name"] == line["source"]
    assert image["file_name_base64"] == line["source_base64"]
    assert b"\\ud" not in coco.read_bytes()
    assert os.listdir(os.fsencode(drawn)) == [b"\xe4\xff.png"]


def test_a_message_may_name_what_is_no_text(folder, server, tmp_path):
    """It is shown on any terminal, and standard output is still valid JSON."""
    output = tmp_path / os.fsdecode(b"\xff.jsonl")
    command = [sys.executable, "-m", "legato_client.cli", "run", folder, "--task", "detect:cat"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"LEGATO_SERVER": server.target, "PYTHONIOENCODING": "utf-8:strict"}
    for words in ([], ["--json"]):
        done = subprocess.run(
            [*command, "--output", output, *words],
            env=environment,
            capture_output=True,
            timeout=100,
            check=True,
        )
    assert json.loads(done.stdout.decode())["images"] == 12


def test_a_image_that_fails_does_not_stop_the_run(run, folder, server):
    """Its error is typed, the exit code tells, and `--retry-failed` asks again."""
    server.script["RunTasks"] += [
        failure(Code.INVALID_ARGUMENT, "IMAGE_UNDECODABLE"),
        failure(Code.INTERNAL, "NUMERIC"),
        failure(Code.DEADLINE_EXCEEDED, ""),
    ]
    code, lines, _, err = run(folder)
    assert (code, len(lines)) == (1, 12)
    assert "3 of 12" in err
    errors = {(e["code"], e["reason"]) for line in lines if (e := line.get("error"))}
    assert errors == {
        ("INVALID_ARGUMENT", "IMAGE_UNDECODABLE"),
        ("INTERNAL", "NUMERIC"),
        ("DEADLINE_EXCEEDED", ""),
    }
    assert run(folder)[0] == 1
    assert server.count("RunTasks") == 12
    code, lines, _, _ = run(folder, "--retry-failed")
    assert (code, len(set(sources(lines)))) == (0, 12)
    assert server.count("RunTasks") == 15


def test_a_task_that_fails_alone(run, folder, server):
    """The other results of the image are kept beside its error."""
    failed = task_pb2.TaskResult(error=failure(Code.INTERNAL, "NUMERIC").status())
    good = task_pb2.TaskResult(caption=task_pb2.CaptionResult(caption="a cat"))
    server.script["RunTasks"].append(
        inference_pb2.RunTasksResponse(results=[good, failed], info=INFO)
    )
    code, (line,), _, _ = run(folder / "00.png", "--task", "caption")
    assert code == 1
    assert line["results"]["detect:cat"]["error"]["reason"] == "NUMERIC"
    assert line["results"]["caption"]["caption"] == "a cat"


@pytest.mark.parametrize(
    ("reply", "exit_code"),
    [
        (failure(Code.UNAVAILABLE, ""), 4),
        (failure(Code.UNAUTHENTICATED, ""), 1),
        (failure(Code.NOT_FOUND, "MODEL_NOT_FOUND"), 3),
        (failure(Code.INVALID_ARGUMENT, "INVALID_FIELD"), 2),
        (failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"), 6),
    ],
)
def test_what_every_image_would_meet_ends_the_run(run, folder, server, reply, exit_code):
    """No image gets a line for it, and a later run asks about the rest."""
    server.script["RunTasks"] += [None] * 3 + [reply] * 200
    code, lines, _, err = run(folder, "--parallel", "1")
    assert (code, len(lines)) == (exit_code, 3)
    assert "legato: error" in err
    server.script.clear()
    code, lines, _, _ = run(folder)
    assert (code, len(set(sources(lines))), len(lines)) == (0, 12, 12)


def test_a_task_that_the_server_cannot_do_ends_the_run(run, folder, server):
    """Also where it is one of several, because it would be missing for every image."""
    refused = failure(Code.FAILED_PRECONDITION, "TASK_UNSUPPORTED").status()
    good = task_pb2.TaskResult(caption=task_pb2.CaptionResult(caption="a cat"))
    reply = inference_pb2.RunTasksResponse(results=[good, task_pb2.TaskResult(error=refused)])
    server.script["RunTasks"] += [reply] * 12
    code, lines, _, err = run(folder, "--task", "caption")
    assert (code, lines) == (1, [])
    assert "TASK_UNSUPPORTED" in err


def test_a_server_that_says_when_is_asked_again(run, folder, server):
    """Busy, or starting: more often than a single call of the client would."""
    again = [failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_info(0.001))] * 9
    starting = [failure(Code.UNAVAILABLE, "ENGINE_STARTING", retry_info(0.001))] * 9
    server.script["RunTasks"] += again + starting
    code, lines, _, _ = run(folder, "--parallel", "1")
    assert (code, len(lines)) == (0, 12)


@pytest.mark.parametrize(
    "words",
    [("no-such-folder",), (".", "--task", "find:cup"), (".", "--every", "2", "--fps", "3"), ()],
)
def test_wrong_usage(run, server, words):
    """It is said before anything is asked."""
    code, lines, _, err = run(*words)
    assert (code, lines) == (2, [])
    assert "legato: error" in err
    assert not server.requests


def test_coco_needs_boxes(run, folder):
    """Said before the run, not after it."""
    code, _, _, err = run(folder, "--coco", "x.json", task="caption")
    assert code == 2
    assert "detect or segment" in err


def test_settings(run, folder, server, tmp_path, monkeypatch):
    """Options come from the environment and from a file too."""
    config = tmp_path / "legato.toml"
    config.write_text("[run]\nmax-objects = 4\nsorted = true\n")
    monkeypatch.setenv("LEGATO_TEMPERATURE", "0.5")
    code, lines, _, _ = run(folder, "--config", config)
    assert code == 0
    assert [line["source"] for line in lines] == sources(lines)
    task = server.last("RunTasks").tasks[0]
    assert (task.detect.max_objects, task.sampling.temperature) == (4, 0.5)


def test_json(run, folder):
    """One document, with the counts."""
    _, _, out, _ = run(folder, "--json")
    document = json.loads(out)
    assert (document["images"], document["new"], document["failed"]) == (12, 12, 0)


class GatedServer(FakeServer):
    """Answers RunTasks `permits` times, then keeps its callers waiting; counts what it answered."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.open = threading.Event()
        self.inside = 0
        self.answered: list[bytes] = []
        self._lock = threading.Lock()

    def RunTasks(self, request, context):
        """Waits for a permit; a caller that is gone takes none."""
        with self._lock:
            self.inside += 1
        try:
            while not self.open.is_set() and not self.permits.acquire(timeout=0.02):
                if not context.is_active():
                    context.abort(Code.CANCELLED, "")
            with self._lock:
                self.answered.append(request.image.encoded.data)
            return super().RunTasks(request, context)
        finally:
            with self._lock:
                self.inside -= 1


def wait_for_lines(path, count):
    """Return once the file has so many line ends."""
    until(lambda: path.read_bytes().count(b"\n") == count)


@pytest.mark.parametrize(
    ("num_files", "kills_after"),
    [
        (12, (3, 4)),
        pytest.param(10_000, (2_500, 4_000), marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_killed_twice_and_complete(tmp_path, num_files, kills_after):
    """After SIGKILL while requests are in flight, every image has one line.

    Those done are not asked again, and a torn line is not taken for one.
    """
    folder = tmp_path / "images"
    for number in range(num_files):
        (folder / f"{number // 1000}").mkdir(parents=True, exist_ok=True)
        (folder / f"{number // 1000}" / f"{number:05}.png").write_bytes(b"image %d" % number)
    output = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "legato_client.cli",
        "run",
        str(folder),
        "--task",
        "detect:cat",
    ]
    command += ["--output", str(output), "--parallel", "3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = GatedServer()
    with server:
        environment["LEGATO_SERVER"] = server.target

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

        done = 0
        for permits in kills_after:
            server.permits = threading.Semaphore(permits)
            done += permits
            child = start()
            until(lambda: server.inside == 3)
            wait_for_lines(output, 1 + done)
            child.send_signal(signal.SIGKILL)
            assert child.wait(60) == -signal.SIGKILL
            until(lambda: server.inside == 0)
            with output.open("ab") as torn:
                torn.write(b'{"source": "images/0/00011.png", "width": 20')
        server.open.set()
        assert start().wait(600) == 0
    paths = sorted(folder.glob("*/*.png"))
    assert sources(read(output)) == [str(path) for path in paths]
    assert sorted(server.answered) == sorted(path.read_bytes() for path in paths)


# ---------------------------------------------------------------- output
# The file of a run holds the images that are done, whatever ended the run before.

SETTINGS = {"tasks": ["detect:cup"], "every": 1}
LINES: list[Line] = [
    {"source": "b.png", "results": {}},
    {**file_name("source", "ä\udcff.png"), "error": {"code": "INTERNAL"}},
    {"source": "a.mp4", "frame": 10, "results": {"detect:cup": {"objects": []}}},
    {"source": "a.mp4", "frame": 2, "results": {"detect:cup": {"error": {}}}},
]
KEYS = [Key("b.png", None), Key("ä\udcff.png", None), Key("a.mp4", 10), Key("a.mp4", 2)]


@pytest.fixture
def path(tmp_path):
    """The complete file of a run."""
    path = tmp_path / "out.jsonl"
    with Output(path, SETTINGS) as output:
        for line in LINES:
            output.append(line)
    return path


def test_a_file_that_ends_anywhere_holds_its_whole_lines(path):
    """Cut inside or beside a line's end, it has the images whose lines are whole, and goes on."""
    whole = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    places = {*range(0, len(whole), 11), *(end + near for end in ends for near in (-1, 0, 1))}
    for end in sorted(places):
        path.write_bytes(whole[:end])
        count = sum(each <= end for each in ends[1:])
        with Output(path, SETTINGS) as output:
            assert output.done == set(KEYS[:count])
            for line in LINES[count:]:
                output.append(line)
        assert path.read_bytes() == whole


def test_what_is_counted(path):
    """Errors of images and of single tasks, read or written."""
    with Output(path, SETTINGS) as output:
        assert output.num_failed == 2
        assert list(output.lines()) == LINES
        output.append({"source": "c.png", "error": {}})
        assert output.num_failed == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {**SETTINGS, "tasks": ["detect:dog"]},
            r'tasks \["detect:cup"\] there, tasks \["detect:dog',
        ),
        ({**SETTINGS, "every": 2}, "every 1 there, every 2 now"),
        ({**SETTINGS, "seed": 3}, "seed null there, seed 3 now"),
    ],
)
def test_another_question_is_refused(path, settings, said):
    """The message says what differs, and the file is as it was."""
    before = path.read_bytes()
    with pytest.raises(RunError, match=said):
        Output(path, settings)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"a,b\n1,2\n", b'{"legato_ru', b"notes", b"[1]\n", b'{"legato_run": 2}\n']
)
def test_another_file_is_refused(tmp_path, content):
    """Nothing of a file that no run wrote is cut off; the beginning of a header is begun again."""
    path = tmp_path / "notes"
    path.write_bytes(content)
    if content.startswith(b'{"legato_ru') and b"\n" not in content:
        Output(path, SETTINGS)
        return
    with pytest.raises(RunError):
        Output(path, SETTINGS)
    assert path.read_bytes() == content


def test_a_broken_line_inside_is_refused(path):
    """It was not a run that did this, so its line is named."""
    content = path.read_bytes().replace(b'"frame": 10', b'"frame" 10')
    path.write_bytes(content)
    with pytest.raises(RunError, match="line 4"):
        Output(path, SETTINGS)
    assert path.read_bytes() == content


def test_one_run_at_a_time(path):
    """Also after the file was replaced by its sorted one."""
    with Output(path, SETTINGS) as output:
        for _ in range(2):
            with pytest.raises(RunError, match="another run"):
                Output(path, SETTINGS)
            output.sort()
    Output(path, SETTINGS).__exit__(None, None, None)


def test_only_files(tmp_path):
    """What cannot be read again is no output."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(RunError, match="not a file"):
            Output(path, SETTINGS)


def test_sorted(path):
    """By name, then by number; what is written later comes after."""
    with Output(path, SETTINGS) as output:
        output.sort()
        output.append({"source": "0.png", "results": {}})
        assert [key for key, _ in output.places()] == [
            *(KEYS[i] for i in (3, 2, 0, 1)),
            ("0.png", None),
        ]
    with Output(path, SETTINGS) as output:
        assert len(output.done) == 5
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_failed_images_are_forgotten(path):
    """So that they are asked again; the others keep their lines."""
    with Output(path, SETTINGS) as output:
        output.drop_failed()
        assert output.num_failed == 0
        assert output.done == {KEYS[0], KEYS[2]}
        assert list(output.lines()) == [LINES[0], LINES[2]]


def test_a_full_disk(path):
    """The line that does not fit is an error, and leaves no part behind, nor does a later one."""
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Output(path, SETTINGS) as output:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                output.append({"source": "x" * 100, "results": {}})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(OSError, match="earlier"):
            output.append({"source": "y", "results": {}})
    assert path.read_bytes() == before


def test_threads(tmp_path):
    """Lines of many threads are whole."""
    path = tmp_path / "out.jsonl"
    with Output(path, SETTINGS) as output:

        def write(thread: int) -> None:
            for number in range(20):
                output.append({"source": f"{thread}/{number}", "text": "x" * 3000, "results": {}})

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    found = [json.loads(line)["source"] for line in path.read_text().splitlines()[1:]]
    assert sorted(found) == sorted(f"{a}/{b}" for a in range(4) for b in range(20))


def test_a_name_that_is_no_text_is_valid_json():
    """Strict readers take the line, and the name's bytes are there beside what can be shown."""
    line = {**file_name("source", "ä\udcff.png"), "error": {"message": "cannot read ä\udcff.png"}}
    found = json.loads(encode(line).decode())
    assert found["source"] == "ä\ufffd.png"
    assert base64.b64decode(found["source_base64"]) == "ä".encode() + b"\xff.png"
    assert found["error"]["message"] == "cannot read ä\ufffd.png"
    assert b"\\u" not in encode(line)
    assert file_name("source", "Tür.png") == {"source": "Tür.png"}


def test_names_of_earlier_runs_are_still_known(path):
    """They were escaped as half of a pair, and are done."""
    with path.open("ab") as file:
        file.write(b'{"source": "\\udcfe.png", "results": {}}\n')
    with Output(path, SETTINGS) as output:
        assert Key("\udcfe.png", None) in output.done


def test_text_is_readable():
    """Other letters than ASCII's are written as they are."""
    assert "Tür".encode() in encode({"source": "Tür.png"})


# ---------------------------------------------------------------- tasks

COLD = Sampling(temperature=0)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("detect:red cup", DetectTask("red cup", 3, COLD, min_confidence=0.5)),
        ("point: nose", PointTask("nose", 3, sampling=COLD, min_confidence=0.5)),
        ("segment:a:b", SegmentTask("a:b", sampling=COLD)),
        ("caption", CaptionTask("normal", COLD)),
        ("caption:long", CaptionTask("long", COLD)),
        ("query:What?", QueryTask("What?", sampling=COLD)),
    ],
)
def test_names(name, task):
    """The skill, a colon, and its text; what the text may hold is not restricted."""
    assert parse(name, COLD, 3, 0.5) == task


@pytest.mark.parametrize("name", ["detect", "detect:", "query: ", "caption:huge", "find:cup", ""])
def test_mistakes(name):
    """A skill that does not exist, or whose text is missing or wrong."""
    with pytest.raises(ValueError, match=r"task|text|caption"):
        parse(name, COLD, None)


def test_lists():
    """Each task once, in their order, and no more than a request may have."""
    assert list(parse_all(["caption", "detect:b", "detect:a"], COLD, None)) == [
        "caption", "detect:b", "detect:a",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="same"):
        parse_all(["caption", "caption"], COLD, None)
    with pytest.raises(ValueError, match="at most 32"):
        parse_all([f"detect:{n}" for n in range(33)], COLD, None)


SIZE = WIDTH, HEIGHT = (64, 48)
RED, GREEN, BLUE, WHITE = (200, 30, 30), (30, 160, 40), (40, 40, 200), (255, 255, 255)
CORNERS = [[RED, GREEN], [BLUE, WHITE]]
EVERY = video.FrameChoice()


def scene(size: tuple[int, int] = SIZE) -> Image.Image:
    """A colour in each corner."""
    return Image.fromarray(np.array(CORNERS, np.uint8)).resize(size, Image.Resampling.NEAREST)


def corners(image: Image.Image) -> list[list[tuple[int, int, int]]]:
    """The colours of `CORNERS` that the corners are nearest to, which is near enough."""
    known = np.array(CORNERS).reshape(4, 3)
    rows = []
    for y in (1 / 4, 3 / 4):
        row = []
        for x in (1 / 4, 3 / 4):
            pixel = np.array(image.getpixel((int(image.width * x), int(image.height * y))))
            distances = np.abs(known - pixel).max(axis=1)
            assert distances.min() < 25, pixel
            row.append(tuple(known[distances.argmin()].tolist()))
        rows.append(row)
    return rows


def write(
    path: Path,
    times: tuple[int, ...] = (0, 1, 2),
    *,
    aspect: fractions.Fraction | None = None,
    size: tuple[int, int] = SIZE,
) -> Path:
    """A video of the scene; `times` are in hundredths of a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = size
        stream.codec_context.time_base = fractions.Fraction(1, 100)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for time in times:
            frame = av.VideoFrame.from_image(scene(size))
            frame.pts, frame.time_base = time, fractions.Fraction(1, 100)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def set_matrix(path: Path, matrix: tuple[float, float, float, float]) -> None:
    """Write a, b, c and d of the display matrix into the header of the MP4 file's track."""
    data = bytearray(path.read_bytes())
    header = data.index(b"tkhd") + 4
    assert data[header] == 0, "the version with times of 32 bits"
    a, b, c, d = (round(each * (1 << 16)) for each in matrix)
    struct.pack_into(">9i", data, header + 40, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


DISPLAYED = {  # matrix: what is shown, by the definition in ISO/IEC 14496-12
    (1, 0, 0, 1): [[RED, GREEN], [BLUE, WHITE]],
    (-1, 0, 0, 1): [[GREEN, RED], [WHITE, BLUE]],
    (1, 0, 0, -1): [[BLUE, WHITE], [RED, GREEN]],
    (-1, 0, 0, -1): [[WHITE, BLUE], [GREEN, RED]],
    (0, 1, -1, 0): [[BLUE, RED], [WHITE, GREEN]],
    (0, -1, 1, 0): [[GREEN, WHITE], [RED, BLUE]],
    (0, 1, 1, 0): [[RED, BLUE], [GREEN, WHITE]],
    (0, -1, -1, 0): [[WHITE, GREEN], [BLUE, RED]],
    (0, 0, 0, 0): [[RED, GREEN], [BLUE, WHITE]],  # broken
}


@pytest.mark.parametrize("matrix", DISPLAYED)
def test_frames_are_turned_and_mirrored(tmp_path, matrix):
    """As the display matrix says, drawn on and sent."""
    path = write(tmp_path / "a.mp4")
    set_matrix(path, matrix)
    (frame, *_) = video.frames(str(path), EVERY)
    assert corners(frame.image()) == DISPLAYED[matrix]
    size = SIZE if not matrix[1] else SIZE[::-1]
    assert frame.image().size == size
    sent = frame.read()
    assert (sent.width, sent.height) == size
    assert bytes(sent.view) == frame.image().tobytes()


@pytest.mark.parametrize(
    ("aspect", "size"),
    [
        ("1", (64, 48)),
        ("4/3", (85, 48)),
        ("64/45", (91, 48)),
        ("1/2", (64, 96)),
        ("255/1", (64, 48)),  # broken
    ],
)
def test_pixels_that_are_not_square_are_stretched(tmp_path, aspect, size):
    """To the longer side, so that no pixel is lost."""
    path = write(tmp_path / "a.mp4", aspect=fractions.Fraction(aspect))
    (frame, *_) = video.frames(str(path), EVERY)
    assert frame.image().size == size
    assert corners(frame.image()) == CORNERS


def test_pixels_are_stretched_before_the_frame_is_turned(tmp_path):
    """The width of a pixel is that of the stored one."""
    path = write(tmp_path / "a.mp4", aspect=fractions.Fraction(2))
    set_matrix(path, (0, 1, -1, 0))
    (frame, *_) = video.frames(str(path), EVERY)
    assert frame.image().size == (48, 128)
    assert corners(frame.image()) == [[BLUE, RED], [WHITE, GREEN]]


def test_a_variable_rate_keeps_its_times(tmp_path):
    """Frames have the times of the file, not those of a rate; `fps` chooses by them."""
    times = (0, 4, 50, 52, 54, 200)
    path = str(write(tmp_path / "a.mp4", times))
    found = list(video.frames(path, EVERY))
    assert [frame.time for frame in found] == pytest.approx([each / 100 for each in times])
    assert [frame.number for frame in video.frames(path, video.FrameChoice(fps=2))] == [0, 2, 5]
    assert [frame.number for frame in video.frames(path, video.FrameChoice(every=2))] == [0, 2, 4]


@pytest.mark.parametrize("size", [(64, 48), (90, 160), (360, 640), (641, 361), (1280, 96)])
def test_a_written_video_has_the_size_of_its_frames(tmp_path, size):
    """Less the last column or row of an odd size; its pixels are square and its times kept."""
    path, times = tmp_path / "out.mp4", (0.0, 0.04, 0.5, 2.0)
    with video.VideoWriter(path) as writer:
        for time in times:
            writer.write(scene(size), time)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        shown = list(container.decode(stream))
        even = size[0] // 2 * 2, size[1] // 2 * 2
        assert (stream.width, stream.height) == even
        assert stream.sample_aspect_ratio in (None, 1)
    assert {(each.width, each.height) for each in shown} == {even}
    assert [each.time for each in shown] == pytest.approx(times, abs=1e-3)
    assert all(corners(each.to_image()) == CORNERS for each in shown)


def test_frames_of_another_size_are_fitted(tmp_path):
    """To that of the first one."""
    path = tmp_path / "out.mp4"
    with video.VideoWriter(path) as writer:
        for time, size in enumerate([(90, 160), (160, 90), (45, 80)]):
            writer.write(scene(size), time)
    shown = [frame.image() for frame in video.frames(str(path), EVERY)]
    assert [image.size for image in shown] == [(90, 160)] * 3
    assert all(corners(image) == CORNERS for image in shown)


@pytest.mark.parametrize("size", [(360, 640), (640, 360), (700, 700)])
def test_an_annotated_video_has_the_shape_of_its_source(run, tmp_path, size):
    """A clip in portrait is not squashed, and its marks are where the answer has them."""
    clip, drawn = write(tmp_path / "clip.mp4", size=size), tmp_path / "drawn"
    assert run(clip, "--annotate", drawn)[0] == 0
    with av.open(str(drawn / "clip.mp4")) as container:
        shown = [frame.to_image() for frame in container.decode(video=0)]
    assert len(shown) == 3
    assert {image.size for image in shown} == {size}
    # The scripted box is from (0.25, 0.5) to (0.75, 1): its left edge crosses the blue corner.
    pixels = np.asarray(shown[0]).astype(int)
    row = pixels[int(0.85 * size[1])]
    (marked,) = np.nonzero(np.abs(row - BLUE).max(axis=1)[: size[0] // 2 - 8] > 60)
    assert marked.size
    assert abs(marked.mean() / size[0] - 0.25) < 0.02
    outside = pixels[int(0.2 * size[1]), : size[0] // 2 - 8]
    assert np.abs(outside - RED).max() < 25


def test_an_image_without_frames_is_an_error(tmp_path):
    """A file of sound has nothing to ask about."""
    path = tmp_path / "a.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame(format="s16", layout="mono", samples=800)
        sound.rate = 8000
        container.mux([*stream.encode(sound), *stream.encode()])
    with pytest.raises(ValueError, match=r"a\.wav has no"):
        next(video.frames(str(path), EVERY))
