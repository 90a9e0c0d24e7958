"""The Python client against a real server: plain calls, sessions of both faces, and the robot."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from legato_client import (
    Answer,
    AsyncClient,
    CachedImage,
    CaptionTask,
    Client,
    Detection,
    DetectTask,
    FrameDelta,
    FrameDropped,
    FrameResult,
    FrameStamp,
    ImageInfo,
    ImageInput,
    ImageNotFound,
    InvalidArgument,
    Preempted,
    QueryResult,
    RawFrame,
    Sampling,
    Session,
    SharedFrames,
    Tracking,
)

from benchmarks.robot import scoring
from benchmarks.robot.drive import play_for, playing
from benchmarks.robot.scene import Clip as RenderedClip
from examples.robot import report
from examples.robot.drive import Clip, play
from examples.robot.recording import Recording
from examples.robot.scene import compose
from tests.e2e.scenes import overlap, two_shapes
from tests.e2e.server import Server

SCENE = two_shapes()
PIXELS = np.asarray(SCENE.image)
NOUN = "red circle"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that reads shared memory; every test leaves it idle."""
    with Server(tmp_path_factory.mktemp("sharing"), "--shared-images") as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def robot(sharing: Server) -> Iterator[Client]:
    """A client with a priority and a tenant."""
    with Client(sharing.address, priority=5, tenant="robots") as connected:
        yield connected


def finds_it(client: Client, image: ImageInput) -> bool:
    """Whether the circle is found, and nothing else."""
    found = client.detect(image, NOUN).objects
    return len(found) == 1 and overlap(found[0].box, SCENE.boxes[NOUN]) > 0.7


def camera_frame(name: str) -> RawFrame:
    """The scene as a camera gives it: BT.601 in limited range, half the colours."""
    y, u, v = np.moveaxis(np.asarray(SCENE.image.convert("YCbCr"), np.float32), -1, 0)
    luma = (y * 219 / 255 + 16).astype(np.uint8)
    width = luma.shape[1]
    rows = slice(None, None, 2 if name == "nv12" else 1)
    half = [((c - 128) * 224 / 255 + 128).astype(np.uint8)[rows, ::2] for c in (u, v)]
    chroma = np.stack(half, -1).reshape(-1, width)
    if name == "nv12":
        return RawFrame.from_array(np.vstack([luma, chroma]), "nv12")
    return RawFrame.from_array(np.stack([luma, chroma], -1), "yuyv")


def test_upload(robot: Client) -> None:
    """An image sent once is asked about by its value, and is gone once it is deleted."""
    held = robot.put_image(SCENE.file("JPEG", quality=95), ttl=60)
    assert (held.width, held.height) == SCENE.image.size
    assert held.expire_time is not None
    assert finds_it(robot, held)
    robot.delete_image(held)
    with pytest.raises(ImageNotFound):
        robot.delete_image(held)


def test_upload_of_pixels(robot: Client) -> None:
    """An array is uploaded as pixels, twice as one image."""
    first, second = robot.put_image(PIXELS), robot.put_image(PIXELS)
    assert first.image_id == second.image_id
    assert finds_it(robot, first)
    robot.delete_image(first)


@pytest.mark.parametrize("name", ["nv12", "yuyv"])
def test_camera_frames(robot: Client, name: str) -> None:
    """What a camera gives needs no conversion."""
    assert finds_it(robot, camera_frame(name))


def test_opencv_frames(robot: Client) -> None:
    """An array in OpenCV's order is sent as such."""
    assert finds_it(robot, RawFrame.from_array(PIXELS[..., ::-1], "bgr8"))


def test_shared_frames(robot: Client) -> None:
    """A frame in shared memory is read where it lies, whatever its format."""
    with SharedFrames(slot_bytes=PIXELS.nbytes, num_slots=2) as ring:
        for frame in (PIXELS, camera_frame("nv12"), SCENE.file("JPEG", quality=95)):
            with ring.write(frame) as shared:
                assert finds_it(robot, shared)


def test_malformed_metadata(sharing: Server) -> None:
    """A priority out of range is refused by name, not lost."""
    with Client(sharing.address, priority=1000) as client, pytest.raises(InvalidArgument) as caught:
        client.detect(PIXELS, NOUN)
    assert caught.value.metadata["field"] == "metadata.legato-priority"


