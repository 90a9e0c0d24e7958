"""ImageService with an engine that holds all images."""

import asyncio
import hashlib
import time
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from legato.v1 import image_pb2, inference_pb2, media_pb2
from legato_engine import errors
from legato_engine.client.monitor import EngineState
from legato_engine.types import CachedImageRef, EncodedImage, PixelFormat, RawImage

from tests.service.fakes import FakeEngine
from tests.service.harness import image_bytes, refusal, running, until

PNG = image_bytes()
LAYOUT = media_pb2.PixelLayout(width=4, height=2, format=media_pb2.PIXEL_FORMAT_NV12)
MAX_BYTES, MAX_PIXELS = 4096, 1000


def head(**fields):
    """Return the first message of an upload."""
    return image_pb2.PutImageRequest(header=image_pb2.PutImageHeader(**fields))


def chunk(data):
    """Return a later message."""
    return image_pb2.PutImageRequest(chunk=data)


def pieces(data, size=7, **header):
    """Return an upload in chunks of `size` bytes."""
    return [head(**header), *(chunk(data[at : at + size]) for at in range(0, len(data), size))]


def put(server, messages, tenant=None):
    """Start an upload of all these messages."""
    metadata = (("legato-tenant", tenant),) if tenant is not None else None
    return server.images.PutImage(iter(messages), metadata=metadata)


def delete(server, image_id, tenant=None):
    """Start a deletion."""
    metadata = (("legato-tenant", tenant),) if tenant is not None else None
    return server.images.DeleteImage(
        image_pb2.DeleteImageRequest(image_id=image_id), metadata=metadata
    )


async def settled(server):
    """Wait until no call and no byte of an upload is left."""
    await until(lambda: len(server.server.requests) == 0 and len(server.engine.blobs) == 0)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_file_in_pieces(size):
    """The engine gets the bytes in order, with their type."""
    async with running() as server:
        response = await put(server, pieces(PNG, size))
        (command,) = server.engine.holds
        assert isinstance(command.image, EncodedImage)
        assert command.image.mime_type == "image/png"
        assert command.image.blob.size == len(PNG)
        key = hashlib.sha256(PNG).hexdigest()
        assert response.image.image_id == f"img_{key[:32]}"
        assert (response.image.width, response.image.height) == (640, 480)
        assert not response.image.cache_hit
        await settled(server)


async def test_large_chunks():
    """A chunk of megabytes arrives as whole as a small one."""
    data = PNG + bytes(3 << 20)
    async with running() as server:
        response = await put(server, [head(), chunk(data), chunk(b"end")])
        key = hashlib.sha256(data + b"end").hexdigest()
        assert response.image.image_id == f"img_{key[:32]}"


async def test_pixels_in_pieces():
    """Pixels have their layout; an absent stride follows from the width."""
    async with running() as server:
        await put(server, pieces(bytes(range(12)), 5, layout=LAYOUT))
    (command,) = server.engine.holds
    assert isinstance(command.image, RawImage)
    assert (command.image.width, command.image.height, command.image.row_stride) == (4, 2, 4)
    assert command.image.format is PixelFormat.NV12


async def test_the_same_bytes_are_one_image():
    """A second upload has the id of the first, and is a cache hit."""
    async with running() as server:
        first = await put(server, pieces(PNG))
        again = await put(server, pieces(PNG, 100))
    assert again.image.image_id == first.image.image_id
    assert again.image.cache_hit


async def test_an_image_that_is_deleted_while_the_next_engine_takes_it_is_gone():
    """The engine does not hold it yet, so that it could not be dropped there."""
    async with running() as server:
        engine = server.engine
        image_id = (await put(server, pieces(PNG))).image.image_id
        engine.held.clear()
        engine.pid += 1
        engine.may_answer.clear()
        engine.become(EngineState.READY)
        await until(lambda: len(engine.holds) == 2)
        deleting = asyncio.ensure_future(delete(server, image_id))
        await until(lambda: not len(server.server.held_uploads))
        engine.may_answer.set()
        await deleting
        await settled(server)
        assert not engine.held


@pytest.mark.parametrize(
    ("requested", "given"), [(None, 50.0), (7.5, 7.5), (90.0, 90.0), (1000.0, 100.0)]
)
async def test_time_to_live(requested, given):
    """An image is held as long as requested, up to the server's limit, or the default."""
    fields = {}
    if requested is not None:
        fields["ttl"] = duration_pb2.Duration()
        fields["ttl"].FromMilliseconds(round(requested * 1000))
    async with running(image_ttl=50.0, image_max_ttl=100.0) as server:
        before = time.time()
        response = await put(server, pieces(PNG, **fields))
        after = time.time()
    assert server.engine.holds[0].ttl == given
    expiry = response.expire_time.ToNanoseconds() / 1e9
    assert before + given - 0.01 <= expiry <= after + given + 0.01


async def test_what_is_announced_and_right():
    """Correct size, hash and type change nothing; the engine checks the hash."""
    digest = hashlib.sha256(PNG).digest()
    async with running() as server:
        await put(server, pieces(PNG, size_bytes=len(PNG), sha256=digest, mime_type="image/PNG"))
    assert server.engine.holds[0].sha256 == digest.hex()


