"""Images of every kind, sent with a request, once for many, or in shared memory."""

from __future__ import annotations

import asyncio
import base64
import datetime
import functools
import io
import itertools
import os
import stat
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from legato.v1 import media_pb2, server_pb2, session_pb2
from legato_client import (
    CachedImage,
    CaptionTask,
    HeldImage,
    ImageInput,
    ImageNotFound,
    QuotaExceeded,
    RawFrame,
    SharedMemoryRefused,
)
from legato_client._images.pillow import open_upright
from legato_client._images.sources import (
    HEADER_SIZE,
    SharedFrames,
    SlotsBusy,
    shm_namespace,
    to_image,
)
from legato_client.draw import annotate
from legato_client.ros import images as ros_images
from legato_client.web import bodies as web_images
from legato_engine.images.decoding import decode_encoded
from legato_engine.images.raw import decode_raw
from legato_engine.shm import blob_folder
from legato_engine.types import BlobRef, PixelFormat, RawImage
from PIL import Image

from tests.clients.python.face import session_of, until
from tests.clients.python.fake_server import BEST_CHUNK, FakeServer, failure, ignore, retry_info


def test_bytes_and_paths(tmp_path):
    """A file's bytes travel unchanged, whether named or given."""
    path = tmp_path / "a.jpg"
    path.write_bytes(b"jpeg")
    images: list[ImageInput] = [b"jpeg", bytearray(b"jpeg"), path, str(path)]
    for image in images:
        assert to_image(image).encoded.data == b"jpeg"


def test_cached():
    """A cached image is its id."""
    assert to_image(CachedImage("i")).image_id == "i"


@pytest.mark.parametrize(
    ("shape", "pixel_format", "stride"),
    [
        ((2, 5), media_pb2.PIXEL_FORMAT_MONO8, 5),
        ((2, 5, 3), media_pb2.PIXEL_FORMAT_RGB8, 15),
        ((2, 5, 4), media_pb2.PIXEL_FORMAT_RGBA8, 20),
    ],
)
def test_arrays(shape, pixel_format, stride):
    """An array is sent raw with its layout."""
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    raw = to_image(array).raw
    assert (raw.layout.width, raw.layout.height) == (5, 2)
    assert (raw.layout.format, raw.layout.row_stride_bytes) == (pixel_format, stride)
    assert raw.data == array.tobytes()


def test_array_view():
    """A view that is not contiguous is sent in its own row order."""
    array = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)[:, ::-1]
    assert to_image(array).raw.data == array.copy().tobytes()


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 2), np.float32), np.zeros(4, np.uint8), np.zeros((2, 2, 5), np.uint8)],
)
def test_bad_arrays(array):
    """An array that is no image is refused."""
    with pytest.raises(ValueError, match="need a"):
        to_image(array)


def test_pillow_is_lossless():
    """A Pillow image arrives pixel for pixel, other modes as RGB."""
    image = Image.effect_noise((9, 7), 50)
    assert Image.open(io.BytesIO(to_image(image).encoded.data)).tobytes() == image.tobytes()
    decoded = Image.open(io.BytesIO(to_image(image.convert("CMYK")).encoded.data))
    assert decoded.mode == "RGB"


def test_pillow_is_turned_upright():
    """The EXIF orientation is applied, since a PNG's reader would not see it."""
    image = Image.new("RGB", (9, 7))
    image.getexif()[0x0112] = 6  # rotate by 90 degrees
    decoded = Image.open(io.BytesIO(to_image(image).encoded.data))
    assert decoded.size == (7, 9)


def test_not_a_image():
    """Anything else is a TypeError."""
    with pytest.raises(TypeError, match="not an image: int"):
        to_image(3)  # type: ignore[arg-type] # the very mistake


