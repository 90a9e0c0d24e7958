"""Commands that ask a server, and answers as they arrive on a terminal."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from legato.v1 import inference_pb2, task_pb2
from legato_client import Client, Finished, LegatoError, QueryResult, ResponseInfo, TextDelta
from legato_client.cli import forward, main
from legato_client.cli.show import EventPrinter, show_notice
from legato_client.cli.terminal import Terminal
from PIL import Image

from tests.clients.python.fake_server import STREAMS, events, failure, retry_info

# ---------------------------------------------------------------- commands

Code = grpc.StatusCode


def test_detect(legato, image, server):
    """Boxes are shown in pixels, and the exit code is 0."""
    code, out, err = legato("detect", image, "cat", "--max-objects", "3", "--temperature", "0")
    assert (code, err) == (0, "")
    assert "cat" in out
    assert "(50, 50) to (150, 100) px" in out
    task = server.last("Generate").task
    assert task.detect.max_objects == 3
    assert task.sampling.HasField("temperature")


def test_an_adapter_is_named(legato, image, server):
    """`--adapter` reaches the server as the option of the same name."""
    assert legato("detect", image, "cat", "--adapter", "cups@12")[0] == 0
    assert server.last("Generate").options.adapter == "cups@12"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("point", "IMAGE", "nose"), "(100, 25) px"),
        (("segment", "IMAGE", "cat"), "M 0 0 L 1 0 L 1 1 z"),
        (("caption", "IMAGE", "--length", "long"), "a cat"),
        (("query", "IMAGE", "how many?"), "two cats"),
        (("query", "how many?"), "two cats"),
        (("query", "IMAGE", "--seed", "1", "how many?"), "two cats"),
    ],
)
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_other_tasks(legato, image, words, shown, stream):
    """Each command shows its answer, streamed or whole."""
    words = tuple(image if word == "IMAGE" else word for word in words)
    code, out, _ = legato(*words, stream)
    assert code == 0
    assert shown in out


def test_several_images(legato, server, image):
    """All words but the last are images, and a complaint about one names its file."""
    assert legato("query", image, image, "which?")[0] == 0
    asked = server.last("Generate")
    assert [bool(each.image.encoded.data) for each in asked.task.query.images] == [True, True]
    assert not asked.HasField("image")
    violation = error_details_pb2.BadRequest.FieldViolation(
        field="task.query.images[1].image.encoded.data", description="is truncated"
    )
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    server.script["Generate"].append(failure(Code.INVALID_ARGUMENT, "IMAGE_UNDECODABLE", bad))
    _, _, err = legato("query", image, image, "which?")
    assert f"{image}: is truncated" in err


def test_formats_reach_the_server(legato, server, tmp_path):
    """Each option is the format of its name; the files are read."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "answer.gbnf"
    schema.write_text('{"type": "object"}')
    grammar.write_text('root ::= "a"')
    for words, expected in (
        (("--json-schema", str(schema)), task_pb2.ResponseFormat(json_schema='{"type": "object"}')),
        (("--grammar", str(grammar)), task_pb2.ResponseFormat(grammar='root ::= "a"')),
        (("--regex", "[ab]"), task_pb2.ResponseFormat(regex="[ab]")),
        (
            ("--choices", "red,green"),
            task_pb2.ResponseFormat(choices=task_pb2.Choices(texts=["red", "green"])),
        ),
    ):
        assert legato("query", "which?", *words)[0] == 0
        assert server.last("Generate").task.query.response_format == expected


def test_a_missing_schema_is_named(legato, server, tmp_path):
    """Nothing is asked if the file cannot be read."""
    code, _, err = legato("query", "which?", "--json-schema", str(tmp_path / "none.json"))
    assert code == 2
    assert "none.json" in err
    assert server.count("Generate") == 0


def test_reasoning_has_its_own_lines(legato):
    """What the model thought and what it answers do not run together."""
    for stream in ("--stream", "--no-stream"):
        assert "hm\ntwo cats\n" in legato("query", "?", "--reasoning", stream)[1]


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_nothing_found(legato, image, server, stream):
    """An empty answer is said, not left blank."""
    empty = task_pb2.TaskResult(detect=task_pb2.DetectResult())
    server.script["Generate"].append(events(finished=empty))
    code, out, _ = legato("detect", image, "owl", stream)
    assert code == 0
    assert "nothing found" in out


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_model_text_cannot_command_the_terminal(legato, image, server, stream):
    """Control characters in an answer are replaced before they reach a terminal."""
    evil = "a\x1b[2Jb"
    result = task_pb2.TaskResult(caption=task_pb2.CaptionResult(caption=evil))
    delta = ("text", inference_pb2.TextDelta(text=evil))
    server.script["Generate"].append(events(delta, finished=result))
    out = legato("caption", image, stream)[1]
    assert "\x1b" not in out
    assert "a\ufffd[2Jb" in out


