"""Images of every form, good, broken and hostile, for a whole server."""

import asyncio
import collections
import functools
import io
import os
import threading
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from legato.v1 import image_pb2, image_pb2_grpc, inference_pb2, inference_pb2_grpc, media_pb2
from legato_client import CachedImage, Client, ClipFrame, InvalidArgument, NotFound, Options
from PIL import Image

from tests import hostile_images
from tests.e2e.scenes import overlap, two_shapes
from tests.e2e.server import ENVIRONMENT, RANDOM, Server, children, open_files, own_bytes
from tests.hostile_images import file, smooth
from tests.service.harness import read_refusal

SCENE = two_shapes()
PIXELS = np.asarray(SCENE.image)
ORIENTATION = 0x0112  # the EXIF tag
TURNS = {  # EXIF orientation: how the stored pixels come from the displayed ones
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}
RAW = {
    media_pb2.PIXEL_FORMAT_RGB8: PIXELS,
    media_pb2.PIXEL_FORMAT_BGR8: PIXELS[..., ::-1],
    media_pb2.PIXEL_FORMAT_RGBA8: np.dstack([PIXELS, np.zeros_like(PIXELS[..., :1])]),
    media_pb2.PIXEL_FORMAT_BGRA8: np.dstack([PIXELS[..., ::-1], np.zeros_like(PIXELS[..., :1])]),
}


def raw(pixels, form, padding=0):
    """Pixels of shape (height, width, channels) as a message; `padding` bytes end every row."""
    height, width, channels = pixels.shape
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (0, padding)), constant_values=99)
    layout = media_pb2.PixelLayout(
        width=width, height=height, row_stride_bytes=width * channels + padding, format=form
    )
    return media_pb2.Image(raw=media_pb2.RawImage(layout=layout, data=rows.tobytes()))


def boxes(server, image, noun="red circle"):
    """The boxes found on an image given as a message."""
    response = server.inference.Detect(inference_pb2.DetectRequest(image=image, object=noun))
    return [found.box for found in response.objects]


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"quality": 95})]
)
def test_image_files(client, kind, options):
    """The shape is found in each kind of file."""
    result = client.detect(SCENE.file(kind, **options), "red circle")
    (found,) = result.objects
    assert overlap(found.box, SCENE.boxes["red circle"]) > 0.7
    assert (result.info.image.width, result.info.image.height) == SCENE.image.size


@pytest.mark.parametrize("form", RAW)
def test_raw_pixels(server, form):
    """The same pixels in any order of channels give the answer that their PNG gives."""
    assert boxes(server, raw(RAW[form], form)) == boxes(server, SCENE.message())


def test_raw_rows_may_be_padded(server):
    """What stands between the rows is not part of the image."""
    padded = raw(PIXELS, media_pb2.PIXEL_FORMAT_RGB8, padding=5)
    assert boxes(server, padded) == boxes(server, SCENE.message())


def test_grey_pixels(server, client):
    """An image without colours still shows its shapes."""
    grey = SCENE.image.convert("L")
    mono = raw(np.asarray(grey)[..., None], media_pb2.PIXEL_FORMAT_MONO8)
    (box,) = boxes(server, mono, "circle")
    (found,) = client.detect(grey, "circle").objects
    assert found.box.x_min == box.x_min
    assert overlap(found.box, SCENE.boxes["red circle"]) > 0.5


def test_a_image_is_named_by_its_id(client):
    """An earlier answer's image id stands for the image."""
    first = client.detect(SCENE.image, "red circle")
    again = client.detect(CachedImage(first.info.image.image_id), "red circle")
    assert again.objects == first.objects
    assert again.info.image.cache_hit
    with pytest.raises(NotFound) as caught:
        client.detect(CachedImage("img_unknown"), "red circle")
    assert caught.value.reason == "IMAGE_NOT_FOUND"