def test_import_is_light():
    """Importing the client, the command line included, loads none of the optional packages."""
    program = (
        "import sys, legato_client, legato_client.cli\n"
        "heavy = {'torch', 'PIL', 'numpy', 'rich', 'legato_engine', 'legato_service'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("shape", "name", "pixel_format", "size"),
    [
        ((2, 6, 3), "bgr8", media_pb2.PIXEL_FORMAT_BGR8, (6, 2)),
        ((2, 6, 4), "bgra8", media_pb2.PIXEL_FORMAT_BGRA8, (6, 2)),
        ((3, 6), "nv12", media_pb2.PIXEL_FORMAT_NV12, (6, 2)),
        ((2, 6, 2), "yuyv", media_pb2.PIXEL_FORMAT_YUYV, (6, 2)),
    ],
)
def test_arrays_of_cameras(shape, name, pixel_format, size):
    """An array of OpenCV or of a camera is sent under its own format and true size."""
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    raw = to_image(RawFrame.from_array(array, name)).raw
    assert raw.layout.format == pixel_format
    assert (raw.layout.width, raw.layout.height) == size
    assert raw.data == array.tobytes()


def test_frame_with_padding():
    """A stride is kept, and the last row needs none."""
    raw = to_image(RawFrame(bytearray(8 + 6), 2, 2, "bgr8", stride=8)).raw
    assert (raw.layout.row_stride_bytes, len(raw.data)) == (8, 14)
    assert to_image(RawFrame(memoryview(bytes(12)), 2, 2, "rgb8")).raw.layout.row_stride_bytes == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"1234", 2, 2, "rgb8"), "need 12 bytes, got 4"),
        ((bytes(12), 2, 2, "rgb8", 5), "row has 6 bytes"),
        ((bytes(12), 0, 2, "rgb8"), "at least one pixel"),
        ((bytes(12), 2, 2, "rgb"), "format must be one of"),
        ((bytes(4), 2, 2, "nv12"), "need 6 bytes"),
    ],
)
def test_bad_frames(arguments, message):
    """Pixels that cannot have the shape are refused, with what is needed."""
    with pytest.raises(ValueError, match=message):
        RawFrame(*arguments)


def test_channels_of_a_format():
    """An array with other channels than its format is refused."""
    with pytest.raises(ValueError, match="bgr8 needs 3 channels"):
        RawFrame.from_array(np.zeros((2, 2), np.uint8), "bgr8")


# ---------------------------------------------------------------- every entry point, every mode

GREY = [[0, 1, 127], [128, 254, 255]]
RGB = [[(255, 0, 0), (0, 255, 0), (0, 0, 255)], [(10, 20, 30), (0, 0, 0), (255, 255, 255)]]
ALPHA = [[0, 255, 51], [255, 0, 255]]


def mixed(colour, alpha):
    """A colour on white."""
    return tuple(round((each * alpha + 255 * (255 - alpha)) / 255) for each in colour)


def on_white(colours):
    """The six colours as a viewer shows them."""
    pairs = zip(colours, ALPHA, strict=True)
    return [[mixed(c, a) for c, a in zip(*row, strict=True)] for row in pairs]


def grey_rgb(rows):
    return [[(value,) * 3 for value in row] for row in rows]


def with_alpha(image, mode):
    """The image with `ALPHA`."""
    image.putalpha(Image.fromarray(np.array(ALPHA, np.uint8)))
    return image.convert(mode)


def declaring(image, transparent):
    """The image with one of its colours declared transparent, as a PNG without alpha may."""
    image.info["transparency"] = transparent
    return image


