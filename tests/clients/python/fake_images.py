"""An image service that holds what it is sent, and refuses what the contract refuses."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterator
from typing import Any

import grpc
from legato.v1 import image_pb2, image_pb2_grpc, media_pb2

from tests.clients.python.failures import Failure, failure

BEST_CHUNK = 256 * 1024


class FakeImages(image_pb2_grpc.ImageServiceServicer):
    """Holds images by id; `held` maps an id to its header and bytes.

    `script` holds failures to answer the next uploads with, `chunks` the sizes of the last one's.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[image_pb2.PutImageHeader, bytes]] = {}
        self.script: collections.deque[Failure] = collections.deque()
        self.metadata: list[dict[str, str | bytes]] = []
        self.chunks: list[int] = []

    def PutImage(
        self, requests: Iterator[image_pb2.PutImageRequest], context: grpc.ServicerContext
    ) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        if self.script:
            self.script.popleft().abort(context)
        first, *rest = requests
        chunks = [request.chunk for request in rest]
        self.chunks = [len(chunk) for chunk in chunks]
        data = b"".join(chunks)
        if (
            first.WhichOneof("part") != "header"
            or any(request.WhichOneof("part") != "chunk" for request in rest)
            or len(data) != first.header.size_bytes
            or hashlib.sha256(data).digest() != first.header.sha256
        ):
            failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD").abort(context)
        image_id = f"img_{hashlib.sha256(data).hexdigest()[:32]}"
        self.held[image_id] = (first.header, data)
        info = media_pb2.ImageInfo(image_id=image_id, width=20, height=10)
        response = image_pb2.PutImageResponse(image=info)
        response.expire_time.FromSeconds(1_000_000_000 + first.header.ttl.seconds)
        return response

    def DeleteImage(
        self, request: image_pb2.DeleteImageRequest, context: grpc.ServicerContext
    ) -> Any:
        if self.held.pop(request.image_id, None) is None:
            failure(grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND").abort(context)
        return image_pb2.DeleteImageResponse()
