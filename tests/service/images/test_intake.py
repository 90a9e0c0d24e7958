"""Intake of images, in shared memory too."""

import io
import os
import secrets
import struct
import subprocess
import sys

import grpc
import numpy as np
import pytest
from legato.v1 import inference_pb2, media_pb2, server_pb2, task_pb2
from legato_client._images.sources import HEADER_SIZE, SharedFrames, shm_namespace
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InvalidField
from legato_engine.shm import BlobReader, BlobStore, blob_folder, new_namespace
from legato_engine.types import CachedImageRef, PixelFormat, RawImage
from legato_service.errors import SharedMemoryForbidden, SharedMemoryTorn
from legato_service.images.intake import ImageIntake, InlineImage
from legato_service.images.shared_memory import SharedMemory
from PIL import Image

from tests.service.harness import image_bytes, refusal, running

MAX_BYTES = 100_000


def jpeg(header_bytes, size=(40, 30)):
    """Return a JPEG whose size follows so many bytes of comments."""
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "JPEG")
    data = buffer.getvalue()
    comment = b"\xff\xfe\x10\x02" + bytes(0x1000)
    return data[:2] + comment * (header_bytes // len(comment)) + data[2:]


def intake():
    """Return an intake with a limit of 2000 pixels."""
    return ImageIntake(max_bytes=MAX_BYTES, max_pixels=2000)


def message(data):
    """Return an image as a request has it."""
    return media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))


@pytest.mark.parametrize("header_bytes", [0, 50_000])
async def test_a_header_of_any_length_is_read(header_bytes):
    """The header gives the type, within the prefix or far beyond it."""
    data = jpeg(header_bytes)
    assert await intake().check(message(data)) == InlineImage(data, "image/jpeg")


@pytest.mark.parametrize("header_bytes", [0, 50_000])
async def test_too_many_pixels_after_a_header_of_any_length(header_bytes):
    """The limit on pixels holds however long the header is."""
    with pytest.raises(ImageTooLarge) as failure:
        await intake().check(message(jpeg(header_bytes, (50, 41))))
    assert failure.value.metadata["field"] == "image.encoded.data"
    assert failure.value.metadata["unit"] == "pixels"


async def test_too_many_bytes_after_a_short_header():
    """The limit on bytes counts the whole file, not the prefix."""
    with pytest.raises(ImageTooLarge) as failure:
        await intake().check(message(jpeg(0) + bytes(MAX_BYTES)))
    assert failure.value.metadata["unit"] == "bytes"


@pytest.mark.parametrize("data", [b"", b"GIF89a", jpeg(50_000)[:30_000]])
async def test_bytes_without_a_header_are_refused(data):
    """Bytes without a readable header are refused."""
    with pytest.raises(ImageUndecodable):
        await intake().check(message(data))


# ---------------------------------------------------------------- shared memory
# Images from shared memory: read, refused or torn.

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
PNG = image_bytes()
RING_BYTES, MAX_PIXELS = 1 << 21, 1000


@pytest.fixture
def blobs():
    """Yield a store that must be empty at the end."""
    store = BlobStore(new_namespace())
    yield store
    assert len(store) == 0
    store.close()


@pytest.fixture
def reader(blobs):
    """Return a reader of this user's regions."""
    return SharedMemory([blobs], max_bytes=RING_BYTES, max_pixels=MAX_PIXELS)


@pytest.fixture
def ring():
    """Yield slots for small frames."""
    with SharedFrames(RING_BYTES, num_slots=2) as frames:
        yield frames


@pytest.fixture
def region_name():
    """Yield a free name of a region, whose file is removed at the end."""
    path = blob_folder() / f"legato-{os.geteuid()}-{secrets.token_hex(8)}"
    yield path.name
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def frame_message(frame, **changes):
    """Return a frame's message with some fields changed."""
    shared = frame.to_image().shared
    for name, value in changes.items():
        setattr(shared, name, value)
    return shared


def bytes_of(image):
    """Return the bytes that an image was staged with."""
    return bytes(image.writer.view())


@pytest.mark.parametrize("size", [len(PNG), 100_000, 1_500_000])
async def test_a_file_is_read_whole(reader, ring, size):
    """The bytes are those of the slot, copied on the event loop or on a thread, with their type."""
    data = PNG.ljust(size, b"\x01")
    for stated in ("", "image/png"):
        with ring.write(data, mime_type=stated) as frame:
            image = await reader.read(frame_message(frame))
            assert bytes_of(image) == data
            assert image.format == "image/png"


async def test_pixels_are_read_with_their_layout(reader, ring):
    """Every slot gives its own frame, and the copy is independent of the slot."""
    first, second = ring.write(PIXELS), ring.write(PIXELS[::-1])
    images = [await reader.read(frame_message(frame)) for frame in (first, second)]
    first.release()
    ring.write(PIXELS * 2)
    assert bytes_of(images[0]) == PIXELS.tobytes()
    assert bytes_of(images[1]) == PIXELS[::-1].tobytes()
    assert (images[0].format.width, images[0].format.format) == (6, PixelFormat.RGB8)