WHITE = (255, 255, 255)
_GREY = Image.fromarray(np.array(GREY, np.uint8))
_RGB = Image.fromarray(np.array(RGB, np.uint8))
_PALETTED = _RGB.quantize(6)
_WIDE = np.array(GREY, np.uint16) << 8 | 0x7F
IMAGES = {  # mode: an image, and the pixels that everyone must see of it
    "1": (_GREY.point(lambda v: 255 * (v > 127), "1"), grey_rgb([[0, 0, 0], [255, 255, 255]])),
    "L": (_GREY, grey_rgb(GREY)),
    "P": (_PALETTED, RGB),
    "RGB": (_RGB, RGB),
    "RGBX": (_RGB.convert("RGBX"), RGB),
    "CMYK": (_RGB.convert("CMYK"), RGB),
    "HSV": (_RGB.convert("HSV"), RGB),
    "RGBA": (with_alpha(_RGB.convert("RGBA"), "RGBA"), on_white(RGB)),
    "RGBa": (with_alpha(_RGB.convert("RGBA"), "RGBa"), on_white(RGB)),
    "PA": (with_alpha(_PALETTED.convert("PA"), "PA"), on_white(RGB)),
    "LA": (with_alpha(_GREY.convert("LA"), "LA"), on_white(grey_rgb(GREY))),
    "La": (with_alpha(_GREY.convert("LA"), "La"), on_white(grey_rgb(GREY))),
    "I": (Image.fromarray(_WIDE.astype(np.int32)), grey_rgb(GREY)),
    "I;16": (Image.fromarray(_WIDE), grey_rgb(GREY)),
    "I;16B": (
        Image.frombytes("I;16B", (3, 2), _WIDE.astype(">u2").tobytes()),
        grey_rgb(GREY),
    ),
    "P, transparent": (
        declaring(_PALETTED.copy(), _PALETTED.getpixel((1, 0))),
        [[RGB[0][0], WHITE, RGB[0][2]], RGB[1]],
    ),
    "RGB, transparent": (
        declaring(_RGB.copy(), (10, 20, 30)),
        [RGB[0], [WHITE, *RGB[1][1:]]],
    ),
    "I;16, transparent": (
        declaring(Image.fromarray(_WIDE), 0x7F7F),
        grey_rgb([[0, 1, 255], [128, 254, 255]]),
    ),
}
IN_A_PNG = {"1", "L", "P", "RGB", "RGBA", "LA", "I;16"}


def seen(image):
    """The pixels that a model sees of a message, decoded as the server does."""
    if image.WhichOneof("source") == "encoded":
        return decode_encoded(image.encoded.data, max_pixels=100)
    layout, data = image.raw.layout, image.raw.data
    form = PixelFormat(media_pb2.PixelFormat.Name(layout.format).split("_")[-1].lower())
    blob = BlobRef(name="", size=len(data))
    return decode_raw(
        data, RawImage(blob, layout.width, layout.height, layout.row_stride_bytes, form)
    )


def entry_points(image, tmp_path):
    """What is seen of a Pillow image, and of its file, however they are given."""
    yield "Pillow", seen(to_image(image))
    yield "Pillow, drawn on", open_upright(image)
    if image.mode not in IN_A_PNG:
        return
    path = tmp_path / "image.png"
    image.save(path, exif=image.getexif())
    file = path.read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    compressed = SimpleNamespace(format="png", data=file)
    for name, given in {
        "path": path,
        "bytes": file,
        "HTTP": asyncio.run(web_images.decoded(url, "image")),
        "bag": ros_images.compressed(compressed),
    }.items():
        yield name, seen(to_image(given))
        yield f"{name}, drawn on", open_upright(given)
    with Image.open(path) as opened:
        yield "Pillow's file", seen(to_image(opened))


@pytest.mark.parametrize("mode", IMAGES)
@pytest.mark.parametrize("is_turned", [False, True])
def test_every_entry_point_sees_the_same_pixels(mode, is_turned, tmp_path):
    """A Pillow image of any mode, and its file, are seen as a viewer shows them by every way in."""
    original, shown = IMAGES[mode]
    image, expected = original.copy(), np.array(shown)
    if is_turned:
        image.getexif()[0x0112] = 6  # turned clockwise
        expected = np.rot90(expected, -1)
    rounding = 2 if mode in ("RGBa", "La", "HSV") else 0
    for name, pixels in entry_points(image, tmp_path):
        found = np.asarray(pixels).astype(int)
        assert found.shape == expected.shape, name
        assert np.abs(found - expected).max() <= rounding, name


