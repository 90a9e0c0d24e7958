"""Whoever goes away, however and whenever, leaves nothing behind in the engine."""

import collections
import contextlib
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable

import grpc
import pytest
from legato.v1 import inference_pb2, media_pb2

from tests.e2e.scenes import huge, long_query, long_stream, session_of, two_shapes
from tests.e2e.server import ENVIRONMENT, Server, until

DEADLINE = 1.0  # seconds; every state below lasts longer, and is reached sooner
SCENE = two_shapes()
VICTIM = two_shapes(offset=20)  # never kept, so that it has to be decoded each time
OFFSETS = itertools.cycle(range(21, 60))  # a session keeps its pictures, so each has its own
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")
BLOCKERS = 8  # pictures that keep the two preprocess threads busy beyond the deadline


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A server that runs one task at a time."""
    with Server(tmp_path_factory.mktemp("narrow"), "--max-running", "1") as running:
        yield running


@pytest.fixture(scope="module")
def slow_picture():
    """A request whose picture takes long to decode, every time."""
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=huge()))
    request = inference_pb2.DetectRequest(image=image, object="red circle")
    request.options.cache_image = False
    return request


@contextlib.contextmanager
def idle(server, slow_picture):
    """Nothing else to do: the victim decodes."""
    yield {"running": 1, "waiting": 0}, {"running": 0, "waiting": 0}


@contextlib.contextmanager
def occupied(server, slow_picture):
    """The one row is taken: the victim waits."""
    blocker = server.inference.Generate(long_stream())
    next(blocker)
    yield {"running": 1, "waiting": 1}, {"running": 1, "waiting": 0}
    blocker.cancel()


@contextlib.contextmanager
def decoding_pictures(server, slow_picture):
    """All preprocess threads are taken: the victim's picture waits to be decoded."""
    blockers = [server.inference.Detect.future(slow_picture) for _ in range(BLOCKERS)]
    until(lambda: server.holds(running=0, waiting=BLOCKERS))
    yield {"running": 0, "waiting": BLOCKERS + 1}, None
    assert not all(blocker.done() for blocker in blockers), "the victim may have got further"
    for blocker in blockers:
        blocker.cancel()


class Caller:
    """A call within this process, which ends by cancellation or by its deadline."""

    def __init__(self, server, rpc, *, deadline):
        self._deadline = deadline
        self._is_stream = rpc != "Query"
        timeout = DEADLINE if deadline else None
        if rpc == "Session":
            self._call = server.sessions.Session(iter(session_of(request(rpc))), timeout=timeout)
            return
        method = getattr(server.inference, rpc)
        start = method if self._is_stream else method.future
        self._call = start(request(rpc), timeout=timeout)

    def is_gone(self):
        """Whether it ended."""
        return self._call.done()

    def leave(self):
        """End, and check that the caller is told why."""
        if not self._deadline:
            self._call.cancel()
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            collections.deque(self._call, 0) if self._is_stream else self._call.result()
        code = grpc.StatusCode.DEADLINE_EXCEEDED if self._deadline else grpc.StatusCode.CANCELLED
        assert self._call.code() is code


class Process:
    """The same call from a process of its own, which ends by SIGKILL."""

    def __init__(self, server, rpc):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.victim", server.address, rpc],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(request(rpc).SerializeToString())

    def is_gone(self):
        """Whether it ended."""
        return self._process.poll() is not None

    def leave(self):
        """End without a word."""
        self._process.kill()
        self._process.wait()


CALLERS: dict[str, Callable[[Server, str], Caller | Process]] = {
    "cancelled": functools.partial(Caller, deadline=False),
    "deadline": functools.partial(Caller, deadline=True),
    "killed": Process,
}


def request(rpc):
    """A long answer about a picture."""
    ask = long_query if rpc == "Query" else long_stream
    scene = two_shapes(offset=next(OFFSETS)) if rpc == "Session" else VICTIM
    asked = ask(image=scene.message())
    asked.options.cache_image = False
    return asked


@pytest.mark.parametrize("way", CALLERS)
@pytest.mark.parametrize("scene", [idle, occupied, decoding_pictures])
@pytest.mark.parametrize("rpc", ["Query", "Generate", "Session"])
def test_nothing_is_left_behind(narrow, slow_picture, rpc, scene, way):
    """The engine drops the request, keeps the others, holds nothing at the end, and serves on."""
    with scene(narrow, slow_picture) as (reached, afterwards):
        victim = CALLERS[way](narrow, rpc)
        until(lambda: narrow.holds(**reached) or victim.is_gone())
        assert not victim.is_gone(), "it ended before it was to go away"
        victim.leave()
        if afterwards is not None:
            until(lambda: narrow.holds(**afterwards))
    narrow.settle()
    (found,) = narrow.inference.Detect(PROBE).objects
    assert found.label == "red circle"


def test_a_stream_that_is_left_early_is_aborted(narrow):
    """A client that stops reading after a few words frees the engine."""
    stream = narrow.inference.Generate(long_stream())
    for _ in range(5):
        next(stream)
    stream.cancel()
    narrow.settle()


def test_cancelled_at_once(narrow):
    """Calls cancelled in the moment they are made leave nothing behind, wherever it hits them."""
    calls = [narrow.inference.Query.future(request("Query")) for _ in range(20)]
    for call in calls:
        call.cancel()
    narrow.settle()
    assert len(narrow.inference.Detect(PROBE).objects) == 1