async def test_a_written_slot_is_torn(reader, ring):
    """A slot that holds another frame, or is being written, is refused."""
    frame = ring.write(PIXELS)
    stale = frame_message(frame)
    frame.release()
    ring.write(PIXELS).release()
    ring.write(PIXELS)
    with pytest.raises(SharedMemoryTorn) as caught:
        await reader.read(stale)
    assert caught.value.metadata["region"] == ring.region
    assert (caught.value.metadata["expected"], caught.value.metadata["actual"]) == ("2", "4")
    header = stale.offset - HEADER_SIZE
    with (blob_folder() / ring.region).open("r+b") as file:
        file.seek(header + 8)
        file.write(struct.pack("<Q", 3))
    with pytest.raises(SharedMemoryTorn):
        await reader.read(stale)


def slot_writer(size):
    """Start a process that writes a slot until its input ends; yield its region's name."""
    writer = subprocess.Popen(
        (sys.executable, "-m", "tests.service.slot_writer", str(size)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert writer.stdout is not None
    return writer, writer.stdout.readline().strip()


@pytest.mark.parametrize("size", [200_000, 1_500_000])
async def test_no_torn_frame_is_ever_accepted(reader, size):
    """While another process writes the slot, every accepted image is one whole frame."""
    writer, region = slot_writer(size)
    accepted = torn = 0
    unlimited = media_pb2.PixelLayout(width=1000, height=1, format=media_pb2.PIXEL_FORMAT_MONO8)
    try:
        with (blob_folder() / region).open("rb") as file:
            while min(accepted, torn) < 20:
                (generation,) = struct.unpack("<Q", os.pread(file.fileno(), 8, 8))
                shared = media_pb2.SharedImage(
                    region=region, offset=64, size_bytes=size, layout=unlimited
                )
                shared.generation = generation - generation % 2 or 2
                try:
                    data = bytes_of(await reader.read(shared))
                except SharedMemoryTorn:
                    torn += 1
                else:
                    assert data == data[:1] * size
                    accepted += 1
    finally:
        writer.communicate()
    assert not (blob_folder() / region).exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "legato-",
        "legato-{other}-abc",
        "legato-{user}-",
        "legato-{user}-a/b",
        "/legato-{user}-abc",
        "../shm/legato-{user}-abc",
        "legato-{user}-../../etc/passwd",
        "legato-{user}-" + "a" * 201,
        "legato-{user}-a\n",
        "legato-{user}-not-there",
    ],
)
async def test_names_that_are_refused(reader, ring, name):
    """A name without this user's prefix, with a slash, or too short, is never opened."""
    user = os.geteuid()
    bad = name.format(user=user, other=user + 1)
    with pytest.raises(SharedMemoryForbidden) as caught:
        await reader.read(frame_message(ring.write(PIXELS), region=bad))
    assert caught.value.metadata["region"] == bad


async def test_the_servers_own_blobs_are_refused(ring):
    """Clients cannot have the server read its own blobs."""
    store = BlobStore(f"legato-{os.geteuid()}-server")
    blob = store.put(b"LEGATO01" + struct.pack("<Q", 2) + bytes(48) + bytes(72))
    reader = SharedMemory(
        [BlobStore(new_namespace()), store], max_bytes=RING_BYTES, max_pixels=MAX_PIXELS
    )
    with pytest.raises(SharedMemoryForbidden):
        await reader.read(frame_message(ring.write(PIXELS), region=blob.name, offset=64))
    store.close()


@pytest.mark.parametrize("kind", ["symlink", "dangling", "directory", "pipe"])
async def test_only_regular_files_are_read(reader, ring, region_name, kind):
    """Links, directories and pipes are refused without blocking."""
    path = blob_folder() / region_name
    if kind == "symlink":
        path.symlink_to(blob_folder() / ring.region)
    elif kind == "dangling":
        path.symlink_to("/nowhere")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(SharedMemoryForbidden):
        await reader.read(frame_message(ring.write(PIXELS), region=region_name))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_files_of_other_users_are_refused(reader, ring):
    """A region of another user is refused, whatever its name."""
    os.chown(blob_folder() / ring.region, 12345, 12345)
    with pytest.raises(SharedMemoryForbidden):
        await reader.read(frame_message(ring.write(PIXELS)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"offset": 0}, "offset"),
        ({"offset": 65}, "offset"),
        ({"offset": 128}, "offset"),
        ({"offset": (1 << 64) - 64}, "size_bytes"),
        ({"offset": 2 * (RING_BYTES + 64) + 64}, "size_bytes"),
        ({"generation": 0}, "generation"),
        ({"generation": 3}, "generation"),
        ({"size_bytes": 0}, "size_bytes"),
    ],
)
async def test_bad_fields(reader, ring, changes, field):
    """A slot that cannot exist is refused by its field, and not as a torn frame."""
    with pytest.raises(InvalidField) as caught:
        await reader.read(frame_message(ring.write(PIXELS), **changes))
    assert caught.value.metadata["field"] == f"image.shared.{field}"