def test_arrays_are_seen_as_they_are():
    """Sent or drawn on, an array has the pixels of its file; alpha of arrays is ignored."""
    grey, rgb = np.array(GREY, np.uint8), np.array(RGB, np.uint8)
    rgba = np.dstack([rgb, np.array(ALPHA, np.uint8)])
    for array, shown in ((grey, grey_rgb(GREY)), (rgb, RGB), (rgba, RGB)):
        assert np.array_equal(seen(to_image(array)), shown)
        assert np.array_equal(np.asarray(open_upright(array)), shown)


UNKNOWN_RANGES = {
    "F": Image.new("F", (2, 2), 0.5),
    "I, negative": Image.new("I", (2, 2), -1),
    "I, 17 bits": Image.new("I", (2, 2), 1 << 16),
    "uint16": np.zeros((2, 2), np.uint16),
    "float32": np.zeros((2, 2, 3), np.float32),
    "bool": np.zeros((2, 2), np.bool_),
}


@pytest.mark.parametrize("name", UNKNOWN_RANGES)
@pytest.mark.parametrize("use", [to_image, annotate])
def test_samples_without_a_known_range_are_refused(name, use):
    """Sent or drawn on: never silently black or white."""
    with pytest.raises(ValueError, match=r"mode|need a uint8 array"):
        use(UNKNOWN_RANGES[name])


# ---------------------------------------------------------------- upload
# Images sent once and asked about many times.

JPEG = bytes(range(256)) * 2500  # 625 KiB: three chunks


def test_upload_whole(client, server):
    """An image arrives byte for byte, in chunks of the size the contract calls best."""
    held = client.put_image(JPEG, ttl=90)
    header, data = server.images.held[held.image_id]
    assert data == JPEG
    assert header.ttl.seconds == 90
    assert server.images.chunks == [BEST_CHUNK, BEST_CHUNK, len(JPEG) - 2 * BEST_CHUNK]


def test_what_is_held(client):
    """The value says the id, the upright size and the end of its time."""
    held = client.put_image(b"jpeg", ttl=60)
    assert (held.width, held.height) == (20, 10)
    assert held.expire_time == datetime.datetime.fromtimestamp(1_000_000_060, datetime.UTC)


def test_a_held_image_stands_for_its_bytes(client, server):
    """What `put_image` gives is an image for every other call, sent as its id."""
    held = client.put_image(b"jpeg")
    client.detect(held, "cat")
    assert server.last("Detect").image.image_id == held.image_id
    assert isinstance(held, CachedImage)


def test_arrays_are_uploaded_as_pixels(client, server):
    """An array, or a camera's frame, is uploaded with its layout."""
    array = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    header, data = server.images.held[client.put_image(array).image_id]
    assert (header.layout.width, header.layout.height) == (5, 4)
    assert data == array.tobytes()
    frame = RawFrame(bytes(6), 2, 2, "nv12")
    header, _ = server.images.held[client.put_image(frame).image_id]
    assert header.layout.format == media_pb2.PIXEL_FORMAT_NV12
    assert not header.HasField("ttl")


def test_only_bytes_are_uploaded(client, server):
    """An image that is only a name cannot be uploaded."""
    with pytest.raises(TypeError, match="own bytes"):
        client.put_image(CachedImage("img_1"))
    with pytest.raises(ValueError, match="must be 0 to"):
        client.put_image(b"jpeg", ttl=-1)
    assert not server.images.metadata


def test_delete(client, server):
    """An image is forgotten by value or id; one that is not held is ImageNotFound."""
    held = client.put_image(b"jpeg")
    client.delete_image(held)
    assert not server.images.held
    with pytest.raises(ImageNotFound):
        client.delete_image(held.image_id)


