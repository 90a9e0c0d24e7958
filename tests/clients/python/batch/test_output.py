"""The file of a run holds the images that are done, whatever ended the run before."""

from __future__ import annotations

import base64
import json
import os
import resource
import threading

import pytest
from legato_client.batch.images import Key, RunError
from legato_client.batch.output import Line, Output, encode, file_name

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