async def test_bad_content(reader, ring):
    """Content is checked as if it had come inline."""
    odd = media_pb2.PixelLayout(width=3, height=2, format=media_pb2.PIXEL_FORMAT_YUYV)
    large = media_pb2.PixelLayout(width=40, height=40, format=media_pb2.PIXEL_FORMAT_MONO8)
    cases = [
        (frame_message(ring.write(PIXELS, layout=odd)), InvalidField, "layout.width"),
        (frame_message(ring.write(bytes(1600), layout=large)), ImageTooLarge, "layout"),
    ]
    for shared, error, field in cases:
        with pytest.raises(error) as caught:
            await reader.read(shared)
        assert caught.value.metadata["field"] == f"image.shared.{field}"
    ring2 = SharedFrames(RING_BYTES + 1)
    cases = [
        (frame_message(ring2.write(bytes(RING_BYTES + 1))), ImageTooLarge, ".size_bytes"),
        (frame_message(ring2.write(PIXELS), size_bytes=71), ImageUndecodable, ".size_bytes"),
        (frame_message(ring2.write(b"junk")), ImageUndecodable, ""),
        (frame_message(ring2.write(PNG, mime_type="image/jpeg")), ImageUndecodable, ".mime_type"),
    ]
    for shared, error, field in cases:
        with pytest.raises(error) as caught:
            await reader.read(shared)
        assert caught.value.metadata["field"] == f"image.shared{field}"
    ring2.close()
    with pytest.raises(InvalidField) as caught:
        await reader.read(media_pb2.SharedImage(region="legato-0-x"))
    assert caught.value.metadata["field"] == "image.shared.content"


@pytest.mark.parametrize("length", [0, 64, 72, 64 + 71])
async def test_a_truncated_region_is_refused(reader, ring, length):
    """A truncated region is refused by its end, and the process survives."""
    shared = frame_message(ring.write(PIXELS))
    os.truncate(blob_folder() / ring.region, length)
    with pytest.raises(InvalidField) as caught:
        await reader.read(shared)
    assert caught.value.metadata["limit"] == str(length)


# ---------------------------------------------------------------- through a server


async def test_a_frame_reaches_the_engine(ring):
    """The engine gets the frame's bytes; no blob is left after the response."""
    async with running(shared_images=True) as server:
        engine = server.engine
        seen = []
        answer = engine.script

        def look(engine, stream):
            seen.append(bytes(BlobReader(engine.blobs.namespace).take(stream.request.image.blob)))
            answer(engine, stream)

        engine.script = look
        with ring.write(PIXELS) as frame:
            await server.inference.Caption(inference_pb2.CaptionRequest(image=frame.to_image()))
        assert seen == [PIXELS.tobytes()]
        assert len(engine.blobs) == 0


async def test_several_tasks_on_one_frame(ring):
    """The slot is read once, and its bytes reach the engine once."""
    tasks = [task_pb2.Task(caption=task_pb2.CaptionTask()) for _ in range(3)]
    async with running(shared_images=True) as server:
        with ring.write(PIXELS) as frame:
            response = await server.inference.RunTasks(
                inference_pb2.RunTasksRequest(image=frame.to_image(), tasks=tasks)
            )
        assert all(result.HasField("caption") for result in response.results)
        first, *later = [request.image for request in server.engine.requests]
        assert isinstance(first, RawImage)
        assert all(isinstance(image, CachedImageRef) for image in later)
        assert len(server.engine.blobs) == 0


async def test_off_by_default(ring):
    """A server without the setting refuses shared images and does not announce them."""
    async with running() as server:
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "shared_images" not in info.capabilities
        assert not info.shm_namespace
        failed = await refusal(
            server.inference.Caption(
                inference_pb2.CaptionRequest(image=ring.write(PIXELS).to_image())
            )
        )
    assert failed.code is grpc.StatusCode.FAILED_PRECONDITION
    assert failed.reason == "SHM_REFUSED"
    assert failed.details["PreconditionFailure"].violations[0].subject == ring.region


async def test_the_namespace_is_announced():
    """With shared images on, a client on the same host finds its own namespace."""
    async with running(shared_images=True) as server:
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert "shared_images" in info.capabilities
    assert info.shm_namespace == shm_namespace() != ""


async def test_a_torn_frame_is_aborted(ring):
    """ABORTED SHM_TORN names the region, and no copy is left."""
    frame = ring.write(PIXELS)
    frame.release()
    ring.write(PIXELS).release()
    ring.write(PIXELS)
    async with running(shared_images=True) as server:
        failed = await refusal(
            server.inference.Caption(inference_pb2.CaptionRequest(image=frame.to_image()))
        )
        assert not server.engine.requests
        assert len(server.engine.blobs) == 0
    assert failed.code is grpc.StatusCode.ABORTED
    assert failed.reason == "SHM_TORN"
    assert failed.details["ErrorInfo"].metadata["region"] == ring.region
