"""Clients that go away and deadlines that pass leave no resource held."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import grpc
import pytest
from legato.v1 import image_pb2, inference_pb2, media_pb2, session_pb2, task_pb2

from tests.e2e.scenes import huge, long_query, long_stream, session_of, two_shapes
from tests.e2e.server import ENVIRONMENT, RANDOM, SLOWLY, TWO_HEARTBEATS, Server, children, until
from tests.e2e.victim import READY

# -------------------------------------------------------------- calls that no client library sends

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_FRAME_HEADER = 9


class RawCall:
    """One call on a connection of its own; with `ends`, `messages` are all of the client's."""

    def __init__(
        self,
        address: str,
        method: str,
        messages: list[bytes],
        headers: dict[str, str],
        *,
        ends: bool = True,
        wait: float = 20.0,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=wait)
        self._unread = b""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": address,
            "te": "trailers",
            "content-type": "application/grpc",
            **headers,
        }
        block = b"".join(map(_literal, fields.items()))
        body = b"".join(struct.pack(">BI", 0, len(each)) + each for each in messages)
        self._socket.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, 1, block)
            + _frame(_DATA, _END_STREAM if ends else 0, 1, body)
        )

    def end(self) -> bytes:
        """Read until the call has ended; return all that the server sent as data and headers."""
        received = b""
        while True:
            kind, flags, stream, payload = self._read()
            if kind == _SETTINGS and not flags & _ACK:
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            if kind == _PING and not flags & _ACK:
                self._socket.sendall(_frame(_PING, _ACK, 0, payload))
            if stream == 1 and kind in (_DATA, _HEADERS):
                received += payload
            ended = stream == 1 and (kind == _RST_STREAM or flags & _END_STREAM)
            if kind == _GOAWAY or (ended and kind in (_DATA, _HEADERS, _RST_STREAM)):
                return received

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self) -> tuple[int, int, int, bytes]:
        head = self._exactly(_FRAME_HEADER)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        return kind, flags, stream, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            received = self._socket.recv(1 << 16)
            assert received, "the server closed the connection"
            self._unread += received
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(field: tuple[str, str]) -> bytes:
    """A header field without indexing and without Huffman coding."""
    name, value = (part.encode() for part in field)
    assert len(name) < 127 > len(value)
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


# ---------------------------------------------------------------- cancellation
# A client that goes away, however and whenever, leaves no resource held in the engine.

DEADLINES = (1.0, 4.0, 16.0, 64.0)  # seconds; a longer one where a machine was not there in time
PREFILL = 0.06  # seconds, about, of an image and a question on two idle cores
SCENE = two_shapes()
VICTIM = two_shapes(offset=20)  # never kept, so that it has to be decoded each time
OFFSETS = itertools.cycle(range(21, 60))  # a session keeps its images, so each has its own
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle", max_objects=1)
BLOCKERS = 8  # images, more than there are decoders


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A server that runs one task at a time."""
    folder = tmp_path_factory.mktemp("narrow")
    with Server(folder, *RANDOM, "--max-running", "1", environment=SLOWLY) as running:
        yield running


@pytest.fixture(scope="module")
def slow_image():
    """A request whose image takes long to decode, every time."""
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=huge()))
    request = inference_pb2.DetectRequest(image=image, object="red circle")
    request.options.cache_image = False
    return request


def is_idle(load):
    """No request runs or waits."""
    return load.running + load.waiting == 0


@contextlib.contextmanager
def decoding(server, slow_image):
    """Nothing else to do: the victim decodes, its prefill and some steps being committed."""
    steps = server.load().engine_step + 2
    yield (
        lambda load: load.running == 1 and load.engine_step >= steps,
        is_idle,
    )


@contextlib.contextmanager
def waiting(server, slow_image):
    """The one row is taken: the victim waits."""
    blocker = server.inference.Generate(long_stream())
    next(blocker)
    yield (
        lambda load: (load.running, load.waiting) == (1, 1),
        lambda load: (load.running, load.waiting) == (1, 0),
    )
    blocker.cancel()


@contextlib.contextmanager
def decoding_images(server, slow_image):
    """All decoders are taken, and stand still: the victim's image waits to be decoded."""
    blockers = [server.inference.Detect.future(slow_image) for _ in range(BLOCKERS)]
    until(lambda: server.holds(running=0, waiting=BLOCKERS))
    decoders = children(server.engine_pid)
    for decoder in decoders:
        os.kill(decoder, signal.SIGSTOP)
    try:
        yield lambda load: load.waiting == BLOCKERS + 1, None
    finally:
        for decoder in decoders:
            os.kill(decoder, signal.SIGCONT)
    for blocker in blockers:
        blocker.cancel()


