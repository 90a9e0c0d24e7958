"""A server on a loopback port with a fake engine, and what tests read from it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import io
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from legato.v1 import (
    admin_pb2_grpc,
    image_pb2_grpc,
    inference_pb2_grpc,
    media_pb2,
    server_pb2_grpc,
    session_pb2_grpc,
)
from legato_client._grpc.transport import ServerStatus
from legato_engine.client.connection import EngineConnection
from legato_engine.config import EngineConfig
from legato_service.config import ServiceConfig
from legato_service.engines.group import EngineGroup
from legato_service.server import Server
from legato_service.workers.processes import WorkerProcesses
from PIL import Image
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.service.fakes import FakeEngine

DETAILS = {
    kind.DESCRIPTOR.full_name: kind
    for kind in (
        error_details_pb2.ErrorInfo,
        error_details_pb2.RequestInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.ResourceInfo,
        error_details_pb2.RetryInfo,
        error_details_pb2.PreconditionFailure,
        error_details_pb2.QuotaFailure,
    )
}


def image_bytes(kind: str = "PNG", size: tuple[int, int] = (8, 6)) -> bytes:
    """Return a small image file."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(buffer, kind)
    return buffer.getvalue()


def image_message() -> media_pb2.Image:
    """Return a small image as a request carries it."""
    return media_pb2.Image(encoded=media_pb2.EncodedImage(data=image_bytes()))


@dataclasses.dataclass(frozen=True)
class Running:
    """A listening server and a channel to it."""

    server: Server
    engine: FakeEngine
    port: int
    channel: Any  # untyped, as the stubs: the typing of grpc has no name for what they are

    @property
    def inference(self) -> Any:
        """A stub of InferenceService."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def sessions(self) -> Any:
        """A stub of SessionService."""
        return session_pb2_grpc.SessionServiceStub(self.channel)

    @property
    def images(self) -> Any:
        """A stub of ImageService."""
        return image_pb2_grpc.ImageServiceStub(self.channel)

    @property
    def info(self) -> Any:
        """A stub of ServerService."""
        return server_pb2_grpc.ServerServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        """A stub of AdminService."""
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    @property
    def health(self) -> Any:
        """A stub of the health service."""
        return health_pb2_grpc.HealthStub(self.channel)


@asynccontextmanager
async def running(
    engine: FakeEngine | Sequence[FakeEngine] | None = None,
    channel_options: Sequence[tuple[str, int | str]] = (),
    engine_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Serve for the length of the block; settings are fields of the two configurations."""
    engine = engine or FakeEngine()
    engines = [engine] if isinstance(engine, FakeEngine) else list(engine)
    config = ServiceConfig(
        engine=EngineConfig(**(engine_settings or {})),
        **{"listen": "127.0.0.1:0", "admin_listen": "same", **settings},
    )
    server = Server(
        config,
        EngineGroup([cast(EngineConnection, each) for each in engines], affinity=config.affinity),
        WorkerProcesses(
            config,
            (),
            lambda grace: server.begin_drain(grace),  # noqa: PLW0108 - made by this statement
            lambda: server.metrics.snapshot(),  # noqa: PLW0108 - the same
        ),
    )
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", channel_options) as channel:
            yield Running(server, engines[0], port, channel)
    finally:
        await server.stop()
        for each in engines:
            each.blobs.close()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A failed call as its client sees it."""

    code: grpc.StatusCode
    message: str
    details: dict[str, Any]  # by the short name of the message
    trailers: dict[str, Any]
    size: int

    @property
    def reason(self) -> str:
        """The reason of its ErrorInfo, empty without one."""
        return self.details["ErrorInfo"].reason if "ErrorInfo" in self.details else ""


async def refusal(awaitable: Any, status: ServerStatus | None = None) -> Refusal:
    """The failure of a call that must fail; `awaitable` is a call or a coroutine that reads one.

    A call that is refused while it still sends is read as our own client reads it: grpc.aio may put
    an error of its own in the place of the server's (github.com/grpc/grpc/issues/36066).
    """
    if isinstance(awaitable, grpc.aio.Call):
        status = ServerStatus(awaitable)
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        return read_refusal(await status.resolve(error) if status else error)
    raise AssertionError("the call succeeded")


def read_refusal(error: Any) -> Refusal:
    """Return the details of a failure of either kind of client."""
    trailers = dict(error.trailing_metadata() or ())
    data = trailers.get("grpc-status-details-bin", b"")
    status = status_pb2.Status.FromString(data)
    details: dict[str, Any] = {}
    for packed in status.details:
        kind = DETAILS[packed.TypeName()]
        message = kind()
        assert packed.Unpack(message)
        details[kind.DESCRIPTOR.name] = message
    if data:
        assert status.code == error.code().value[0]
        assert status.message == error.details()
    return Refusal(error.code(), error.details() or "", details, trailers, len(data))


async def until(condition: Callable[[], bool]) -> None:
    """Return once `condition` holds; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
        await asyncio.sleep(0.005)


def remaining(*kinds: type) -> dict[int, object]:
    """Return all objects of these types by id; keep them, so that no id is reused."""
    return {id(each): each for each in gc.get_objects() if type(each) in kinds}


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counts free objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Scrape:
    """Parsed metrics."""

    def __init__(self, text: str, *, openmetrics: bool = False) -> None:
        parse: Any = parse_openmetrics if openmetrics else text_string_to_metric_families
        self.families = list(parse(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Names of all samples."""
        return {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples with this name and these labels."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)


async def get(address: str, path: str = "/metrics", accept: str = "", method: str = "GET") -> bytes:
    """The whole response of the HTTP listener."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nAccept: {accept}\r\n\r\n"
    writer.write(head.encode())
    try:
        return await reader.read()
    finally:
        writer.close()


async def scrape(address: str, accept: str = "") -> Scrape:
    """Scrape over HTTP."""
    response = await get(address, accept=accept)
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    return Scrape(body.decode(), openmetrics="openmetrics" in accept)
