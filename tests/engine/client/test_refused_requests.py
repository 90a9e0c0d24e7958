"""Requests that ended engines are known again by their content."""

import time

import msgspec
import pytest
from legato_engine.client import recovery
from legato_engine.client.recovery import RefusedRequests, fingerprint
from legato_engine.errors import Poisoned
from legato_engine.images.decoding import content_key, image_id
from legato_engine.shm import BlobStore, new_namespace
from legato_engine.types import (
    CachedImage,
    DetectTask,
    EncodedImage,
    PixelFormat,
    QueryTask,
    RawImage,
    Request,
    RequestKey,
    SamplingParams,
)

SIZES = pytest.mark.parametrize("size", [10, 5_000_000], ids=["segment", "file"])


@pytest.fixture
def blobs():
    """A store of blobs."""
    store = BlobStore(new_namespace())
    yield store
    store.close()


def request(blobs, data=b"picture", **fields):
    """A request with an image of these bytes."""
    image = EncodedImage(blob=blobs.put(data), mime_type="image/png")
    made = Request(request_id=RequestKey("a"), task=QueryTask(question="?"), image=image)
    return msgspec.structs.replace(made, **fields)


@SIZES
def test_the_same_content_is_refused(blobs, size):
    """Whatever its id; other words, sampling, adapter or image pass."""
    refused = RefusedRequests()
    data = b"x" * size
    refused.add(fingerprint(request(blobs, data), blobs))
    with pytest.raises(Poisoned):
        refused.check(request(blobs, data, request_id=RequestKey("b")), blobs)
    named = CachedImage(image_id=image_id(content_key(data)))
    with pytest.raises(Poisoned):
        refused.check(request(blobs, data, image=named), blobs)
    refused.check(request(blobs, data + b"y"), blobs)
    refused.check(request(blobs, data, task=QueryTask(question="!")), blobs)
    refused.check(request(blobs, data, task=DetectTask(object="?")), blobs)
    refused.check(request(blobs, data, sampling=SamplingParams(max_tokens=3)), blobs)
    refused.check(request(blobs, data, adapter="a"), blobs)
    refused.check(request(blobs, data, image=None), blobs)


def test_raw_pixels_differ_by_their_layout(blobs):
    """The same bytes in another layout are another image."""
    refused = RefusedRequests()

    def raw(width):
        return RawImage(
            blob=blobs.put(b"x" * 12), width=width, height=1, row_stride=6, format=PixelFormat.RGB8
        )

    refused.add(fingerprint(request(blobs, image=raw(2)), blobs))
    with pytest.raises(Poisoned):
        refused.check(request(blobs, image=raw(2)), blobs)
    refused.check(request(blobs, image=raw(1)), blobs)


def test_it_is_refused_for_a_while(blobs, monkeypatch):
    """After that the request is tried again."""
    refused = RefusedRequests()
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    refused.add(fingerprint(request(blobs), blobs))
    now[0] += recovery.REFUSAL - 1
    with pytest.raises(Poisoned):
        refused.check(request(blobs), blobs)
    now[0] += 2
    refused.check(request(blobs), blobs)
    assert len(refused) == 0