def test_a_image_that_may_not_be_kept_is_not(client):
    """With `cache_image` false the next request cannot name the image."""
    image = two_shapes(offset=67).image
    options = Options(cache_image=False)
    info = client.detect(image, "red circle", options=options).info
    with pytest.raises(NotFound):
        client.detect(CachedImage(info.image.image_id), "red circle")


@pytest.mark.parametrize("orientation", TURNS)
def test_boxes_are_in_the_displayed_frame(client, orientation):
    """A camera's turned file is answered as a viewer shows it."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    buffer = io.BytesIO()
    SCENE.image.transpose(TURNS[orientation]).save(buffer, "JPEG", exif=exif, quality=95)
    result = client.detect(buffer.getvalue(), "red circle")
    (found,) = result.objects
    assert overlap(found.box, SCENE.boxes["red circle"]) > 0.7
    assert (result.info.image.width, result.info.image.height) == SCENE.image.size


def test_several_images_of_one_query(tmp_path):
    """New, named and raw ones in order; named ones are found, and a lost one is NotFound."""
    first, second = SCENE.file("PNG"), smooth(64, 48)
    with Server(tmp_path, "--model", "null") as server, Client(server.address) as client:
        assert client.models()[0].max_images == 8
        held = client.put_image(file(second, "PNG"))
        answer = client.query([first, held, ClipFrame(PIXELS, 1.5)], "Which is larger?")
        shown = answer.info.images
        assert [each.cache_hit for each in shown] == [False, True, False]
        assert [(each.width, each.height) for each in shown[:2]] == [SCENE.image.size, (64, 48)]
        assert answer.info.image == shown[0]
        alone = client.query(first, "What?").info.usage
        assert answer.info.usage is not None
        assert alone is not None
        assert answer.info.usage.image_tokens == 3 * (alone.image_tokens or 0) > 0
        with pytest.raises(NotFound):
            client.query([first, CachedImage("img_0")], "Which?")


def test_a_model_of_one_image_refuses_two(client):
    """Whatever they are; one in a list is one."""
    with pytest.raises(InvalidArgument, match="takes at most 1 of 2"):
        client.query([SCENE.file("PNG"), SCENE.file("PNG")], "Which?")
    assert client.query([SCENE.file("PNG")], "How many?").answer


@pytest.mark.parametrize(
    "data", [b"not an image", SCENE.file("PNG")[:-400], SCENE.file("JPEG")[:300]]
)
def test_broken_files_are_refused(client, data):
    """What is no image, or only part of one, is the caller's mistake."""
    with pytest.raises(InvalidArgument) as caught:
        client.detect(data, "red circle")
    assert caught.value.reason == "IMAGE_UNDECODABLE"
    assert caught.value.field_violations[0].field == "image.encoded.data"