class Caller:
    """A call within this process, which ends by cancellation or, with a `timeout`, by that."""

    def __init__(self, server, rpc, timeout):
        self._server, self._rpc, self._timeout = server, rpc, timeout
        self._is_stream = rpc != "Query"

    def call(self):
        """Begin."""
        if self._rpc == "Session":
            session = iter(session_of(request(self._rpc)))
            self._call = self._server.sessions.Session(session, timeout=self._timeout)
            return self
        method = getattr(self._server.inference, self._rpc)
        start = method if self._is_stream else method.future
        self._call = start(request(self._rpc), timeout=self._timeout)
        return self

    def is_gone(self):
        """Whether it ended."""
        return self._call.done()

    def leave(self):
        """End, and check that the caller is told why."""
        if self._timeout is None:
            self._call.cancel()
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            collections.deque(self._call, 0) if self._is_stream else self._call.result()
        late = self._timeout is not None
        code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        assert self._call.code() is code

    def clean_up(self):
        """Nothing is left of it."""


class Process:
    """The same call from a process of its own, which ends by a signal.

    A process that is frozen does not even hang up; the server ends its call at the deadline.
    """

    def __init__(self, server, rpc, timeout):
        self._rpc = rpc
        self._signal = signal.SIGKILL if timeout is None else signal.SIGSTOP
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.victim", server.address, rpc, str(timeout or 0)],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            assert pipe.readline() == READY

    def call(self):
        """Begin: the program is loaded, which takes seconds on a busy machine."""
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(request(self._rpc).SerializeToString())
        return self

    def is_gone(self):
        """Whether it ended."""
        return self._process.poll() is not None

    def leave(self):
        """End, or stand still, without a word."""
        self._process.send_signal(self._signal)

    def clean_up(self):
        """Let go of a process that stands still."""
        self._process.kill()
        self._process.wait()


Victim = Caller | Process
WAYS: dict[str, tuple[type[Victim], tuple[float | None, ...]]] = {
    "cancelled": (Caller, (None,)),
    "deadline": (Caller, DEADLINES),
    "killed": (Process, (None,)),
    "frozen": (Process, (1.5, 12.0, 60.0)),
}


@contextlib.contextmanager
def calling(server, victims, reached):
    """The first of the victims whose call gets as far as `reached`."""
    for victim in victims:
        victim.call()
        until(lambda: reached(server.load()) or victim.is_gone())  # noqa: B023 - used at once
        if not victim.is_gone():
            break
        victim.clean_up()
    else:
        raise AssertionError("it ended before it was to go away")
    try:
        yield victim
    finally:
        victim.clean_up()


def request(rpc):
    """A long answer about an image."""
    ask = long_query if rpc == "Query" else long_stream
    scene = two_shapes(offset=next(OFFSETS)) if rpc == "Session" else VICTIM
    asked = ask(image=scene.message())
    asked.options.cache_image = False
    return asked


RPCS = ("Query", "Generate", "Session")
SCENES = (decoding, waiting, decoding_images)


def cases():
    """All combinations; those that end soon have each pair of an RPC, a scene and a way once."""
    for (row, rpc), (column, scene), (turn, way) in itertools.product(
        enumerate(RPCS), enumerate(SCENES), enumerate(WAYS)
    ):
        is_soon = (row + column) % len(SCENES) == turn % len(SCENES)
        marks = () if is_soon else pytest.mark.slow
        yield pytest.param(rpc, scene, way, marks=marks, id=f"{rpc}-{scene.__name__}-{way}")


@pytest.mark.parametrize(("rpc", "scene", "way"), list(cases()))
def test_nothing_is_left_behind(narrow, slow_image, rpc, scene, way):
    """The engine drops the request, keeps the others, holds nothing at the end, and serves on.

    By a deadline the others may have come to their end as well: a machine may be quick.
    """
    kind, timeouts = WAYS[way]
    late = timeouts != (None,)
    first = kind(narrow, rpc, timeouts[0])  # before the scene, which does not last
    others = (kind(narrow, rpc, timeout) for timeout in timeouts[1:])
    with (
        scene(narrow, slow_image) as (reached, afterwards),
        calling(narrow, itertools.chain([first], others), reached) as victim,
    ):
        victim.leave()
        if afterwards is not None:
            until(lambda: afterwards(load := narrow.load()) or (late and is_idle(load)))
    narrow.settle()
    (found,) = narrow.inference.Detect(PROBE).objects
    assert found.label == "red circle"


@pytest.mark.parametrize("rpc", ["Query", "Generate", "Session"])
def test_who_has_said_all_is_answered(narrow, rpc):
    """Half-closed, a call goes on to its end, and holds nothing then."""
    asked = request(rpc)
    asked.options.cache_image = True
    if rpc == "Query":
        asked.sampling.max_tokens = 4
        assert narrow.inference.Query(asked).info.usage.output_tokens == 4
    else:
        asked.task.sampling.max_tokens = 4
        is_session = rpc == "Session"
        call = (
            narrow.sessions.Session(iter(session_of(asked)))
            if is_session
            else narrow.inference.Generate(asked)
        )
        *_, last = call
        assert last.HasField("result" if is_session else "finished")
        assert call.code() is grpc.StatusCode.OK
    narrow.settle()


