"""Faults of the network, of clocks and inside the engine, as callers see them."""

from __future__ import annotations

import ast
import asyncio
import collections
import socket
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_client import Client
from legato_engine import failpoints

from tests.e2e.scenes import long_query, long_stream, two_shapes
from tests.e2e.server import RANDOM, SLOWLY, Server, until

# ------------------------------------------------------------- a proxy with the faults of networks

PIECE = 16 * 1024  # bytes
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds


class FaultProxy:
    """Forwards connections to `target` (host:port) from a thread of its own.

    The faults hold for connections that are open and those that follow:

    - `delay`: seconds until a piece of data goes on, in each direction
    - `bandwidth`: bytes a second of each direction of each connection; 0 is without a limit
    - `freeze`, `thaw`: hold all data; both ends still see an open connection (half-open TCP)
    - `reset`: end the open connections by RST, in the middle of whatever is under way
    - `reset_after`: the same as soon as that many bytes of responses have passed
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.delay = 0.0
        self.bandwidth = 0
        self.num_accepted = 0
        self._reset_after = 0
        self._loop = asyncio.new_event_loop()
        self._moving = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fault-proxy", daemon=True
        )
        self.address = ""

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self.address = self._call(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------ faults

    def freeze(self) -> None:
        self._loop.call_soon_threadsafe(self._moving.clear)

    def thaw(self) -> None:
        self._loop.call_soon_threadsafe(self._moving.set)

    def reset(self) -> None:
        self._call(self._reset())

    def reset_after(self, num_bytes: int) -> None:
        """Count from now; 0 ends the fault."""
        self._loop.call_soon_threadsafe(setattr, self, "_reset_after", num_bytes)

    @property
    def num_open(self) -> int:
        """Connections of clients."""
        return len(self._open) // 2

    # ------------------------------------------------------------ the loop's side

    def _call(self, coroutine):
        future: Future[object] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(30)

    async def _start(self) -> str:
        self._moving.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _stop(self) -> None:
        self._server.close()
        await self._reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reset(self) -> None:
        for writer in list(self._open):
            _abort(writer)
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, server_writer}
        with suppress(asyncio.CancelledError):  # which asyncio's streams log as an error
            await asyncio.gather(
                self._forward(reader, server_writer, counts=False),
                self._forward(server_reader, writer, counts=True),
            )
        self._open -= {writer, server_writer}

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(PIECE):
                await self._moving.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.bandwidth:
                    await asyncio.sleep(len(data) / self.bandwidth)
                if counts and self._reset_after:
                    await self._count(len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _count(self, num_bytes: int) -> None:
        self._reset_after -= num_bytes
        if self._reset_after <= 0:
            self._reset_after = 0
            await self._reset()


def _abort(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()


# ---------------------------------------------------------------- the network

SCENE = two_shapes()
DETECT = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle", max_objects=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of legato-tiny."""
    with Server(tmp_path_factory.mktemp("server"), *RANDOM, environment=SLOWLY) as running:
        yield running


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A server whose answers take minutes."""
    options = ("--model", "null", "--null-step-ms", "1000")
    with Server(tmp_path_factory.mktemp("endless"), *options) as running:
        yield running


@pytest.fixture
def proxy(server):
    """Between the tests' clients and the server, without faults yet."""
    with FaultProxy(server.address) as between:
        yield between