def test_too_many_pixels_are_refused(client):
    """An image over the limit is refused with the limit, without being decoded."""
    limit = client.server_info().limits.max_image_pixels
    buffer = io.BytesIO()
    Image.new("1", (8000, limit // 8000 + 1)).save(buffer, "PNG")
    with pytest.raises(InvalidArgument) as caught:
        client.detect(buffer.getvalue(), "red circle")
    assert caught.value.reason == "IMAGE_TOO_LARGE"
    assert caught.value.metadata["limit"] == str(limit)


# ---------------------------------------------------------------- broken uploads
# Uploads that cannot be decoded leave nothing behind, in either process.

MAX_GROWTH = 3 * 1024 * 1024  # bytes of each process
MAX_DESCRIPTORS = 50  # of each process
AT_A_TIME = 16
SETTLING = 400  # calls before the first reading
NUM_BROKEN = 400  # calls between the readings; each of a leak of 20 kB passes the limit
LONG_SETTLING = 20_000  # until rings of bounded size are full, and allocators have their arenas
KINDS = ("PNG", "JPEG", "progressive", "WEBP")

LEAKS = """
import legato_engine.shm as reader
import legato_service.services.image as servicer
kept = []
def leaking(function):
    def call(*arguments):
        result = function(*arguments)
        kept.append((result, bytearray(20_000)))
        return result
    return call
reader._take_file = leaking(reader._take_file)
servicer.read_header = leaking(servicer.read_header)
"""
"""A `sitecustomize` of a deliberate leak: each upload keeps memory in both processes, and a
descriptor in the engine."""


@functools.cache
def half(kind: str) -> bytes:
    """The first half of a good file."""
    options = {"progressive": True} if kind == "progressive" else {}
    data = file(smooth(64, 48), "JPEG" if kind == "progressive" else kind, **options)
    return data[: len(data) // 2]


def broken(kind: str, number: int) -> bytes:
    """A file with a good header that is cut off; each number has other bytes, of no marker."""
    return half(kind) + f"{number:08}".encode()


class Growth:
    """How far the processes of a server grow from the first reading."""

    def __init__(self, server: Server) -> None:
        self._pids = {"service": server.process.pid, "engine": server.engine_pid}
        self._before = self._read()

    def _read(self) -> dict[str, tuple[int, int]]:
        return {name: (own_bytes(pid), open_files(pid).total()) for name, pid in self._pids.items()}

    def over_limit(self) -> list[str]:
        """What grew by too much."""
        found = []
        for name, (memory, descriptors) in self._read().items():
            before = self._before[name]
            if memory - before[0] > MAX_GROWTH:
                found.append(f"{name}: {memory - before[0]} bytes")
            if descriptors - before[1] > MAX_DESCRIPTORS:
                found.append(f"{name}: {descriptors - before[1]} descriptors")
        print(self._before, self._read())  # noqa: T201 - the figures of a failed run
        return found


async def _upload(channel: grpc.aio.Channel, data: bytes) -> None:
    stub = image_pb2_grpc.ImageServiceStub(channel)
    parts = [
        image_pb2.PutImageRequest(header=image_pb2.PutImageHeader()),
        image_pb2.PutImageRequest(chunk=data),
    ]
    await stub.PutImage(iter(parts))


async def _detect(channel: grpc.aio.Channel, data: bytes) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))
    await stub.Detect(inference_pb2.DetectRequest(image=image, object="cat"))


def send_broken(address: str, numbers: range) -> set[tuple[grpc.StatusCode, str]]:
    """Send broken images, uploads and requests in turn; return the codes and fields of failure."""
    ends: set[tuple[grpc.StatusCode, str]] = set()

    async def send_some(channel: grpc.aio.Channel, mine: range) -> None:
        for number in mine:
            call: Callable[..., object] = _detect if number % 2 else _upload
            data = broken(KINDS[number // 2 % len(KINDS)], number)
            try:
                await call(channel, data)  # type: ignore[misc]
                ends.add((grpc.StatusCode.OK, ""))
            except grpc.aio.AioRpcError as error:
                ends.add((error.code(), (error.details() or "").partition(":")[0]))

    async def send_all() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            shares = [numbers[start::AT_A_TIME] for start in range(AT_A_TIME)]
            await asyncio.gather(*(send_some(channel, share) for share in shares))

    asyncio.run(send_all())
    return ends


def check(server: Server, count: int, settling: int) -> list[str]:
    """What grows by too much over `count` broken images."""
    refused = {
        (grpc.StatusCode.INVALID_ARGUMENT, "chunk"),
        (grpc.StatusCode.INVALID_ARGUMENT, "image.encoded.data"),
    }
    assert send_broken(server.address, range(settling)) == refused
    growth = Growth(server)
    assert send_broken(server.address, range(settling, settling + count)) == refused
    server.settle()
    return growth.over_limit()


@pytest.mark.timeout(600)
def test_broken_uploads_leave_neither_memory_nor_descriptors(tmp_path):
    """Hundreds of images that cannot be decoded: no process grows, and none restarts."""
    with Server(tmp_path, *RANDOM) as server:
        engine = server.engine_pid
        assert check(server, NUM_BROKEN, SETTLING) == []
        assert server.engine_pid == engine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gate_finds_a_deliberate_leak(tmp_path):
    """The control: what the same gate says of a server that keeps something of every upload."""
    (tmp_path / "sitecustomize.py").write_text(LEAKS)
    path = os.pathsep.join((str(tmp_path), ENVIRONMENT["PYTHONPATH"]))
    with Server(tmp_path, *RANDOM, environment={"PYTHONPATH": path}) as server:
        found = " ".join(check(server, NUM_BROKEN, 100))
    assert "service: " in found
    assert "engine: " in found
    assert "descriptors" in found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_broken_uploads_leave_nothing(tmp_path):
    """The same bounds, a hundred times as many."""
    with Server(tmp_path) as server:
        assert check(server, 100_000, LONG_SETTLING) == []


# ---------------------------------------------------------------- hostile images
# Images that cost their reader far more than their sender, to a whole server.

AT_ONCE = 5
LARGE = 6
CHUNK = 1 << 20
GROWTH = 96 << 20  # bytes; each of the hostile images would take more if it were decoded here
MOMENT = 0.05

UNREADABLE = {"IMAGE_TOO_LARGE", "IMAGE_UNDECODABLE"}


def detect(server, data, timeout=90.0):
    """Ask for a cat in an image."""
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))
    request = inference_pb2.DetectRequest(image=image, object="cat")
    return server.inference.Detect(request, timeout=timeout)


def upload(server, data, timeout=90.0):
    """Upload an image in chunks."""
    parts = [image_pb2.PutImageRequest(header=image_pb2.PutImageHeader())]
    parts += [
        image_pb2.PutImageRequest(chunk=data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)
    ]
    stub = image_pb2_grpc.ImageServiceStub(server.channel)
    return stub.PutImage(iter(parts), timeout=timeout)


def send_at_once(server, call, data, count):
    """Send an image many times at once; return threads and the reasons they gather."""
    reasons: collections.Counter[str] = collections.Counter()

    def run() -> None:
        try:
            call(server, data)
            reasons["OK"] += 1
        except grpc.RpcError as error:
            reasons[read_refusal(error).reason or str(error)] += 1

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, reasons


@pytest.mark.timeout(600)
def test_hostile_images_are_refused_while_others_are_answered(tmp_path):
    """Each kind many times at once: typed errors, the same engine, its memory back."""
    images = {
        name: data
        for name, data in hostile_images.hostile().items()
        if name not in ("exif", "fill bytes")
    }
    with Server(tmp_path, *RANDOM) as server:
        detect(server, file(smooth(64, 48), "PNG"))
        engine, before = server.engine_pid, own_bytes(server.engine_pid)
        for name, data in images.items():
            call, count = (upload, 4) if len(data) > 3 * CHUNK else (detect, AT_ONCE)
            threads, reasons = send_at_once(server, call, data, count)
            others = 0
            while any(thread.is_alive() for thread in threads) or not others:
                detect(server, file(smooth(64 + others, 48), ("JPEG", "PNG")[others % 2]))
                others += 1
                time.sleep(MOMENT)
            assert set(reasons) <= UNREADABLE, (name, reasons)
            assert server.engine_pid == engine, name
        server.settle()
        assert own_bytes(engine) - before < GROWTH
        assert all(own_bytes(worker) < GROWTH for worker in children(engine))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_costly_images_do_not_hold_up_the_others(tmp_path):
    """While honest images of 16 megapixels wait for each other, small ones overtake them."""
    large = file(smooth(4000, 4000), "WEBP", method=0, quality=50)
    with Server(tmp_path) as server:
        detect(server, file(smooth(64, 48), "PNG"))
        threads, reasons = send_at_once(server, detect, large, LARGE)
        small = 0
        while any(thread.is_alive() for thread in threads):
            kind = ("JPEG", "PNG", "WEBP")[small % 3]
            detect(server, file(smooth(70 + small, 48), kind))
            small += 1
            if small == 3:
                ended_before = sum(reasons.values())
        assert ended_before < LARGE
        assert reasons == {"OK": LARGE}