UNDECODABLE, TOO_LARGE = "IMAGE_UNDECODABLE", "IMAGE_TOO_LARGE"
BAD = {
    "nothing": ([], "header"),
    "no header": ([chunk(PNG)], "header"),
    "two headers": ([head(), head(), chunk(PNG)], "header"),
    "a late header": ([head(), chunk(PNG), head()], "header"),
    "no part": ([head(), image_pb2.PutImageRequest()], "part"),
    "no part first": ([image_pb2.PutImageRequest()], "header"),
    "type and layout": (pieces(PNG, layout=LAYOUT, mime_type="image/png"), "header.mime_type"),
    "too long a hash": (pieces(PNG, sha256=bytes(33)), "header.sha256"),
    "hex for a hash": (pieces(PNG, sha256=b"0" * 64), "header.sha256"),
    "no time": (pieces(PNG, ttl=duration_pb2.Duration()), "header.ttl"),
    "negative time": (pieces(PNG, ttl=duration_pb2.Duration(seconds=-1)), "header.ttl"),
    "fewer bytes": (pieces(PNG, size_bytes=len(PNG) + 1), "header.size_bytes"),
    "more bytes": (pieces(PNG, size_bytes=len(PNG) - 1), "header.size_bytes"),
    "odd layout": (
        pieces(
            bytes(12),
            layout=media_pb2.PixelLayout(width=3, height=2, format=media_pb2.PIXEL_FORMAT_NV12),
        ),
        "header.layout.width",
    ),
    "no format": (
        pieces(bytes(12), layout=media_pb2.PixelLayout(width=2, height=2)),
        "header.layout.format",
    ),
    "no bytes": ([head()], "chunk", UNDECODABLE),
    "empty chunks": ([head(), chunk(b""), chunk(b"")], "chunk", UNDECODABLE),
    "no picture": (pieces(b"hello"), "chunk", UNDECODABLE),
    "half a header": (pieces(PNG[:20]), "chunk", UNDECODABLE),
    "another type": (pieces(PNG, mime_type="image/jpeg"), "header.mime_type", UNDECODABLE),
    "too few pixels": (pieces(bytes(11), layout=LAYOUT), "chunk", UNDECODABLE),
    "too large": (pieces(PNG + bytes(MAX_BYTES), 512), "chunk", TOO_LARGE),
    "too large by announcement": (
        pieces(PNG, size_bytes=MAX_BYTES + 1),
        "header.size_bytes",
        TOO_LARGE,
    ),
    "too many pixels in a file": (pieces(image_bytes(size=(40, 40))), "chunk", TOO_LARGE),
    "too many pixels by layout": (
        pieces(
            b"",
            layout=media_pb2.PixelLayout(width=40, height=40, format=media_pb2.PIXEL_FORMAT_MONO8),
        ),
        "header.layout",
        TOO_LARGE,
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_upload_is_refused_by_its_field(case):
    """INVALID_ARGUMENT names the field, the engine gets nothing, and nothing is left."""
    messages, field, *reason = BAD[case]
    limits = {"max_image_pixels": MAX_PIXELS}
    async with running(engine_settings=limits, max_image_bytes=MAX_BYTES) as server:
        failed = await refusal(put(server, messages))
        assert not server.engine.holds
        await settled(server)
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.reason == (reason[0] if reason else "INVALID_FIELD")
    assert failed.details["BadRequest"].field_violations[0].field == field
    assert failed.details["ErrorInfo"].metadata["field"] == field


@pytest.mark.parametrize(
    ("error", "field", "reason"),
    [
        (errors.ImageUndecodable("cut", field="image"), "chunk", UNDECODABLE),
        (errors.ImageTooLarge("big", field="image"), "chunk", TOO_LARGE),
        (errors.InvalidField("wrong", field="sha256"), "header.sha256", "INVALID_FIELD"),
    ],
)
async def test_what_only_the_engine_finds_out_names_the_field(error, field, reason):
    """An upload that cannot be decoded is refused at once, by its field."""
    engine = FakeEngine()
    engine.refuses_holds = error
    async with running(engine) as server:
        failed = await refusal(put(server, pieces(PNG)))
        await settled(server)
    assert (failed.reason, failed.details["ErrorInfo"].metadata["field"]) == (reason, field)


async def test_an_exceeded_quota_has_a_quota_failure():
    """QUOTA_EXCEEDED comes with a QuotaFailure that names the owner, without a retry delay."""
    engine = FakeEngine()
    engine.refuses_holds = errors.BytesExceeded("full", caller="tenant:a", limit=1, actual=2)
    async with running(engine) as server:
        failed = await refusal(put(server, pieces(PNG), "a"))
    assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.reason == "QUOTA_EXCEEDED"
    assert failed.details["QuotaFailure"].violations[0].subject == "tenant:a"
    assert "grpc-retry-pushback-ms" not in failed.trailers


async def test_uploads_under_way_have_a_quota():
    """Uploads in progress count for their owner, with or without a size, until they end."""
    settings = {"image_quota_bytes": 2 * len(PNG)}
    engine = FakeEngine()
    engine.may_answer.clear()
    async with running(engine, engine_settings=settings) as server:
        first = put(server, pieces(PNG), "a")
        second = put(server, pieces(PNG, size_bytes=len(PNG)), "a")
        await until(lambda: len(engine.holds) == 2)
        failed = await refusal(put(server, pieces(PNG), "a"))
        assert failed.reason == "QUOTA_EXCEEDED"
        assert failed.details["QuotaFailure"].violations[0].subject == "tenant:a"
        failed = await refusal(put(server, [head(size_bytes=1)], "a"))
        assert failed.reason == "QUOTA_EXCEEDED"
        other = put(server, pieces(PNG), "b")
        await until(lambda: len(engine.holds) == 3)
        engine.may_answer.set()
        await asyncio.gather(first, second, other)
        await put(server, pieces(PNG), "a")


async def test_owners_are_distinguished():
    """A tenant has its own images; clients without a tenant share those of their host."""
    async with running() as server:
        image_id = (await put(server, pieces(PNG), "a")).image.image_id
        assert (await refusal(delete(server, image_id, "b"))).reason == "IMAGE_NOT_FOUND"
        assert (await refusal(delete(server, image_id))).reason == "IMAGE_NOT_FOUND"
        await delete(server, image_id, "a")
        await put(server, pieces(PNG))
        (owner,) = {owner for owner, _ in server.engine.held}
        assert owner == "peer:127.0.0.1"
        failed = await refusal(delete(server, image_id, "x" * 65))
        assert failed.details["ErrorInfo"].metadata["field"] == "metadata.legato-tenant"


async def test_an_image_is_deleted_once():
    """The second deletion is NOT_FOUND, by the image's name."""
    async with running() as server:
        image_id = (await put(server, pieces(PNG))).image.image_id
        await delete(server, image_id)
        failed = await refusal(delete(server, image_id))
        assert failed.code is grpc.StatusCode.NOT_FOUND
        assert failed.reason == "IMAGE_NOT_FOUND"
        resource = failed.details["ResourceInfo"]
        assert (resource.resource_type, resource.resource_name) == ("image", image_id)
        failed = await refusal(delete(server, ""))
        assert failed.details["ErrorInfo"].metadata["field"] == "image_id"


@pytest.mark.parametrize("how", ["cancel", "deadline", "stall", "engine"])
async def test_an_upload_that_ends_half_way_leaves_nothing(how):
    """Cancelled, late, stalled or without an engine: no blob, no quota, no image."""
    settings: dict[str, Any] = {"stall_timeout": 0.2} if how == "stall" else {}
    timeout = 0.3 if how == "deadline" else None
    async with running(engine_settings={"image_quota_bytes": len(PNG)}, **settings) as server:
        call = server.images.PutImage(timeout=timeout)
        await call.write(head())
        await call.write(chunk(PNG[:-1]))
        await until(lambda: len(server.engine.blobs) == 1)
        if how == "cancel":
            server.engine.may_answer.clear()
            call.cancel()
        elif how == "engine":
            server.engine.become(EngineState.LOST)
            server.engine.refuses_holds = errors.EngineLost("died")
            await call.write(chunk(PNG[-1:]))
            await call.done_writing()
            assert (await refusal(call)).reason == "ENGINE_LOST"
        else:
            failed = await refusal(call)
            codes = {"deadline": "DEADLINE_EXCEEDED", "stall": "ABORTED"}
            assert failed.code is grpc.StatusCode[codes[how]]
            assert failed.reason == ("CLIENT_TOO_SLOW" if how == "stall" else "")
        await settled(server)
        assert not server.engine.held
        server.engine.refuses_holds = None
        server.engine.may_answer.set()
        await put(server, pieces(PNG))


async def test_a_client_that_leaves_while_its_image_is_held():
    """An upload whose client leaves before the engine responds leaves nothing."""
    engine = FakeEngine()
    engine.may_answer.clear()
    async with running(engine) as server:
        call = put(server, pieces(PNG))
        await until(lambda: bool(engine.holds))
        call.cancel()
        await settled(server)
        assert not engine.held


async def test_draining_refuses_uploads():
    """A server that shuts down refuses uploads and keeps held images."""
    async with running() as server:
        await server.server.drain(0)
        assert (await refusal(put(server, pieces(PNG)))).reason == "DRAINING"
        assert (await refusal(delete(server, "img_0"))).reason == "DRAINING"


async def test_a_call_without_a_deadline_gets_the_default():
    """An endless upload is ended."""
    async with running(unary_deadline=0.3) as server:
        call = server.images.PutImage()
        await call.write(head())
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await settled(server)


async def test_a_held_image_is_named_by_its_id():
    """A request can name an image by its upload's id."""
    async with running() as server:
        image_id = (await put(server, pieces(PNG))).image.image_id
        await server.inference.Caption(
            inference_pb2.CaptionRequest(image=media_pb2.Image(image_id=image_id))
        )
    assert server.engine.requests[0].image == CachedImageRef(image_id=image_id)
