"""`python -m examples.robot` and its camera, against a server without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.v1 import geometry_pb2, session_pb2, session_pb2_grpc
from legato_client import AsyncClient, Box, LegatoError
from PIL import Image

from examples.robot import report
from examples.robot.drive import CAMERA, Clip, play
from examples.robot.recording import Recording
from examples.robot.scene import Scene, compose

# --------------------------------------------------------------- a session service without a model

EVERY_THIRD = 3
_STEP = 0.2  # seconds; places are whole pixels, so a shorter one says little of the velocity


class FakeSession(session_pb2_grpc.SessionServiceServicer):
    """Answers each third frame truly and drops the others, at once, by the contract's book-keeping.

    `twist` may change a message on its way out, or leave it out by giving None.
    """

    def __init__(
        self,
        scene: Scene,
        fps: float,
        twist: Callable[[session_pb2.SessionResponse], session_pb2.SessionResponse | None],
    ) -> None:
        self._scene = scene
        self._fps = fps
        self._twist = twist
        self.opened: session_pb2.SessionOpen | None = None
        self.credits = 100
        self.frames: list[session_pb2.Frame] = []
        self.end = grpc.StatusCode.OK
        self.end_after: int | None = None

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        """Speak the session's grammar."""
        index = 0
        async for request in request_iterator:
            for response in self._replies(request):
                response.index = index
                index += 1
                if (told := self._twist(response)) is not None:
                    yield told
            if len(self.frames) == self.end_after:
                break
        if self.end is not grpc.StatusCode.OK:
            await context.abort(self.end, "as the test wants it")

    def _replies(self, request: session_pb2.SessionRequest) -> list[session_pb2.SessionResponse]:
        if request.WhichOneof("message") == "grant":
            return []
        if request.WhichOneof("message") == "open":
            self.opened = request.open
            opened = session_pb2.SessionOpened(session_id="s", frame_credits=self.credits)
            return [session_pb2.SessionResponse(opened=opened)]
        self.frames.append(request.frame)
        if len(self.frames) % EVERY_THIRD == 0:
            return self._results(request.frame)
        dropped = session_pb2.FrameDropped(
            sequence=request.frame.stamp.sequence,
            reason=session_pb2.DROP_REASON_SUPERSEDED,
            frame_credits=self.credits,
            dropped_total=len(self.frames) - len(self.frames) // EVERY_THIRD,
        )
        return [session_pb2.SessionResponse(dropped=dropped)]

    def _results(self, frame: session_pb2.Frame) -> list[session_pb2.SessionResponse]:
        assert self.opened is not None
        captured = (frame.stamp.sequence - 1) / self._fps
        truth, soon = self._scene.truth(captured), self._scene.truth(captured + _STEP)
        accepted = session_pb2.FrameAccepted(
            sequence=frame.stamp.sequence, frame_credits=self.credits
        )
        replies = [session_pb2.SessionResponse(accepted=accepted)]
        for task in self.opened.standing_tasks:
            reply = session_pb2.SessionResponse()
            reply.result.stamp.CopyFrom(frame.stamp)
            reply.result.result.task_id = task.task_id
            reply.result.age.FromMilliseconds(7)
            box = truth[task.detect.object]
            found = reply.result.result.detect.objects.add(label=task.detect.object)
            found.box.x_min, found.box.y_min = box.x_min, box.y_min
            found.box.x_max, found.box.y_max = box.x_max, box.y_max
            _fill_motion(found, box, soon[task.detect.object])
            replies.append(reply)
        replies[-1].result.last_for_frame = True
        return replies


def _fill_motion(found: geometry_pb2.DetectedObject, box: Box, soon: Box) -> None:
    """A track for each object, at the true place with the true velocity."""
    found.track_id = f"{found.label}-1"
    now, then = _axes(box), _axes(soon)
    for message, axes in (
        (found.motion.position, now),
        (found.motion.velocity, [(b - a) / _STEP for a, b in zip(now, then, strict=True)]),
        (found.motion.position_deviation, [0.01] * 4),
        (found.motion.velocity_deviation, [0.1] * 4),
    ):
        message.center_x, message.center_y, message.width, message.height = axes


def _axes(box: Box) -> list[float]:
    width, height = box.x_max - box.x_min, box.y_max - box.y_min
    return [box.x_min + width / 2, box.y_min + height / 2, width, height]


