"""What people type wrong, and what they are told."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import grpc
import pytest
from google.rpc import error_details_pb2
from legato_client import Client, DeadlineExceeded, Unavailable
from legato_client._grpc.channel import full_target
from legato_client.cli import main
from legato_client.cli.hints import hint_of
from PIL import Image

from tests.clients.python.failures import failure


@pytest.fixture
def image(tmp_path):
    """An image file."""
    path = tmp_path / "a.png"
    Image.new("RGB", (200, 100), "white").save(path)
    return str(path)


@pytest.mark.parametrize(
    ("typed", "target"),
    [
        ("robot", "robot:50051"),
        ("127.0.0.1", "127.0.0.1:50051"),
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("dns:50051", "dns:50051"),
        ("unix:/run/legato.sock", "unix:/run/legato.sock"),
        ("dns:///robot:7", "dns:///robot:7"),
        ("ipv4:10.0.0.1:7,10.0.0.2:7", "ipv4:10.0.0.1:7,10.0.0.2:7"),
    ],
)
def test_targets(typed, target):
    """A host without a port is asked at Legato's, not at gRPC's 443."""
    assert full_target(typed) == target


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("http://127.0.0.1:7", "no URL: '127.0.0.1:7' instead of 'http://127.0.0.1:7'"),
        ("https://robot/", "no URL: 'robot'"),
        ("robot:", "HOST:PORT, not 'robot:'"),
        ("robot:fast", "HOST:PORT, not 'robot:fast'"),
        ("robot:70000", "HOST:PORT"),
        (":7", "HOST:PORT"),
    ],
)
def test_targets_that_are_none(typed, problem, capsys, monkeypatch):
    """They are refused by name: by the client, by the flag and in the environment."""
    with pytest.raises(ValueError, match="a server is HOST:PORT"):
        Client(typed)
    assert main(["info", "--server", typed]) == 2
    assert problem in capsys.readouterr().err
    monkeypatch.setenv("LEGATO_SERVER", typed)
    assert main(["info"]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "LEGATO_SERVER" in said


@pytest.mark.parametrize(
    ("name", "form"), [("a.png", "PNG"), ("a.JPG", "JPEG"), ("a.jpeg", "JPEG"), ("a.webp", "WEBP")]
)
def test_the_name_of_a_image_tells_its_form(name, form, image, server, tmp_path):
    """The file holds what its name says."""
    target = tmp_path / name
    words = ["detect", image, "cat", "--output", str(target), "--server", server.target]
    assert main(words) == 0
    with Image.open(target) as drawn:
        assert drawn.format == form


@pytest.mark.parametrize("name", ["found.txt", "found", "found.gif"])
def test_a_name_of_no_image(name, image, server, tmp_path, capsys):
    """It is refused before the server is asked, and nothing is written."""
    target = tmp_path / name
    words = ["detect", image, "cat", "--output", str(target), "--server", server.target]
    assert main(words) == 2
    assert ".png, .jpg, .jpeg, .webp" in capsys.readouterr().err
    assert not target.exists()
    assert not server.requests


def test_a_word_too_many(image, capsys):
    """The help that is named is that of the command."""
    assert main(["detect", image, "a", "b"]) == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: b" in said
    assert "legato detect --help" in said
    assert main(["token", "new", "--who"]) == 2
    assert "legato token new --help" in capsys.readouterr().err


def test_an_unknown_model(capsys):
    """The models that users know are told, before anything is loaded."""
    assert main(["serve", "--model", "moondream-2"]) == 2
    said = capsys.readouterr().err
    assert "no model is called 'moondream-2', but 'moondream2' is" in said
    assert "legato-tiny, moondream2" in said
    assert "random-tiny" not in said
    assert len(said.splitlines()) == 1


def test_load_is_a_command_of_its_own(capsys):
    """`bench` measures this machine only."""
    assert main(["bench", "--serve"]) == 2
    with pytest.raises(SystemExit):
        main(["load", "--help"])
    assert "Put load on a running server" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_is_named_where_no_server_answers(name, monkeypatch):
    """A server that cannot be reached may be behind a proxy that cannot."""
    for each in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(each, raising=False)
    assert "no_proxy" not in hint_of(Unavailable("no"))
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert f"through {name}; see no_proxy" in hint_of(Unavailable("no"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["dtect"], "there is no command 'dtect'; did you mean detect?"),
        (["token", "nw"], "there is no command 'nw'; did you mean new?"),
        (["detect", "a.png", "cat", "--outptu", "b"], "--outptu b; did you mean --output?"),
        (["serve", "--max-runing", "3"], "--max-runing 3; did you mean --max-running?"),
        (["caption", "a.png", "--length", "shrt"], "not 'shrt'; did you mean short?"),
        (["pull", "moondrem2"], "not 'moondrem2'; did you mean moondream2?"),
        (["detect", "a.png", " "], "argument object: must not be empty"),
        (["query", ""], "argument question: must not be empty"),
        (["detect", "a.png", "cat", "--max-objects", "0"], "must be at least 1, and is 0"),
        (["detect", "a.png", "cat", "--temperature", "-1"], "must be 0 or more, and is -1"),
        (["detect", "a.png", "cat", "--top-p", "0"], "must be above 0 and at most 1, and is 0"),
        (["detect", "a.png", "cat", "--max-tokens", "0"], "must be at least 1, and is 0"),
        (["detect", "none.png", "cat"], "cannot read none.png: No such file or directory"),
        (["detect", "/dev/null", "cat"], "/dev/null is no JPEG, PNG or WebP image"),
        (["chat", "/dev/null"], "/dev/null is no JPEG, PNG or WebP image"),
        (["trace", "--follow"], "--follow needs --server"),
        (["playground", "--require-token"], "unrecognized arguments: --require-token"),
    ],
)
def test_a_mistake_is_reported_before_any_call(words, problem, capsys):
    """Once, in a line that names the argument; nothing is asked of a server."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.count(problem) == 1


