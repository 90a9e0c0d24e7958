"""Images that are uploaded once, and frames in shared memory, with a real model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2
from legato.v1 import image_pb2, image_pb2_grpc, inference_pb2, media_pb2
from legato_client._images.sources import SharedFrames
from PIL import Image

from tests.e2e.scenes import long_stream, overlap, two_shapes
from tests.e2e.server import RANDOM, SLOWLY, Server, failure_of, until
from tests.service.harness import read_refusal

SCENE = two_shapes(offset=31)
PIXELS = np.asarray(SCENE.image)
NOUN = "red circle"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that reads shared images and holds little for each caller."""
    options = ("--shared-images", "--image-quota-bytes", "3000000")
    with Server(tmp_path_factory.mktemp("sharing"), *options) as running:
        yield running
        running.settle()


def put(server, data, chunk=1000, **header):
    """Upload an image in pieces."""
    images = image_pb2_grpc.ImageServiceStub(server.channel)
    pieces = [
        image_pb2.PutImageRequest(chunk=data[at : at + chunk]) for at in range(0, len(data), chunk)
    ]
    first = image_pb2.PutImageRequest(header=image_pb2.PutImageHeader(**header))
    return images.PutImage(iter([first, *pieces]))


def delete(server, image_id):
    """Forget an image."""
    images = image_pb2_grpc.ImageServiceStub(server.channel)
    return images.DeleteImage(image_pb2.DeleteImageRequest(image_id=image_id))


def boxes(server, image):
    """The boxes found, and what is told of the image."""
    response = server.inference.Detect(inference_pb2.DetectRequest(image=image, object=NOUN))
    return [found.box for found in response.objects], response.info.image


