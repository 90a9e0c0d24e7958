"""`python -m examples.robot`, against a server without a model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import grpc
from legato.v1 import session_pb2
from PIL import Image

from examples.robot.scene import compose
from tests.examples.robot.fake_session import FakeSession, serving

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
SCENE = compose(("bus", "dog"), 4, (160, 120))
CLIP = ("--nouns", "bus", "dog", "--seed", "4", "--size", "160", "120")
TWELVE_FRAMES = ("--fps", "50", "--seconds", "0.24")


def as_it_is(response: session_pb2.SessionResponse) -> session_pb2.SessionResponse:
    """No twist."""
    return response


async def robot(session: FakeSession, out: Path, *options: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    async with serving(session) as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.robot", "--target", address, "--out", str(out)),
            *(*CLIP, *TWELVE_FRAMES, *options),
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_it_writes_a_report(tmp_path: Path) -> None:
    """Figures as JSON, a table and an image, the table on the screen, and exit code 0."""
    code, output, errors = await robot(
        FakeSession(SCENE, 50, as_it_is), tmp_path / "new" / "folder"
    )
    assert code == 0, errors
    out = tmp_path / "new" / "folder"
    assert sorted(path.name for path in out.iterdir()) == ["robot.json", "robot.md", "robot.png"]
    record = json.loads((out / "robot.json").read_text())
    assert record["figures"]["frames"]["sent"] == 12
    assert record["figures"]["faults"] == []
    assert record["setting"]["seed"] == 4
    assert (out / "robot.md").read_text().strip() == output.strip()
    with Image.open(out / "robot.png") as sheet:
        assert sheet.width > sheet.height


async def test_books_that_do_not_agree_are_a_failure(tmp_path: Path) -> None:
    """A frame that the server forgets makes the exit code 1, with the report written."""

    def without_drops(response: session_pb2.SessionResponse) -> Any:
        return None if response.WhichOneof("message") == "dropped" else response

    code, output, _ = await robot(FakeSession(SCENE, 50, without_drops), tmp_path)
    assert code == 1
    assert "**fault**: frame 1: answers [], 0 drops" in output


async def test_a_session_that_breaks_off_is_a_failure(tmp_path: Path) -> None:
    """The status is among the faults, and the exit code is 1."""
    session = FakeSession(SCENE, 50, as_it_is)
    session.end, session.end_after = grpc.StatusCode.UNAVAILABLE, 2
    code, output, _ = await robot(session, tmp_path)
    assert code == 1
    assert "as the test wants it" in output


async def test_a_session_that_does_not_open_is_told_in_one_line(tmp_path: Path) -> None:
    """The reason is shown, nothing is written, and the exit code is 1."""
    session = FakeSession(SCENE, 50, lambda response: None)
    session.end, session.end_after = grpc.StatusCode.FAILED_PRECONDITION, 0
    code, output, errors = await robot(session, tmp_path / "none")
    assert (code, output) == (1, "")
    assert errors.splitlines()[-1].startswith("nothing measured: ")
    assert not (tmp_path / "none").exists()


async def test_a_film_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    """One image for each frame of the clip; a GIF has equal ones as one, shown for longer."""
    code, _, errors = await robot(FakeSession(SCENE, 50, as_it_is), tmp_path, "--film", "gif")
    assert code == 0, errors
    with Image.open(tmp_path / "robot.gif") as film:
        assert 1 < getattr(film, "n_frames", 1) <= 12