def test_a_full_server_is_asked_again(client, server):
    """An upload that meets a full server is sent whole a second time, when the server said."""
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    server.images.script.append(failure(full, "QUEUE_FULL", retry_info(0.01)))
    assert server.images.held[client.put_image(JPEG).image_id][1] == JPEG
    assert len(server.images.metadata) == 2


def test_a_refusal_in_the_middle(client, server):
    """An upload that is refused while it is being sent fails with the server's reason."""
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    for _ in range(20):
        server.images.script.append(full)
        with pytest.raises(QuotaExceeded):
            client.put_image(bytes(4_000_000))


def test_the_other_name(client):
    """`encode_image`, as the moondream SDK has it, is `put_image`."""
    assert isinstance(client.encode_image(b"jpeg"), HeldImage)


PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def content(frame):
    """What a slot holds: its header's magic and generation, and its bytes."""
    shared = frame.to_image().shared
    data = (blob_folder() / shared.region).read_bytes()
    magic, generation = struct.unpack_from("<8sQ", data, shared.offset - HEADER_SIZE)
    return magic, generation, data[shared.offset : shared.offset + shared.size_bytes]


def regions():
    """The regions of this user that exist now."""
    return set(blob_folder().glob(f"legato-{os.geteuid()}-*"))


def test_an_array_is_written_with_its_layout():
    """The slot holds the pixels, and the message says how they lie and at which generation."""
    with SharedFrames(PIXELS.nbytes) as frames, frames.write(PIXELS) as frame:
        shared = frame.to_image().shared
        assert content(frame) == (b"LEGATO01", shared.generation, PIXELS.tobytes())
        assert (shared.layout.width, shared.layout.height) == (6, 4)
        assert shared.layout.format == media_pb2.PIXEL_FORMAT_RGB8
        assert shared.generation == 2
        assert shared.offset % HEADER_SIZE == 0


@pytest.mark.parametrize(
    "array", [PIXELS[:, ::-1], PIXELS[::2], PIXELS[:, :, 0], np.asfortranarray(PIXELS)]
)
def test_an_array_of_any_order(array):
    """Views are written row by row, as they look."""
    with SharedFrames(1000) as frames, frames.write(array) as frame:
        assert content(frame)[2] == array.tobytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_a_file_or_pixels_of_a_layout(kind):
    """Without a layout bytes are an image file, with one they are pixels."""
    layout = media_pb2.PixelLayout(width=4, height=2, format=media_pb2.PIXEL_FORMAT_NV12)
    with SharedFrames(100) as frames:
        file = frames.write(kind(b"file"), mime_type="image/jpeg").to_image().shared
        assert file.WhichOneof("content") == "mime_type"
        assert (file.mime_type, file.size_bytes) == ("image/jpeg", 4)
        pixels = frames.write(kind(bytes(12)), layout=layout).to_image().shared
        assert pixels.layout == layout
        unnamed = frames.write(kind(b"file")).to_image().shared
        assert unnamed.WhichOneof("content") == "mime_type"


def test_slots_are_written_in_turn_and_never_while_they_are_used():
    """Each frame keeps its slot until it is released, and a full ring refuses one more."""
    with SharedFrames(10, num_slots=2) as frames:
        first, second = frames.write(b"1"), frames.write(b"2")
        with pytest.raises(SlotsBusy):
            frames.write(b"3")
        first.release()
        first.release()
        assert frames.num_free == 1
        third = frames.write(b"3")
        assert third.to_image().shared.offset == first.to_image().shared.offset
        assert third.to_image().shared.generation == 4
        assert content(second) == (b"LEGATO01", 2, b"2")
        assert content(third) == (b"LEGATO01", 4, b"3")


def test_a_writer_can_wait_for_a_slot():
    """With a timeout, a release in another thread lets the writer go on."""
    with SharedFrames(10, num_slots=1) as frames:
        frame = frames.write(b"1")
        threading.Timer(0.05, frame.release).start()
        assert content(frames.write(b"2", timeout=60))[2] == b"2"