def nv12(image: Image.Image) -> media_pb2.RawImage:
    """An image as a camera gives it, by the formulas of BT.601 in limited range."""
    red, green, blue = np.moveaxis(np.asarray(image, float) / 255, -1, 0)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    u, v = (blue - luma) / 1.772, (red - luma) / 1.402
    chroma = np.stack([u, v], axis=-1).reshape(image.height // 2, 2, image.width // 2, 2, 2)
    planes = [16 + 219 * luma, 128 + 224 * chroma.mean(axis=(1, 3))]
    data = b"".join(np.rint(plane).astype(np.uint8).tobytes() for plane in planes)
    layout = media_pb2.PixelLayout(
        width=image.width, height=image.height, format=media_pb2.PIXEL_FORMAT_NV12
    )
    return media_pb2.RawImage(layout=layout, data=data)


def test_put_ask_delete_ask(server):
    """An image sent in pieces answers by its id as it does inline, until it is deleted."""
    file = SCENE.file()
    by_bytes, _ = boxes(server, SCENE.message())
    digest = hashlib.sha256(file).digest()
    held = put(server, file, sha256=digest, size_bytes=len(file), mime_type="image/png").image
    assert (held.width, held.height) == SCENE.image.size
    assert held.image_id == f"img_{digest.hex()[:32]}"
    again = put(server, file, chunk=100).image
    assert (again.image_id, again.cache_hit) == (held.image_id, True)
    by_id, image = boxes(server, media_pb2.Image(image_id=held.image_id))
    assert by_id == by_bytes
    assert (image.image_id, image.cache_hit) == (held.image_id, True)
    delete(server, held.image_id)
    for ask in (
        lambda: boxes(server, media_pb2.Image(image_id=held.image_id)),
        lambda: delete(server, held.image_id),
    ):
        failed = failure_of(ask)
        assert (failed.code, failed.reason) == (grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND")


def test_a_image_is_gone_when_its_time_is_over(server):
    """After its time, and not before, an image is unknown."""
    file = two_shapes(offset=33).file()
    begun = time.monotonic()
    image_id = put(server, file, ttl=duration_pb2.Duration(seconds=2)).image.image_id
    image = media_pb2.Image(image_id=image_id)

    asked = time.monotonic()
    assert reason_against(server, image) is None or time.monotonic() - begun > 2
    until(lambda: time.monotonic() - asked > 2)
    assert failure_of(lambda: boxes(server, image)).reason == "IMAGE_NOT_FOUND"
    assert put(server, file).image.cache_hit is False
    boxes(server, image)
    delete(server, image_id)


def test_a_broken_upload_is_told_at_once(server):
    """What cannot be decoded, or is not what it should be, is refused at the upload."""
    file = SCENE.file()
    failed = failure_of(lambda: put(server, file[: len(file) // 2]))
    assert (failed.reason, failed.details["ErrorInfo"].metadata["field"]) == (
        "IMAGE_UNDECODABLE",
        "chunk",
    )
    failed = failure_of(lambda: put(server, file, sha256=bytes(32)))
    assert failed.details["ErrorInfo"].metadata["field"] == "header.sha256"


def test_a_cancelled_upload_leaves_nothing(server):
    """No byte of an upload stays when its caller goes in the middle of it."""
    gate = Gate(SCENE.file())
    call = image_pb2_grpc.ImageServiceStub(server.channel).PutImage.future(gate)
    until(server.blobs)
    call.cancel()
    until(lambda: not server.blobs())
    gate.closed = True


class Gate:
    """An upload that never comes to its end by itself."""

    def __init__(self, data: bytes) -> None:
        self._messages = iter(
            (
                image_pb2.PutImageRequest(header=image_pb2.PutImageHeader()),
                image_pb2.PutImageRequest(chunk=data[:1000]),
            )
        )
        self.closed = False

    def __iter__(self):
        return self

    def __next__(self):
        for message in self._messages:
            return message
        until(lambda: self.closed)
        raise StopIteration


def test_pixels_of_a_camera_find_the_same(server):
    """An image in NV12 has its objects where the file has them."""
    (expected,), _ = boxes(server, SCENE.message())
    (box,), image = boxes(server, media_pb2.Image(raw=nv12(SCENE.image)))
    assert overlap(box, expected) > 0.9
    assert (image.width, image.height) == SCENE.image.size


def test_a_shared_frame_answers_as_the_same_pixels_inline(sharing):
    """The way of the pixels makes no difference to the answer."""
    layout = media_pb2.PixelLayout(
        width=SCENE.image.width, height=SCENE.image.height, format=media_pb2.PIXEL_FORMAT_RGB8
    )
    raw = media_pb2.RawImage(layout=layout, data=PIXELS.tobytes())
    inline, _ = boxes(sharing, media_pb2.Image(raw=raw))
    camera = nv12(SCENE.image)
    yuv, _ = boxes(sharing, media_pb2.Image(raw=camera))
    with SharedFrames(PIXELS.nbytes, num_slots=2) as frames:
        for _ in range(3):
            with frames.write(PIXELS) as frame:
                assert boxes(sharing, frame.to_image())[0] == inline
            with frames.write(SCENE.file()) as frame:
                assert boxes(sharing, frame.to_image())[0] == inline
            with frames.write(camera.data, layout=camera.layout) as frame:
                assert boxes(sharing, frame.to_image())[0] == yuv
        frame = frames.write(PIXELS)
        frame.release()
        frames.write(PIXELS).release()
        frames.write(PIXELS).release()
        failed = failure_of(lambda: boxes(sharing, frame.to_image()))
        assert (failed.code, failed.reason) == (grpc.StatusCode.ABORTED, "SHM_TORN")
    failed = failure_of(lambda: boxes(sharing, frame.to_image()))
    assert failed.reason == "SHM_REFUSED"


def test_the_quota_is_of_what_is_held(sharing):
    """A caller at its quota is refused further uploads until it deletes one."""
    held: list[str] = []

    def fill():
        files = (two_shapes(offset).file() for offset in range(100))
        held.extend(put(sharing, file).image.image_id for file in files)

    failed = failure_of(fill)
    assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.reason == "QUOTA_EXCEEDED"
    assert failed.details["QuotaFailure"].violations[0].subject == "peer:127.0.0.1"
    delete(sharing, held.pop())
    held.append(put(sharing, two_shapes(99).file()).image.image_id)
    assert failure_of(lambda: put(sharing, two_shapes(98).file())).reason == "QUOTA_EXCEEDED"
    for image_id in held:
        delete(sharing, image_id)


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine may be killed."""
    program = ("-m", "tests.e2e.quick_service")
    folder = tmp_path_factory.mktemp("mortal")
    with Server(folder, *RANDOM, program=program, environment=SLOWLY) as running:
        yield running


def lose_engine(server: Server) -> None:
    """Return once the next engine serves."""
    server.kill_engine()
    until(lambda: not server.is_serving())
    until(server.is_serving)


def test_an_upload_outlives_its_engine(mortal):
    """It answers by its id as before, is deleted once, and then is unknown."""
    expected, _ = boxes(mortal, SCENE.message())
    image = media_pb2.Image(image_id=put(mortal, SCENE.file()).image.image_id)
    lose_engine(mortal)
    by_id, info = boxes(mortal, image)
    assert by_id == expected
    assert info.image_id == image.image_id
    lose_engine(mortal)
    delete(mortal, image.image_id)
    for ask in (lambda: boxes(mortal, image), lambda: delete(mortal, image.image_id)):
        assert failure_of(ask).reason == "IMAGE_NOT_FOUND"
    mortal.settle()


def test_a_request_that_names_an_upload_outlives_its_engine(mortal):
    """A stream that began with the lost engine goes on with the next one."""
    image = media_pb2.Image(image_id=put(mortal, SCENE.file()).image.image_id)
    calm = list(mortal.inference.Generate(long_stream(60, image=image)))
    for _ in range(5):  # the engine may have been quicker than its end
        stream = mortal.inference.Generate(long_stream(60, image=image))
        first = [next(stream) for _ in range(5)]
        mortal.kill_engine()
        rest = list(stream)
        texts = "".join(each.text.text for each in (*first, *rest))
        assert texts == "".join(each.text.text for each in calm)
        if rest[-1].finished.info.resumptions:
            break
        until(mortal.is_serving)
    assert rest[-1].finished.info.resumptions == 1
    delete(mortal, image.image_id)


def test_a_hold_ends_with_its_time_whatever_engine_holds_it(mortal):
    file = two_shapes(offset=21).file()
    image_id = put(mortal, file, ttl=duration_pb2.Duration(seconds=3)).image.image_id
    lose_engine(mortal)
    image = media_pb2.Image(image_id=image_id)
    until(lambda: reason_against(mortal, image) == "IMAGE_NOT_FOUND")
    mortal.settle()


def reason_against(server: Server, image: media_pb2.Image) -> str | None:
    """Why the image gives no answer; not cached, so that only a hold can have it."""
    options = inference_pb2.RequestOptions(cache_image=False)
    request = inference_pb2.DetectRequest(image=image, object=NOUN, max_objects=1, options=options)
    try:
        server.inference.Detect(request)
    except grpc.RpcError as error:
        return read_refusal(error).reason
    return None