@pytest.mark.parametrize("way", ["cancelled", "deadline"])
@pytest.mark.parametrize("rpc", ["Query", "Generate", "Session"])
def test_nothing_is_left_of_a_prefill(narrow, rpc, way):
    """A client that leaves during prefill costs at most two launches, and holds nothing.

    The moment is searched for: it is another one on each machine.
    """
    moment = PREFILL / 2
    for _ in range(25):
        before = narrow.load().engine_step
        victim = Caller(narrow, rpc, moment if way == "deadline" else None).call()
        time.sleep(moment)
        victim.leave()
        narrow.settle()
        launches = narrow.load().engine_step - before
        if 1 <= launches <= 2:
            return
        moment *= 1.5 if launches == 0 else 0.75
    raise AssertionError("the moment was missed, or the engine went on")


def test_a_stream_that_is_left_early_is_aborted(narrow):
    """A client that stops reading after a few words frees the engine."""
    stream = narrow.inference.Generate(long_stream())
    for _ in range(5):
        next(stream)
    stream.cancel()
    narrow.settle()


def test_cancelled_at_once(narrow):
    """Calls cancelled as soon as they are made leave nothing held."""
    calls = [narrow.inference.Query.future(request("Query")) for _ in range(20)]
    for call in calls:
        call.cancel()
    narrow.settle()
    assert len(narrow.inference.Detect(PROBE).objects) == 1


# ---------------------------------------------------------------- deadlines
# Deadlines from a nanosecond to the longest that gRPC's wire format carries.

INFERENCE, IMAGES = "/legato.v1.InferenceService/", "/legato.v1.ImageService/"
SHORT = ["1n", "1u"]
LONG = ["597H", "1193H", "99999999S", "99999999M", "2562048H", "99999999H"]  # over 2^31 ms
A_MONTH = 2_600_000.0  # seconds; a shorter deadline would hide the longer ones from the engine
QUERY = inference_pb2.QueryRequest(question="hello")
OK, DEADLINE_EXCEEDED = b"\x0bgrpc-status\x010", b"\x0bgrpc-status\x014"


def named(request_id):
    """A query whose reply is kept for repeats."""
    request = inference_pb2.QueryRequest(question="hello")
    request.options.request_id = request_id
    return request


def calls(timeout):
    """One call of each kind: its method and messages."""
    tasks = [task_pb2.Task(query=task_pb2.QueryTask(question=text)) for text in ("one", "two")]
    image = two_shapes(offset=sum(timeout.encode()) % 70)  # an image of its own
    upload = image_pb2.PutImageRequest
    return {
        "unary": (INFERENCE + "Query", [QUERY]),
        "unary, named": (INFERENCE + "Query", [named(f"q{timeout}")]),
        "unary, image": (
            INFERENCE + "Detect",
            [inference_pb2.DetectRequest(image=image.message(), object="cat")],
        ),
        "stream": (INFERENCE + "Generate", [inference_pb2.GenerateRequest(task=tasks[0])]),
        "tasks": (INFERENCE + "RunTasks", [inference_pb2.RunTasksRequest(tasks=tasks)]),
        "upload": (
            IMAGES + "PutImage",
            [upload(header=image_pb2.PutImageHeader()), upload(chunk=image.file())],
        ),
        "session": (
            "/legato.v1.SessionService/Session",
            [session_pb2.SessionRequest(open=session_pb2.SessionOpen())],
        ),
    }


@pytest.fixture(
    scope="module", params=[pytest.param("legato-tiny", marks=pytest.mark.slow), "null"]
)
def either(request, tmp_path_factory):
    """A server with a model, and one without."""
    with Server(tmp_path_factory.mktemp("deadlines"), "--model", request.param) as running:
        yield running


def end_of(server, kind, timeout, *, ends=True):
    """All that the server answers to a call of the kind."""
    method, messages = calls(timeout)[kind]
    bodies = [message.SerializeToString() for message in messages]
    raw = RawCall(server.address, method, bodies, {"grpc-timeout": timeout}, ends=ends)
    try:
        return raw.end()
    finally:
        raw.close()


@pytest.mark.parametrize("kind", calls("0"))
def test_a_long_deadline_ends_no_call_and_no_engine(either, kind):
    """Every kind of call takes a deadline months or millennia away, and the engine outlives it."""
    engine = either.engine_pid
    for timeout in LONG:
        assert OK in end_of(either, kind, timeout), timeout
        assert either.inference.Query(QUERY, timeout=A_MONTH).info.model
    time.sleep(TWO_HEARTBEATS)
    assert either.engine_pid == engine
    assert either.is_serving()


@pytest.mark.parametrize("kind", calls("0"))
def test_a_deadline_that_has_passed_ends_at_most_the_call(either, kind):
    """A deadline of a nanosecond is exceeded, or met within gRPC's own millisecond."""
    engine = either.engine_pid
    for timeout in SHORT:
        answer = end_of(either, kind, timeout, ends=kind != "session")
        assert DEADLINE_EXCEEDED in answer or OK in answer, timeout
    assert either.inference.Query(QUERY, timeout=A_MONTH).info.model
    assert either.engine_pid == engine