@pytest.fixture
def stub(proxy):
    """Without retries."""
    with grpc.insecure_channel(proxy.address, [("grpc.enable_retries", 0)]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def test_delay_changes_no_answer(server, proxy, stub):
    direct = server.inference.Detect(DETECT)
    proxy.delay = 0.05
    start = time.monotonic()
    assert stub.Detect(DETECT).objects == direct.objects
    assert time.monotonic() - start > 0.1, "the proxy did not delay the data"


def test_a_narrow_link_changes_no_answer(server, proxy, stub):
    whole = "".join(_texts(server.inference.Generate(long_stream())))
    proxy.bandwidth = 400_000
    assert "".join(_texts(stub.Generate(long_stream()))) == whole


def test_a_reset_in_the_middle_of_an_answer_frees_its_request(server, proxy, stub):
    stream = stub.Generate(long_stream())
    next(stream)
    until(lambda: server.holds(running=1, waiting=0))
    proxy.reset()
    with pytest.raises(grpc.RpcError) as caught:
        collections.deque(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    server.settle()


def test_a_reset_in_the_middle_of_a_frame_frees_its_request(server, proxy, stub):
    stub.Detect(DETECT)
    proxy.reset_after(400)  # within the stream's first messages
    with pytest.raises(grpc.RpcError) as caught:
        collections.deque(stub.Generate(long_stream()))
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    server.settle()


def test_clients_retry_a_unary_call_after_a_reset(server, proxy):
    with Client(proxy.address) as client:
        expected = client.detect(SCENE.file(), "red circle", max_objects=1).objects
        for _ in range(3):
            proxy.reset()
            assert client.detect(SCENE.file(), "red circle", max_objects=1).objects == expected


@pytest.mark.slow
def test_half_open_connections_are_closed_and_their_requests_freed(endless):
    """After the keep-alive's 20 and 5 seconds, whatever the requests' own length."""
    with FaultProxy(endless.address) as proxy, grpc.insecure_channel(proxy.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stream = stub.Generate(long_stream())
        unary = stub.Query.future(long_query())
        next(stream)
        until(lambda: endless.holds(running=2, waiting=0))
        proxy.freeze()
        endless.settle()  # the test's own timeout bounds it
        proxy.reset()
        for read in (lambda: collections.deque(stream), unary.result):
            with pytest.raises(grpc.RpcError) as caught:
                read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_fresh_connection_is_served_while_another_is_half_open(server, proxy, stub):
    stream = stub.Generate(long_stream())
    next(stream)
    proxy.freeze()
    assert len(server.inference.Detect(DETECT).objects) == 1
    proxy.thaw()
    stream.cancel()
    server.settle()


def _texts(stream):
    for message in stream:
        if message.HasField("text"):
            yield message.text.text


# ---------------------------------------------------------------- clocks

ROOT = Path(__file__).parents[2]
WALL_CLOCK = {"time", "time_ns", "now", "utcnow", "today"}
# Stamps that are shown or sent, and expiries that people write as dates.
ALLOWED = {
    "service/legato_service/access/principal.py",
    "service/legato_service/images/intake.py",
    "service/legato_service/logs.py",
    "service/legato_service/rpc/call_log.py",
    "service/legato_service/services/image.py",
    "service/legato_service/session/session.py",
    "service/legato_service/tracing.py",
    "engine/legato_engine/crash.py",
    "engine/legato_engine/core/process.py",
}


def reads_wall_clock(source: str) -> bool:
    """Whether it calls `time.time()`, `time.time_ns()` or `datetime.now()`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            named = isinstance(owner, ast.Name) and owner.id in ("time", "datetime", "date")
            if named and node.func.attr in WALL_CLOCK:
                return True
    return False


def test_the_wall_clock_is_read_for_stamps_only():
    sources = [
        path
        for folder in ("service/legato_service", "engine/legato_engine")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)) for path in sources if reads_wall_clock(path.read_text())}
    assert found <= ALLOWED, f"durations by the wall clock? {sorted(found - ALLOWED)}"


def test_the_check_finds_the_wall_clock():
    assert reads_wall_clock("import time\nleft = deadline - time.time()")
    assert not reads_wall_clock("import time\nleft = deadline - time.monotonic()")


# ---------------------------------------------------------------- inside the engine

QUICK = ("-m", "tests.e2e.quick_service")
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The text of a run without faults."""
    with Server(tmp_path_factory.mktemp("calm"), *RANDOM) as server:
        return _text(server.inference.Generate(long_stream(NUM_TOKENS)))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("engine.forward=raise@50", marks=pytest.mark.slow),
        pytest.param("engine.sample=raise@50", marks=pytest.mark.slow),
        pytest.param("engine.plan=raise@60", marks=pytest.mark.slow),
        pytest.param("engine.launch=exit@50", marks=pytest.mark.slow),
        "engine.commit=kill@50",
    ],
)
def test_a_fault_at_any_point_of_a_step_changes_no_answer(tmp_path, expected, fault):
    """Every engine meets the fault again after as many steps, so that several die."""
    environment = {failpoints.VARIABLE: fault}
    with Server(tmp_path, *RANDOM, program=QUICK, environment=environment) as server:
        responses = list(server.inference.Generate(long_stream(NUM_TOKENS)))
        assert _text(responses) == expected
        assert responses[-1].finished.info.resumptions >= 1
        server.wait_for("engine_lost")


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_refused_as_unavailable(tmp_path):
    """It is tried again with growing delays, and the process gives up after some attempts."""
    fault = {failpoints.VARIABLE: "engine.startup=exit"}
    server = Server(tmp_path, environment=fault)
    with pytest.raises(AssertionError, match="engine_never_ready"):
        server.__enter__()
    assert server.process.wait() != 0
    server.wait_for("engine_never_ready")


def _text(responses):
    return "".join(each.text.text for each in responses)
