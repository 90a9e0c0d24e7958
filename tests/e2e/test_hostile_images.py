"""Images that cost their reader far more than their sender, to a whole server."""

import collections
import threading
import time

import grpc
import pytest
from legato.v1 import image_pb2, image_pb2_grpc, inference_pb2, media_pb2

from tests import hostile_images
from tests.e2e.server import Server, children, own_bytes
from tests.hostile_images import file, smooth
from tests.service.harness import read_refusal

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


def send(server, call, data, count):
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
    with Server(tmp_path) as server:
        detect(server, file(smooth(64, 48), "PNG"))
        engine, before = server.engine_pid, own_bytes(server.engine_pid)
        for name, data in images.items():
            call, count = (upload, 4) if len(data) > 3 * CHUNK else (detect, AT_ONCE)
            threads, reasons = send(server, call, data, count)
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
        threads, reasons = send(server, detect, large, LARGE)
        small = 0
        while any(thread.is_alive() for thread in threads):
            kind = ("JPEG", "PNG", "WEBP")[small % 3]
            detect(server, file(smooth(70 + small, 48), kind))
            small += 1
            if small == 3:
                ended_before = sum(reasons.values())
        assert ended_before < LARGE
        assert reasons == {"OK": LARGE}
