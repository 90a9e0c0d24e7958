"""What the Python client brings beyond the plain calls, against a real server."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from legato_client import (
    Client,
    ImageInput,
    ImageNotFound,
    InvalidArgument,
    RawFrame,
    SharedFrames,
)

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
