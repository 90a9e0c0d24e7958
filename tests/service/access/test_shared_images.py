"""Shared memory needs a scope of its own: a region does not say which tenant wrote it."""

import grpc
import pytest
from legato.v1 import inference_pb2
from legato_client._images.sources import SharedFrames

from tests.service.access.tokens import Token, write
from tests.service.harness import image_bytes, refusal, running
from tests.service.session.client import SessionClient, opening

ALLOWED = Token("arm-3", ["infer", "shared_images"], tenant="robots")
OTHER = Token("hall-3", ["infer", "upload"], tenant="others")


@pytest.fixture
def frame():
    """Yield an image in a region of this user."""
    with SharedFrames(1 << 16) as ring, ring.write(image_bytes()) as written:
        yield written.to_image()


@pytest.fixture
def tokens(tmp_path):
    """Return the settings of a server with both tokens."""
    return {"tokens": write(tmp_path / "tokens.toml", ALLOWED, OTHER), "shared_images": True}


async def test_a_credential_without_the_scope_reads_no_region(frame, tokens):
    """FORBIDDEN names the scope, before the region is opened; with it the image is read."""
    request = inference_pb2.DetectRequest(object="cup", image=frame)
    async with running(**tokens) as server:
        refused = await refusal(server.inference.Detect(request, metadata=OTHER.metadata))
        assert refused.code is grpc.StatusCode.PERMISSION_DENIED
        assert refused.reason == "FORBIDDEN"
        assert refused.details["ErrorInfo"].metadata["scope"] == "shared_images"
        request.image.shared.region = "legato-0-not-there"
        unknown = await refusal(server.inference.Detect(request, metadata=OTHER.metadata))
        assert unknown.reason == "FORBIDDEN"
        request.image.CopyFrom(frame)
        assert await server.inference.Detect(request, metadata=ALLOWED.metadata)
        assert len(server.engine.requests) == 1


async def test_a_session_without_the_scope_reads_no_region(frame, tokens):
    """The frame's result is FORBIDDEN, and the session goes on."""
    async with running(**tokens) as server:
        client = SessionClient(server.sessions.Session(metadata=OTHER.metadata))
        await client.send(open=opening())
        await client.frame(1, image=frame)
        await client.outcome(1)
        (result,) = client.results[1]
        assert result.error.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        await client.frame(2)
        await client.outcome(2)
        client.call.cancel()