@contextlib.asynccontextmanager
async def serving(session: FakeSession) -> AsyncIterator[str]:
    """The address of a server of it, for the length of the block."""
    server = grpc.aio.server()
    session_pb2_grpc.add_SessionServiceServicer_to_server(session, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


# ---------------------------------------------------------------- drive
# The camera's side of a session, against a server without a model.

FPS = 200.0  # a third of an image's travel between two frames does not matter here
SCENE = compose(("bus", "dog"), 0)
NOUNS = ("bus", "dog")
FILES = [b"image %d" % k for k in range(12)]


def as_it_is(response: session_pb2.SessionResponse) -> session_pb2.SessionResponse:
    """No twist."""
    return response


async def run(session: FakeSession, fps: float = FPS) -> Recording:
    """The clip, played to that server."""
    async with serving(session) as address, AsyncClient(address) as client:
        return await play(client, Clip(FILES, fps), NOUNS, max_frame_age=0.25)


async def test_the_terms_are_those_that_were_asked_for() -> None:
    """Latest wins, one Detect for each noun, and the greatest age, to the nanosecond."""
    session = FakeSession(SCENE, FPS, as_it_is)
    await run(session)
    opened: Any = session.opened
    assert opened.frame_policy == session_pb2.FRAME_POLICY_LATEST_WINS
    assert opened.max_frame_age.ToNanoseconds() == 250_000_000
    assert [(task.task_id, task.detect.object) for task in opened.standing_tasks] == [
        ("bus", "bus"),
        ("dog", "dog"),
    ]
    assert all(task.detect.HasField("tracking") for task in opened.standing_tasks)


async def test_every_image_is_sent_once_with_its_own_stamp() -> None:
    """Frames go in order, their capture times exactly a frame apart, on the wall's clock."""
    session = FakeSession(SCENE, FPS, as_it_is)
    before = time.time_ns()
    await run(session)
    assert [frame.image.encoded.data for frame in session.frames] == FILES
    assert [frame.stamp.sequence for frame in session.frames] == list(range(1, 13))
    assert {frame.stamp.frame_id for frame in session.frames} == {CAMERA}
    taken = [frame.stamp.capture_time.ToNanoseconds() for frame in session.frames]
    assert [at - taken[0] for at in taken] == [round(k / FPS * 1e9) for k in range(12)]
    assert before <= taken[0] <= time.time_ns()


async def test_the_session_is_asked_where_things_are_at_every_frame() -> None:
    """Each look has the tracks of the answers that had arrived, extrapolated to its moment."""
    recording = await run(FakeSession(SCENE, FPS, as_it_is))
    assert len(recording.looks) == 12
    assert recording.looks[0].tracks == ()
    for look in recording.looks:
        for track in look.tracks:
            assert track.age == pytest.approx(look.time - (track.sequence - 1) / FPS, abs=1e-6)
    last = {answer.noun: answer for answer in recording.answers}
    assert [track.track_id for track in last["dog"].tracks] == ["dog-1"]
    assert all(answer.told_age == 0.007 for answer in recording.answers)


async def test_no_frame_leaves_before_it_is_taken() -> None:
    """The clock is the camera's: a frame is sent at its time or later, never sooner."""
    recording = await run(FakeSession(SCENE, FPS, as_it_is))
    assert [frame.captured for frame in recording.sent] == [k / FPS for k in range(12)]
    assert all(frame.sent >= frame.captured for frame in recording.sent)


async def test_both_books_agree_and_true_boxes_score_one() -> None:
    """Four frames answered, eight dropped, none lost; boxes at the truth of their capture fit."""
    recording = await run(FakeSession(SCENE, FPS, as_it_is))
    figures = report.summarise(SCENE, recording)
    assert figures["faults"] == []
    assert figures["frames"] == {
        "taken": 12,
        "left_out": 0,
        "sent": 12,
        "answered": 4,
        "dropped": 8,
        "dropped_by_reason": {"superseded": 8},
        "dropped_as_the_server_counts": 8,
    }
    assert figures["iou_at_capture"]["mean"] == pytest.approx(1, abs=1e-5)
    assert figures["iou_on_arrival"]["mean"] <= figures["iou_at_capture"]["mean"]
    assert figures["tracks_by_noun"] == {"bus": 1, "dog": 1}
    assert figures["boxes_too_many"] == 0


@pytest.mark.parametrize("kind", ["dropped", "result"])
async def test_a_message_that_is_lost_shows(kind: str) -> None:
    """A server that forgets one frame's end cannot look whole."""
    seen = []

    def without_the_first(response: session_pb2.SessionResponse) -> Any:
        if response.WhichOneof("message") == kind:
            seen.append(response)
        return None if seen and response is seen[0] else response

    recording = await run(FakeSession(SCENE, FPS, without_the_first))
    assert recording.failure.startswith("IncompleteStream")
    assert recording.failure in recording.faults()
    assert any(fault.startswith("frame ") for fault in recording.faults())


async def test_a_frame_without_a_credit_is_left_out_and_counted() -> None:
    """With one credit that never comes back, one frame goes and the others are left out here."""

    def keeps_the_credit(response: session_pb2.SessionResponse) -> Any:
        """Nothing is said of the first frame, so it stays under way."""
        return response if response.WhichOneof("message") == "opened" else None

    session = FakeSession(SCENE, FPS, keeps_the_credit)
    session.credits = 1
    recording = await run(session)
    assert [frame.sequence for frame in recording.sent] == [1]
    assert recording.left_out == list(range(2, 13))
    assert "frame 1: answers [], 0 drops" in recording.faults()


async def test_a_failed_task_is_an_answer_without_boxes() -> None:
    """An error counts as the frame's end, is not scored, and is counted as failed."""

    def failed(response: session_pb2.SessionResponse) -> session_pb2.SessionResponse:
        if response.WhichOneof("message") == "result":
            response.result.result.error.code = 5
            response.result.result.error.message = "no such thing"
        return response

    recording = await run(FakeSession(SCENE, FPS, failed))
    figures = report.summarise(SCENE, recording)
    assert figures["faults"] == []
    assert figures["answers"] == {"total": 8, "failed": 8}
    assert figures["frames"]["answered"] == 4
    assert all("no such thing" in answer.error for answer in recording.answers)


async def test_a_session_that_does_not_open_is_broken() -> None:
    """Anything but `opened` as the first message ends the run at once."""

    def no_opened(response: session_pb2.SessionResponse) -> session_pb2.SessionResponse:
        if response.WhichOneof("message") == "opened":
            response.heartbeat.SetInParent()
        return response

    with pytest.raises(LegatoError):
        await run(FakeSession(SCENE, FPS, no_opened))


async def test_a_session_that_fails_says_so() -> None:
    """The server's status is among the faults, and what was recorded until then is kept."""
    session = FakeSession(SCENE, FPS, as_it_is)
    session.end, session.end_after = grpc.StatusCode.UNAVAILABLE, 4
    recording = await run(session)
    assert recording.failure.startswith("Unavailable")
    assert recording.failure in recording.faults()


async def test_a_session_that_ends_early_does_not_look_whole() -> None:
    """OK before the clip is over is a fault, though every frame sent had its end."""
    session = FakeSession(SCENE, FPS, as_it_is)
    session.end_after = 1
    recording = await run(session, fps=6)
    assert any("before the clip was" in fault for fault in recording.faults())


# ---------------------------------------------------------------- command
# `python -m examples.robot`, against a server without a model.

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
SMALL_SCENE = compose(("bus", "dog"), 4, (160, 120))
CLIP = ("--nouns", "bus", "dog", "--seed", "4", "--size", "160", "120")
TWELVE_FRAMES = ("--fps", "50", "--seconds", "0.24")


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
        FakeSession(SMALL_SCENE, 50, as_it_is), tmp_path / "new" / "folder"
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

    code, output, _ = await robot(FakeSession(SMALL_SCENE, 50, without_drops), tmp_path)
    assert code == 1
    assert "**fault**: frame 1: answers [], 0 drops" in output


async def test_a_session_that_breaks_off_is_a_failure(tmp_path: Path) -> None:
    """The status is among the faults, and the exit code is 1."""
    session = FakeSession(SMALL_SCENE, 50, as_it_is)
    session.end, session.end_after = grpc.StatusCode.UNAVAILABLE, 2
    code, output, _ = await robot(session, tmp_path)
    assert code == 1
    assert "as the test wants it" in output


async def test_a_session_that_does_not_open_is_told_in_one_line(tmp_path: Path) -> None:
    """The reason is shown, nothing is written, and the exit code is 1."""
    session = FakeSession(SMALL_SCENE, 50, lambda response: None)
    session.end, session.end_after = grpc.StatusCode.FAILED_PRECONDITION, 0
    code, output, errors = await robot(session, tmp_path / "none")
    assert (code, output) == (1, "")
    assert errors.splitlines()[-1].startswith("nothing measured: ")
    assert not (tmp_path / "none").exists()


async def test_a_film_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    """One image for each frame of the clip; a GIF has equal ones as one, shown for longer."""
    code, _, errors = await robot(FakeSession(SMALL_SCENE, 50, as_it_is), tmp_path, "--film", "gif")
    assert code == 0, errors
    with Image.open(tmp_path / "robot.gif") as film:
        assert 1 < getattr(film, "n_frames", 1) <= 12
