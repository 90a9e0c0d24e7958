"""Damaged and random messages, requests and image files, to whole servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from concurrent.futures import Future
from http import HTTPStatus
from typing import cast

import grpc
import pytest
import structlog
from legato.v1 import media_pb2, session_pb2
from legato_client import LegatoError as ClientError
from legato_client._grpc.transport import ServerStatus
from legato_client.web import bodies, moondream_api
from legato_client.web.bodies import Bodies
from legato_client.web.connections import ConnectionLimits
from legato_client.web.errors import RejectedRequest
from legato_client.web.openai_api import ChatBody
from legato_client.web.responses_api import ResponsesBody
from legato_engine.core.preprocessor import Preprocessor
from legato_engine.errors import ImageTooLarge, ImageUndecodable, LegatoError
from legato_engine.images.cache import ImageCache, ImageKey
from legato_engine.images.memory import PixelMemory, host_slab
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import EncodedImage
from legato_service.images.intake import ImageIntake, stage
from msgspec import Struct
from starlette.requests import Request

from tests.clients.python.fake_server import FakeServer
from tests.clients.python.web.serving import PATIENCE, http_server
from tests.fuzz.messages import disturbed, methods, mutate, request_of
from tests.fuzz.seeds import STREAMS_IN, STREAMS_OUT, http_bodies, images, messages
from tests.service.harness import running

# ---------------------------------------------------------------- wire
# Damaged and random messages of every method, to a whole server.

MESSAGE_MUTANTS = 800
SEED = 16
C = grpc.StatusCode
TYPED = {C.OK, C.INVALID_ARGUMENT, C.NOT_FOUND, C.FAILED_PRECONDITION, C.ALREADY_EXISTS}
ANY = TYPED | {C.UNIMPLEMENTED, C.RESOURCE_EXHAUSTED, C.DEADLINE_EXCEEDED}
BUGS = ("uncaught_exception", "internal_error")
RANDOM = 16  # requests of each method
LIVE = ("Watch", "WatchTimeline")  # streams without an end
PARSER = ("protobuf", "Error parsing", "DecodeError", "Exception", "Traceback")


async def end_of(channel, method, bodies):
    """The code and message of a call whose messages are these bytes."""
    streams_in = method.endswith(STREAMS_IN)
    streams_out = method.endswith(STREAMS_OUT)
    kind = ("stream" if streams_in else "unary", "stream" if streams_out else "unary")
    call = getattr(channel, "_".join(kind))(method)(
        iter(bodies) if streams_in else bodies[0], timeout=60
    )
    status = ServerStatus(call)  # a call that ends while it still sends gets an error of its own
    try:
        if streams_out:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        error = await status.resolve(error)
        return error.code(), error.details() or ""
    return C.OK, ""


def mutants(count):
    """Damaged messages of all methods in turn; the others of a stream stay whole."""
    chance = random.Random(SEED)
    methods = list(messages().items())
    for number in range(count):
        method, sent = methods[number % len(methods)]
        bodies = [message.SerializeToString() for message in sent]
        if not method.endswith(STREAMS_IN):
            bodies = [chance.choice(bodies)]
        at = chance.randrange(len(bodies))
        bodies[at] = mutate(bodies[at], chance) or b"\xff"
        yield method, bodies


@pytest.mark.timeout(600)
async def test_damaged_messages_end_with_a_typed_status():
    """Of 800 mutants none is called a fault of the server, and no parser's text is sent."""
    ends: dict[grpc.StatusCode, int] = {}
    async with running() as server:
        for method, bodies in mutants(MESSAGE_MUTANTS):
            code, text = await end_of(server.channel, method, bodies)
            assert code in TYPED, (method, code, text, bodies)
            assert text == "the request is not a valid protobuf message" or not any(
                word in text for word in PARSER
            ), text
            ends[code] = ends.get(code, 0) + 1
    assert ends[C.OK] > MESSAGE_MUTANTS // 20
    assert ends[C.INVALID_ARGUMENT] > MESSAGE_MUTANTS // 20


async def test_undamaged_messages_are_answered():
    """The control: every seed but those that name what is not there."""
    async with running() as server:
        for method, sent in messages().items():
            bodies = [message.SerializeToString() for message in sent]
            code, text = await end_of(server.channel, method, bodies)
            expected = {C.OK} if "Delete" not in method else {C.NOT_FOUND}
            if method.endswith("Detect"):
                expected = {C.FAILED_PRECONDITION, C.INVALID_ARGUMENT}  # the shared image
            assert code in expected, (method, code, text)


def random_requests(method, descriptor, chance):
    """The messages of one call, random ones or well-formed ones with a field that is changed."""
    known = messages().get(method, ())
    if known and chance.random() < 0.8:
        sent = [disturbed(each, chance) if chance.random() < 0.5 else each for each in known]
    else:
        sent = [request_of(descriptor, chance) for _ in range(3)]
    if method.endswith("/Session") and chance.random() < 0.8:
        sent[0] = session_pb2.SessionRequest(open=session_pb2.SessionOpen(stream_deltas=True))
    return sent if descriptor.client_streaming else [chance.choice(sent)]