def test_operator(robot: Client) -> None:
    """The load is that of a serving engine; stopping what never was stops nothing."""
    assert robot.load().engine_state == "serving"
    assert robot.abort(request_id="never-was").aborted == 0


# ---------------------------------------------------------------- sessions

JPEG = SCENE.file("JPEG", quality=95)
CIRCLE = DetectTask("red circle", task_id="circle")


def test_a_video(client: Client) -> None:
    """Every frame of a stream is answered in order, with its own stamp, on the right place."""
    with client.session([CIRCLE], policy="every_frame") as session:

        def feed() -> None:
            for number in range(1, 5):
                scene = two_shapes(number * 4)
                stamp = FrameStamp("camera", 1_000_000_007 * number, number)
                session.send(scene.file("JPEG", quality=95), stamp=stamp)
            session.finish()

        feeder = threading.Thread(target=feed)
        feeder.start()
        answers = [answer for answer in session if isinstance(answer, FrameResult)]
        feeder.join()
    assert [answer.sequence for answer in answers] == [*range(1, 5)]
    for number, answer in enumerate(answers, 1):
        assert answer.stamp == FrameStamp("camera", 1_000_000_007 * number, number)
        (found,) = answer.result.objects  # type: ignore[union-attr] # a DetectTask's
        assert overlap(found.box, two_shapes(number * 4).boxes["red circle"]) > 0.6


async def test_too_many_frames(server: Server) -> None:
    """Frames sent as fast as the server takes them: each has its results or its drop, once."""
    outcomes: collections.Counter[int] = collections.Counter()
    async with AsyncClient(server.address) as client, client.session([CIRCLE]) as session:

        async def feed() -> None:
            for _ in range(40):
                await session.send(JPEG)
            await session.finish()

        feeder = asyncio.create_task(feed())
        async for answer in session:
            if isinstance(answer, FrameDropped) or (
                isinstance(answer, FrameResult) and answer.last_for_frame
            ):
                outcomes[answer.sequence] += 1
        await feeder
        stats = session.stats
    assert outcomes == dict.fromkeys(range(1, 41), 1)
    assert stats.sent == stats.answered + stats.dropped == 40


def test_deltas_and_changes(client: Client) -> None:
    """Deltas come before their result, read late or not, where the window has room for all.

    Tasks are changed, and a bad image fails alone.
    """
    with client.session([CIRCLE], stream_deltas=True, answer_window=8) as session:
        session.send(JPEG)
        *deltas, end = take_frame(session)
        assert deltas
        assert all(isinstance(delta, FrameDelta) for delta in deltas)
        assert isinstance(end, FrameResult)
        session.update_tasks([CaptionTask("short", task_id="caption")])
        session.send(b"no image")
        (*_, failed) = take_frame(session)
        assert isinstance(failed, FrameResult)
        assert failed.task_id == "caption"
        assert isinstance(failed.outcome, InvalidArgument)


def test_an_operator_ends_it(client: Client) -> None:
    """A session that an operator stops fails as Preempted."""
    with client.session([CIRCLE]) as session:
        client.abort(session_id=session.terms.session_id)
        with pytest.raises(Preempted):
            next(session)


def take_frame(session: Session) -> list[Answer]:
    """The answers of one frame."""
    answers: list[Answer] = []
    for answer in session:
        answers.append(answer)
        if isinstance(answer, FrameResult) and answer.last_for_frame:
            break
    return answers


def test_a_camera_that_changes_mid_stream(robot: Client) -> None:
    """Another size or encoding keeps the track, a frame that cannot be read says why itself."""
    whole = SCENE.file("JPEG", quality=95)
    large = PIXELS.repeat(2, axis=0).repeat(2, axis=1)
    images: list[ImageInput] = [PIXELS, large, whole[:300], camera_frame("nv12"), whole, PIXELS]
    depth = np.full(PIXELS.shape[:2], 2.0)
    names, sizes = set(), []
    with robot.session([DetectTask(NOUN, tracking=Tracking())], policy="every_frame") as session:
        for image in images:
            session.send(image)
            (result,) = take_frame(session)
            assert isinstance(result, FrameResult)
            if image is images[2]:
                assert isinstance(result.outcome, InvalidArgument)
                assert result.outcome.metadata["field"].startswith("frame.image")
                continue
            (found,) = result.result.marks
            assert isinstance(found, Detection)
            assert overlap(found.box, SCENE.boxes[NOUN]) > 0.7
            names.add(found.track_id)
            assert result.image is not None
            sizes.append((result.image.width, result.image.height))
            if image is large:
                with pytest.raises(ValueError, match="depth is 320x240, but the image is 640x480"):
                    robot.lift(result, depth, (300, 300, 159.5, 119.5))
            else:
                (placed,) = robot.lift(result, depth, (300, 300, 159.5, 119.5))
                assert placed.center is not None
    assert len(names) == 1
    assert sizes == [(320, 240), (640, 480), (320, 240), (320, 240), (320, 240)]


