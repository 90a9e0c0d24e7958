"""The engine dies or hangs; the service tells the truth and carries on."""

import collections
import os
import signal
import threading

import grpc
import pytest
from legato.v1 import inference_pb2
from legato_engine.failpoints import VARIABLE

from tests.e2e.scenes import long_query, long_stream, two_shapes
from tests.e2e.server import NOT_SERVING, SERVING, Server, exists, failure_of, until
from tests.grammar import Grammar

SCENE = two_shapes()
QUICK = ("-m", "tests.e2e.quick_service")
NULL = ("--model", "null", "--null-step-ms", "20", "--null-objects", "1")
"""What is lost is a process; what its model had said, test_no_lost_work.py asks for."""
pytestmark = pytest.mark.real_start
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")


@pytest.fixture(scope="module")
def mortal(tmp_path_factory):
    """A server whose engine may be killed."""
    late = {VARIABLE: "engine.startup=sleep(2)"}  # so that there is none for a while
    folder = tmp_path_factory.mktemp("mortal")
    with Server(folder, *NULL, program=QUICK, environment=late) as running:
        yield running


class HealthLog:
    """What a watcher of the server's health is told, in order."""

    def __init__(self, server):
        self.seen: list[int] = []
        self._watch = server.watch()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: self.seen)

    def _read(self):
        try:
            for response in self._watch:
                self.seen.append(response.status)
        except grpc.RpcError:
            return  # the watch is over

    def close(self):
        """Watch no more."""
        self._watch.cancel()
        self._thread.join()


def test_a_killed_engine_is_told_and_replaced(mortal):
    """Health flips; requests in flight go on with the next engine; new ones are answered."""
    before = mortal.inference.Detect(PROBE)
    health = HealthLog(mortal)
    stream = mortal.inference.Generate(long_stream())
    unary = mortal.inference.Query.future(long_query())
    grammar = Grammar()
    for _ in range(5):
        grammar.feed(next(stream))
    until(lambda: mortal.holds(running=2, waiting=0))
    killed = mortal.kill_engine()

    until(lambda: health.seen == [SERVING, NOT_SERVING, SERVING])
    health.close()
    assert not exists(killed)
    assert mortal.engine_pid != killed
    collections.deque(map(grammar.feed, stream))
    grammar.end(ok=True)
    assert grammar.events[-1].finished.info.resumptions == 1
    assert unary.result().info.resumptions == 1
    assert mortal.inference.Detect(PROBE).objects == before.objects
    mortal.settle()


def test_requests_are_refused_while_there_is_no_engine(mortal):
    """Until the new engine is ready a call is refused at once, as UNAVAILABLE with a reason."""
    health = HealthLog(mortal)
    mortal.kill_engine()
    until(lambda: NOT_SERVING in health.seen)
    refused = failure_of(lambda: mortal.inference.Detect(PROBE))
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert refused.reason in ("ENGINE_LOST", "ENGINE_STARTING")
    assert refused.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
    until(lambda: mortal.load().engine_state in ("lost", "starting"))
    until(mortal.is_serving)
    health.close()
    assert len(mortal.inference.Detect(PROBE).objects) == 1


def test_the_engine_dies_with_the_service(tmp_path):
    """When the service is killed its engine leaves too, even in the middle of an answer."""
    with Server(tmp_path, *NULL) as server:
        engine = server.engine_pid
        stream = server.inference.Generate(long_stream())
        next(stream)
        server.process.kill()
        until(lambda: not exists(engine))
        with pytest.raises(grpc.RpcError):
            list(stream)


@pytest.mark.slow
def test_an_engine_that_hangs_is_replaced(mortal):
    """A stopped engine turns the health, is put down, and another answers."""
    health = HealthLog(mortal)
    hung = mortal.engine_pid
    os.kill(hung, signal.SIGSTOP)
    until(lambda: health.seen == [SERVING, NOT_SERVING, SERVING])
    health.close()
    assert not exists(hung)
    assert len(mortal.inference.Detect(PROBE).objects) == 1