def test_query_without_a_image(legato, server):
    """A question alone is sent without an image."""
    assert legato("query", "why?")[0] == 0
    assert not server.last("Generate").HasField("image")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("detect", "cat"), "objects"),
        (("point", "nose"), "points"),
        (("segment", "cat"), "segments"),
        (("caption",), "caption"),
        (("query", "?"), "answer"),
    ],
)
def test_json(legato, image, words, key):
    """`--json` writes one JSON document with the task, its answer and its info, nothing else."""
    command, *rest = words
    code, out, err = legato(command, image, *rest, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["task"] == command
    assert answer[key]
    assert set(answer["info"]) == {
        "request_id", "model", "finish_reason", "usage", "timings", "image", "stamp", "tokens",
        "resumptions",
        "images",
    }  # fmt: skip
    assert answer["info"]["image"]["width"] == 200


def test_json_box(legato, image):
    """A box in JSON has the names of the contract."""
    _, out, _ = legato("detect", image, "cat", "--json")
    found = json.loads(out)["objects"][0]
    assert found == {
        "box": {"x_min": 0.25, "y_min": 0.5, "x_max": 0.75, "y_max": 1.0},
        "label": "cat",
        "confidence": None,
        "track_id": "",
        "motion": None,
    }


def test_output(legato, image, tmp_path):
    """`--output` saves the annotated image as PNG."""
    target = tmp_path / "out.png"
    code, out, _ = legato("detect", image, "cat", "--output", str(target))
    assert code == 0
    assert str(target) in out
    with Image.open(target) as drawn:
        assert drawn.format == "PNG"
        assert drawn.getcolors(1) is None, "only one colour"


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (Code.INVALID_ARGUMENT, "INVALID_FIELD", 2),
        (Code.NOT_FOUND, "MODEL_NOT_FOUND", 3),
        (Code.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE", 5),
        (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", 6),
        (Code.INTERNAL, "INTERNAL", 1),
    ],
)
def test_exit_codes(legato, image, server, code, reason, expected):
    """Each kind of failure has its exit code, and the reason is shown."""
    server.script["Generate"].append(failure(code, reason))
    status, out, err = legato("detect", image, "cat")
    assert (status, out) == (expected, "")
    assert reason in err


def test_engine_lost(legato, image, server):
    """A stream that breaks because the engine died exits with 4."""
    lost = failure(Code.UNAVAILABLE, "ENGINE_LOST")
    server.script["Generate"].append([*STREAMS["detect"][:2], lost])
    assert legato("detect", image, "cat")[0] == 4


def test_no_server(image, capsys):
    """Without a listening server the command exits with 4 and says how to start one."""
    status = main(["detect", image, "cat", "--server", "127.0.0.1:1"])
    assert status == 4
    assert "legato serve" in capsys.readouterr().err


def test_error_details(legato, image, server):
    """The text of an error names the fields at fault and when to try again."""
    violation = error_details_pb2.BadRequest.FieldViolation(field="object", description="is empty")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    server.script["Generate"].append(
        failure(Code.INVALID_ARGUMENT, "INVALID_FIELD", bad, retry_info(0.5))
    )
    _, _, err = legato("detect", image, "x")
    assert "object: is empty" in err
    assert "try again in 0.5 s" in err


def test_json_errors(legato, image, server):
    """With `--json` a failure is one JSON document on standard error."""
    server.script["Generate"].append(failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", limit="4"))
    status, out, err = legato("detect", image, "x", "--json")
    error = json.loads(err)["error"]
    assert (status, out) == (6, "")
    assert (error["exit_code"], error["reason"]) == (6, "QUEUE_FULL")
    assert error["metadata"] == {"limit": "4"}
    assert error["request_id"] == "r-9"


@pytest.mark.parametrize(
    "words",
    [
        ("detect",),
        ("detect", "missing.png", "cat"),
        ("caption", "IMAGE", "--length", "epic"),
        ("detect", "IMAGE", "cat", "--timeout", "0"),
        ("detect", "IMAGE", "cat", "--top-k", "-1"),
        ("detect", "IMAGE", "cat", "--stream", "--json"),
        ("query", "?", "--output", "x.png"),
        ("query", "IMAGE", "IMAGE", "?", "--output", "x.png"),
        ("nonsense",),
    ],
)
def test_usage_errors(legato, image, server, words):
    """A command that makes no sense exits with 2 before anything is sent, in JSON too."""
    words = tuple(image if word == "IMAGE" else word for word in words)
    assert legato(*words)[0] == 2
    assert not server.requests
    status, _, err = legato(*words, "--json")
    assert status == 2
    assert json.loads(err)["error"]["exit_code"] == 2


def test_info(legato):
    """`info` shows the version and every model, and as JSON the whole account; so calibrations."""
    _, out, _ = legato("info")
    assert "legato 1.2.3" in out
    assert "second" in out
    assert "calibrated: detect (my kitchen, 400 images)" in out
    document = json.loads(legato("info", "--json")[1])
    assert document["server"]["version"] == "1.2.3"
    first, second = document["models"]
    assert (first["name"], first["confidence"]) == ("first", None)
    assert second["confidence"]["fitted_at"] == "2026-11-25T00:00:00+00:00"


def test_info_describes_this_machine(legato, monkeypatch):
    """With what an engine here computes with, and why not with more."""
    monkeypatch.setenv("LEGATO_TOKEN", "secret")
    machine = json.loads(legato("info", "--json")[1])["machine"]
    assert machine["settings"]["LEGATO_SERVER"]
    engine = machine["engine"]
    assert engine["versions"]["torch"]
    assert bool(engine["cpu"]["instructions"]) != bool(engine["cpu"]["reason"])
    assert bool(engine["gpus"]) != bool(engine["no_gpu"])
    _, out, _ = legato("info")
    assert "secret" not in out
    assert engine["cpu"]["name"] in out
    assert engine["no_gpu"] in out
    assert f"pulled models in {engine['models_folder']}: " in out


def test_info_without_a_server(capsys):
    """This machine is described all the same, and the exit code tells that no server answered."""
    assert main(["info", "--server", "127.0.0.1:1"]) == 4
    out, err = capsys.readouterr()
    assert out.startswith("this machine: client ")
    assert "is the server running?" in err
    assert main(["info", "--server", "127.0.0.1:1", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["server"] is None


def test_info_without_an_engine(legato, monkeypatch):
    """It says what is missing."""
    monkeypatch.setattr(forward, "_ENGINE_NEEDS", ("no_such_engine",))
    _, out, _ = legato("info")
    assert "engine: none, `legato info` needs the server, which is not installed" in out


def test_help_documents_exit_codes(capsys):
    """`--help` of the command and of each task says what the exit codes mean."""
    for words in (["--help"], ["detect", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
        assert "6 busy" in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------- show
# Answers as they arrive on a terminal.

RESULT = Finished(QueryResult("three", None, ResponseInfo("r", "tiny", "stop")))


@pytest.mark.parametrize("events", [[TextDelta("th"), TextDelta("ree"), RESULT], [RESULT]])
def test_words_are_shown_once(events):
    """Those that stream as they come, the others with the end of the answer."""
    out = io.StringIO()
    printer = EventPrinter(Terminal(False, out))
    for event in events:
        printer.show(event)
    assert out.getvalue().splitlines() == ["three", "stop, tiny"]


HOSTILE = [
    "\x1b[2J",  # clears
    "\x1b]0;title\x07",
    "\x1b]8;;https://a.example\x1b\\link",
    "\x9b31m",
    "\x9d0;title\x9c",
    "\x1bc",  # resets
    "\x1b[8m",  # conceals
    "\x1bP1$r\x1b\\",
    "a\rb",
    "\x08\x08",
    "\x7f",
    "\x1b",
]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_text_moves_no_terminal(text):
    """Names, answers and errors of a server reach a terminal without what it would act on."""
    for json_output in (False, True):
        out, err = io.StringIO(), io.StringIO()
        terminal = Terminal(json_output, out, err)
        terminal.line(f"before{text}after")
        terminal.heading(text)
        terminal.table(("name",), [(text,)])
        terminal.document({"name": text})
        terminal.fail(LegatoError(f"before{text}after", request_id=text))
        assert not CONTROL.search(out.getvalue() + err.getvalue())
        if json_output:
            assert json.loads(out.getvalue()) == {"name": text}  # nothing is lost
        else:
            assert "before" in out.getvalue()
            assert "after" in out.getvalue()


def test_pieces_of_an_answer_move_no_terminal():
    """A sequence that arrives in pieces is none either."""
    out = io.StringIO()
    terminal = Terminal(False, out)
    for piece in "\x1b[2J\x1b]0;t\x07":
        terminal.write(piece)
    assert not CONTROL.search(out.getvalue())


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def test_a_terminal_shows_a_models_limits_once(server):
    """Limits that several models share are one line on a terminal, and nothing elsewhere."""
    for out, shown in ((Screen(), 1), (io.StringIO(), 0)):
        with Client(server.target) as client:
            show_notice(Terminal(False, out), client)
        assert out.getvalue().count("It knows drawings only.") == shown


def test_our_own_styles_reach_the_terminal():
    """Headings of a terminal stay bold."""
    out = Screen()
    Terminal(False, out).heading("name\x1b[2J")
    assert out.getvalue() == "\x1b[1mname\x1b[0m\n"


# ---------------------------------------------------------------- chat


@pytest.fixture
def talk(server, monkeypatch, capsys):
    """Run `legato chat` on lines of standard input: exit code, standard output, standard error."""
    monkeypatch.setenv("LEGATO_SERVER", server.target)

    def run(lines: list[str], *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def said(server: Any) -> list[list[tuple[int, str]]]:
    """The text of each message of each question that the server got."""
    return [
        [(m.role, "".join(part.text for part in m.parts)) for m in request.task.query.messages]
        for name, request, *_ in server.requests
        if name == "Generate"
    ]


def test_a_question_is_asked_after_what_was_said(talk, server):
    """Each question comes with those before it and their answers, which are streamed."""
    code, out, err = talk(["how many?", "", "sure?"], "--system", "Be brief.")
    assert (code, err) == (0, "")
    assert out.count("two cats") == 2
    system, user, assistant = (
        task_pb2.CHAT_ROLE_SYSTEM,
        task_pb2.CHAT_ROLE_USER,
        task_pb2.CHAT_ROLE_ASSISTANT,
    )
    first = [(system, "Be brief."), (user, "how many?")]
    assert said(server) == [first, [*first, (assistant, "two cats"), (user, "sure?")]]


def test_commands(talk, server, tmp_path):
    """Each of them begins the conversation again; /quit ends it."""
    image = tmp_path / "a.png"
    Image.new("RGB", (20, 10)).save(image)
    lines = ["one", "/reset", "two", f"/image {image}", "three", "four", "/system Be kind.", "five"]
    assert talk([*lines, "/help", "/quit", "six"])[0] == 0
    asked = [request for name, request, *_ in server.requests if name == "Generate"]
    assert [[text for _, text in each] for each in said(server)] == [
        ["one"],
        ["two"],
        ["three"],
        ["three", "two cats", "four"],
        ["Be kind.", "five"],
    ]
    assert [bool(each.image.encoded.data) for each in asked] == [False, False, True, True, True]


def test_json_and_errors(talk, server):
    """One document an answer; without a person at the keyboard an error ends the run."""
    code, out, _ = talk(["how many?", "sure?"], "--json")
    assert [json.loads(line)["answer"] for line in out.splitlines()] == ["two cats"] * 2
    assert code == 0
    server.script["Generate"].append(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    asked = len(said(server))
    code, _, err = talk(["how many?", "sure?"])
    assert code == 6
    assert "QUEUE_FULL" in err
    assert len(said(server)) == asked + 1
    assert talk(["/dance"])[0] == 2
    assert talk(["/image /no/such/file"])[0] == 2


def test_a_person_is_told_and_asked_again(talk, server, monkeypatch):
    """An error does not end a conversation at a terminal, and its question is forgotten."""
    typed = iter(["one", "two"])

    def ask(_prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", Screen())
    monkeypatch.setattr("sys.stdout", screen)
    server.script["Generate"].append(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    assert main(["chat"]) == 0
    assert "QUEUE_FULL" in screen.getvalue()
    assert "two cats" in screen.getvalue()
    assert [[text for _, text in each] for each in said(server)] == [["one"], ["two"]]