def test_a_question_meanwhile(client: Client) -> None:
    """Frames are answered, none is dropped and the track stays while a question is answered.

    It is about an answered frame, by its id.
    """
    answers: list[QueryResult] = []
    with client.session([DetectTask(NOUN, tracking=Tracking())], policy="every_frame") as session:

        def found() -> Detection:
            session.send(JPEG)
            (result,) = take_frame(session)
            assert isinstance(result, FrameResult)
            seen.append(result.image)
            (detection,) = result.result.objects  # type: ignore[union-attr] # a DetectTask's
            return detection

        seen: list[ImageInfo | None] = []
        before = found()
        image = seen[0]
        assert image is not None

        def ask() -> None:
            sampling = Sampling(temperature=100.0, seed=3, max_tokens=440)
            answers.append(client.query(CachedImage(image.image_id), "hello", sampling=sampling))

        asking = threading.Thread(target=ask)
        asking.start()
        meanwhile = [found() for _ in range(3)]
        assert not answers, "the question was answered before the frames"
        asking.join()
        stats = session.stats
    assert {each.track_id for each in meanwhile} == {before.track_id}
    assert (stats.answered, stats.dropped) == (4, 0)
    assert answers[0].info.image is not None
    assert answers[0].info.image.cache_hit
    assert client.query(JPEG, "How many circles are there?").answer == (
        client.query(CachedImage(image.image_id), "How many circles are there?").answer
    )


# ---------------------------------------------------------------- the robot's camera

NOUNS = ("bus", "dog")
CAMERA_SCENE = compose(NOUNS, 0, (320, 240))
FPS, COUNT = 10.0, 16  # more than two cores answer
LONG = 60.0  # seconds; a machine under load must not make frames too old
LEAST_OVERLAP = 0.85  # alone, every box of 288 had 0.91 or more


async def _play(address: str) -> Recording:
    clip = Clip([CAMERA_SCENE.jpeg(k / FPS) for k in range(COUNT)], FPS)
    async with AsyncClient(address) as client:
        return await play(client, clip, NOUNS, LONG)


def test_every_frame_is_answered_rightly_or_dropped(server: Server) -> None:
    """Both sides' books agree to the frame, the newest is answered, and boxes fit their image."""
    recording = asyncio.run(_play(server.address))
    figures = report.summarise(CAMERA_SCENE, recording)
    frames = figures["frames"]
    assert figures["faults"] == []
    assert frames["sent"] + frames["left_out"] == COUNT  # a busy server grants no credit in time
    assert frames["sent"] == frames["answered"] + frames["dropped"]
    assert frames["dropped_as_the_server_counts"] == frames["dropped"]
    assert set(frames["dropped_by_reason"]) <= {"superseded"}
    assert recording.sent[-1].sequence in recording.answered()
    assert figures["answers"] == {"total": frames["answered"] * len(NOUNS), "failed": 0}
    assert figures["iou_at_capture"]["mean"] > LEAST_OVERLAP
    assert figures["boxes_too_many"] == 0
    assert figures["tracks_by_noun"] == dict.fromkeys(NOUNS, 1)


# ---------------------------------------------------------------- a rendered world


def test_a_camera_in_a_rendered_world(robot: Client) -> None:
    """legato-tiny finds and follows what the simulator renders, and depth places it."""
    clip = RenderedClip(0.2, begin=2.0)  # nothing is hidden then
    with playing(robot, clip, 30) as (camera,):
        play_for(camera, 0, answers=3)
    figures = scoring.figures(clip, [camera])
    assert figures["iou"]["captured"] > 0.7
    assert figures["error_m"]["answer"]["p95"] < 0.05
    assert all(each.track_id for answer in camera.answers for each in answer.found["yellow star"])
