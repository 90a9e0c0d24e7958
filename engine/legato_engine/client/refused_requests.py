"""Requests that are refused because they ended engines."""

from __future__ import annotations

import hashlib
import time

import msgspec

from legato_engine.core.images import CachedImage, RawImage
from legato_engine.core.requests import Request
from legato_engine.errors import Poisoned
from legato_engine.images.decoding import content_key, image_id
from legato_engine.shm.blob_store import BlobStore

REFUSAL = 600.0  # seconds
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class RefusedRequests:
    """Fingerprints of such requests, each kept for `REFUSAL` seconds.

    A fingerprint is of a request's task, sampling, adapter and image. An image is hashed only if
    the rest matches; the blob, if the request has one, is in `blobs` and not taken yet.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # monotonic seconds

    def __len__(self) -> int:
        return len(self._until)

    def add(self, fingerprint: str) -> None:
        self._until[fingerprint] = time.monotonic() + REFUSAL

    def check(self, request: Request, blobs: BlobStore) -> None:
        """Check a request before it is sent.

        Raises:
            Poisoned: it is refused.
        """
        now = time.monotonic()
        self._until = {each: until for each, until in self._until.items() if until > now}
        words = f"{_words_of(request)}:"
        if not any(each.startswith(words) for each in self._until):
            return
        if fingerprint(request, blobs) in self._until:
            raise poisoned()


def fingerprint(request: Request, blobs: BlobStore) -> str:
    """The fingerprint of a request whose blob, if it has one, is in `blobs` and not taken yet."""
    return f"{_words_of(request)}:{_image_of(request, blobs)}"


def poisoned() -> Poisoned:
    return Poisoned("the engine ends whenever it runs this request")


def _image_of(request: Request, blobs: BlobStore) -> str:
    source = request.image
    if source is None:
        return ""
    if isinstance(source, CachedImage):
        return source.image_id
    raw = source if isinstance(source, RawImage) else None
    with blobs.read(source.blob) as view:
        return image_id(content_key(view, raw))


def _words_of(request: Request) -> str:
    content = (request.task, request.sampling, request.adapter)
    return hashlib.sha256(_encode(content)).hexdigest()