def test_a_video_is_no_image(tmp_path, capsys):
    """The commands for videos are named."""
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"\0\0\0\x18ftypmp42")
    assert main(["detect", str(clip), "cat"]) == 2
    assert f"{clip} is no JPEG, PNG or WebP image: it seems to be a video; use `legato run`" in (
        capsys.readouterr().err
    )


def test_what_the_server_refuses_is_named_once(image, server, capsys):
    """By the file, not by a field of the contract."""
    refused = failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(
                    field="image.encoded.data", description="the image is truncated or corrupt"
                )
            ]
        ),
    )
    server.script["Generate"].append(refused)
    assert main(["detect", image, "cat", "--server", server.target]) == 2
    said = capsys.readouterr().err
    assert said.count("the image is truncated or corrupt") == 1
    assert f"{image}: the image is truncated or corrupt" in said


def test_a_playground_recommends_what_it_has(capsys):
    """Its help names no option that it lacks."""
    with pytest.raises(SystemExit):
        main(["playground", "--help"])
    assert "--require-token" not in capsys.readouterr().out
    assert main(["playground", "--listen", "0.0.0.0:0"]) == 2
    said = capsys.readouterr().err
    assert "--allow-remote" in said
    assert "--require-token" not in said


@pytest.mark.parametrize(
    "words", [["models", "--json"], ["--help"], ["serve", "--help"], ["completion", "bash"]]
)
def test_a_reader_may_leave(words):
    """`| head` ends a command without a traceback, whoever's program it is."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "legato_client.cli", *words]
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["run", "clip.mp4", "--task", "caption", "--output", "o.jsonl"], "av", "video"),
        (
            ["run", "a.png", "--task", "caption", "--output", "o.jsonl", "--annotate", "d"],
            "PIL",
            "cli",
        ),
        (["watch", "clip.mp4", "--task", "caption"], "av", "video"),
        (["bag", "a.mcap", "--image", "/a", "--task", "detect:a", "--output", "b"], "mcap", "ros"),
        (["ros2", "--image", "/a", "--task", "detect:a"], "cyclonedds", "dds"),
        (["detect", "IMAGE", "cat", "--output", "a.png"], "PIL", "cli"),
        (["playground"], "starlette", "web"),
        (["completion", "bash"], "shtab", "cli"),
    ],
)
def test_a_missing_extra_is_reported_first(
    words, module, extra, image, capsys, monkeypatch, tmp_path
):
    """Before a file is written or a server is asked, with the command that installs it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == module else found(name, *of)
    )
    assert main([image if word == "IMAGE" else word for word in words]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"[{extra}]" in err
    assert err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"clip.mp4", "a.png"}


def test_a_folder_of_several_bags_is_refused(tmp_path, capsys):
    """A recorded folder has one file; of several one must be named."""
    words = ["--image", "/a", "--task", "detect:a", "--output", str(tmp_path / "out")]
    assert main(["bag", str(tmp_path), *words]) == 2
    assert f"{tmp_path} has 0 .mcap files: name one" in capsys.readouterr().err
    (tmp_path / "a_0.mcap").write_bytes(b"no bag")
    assert main(["bag", str(tmp_path), *words]) == 2
    assert "a_0.mcap is no MCAP file" in capsys.readouterr().err


def test_many_images_name_the_option_that_the_server_refuses(image, server, tmp_path, capsys):
    """As a single one does: `--max-tokens`, not a field of the contract."""
    field = "generate_batch.tasks.sampling.max_tokens"
    refused = failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=field, description="too many")
            ]
        ),
    )
    server.script["RunTasks"] += [refused] * 9
    words = [image, "--output", str(tmp_path / "out.jsonl"), "--max-tokens", "99999"]
    assert main(["run", *words, "--task", "detect:cat", "--server", server.target]) == 2
    assert "--max-tokens: too many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (Unavailable("Trying to connect an http1.x server"), "speaks HTTP/1"),
        (DeadlineExceeded("Deadline Exceeded"), "--timeout"),
    ],
)
def test_a_remedy_is_named(error, hint):
    """Another port for HTTP, and the option for more time."""
    assert hint in hint_of(error)
