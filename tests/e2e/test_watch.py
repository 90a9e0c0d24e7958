"""`legato watch` plays a clip to a server without a model."""

from __future__ import annotations

import json
import subprocess
import sys

import av
import pytest
from legato_client.cli import main
from legato_client.cli.exits import ExitCode

from tests.clients.python.live.streams import HttpCamera, add_stream, encoded
from tests.e2e.server import ENVIRONMENT, Server, until
from tests.e2e.test_lost_servers import end, started

NULL = ("--model", "null", "--null-objects", "2")
FRAMES = 50


@pytest.fixture
def clip(tmp_path):
    """Two seconds."""
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = add_stream(container, "mpeg4")
        for number in range(FRAMES):
            container.mux(encoded(stream, number))
        container.mux(stream.encode())
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_clip_is_answered_and_drawn(clip, tmp_path, capsys):
    """Each frame is answered or accounted for; `--every-frame` answers all, in order."""
    lines, film = tmp_path / "out.jsonl", tmp_path / "out.mp4"
    with Server(tmp_path, *NULL) as server:
        words = ["watch", str(clip), "--server", server.address, "--task", "detect:cup", "--json"]
        assert main([*words, "--output", str(lines), "--output", str(film)]) == 0
        figures = json.loads(capsys.readouterr().out)
        sent = figures["answered"] + sum(figures["dropped"].values())
        assert figures["sent"] == sent
        assert sent + figures["replaced"] + figures["refused"] == figures["taken"] == FRAMES
        assert figures["model"] == "null"
        found = lines_of(lines)
        assert len(found) == figures["answered"]
        assert len(found[0]["results"]["detect:cup"]["objects"]) == 2
        with av.open(str(film)) as container:
            assert 0 < sum(1 for _ in container.decode(video=0)) <= figures["answered"]

        words += ["--rate", "4", "--every-frame", "--output", str(lines)]
        assert main(words) == 0
        assert [line["frame"] for line in lines_of(lines)] == list(range(FRAMES))


def test_a_stream_outlives_its_server_and_itself(tmp_path):
    """The server is killed, the source is cut off: both are found again, and it goes on.

    At SIGTERM it ends with the numbers of the session.
    """
    lines = tmp_path / "out.jsonl"

    def count():
        return len(lines.read_text().splitlines()) if lines.exists() else 0

    with (
        HttpCamera() as camera,
        started(tmp_path, "one", *NULL) as one,
        started(tmp_path, "two", *NULL) as two,
    ):
        words = ["watch", camera.url, "--server", f"ipv4:{one.address},{two.address}", "--json"]
        words += ["--task", "detect:cup", "--output", str(lines)]
        command = [sys.executable, "-m", "legato_client.cli", *words]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
            until(lambda: count() > 5)
            (busy,) = [each for each in (one, two) if each.load().sessions]
            end(busy)
            before = count()
            until(lambda: count() > before + 5)
            camera.cut_off()
            until(lambda: camera.num_connections == 2)
            before = count()
            until(lambda: count() > before + 5)
            process.terminate()
            said, _ = process.communicate()
    assert process.returncode == 0
    figures = json.loads(said)
    assert (figures["reconnects"], figures["source_reconnects"]) == (1, 1)
    assert figures["age_p95"] is not None
    numbers = [line["frame"] for line in lines_of(lines)]
    assert numbers == sorted(set(numbers))


def test_without_a_server_it_ends_at_once(clip, capsys):
    """With the exit code of every command."""
    words = ["watch", str(clip), "--server", "127.0.0.1:1", "--task", "detect:cup"]
    assert main(words) == ExitCode.UNAVAILABLE
    assert "is the server running?" in capsys.readouterr().err