async def outcome(channel, method, descriptor, sent):
    """The code of a call with these messages, its text, and its responses."""
    kind = f"{'stream' if descriptor.client_streaming else 'unary'}"
    kind += f"_{'stream' if descriptor.server_streaming else 'unary'}"
    bodies = [each.SerializeToString() for each in sent]
    timeout = 0.05 if method.endswith(LIVE) else 60
    start = getattr(channel, kind)(method)
    call = start(iter(bodies) if descriptor.client_streaming else bodies[0], timeout=timeout)
    status, responses = ServerStatus(call), []
    try:
        if not descriptor.server_streaming:
            return C.OK, "", [await call]
        responses += [each async for each in call]
    except grpc.aio.AioRpcError as error:
        error = await status.resolve(error)
        return error.code(), error.details() or "", responses
    return C.OK, "", responses


@pytest.mark.timeout(600)
async def test_random_messages_end_with_a_typed_status():
    """Of every method that the descriptors name, no request is called a fault of the server."""
    chance = random.Random(SEED)
    drain = "/legato.v1.AdminService/Drain"  # last: the server takes no calls after it
    order = sorted(methods(), key=lambda each: each[0] == drain)
    ends: dict[str, set[grpc.StatusCode]] = {}
    with structlog.testing.capture_logs() as logs:
        async with running(depth_switch=True) as server:
            for method, descriptor in order:
                for _ in range(RANDOM if method != drain else 1):
                    sent = random_requests(method, descriptor, chance)
                    code, text, responses = await outcome(server.channel, method, descriptor, sent)
                    assert code in ANY, (method, code, text, sent)
                    ends.setdefault(method, set()).add(code)
                    if method.endswith("/Session"):
                        for each in map(session_pb2.SessionResponse.FromString, responses):
                            failed = each.result.result.error
                            assert failed.code != C.INTERNAL.value[0], (failed, sent)
    assert [line for line in logs if line["event"] in BUGS] == []
    assert sum(C.OK in codes for codes in ends.values()) > len(ends) // 2


# ---------------------------------------------------------------- images
# Damaged image files on their whole way: the service's intake, shared memory, the engine.

MUTANTS = 800
MAX_PIXELS = 1_000_000


class Frontend:
    """A frontend that keeps the pixels as they are."""

    def prepare_image(self, pixels_HWC, key, info):
        """Wrap the pixels; reading them shows that they are there."""
        assert pixels_HWC.shape == (info.height, info.width, 3)
        assert 0 <= pixels_HWC.mean() <= 255
        return PreparedImage(key=key, pixels=pixels_HWC, info=info, num_bytes=0)


@pytest.fixture
def intake():
    """The service's side and the engine's side of images."""
    blobs = BlobStore(new_namespace())
    preprocessor = Preprocessor(
        cast(ModelFrontend, Frontend()),
        ImageCache[ImageKey, PreparedImage](0),
        blobs=BlobReader(blobs.namespace),
        max_pixels=MAX_PIXELS,
        threads=2,
        memory=PixelMemory(host_slab(1 << 24)),
        max_inline_pixels=MAX_PIXELS,
    )
    yield ImageIntake(max_bytes=1 << 20, max_pixels=MAX_PIXELS), preprocessor, blobs
    preprocessor.close()
    blobs.close()


async def prepare(path, data, *, inline):
    """The type of error of an image, or None if it is prepared."""
    intake, preprocessor, blobs = path
    try:
        image = await intake.check(media_pb2.Image(encoded=media_pb2.EncodedImage(data=data)))
    except LegatoError as error:
        return type(error)
    source = stage(image, blobs)
    assert isinstance(source, EncodedImage)
    try:
        found = preprocessor.find(source, tenant="", may_hash=inline)
        pending = preprocessor.start(source, found, tenant="", keep=False, inline=inline)
        if isinstance(pending, Future):
            pending.result(60)
    except LegatoError as error:
        return type(error)
    finally:
        blobs.discard(source.blob)
    return None


@pytest.mark.timeout(600)
async def test_damaged_files_are_decoded_or_refused(intake):
    """Of 800 mutants none crashes a decoder or is called a fault of the server."""
    chance = random.Random(SEED)
    ends: dict[type[LegatoError] | None, int] = {}
    for number in range(MUTANTS):
        data = mutate(images()[number % len(images())], chance)
        end = await prepare(intake, data, inline=bool(number % 2))
        ends[end] = ends.get(end, 0) + 1
    assert set(ends) <= {None, ImageUndecodable, ImageTooLarge}
    assert min(ends[None], ends[ImageUndecodable]) > MUTANTS // 20  # both are exercised
    lane = intake[1]._light
    assert len(lane.workers.pids) == len(lane.workers._idle)


