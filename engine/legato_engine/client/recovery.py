"""Recovery of open requests after an engine's end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator

import msgspec
import structlog

from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import EngineLost, LegatoError, PoisonedRequest
from legato_engine.images.decoding import content_key, image_id
from legato_engine.ipc.messages import RunningAlone
from legato_engine.shm import BlobStore
from legato_engine.types import CachedImageRef, ImageSource, RawImage, Request

REFUSAL = 600.0  # seconds
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class RefusedRequests:
    """Fingerprints of refused requests, each kept for `REFUSAL` seconds.

    A fingerprint is of a request's task, sampling, adapter and images. Images are hashed only if
    the rest matches; the blobs, if the request has any, are in `blobs` and not read yet.
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
    """Return the fingerprint of a request whose blobs, if any, are in `blobs` and not read yet."""
    images = ",".join(_image_of(source, blobs) for source in request.images)
    return f"{_words_of(request)}:{images}"


def poisoned() -> PoisonedRequest:
    return PoisonedRequest("the engine ends whenever it runs this request")


def _image_of(source: ImageSource, blobs: BlobStore) -> str:
    if isinstance(source, CachedImageRef):
        return source.image_id
    raw = source if isinstance(source, RawImage) else None
    with blobs.read(source.blob) as view:
        return image_id(content_key(view, raw))


def _words_of(request: Request) -> str:
    content = (request.task, request.sampling, request.adapter)
    return hashlib.sha256(_encode(content)).hexdigest()


# ---------------------------------------------------------------- recovery

MAX_RESUMPTIONS = 3
"""Engines that a request may lose; with one more it fails, as poisoned if it ran alone."""

SUSPECT = 2
"""Lost engines after which a request runs alone."""

_log = structlog.get_logger()


class Recovery:
    """Attribution of crashes to requests, and resumption of the others on the next engine.

    A crash counts against all requests of the engine, unless it ran one alone: then against that
    one only. Refused requests are `refused` by all engines of the process.
    """

    def __init__(self, blobs: BlobStore, refused: RefusedRequests | None = None) -> None:
        self._blobs = blobs
        self._alone: RunningAlone | None = None
        self.refused = RefusedRequests() if refused is None else refused
        self.num_resumptions = 0  # since the start
        self.num_poisoned = 0

    def set_running_alone(self, message: RunningAlone) -> None:
        self._alone = None if message.request_id is None else message

    def record_loss(
        self, streams: Iterable[RequestStream], error: EngineLost
    ) -> Iterator[tuple[RequestStream, LegatoError]]:
        """Record the loss of an engine that was ready; yield the requests that fail with it."""
        alone, self._alone = self._alone, None
        if alone is not None and alone.is_last:
            self.refused.add(alone.fingerprint)
        for stream in streams:
            for blob in stream.request.blobs:
                self._blobs.discard(blob)
            was_sent, stream.is_sent = stream.is_sent, False
            was_alone = alone is not None and stream.request_id == alone.request_id
            if was_sent and (was_alone or alone is None):
                stream.resumptions += 1
            if stream.resumptions > MAX_RESUMPTIONS and was_alone:
                self.num_poisoned += 1
                _log.error("request_poisoned", request_id=stream.request_id.name)
                yield stream, poisoned()
            elif stream.resumptions > MAX_RESUMPTIONS or (was_sent and not can_resume(stream)):
                yield stream, error

    def renew(self, stream: RequestStream) -> Request:
        """Return an open request for the next engine, its images in new blobs.

        Raises:
            QueueFull: shared memory is full.
        """
        images = stream.request.images if stream.restage is None else stream.restage(self._blobs)
        if not stream.resumptions:  # no engine has started it
            return stream.request.with_images(images)
        alone = stream.resumptions >= SUSPECT
        request = stream.resumed(images, alone=alone)
        resumed = request.resumed
        assert resumed is not None
        if alone:
            resumed = msgspec.structs.replace(
                resumed,
                fingerprint=fingerprint(request, self._blobs),
                is_last=stream.resumptions == MAX_RESUMPTIONS,
            )
            request = msgspec.structs.replace(request, resumed=resumed)
        self.num_resumptions += 1
        _log.info(
            "request_resumed",
            request_id=stream.request_id.name,
            resumptions=stream.resumptions,
            tokens=len(resumed.token_ids),
            alone=alone,
        )
        return request


def can_resume(stream: RequestStream) -> bool:
    """Return whether another engine can be given the request's images."""
    return stream.restage is not None or not stream.request.blobs