def test_the_region_is_private_and_goes():
    """Only this user may open it, slots do not overlap, and nothing is left."""
    before = regions()
    with SharedFrames(100, num_slots=3) as frames:
        (path,) = regions() - before
        assert path.name == frames.region
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        offsets = [frames.write(bytes(100)).to_image().shared.offset for _ in range(3)]
        assert all(b - a >= 100 + HEADER_SIZE for a, b in itertools.pairwise(offsets))
    assert regions() == before
    frames.close()
    with pytest.raises(ValueError, match="closed"):
        frames.write(b"x")
    SharedFrames(100)
    assert regions() == before


@pytest.mark.parametrize(
    "frame",
    [b"", bytes(101), PIXELS.astype(np.float32), np.zeros((2, 2, 2), np.uint8), np.uint8(3)],
)
def test_what_is_no_frame_is_refused(frame):
    """Too many bytes, none, or an array of another kind take no slot."""
    with SharedFrames(100, num_slots=1) as frames:
        with pytest.raises(ValueError, match=r"a slot takes|need a"):
            frames.write(frame)
        assert frames.num_free == 1


def test_the_namespace_names_boot_and_device():
    """Client and server on one host find the same name."""
    boot_id, device = shm_namespace().split(":")
    assert len(boot_id) == 36
    assert int(device) == blob_folder().stat().st_dev


# ---------------------------------------------------------------- shared frames
# Frames in shared memory as images of any call.

FRAME = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


@pytest.fixture
def ring():
    """Four slots."""
    with SharedFrames(slot_bytes=100) as frames:
        yield frames


def allow(server: FakeServer, namespace: str | None = None) -> None:
    """Let the server read this namespace, its host's own where none is given."""
    name = shm_namespace() if namespace is None else namespace
    server.script["GetServerInfo"].append(server_pb2.GetServerInfoResponse(shm_namespace=name))


def test_a_frame_is_sent_by_name(client, server, ring):
    """A shared frame travels as its slot; the server is asked once whether it can read it."""
    allow(server)
    with ring.write(FRAME) as frame:
        client.detect(frame, "cat")
    sent = server.last("Detect").image.shared
    assert (sent.region, sent.size_bytes) == (ring.region, 60)
    assert (sent.layout.width, sent.layout.height) == (5, 4)
    assert ring.num_free == 4


@pytest.mark.parametrize("namespace", ["", "another-host:7"])
def test_another_hosts_memory(client, server, ring, namespace):
    """A server that reads no shared memory, or another host's, is not sent a slot."""
    allow(server, namespace)
    with ring.write(FRAME) as frame, pytest.raises(SharedMemoryRefused, match="send the bytes"):
        client.detect(frame, "cat")
    assert server.count("Detect") == 0


def test_a_cameras_frame_in_a_slot(ring):
    """A raw frame keeps its format and its padding in a slot."""
    with ring.write(RawFrame(bytes(8 + 6), 2, 2, "bgr8", stride=8)) as frame:
        layout = frame.to_image().shared.layout
    assert (layout.format, layout.row_stride_bytes) == (media_pb2.PIXEL_FORMAT_BGR8, 8)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_session_gives_slots_back(kind, server, ring):
    """A slot is free again once the server took or dropped its frame, or the session ended."""
    server.sessions.frame_credits = 4
    server.sessions.on_frame = ignore
    connect = functools.partial(session_of, kind, server.target)
    with connect([CaptionTask()]) as session:
        allow(server)
        for _ in range(4):
            session.send(ring.write(FRAME))
        assert ring.num_free == 0
        conversation = server.sessions.last
        until(lambda: len(conversation.frames) == 4)
        assert conversation.frames[0].image.shared.region == ring.region
        conversation.accept(1)
        until(lambda: ring.num_free == 1)
        conversation.drop(2, session_pb2.DROP_REASON_SUPERSEDED)
        until(lambda: ring.num_free == 2)
    assert ring.num_free == 4