async def test_undamaged_files_are_decoded(intake):
    """The control: every seed is prepared."""
    for data in images():
        for inline in (False, True):
            assert await prepare(intake, data, inline=inline) is None


# ---------------------------------------------------------------- http
# Damaged requests of every path, to a whole HTTP process.

REQUEST_MUTANTS = 600
NO_OPERATOR = HTTPStatus.NOT_IMPLEMENTED  # the scripted server has no AdminService
TRACES = (b"Traceback", b"a bug of this HTTP server", b"Internal Server Error")


BODIES: dict[str, type[Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/query": moondream_api.QueryBody,
    "/v1/caption": moondream_api.CaptionBody,
    "/v1/detect": moondream_api.DetectBody,
    "/v1/point": moondream_api.PointBody,
    "/v1/segment": moondream_api.SegmentBody,
}
_loop = asyncio.new_event_loop()


def body_to_task(data: bytes) -> None:
    """Read a body of the path that the first byte names, in two pieces, and convert it."""
    if len(data) > 1:
        with contextlib.suppress(RejectedRequest, ClientError):
            _loop.run_until_complete(_body_to_task(data))


async def _body_to_task(data: bytes) -> None:
    kind, cut = list(BODIES.values())[data[0] % len(BODIES)], data[1]
    pieces = [data[2 : 2 + cut], data[2 + cut :]]

    async def receive():
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def accept():
        """Accept any token."""

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    async with Bodies(accept).reading(request, kind) as body:
        if isinstance(body, ChatBody | ResponsesBody):
            await body.asked().task()
        elif isinstance(body, moondream_api.Question):
            body.task()
            if body.image_url is not None:
                await bodies.decoded(body.image_url, "image_url")


def body_seeds() -> list[bytes]:
    """What `body_to_task` reads, undamaged."""
    documents = http_bodies()
    return [
        bytes((number, 200)) + json.dumps(body).encode()
        for number, path in enumerate(BODIES)
        for body in documents[path]
    ]


def test_damaged_bodies_are_converted_or_refused():
    """Of 2,000 mutants none ends otherwise; the undamaged ones are converted."""
    chance, seeds = random.Random(SEED), body_seeds()
    for seed in seeds:
        _loop.run_until_complete(_body_to_task(seed))
    for number in range(2000):
        body_to_task(mutate(seeds[number % len(seeds)], chance))


@pytest.fixture(scope="module", params=[False, True], ids=["http", "playground"])
def address(request):
    """Host and port of `legato http`, or of the playground, before a scripted server."""
    with (
        FakeServer() as fake,
        http_server(
            fake.target, page=request.param, limits=ConnectionLimits(ahead_pause=0.0)
        ) as url,
    ):
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)


def requests():
    """Whole requests, by what they ask for."""
    for path, documents in http_bodies().items():
        for body in documents:
            yield from _requests(path, body)
    for path in ("/healthz", "/readyz", "/openapi.json", "/v1/models", "/v1/models/fake", "/"):
        yield f"GET {path} HTTP/1.1\r\nHost: localhost\r\n", b""
    socket_head = (
        "GET /playground/session HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    )
    yield socket_head, b"\x81\x82\x00\x00\x00\x00{}"


def _requests(path, body):
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    yield (
        (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Legato-Timeout: 5\r\nAuthorization: Bearer x\r\nContent-Length: {len(sent)}\r\n"
        ),
        sent,
    )


def answer(address, request):
    """The status of the first answer, or None where the connection ends without one."""
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            said = b""
            while len(said) < 64 * 1024 and (piece := connection.recv(64 * 1024)):
                said += piece
                if b"\r\n\r\n" in said and b" 101 " in said[:20]:
                    break
        except ConnectionError:
            return None, b""
    words = said.split(b" ", 2)
    return (int(words[1]) if len(words) > 1 else None), said


@pytest.mark.timeout(600)
def test_damaged_requests_end_with_a_typed_answer(address):
    """Of 600 mutants of heads and bodies none is called a fault of this process."""
    chance = random.Random(SEED)
    seeds = list(requests())
    ends: dict[int | None, int] = {}
    for number in range(REQUEST_MUTANTS):
        head, body = seeds[number % len(seeds)]
        if number % 3 == 0:  # else the body, whose length stays true
            request = mutate(f"{head}\r\n".encode() + body, chance)
        else:
            damaged = mutate(body or b"{}", chance)
            head = head.replace(f"Content-Length: {len(body)}", f"Content-Length: {len(damaged)}")
            request = f"{head}Connection: close\r\n\r\n".encode() + damaged
        status, said = answer(address, request)
        assert status is None or status < 500 or status == NO_OPERATOR, (request, said)
        assert not any(trace in said for trace in TRACES), (request, said)
        ends[status] = ends.get(status, 0) + 1
    assert ends[HTTPStatus.OK] > REQUEST_MUTANTS // 50
    assert ends[HTTPStatus.BAD_REQUEST] > REQUEST_MUTANTS // 20
    status, _ = answer(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == HTTPStatus.OK
