"""However a request ends, the engine aborts it once; timers of deadlines and waits."""

import asyncio
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import closing

import grpc
import pytest
from legato.v1 import inference_pb2, task_pb2
from legato_engine.client.monitor import EngineState
from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import DeadlineExceeded, Overloaded
from legato_engine.types import QuerySpec, Request, RequestKey
from legato_service.requests.registry import ActiveRequest
from legato_service.rpc.reusable_timeout import ReusableTimeout

from tests.grammar import Grammar, check
from tests.service.fakes import FakeEngine, answer, begin, delta, hold, started, words
from tests.service.harness import image_message, no_collections, refusal, remaining, running, until
from tests.simulation.engine_host import virtual_time

QUERY = inference_pb2.QueryRequest(image=image_message(), question="How many?")
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))
STREAM = inference_pb2.GenerateRequest(image=image_message(), task=TASK)
DEADLINES = (0.2, 2.0, 20.0)  # seconds; a longer one where no request reached the engine in time


def stream_forever(engine, stream):
    """Start, then send a word whenever the last one was read."""
    engine.feed(stream, started(stream.request))

    async def talk():
        while not stream.ended:
            engine.feed(stream, delta(stream.request, *words("word ")))
            await asyncio.sleep(0.001)

    engine.talking = asyncio.create_task(talk())


def flood(engine, stream):
    """Start, then queue more than any connection takes."""
    engine.feed(stream, started(stream.request))

    async def talk():
        while not stream.ended:
            engine.feed(stream, delta(stream.request, *words("x" * 200_000)))
            await asyncio.sleep(0.001)

    engine.talking = asyncio.create_task(talk())


def refuse_request(engine, stream):
    """Fail a request with an error of its own."""
    engine.fail(stream, Overloaded("no room"))


def call_of(server, rpc, **options):
    """Start a call of either kind."""
    if rpc == "Query":
        return server.inference.Query(QUERY, **options)
    return server.inference.Generate(STREAM, **options)


async def settled(server, *aborted):
    """Wait until nothing is in flight; only `aborted` were aborted, and no blob is left."""
    await until(lambda: not server.engine.streams and len(server.server.requests) == 0)
    assert server.engine.aborted == list(aborted)
    assert len(server.engine.blobs) == 0


@pytest.mark.parametrize("script", [hold, begin], ids=["waiting", "running"])
@pytest.mark.parametrize("rpc", ["Query", "Generate"])
async def test_a_cancelled_call_is_aborted(rpc, script):
    """A client that cancels frees its request, whether it waits or runs."""
    async with running(FakeEngine(script)) as server:
        call = call_of(server, rpc)
        await until(lambda: bool(server.engine.streams))
        call.cancel()
        await settled(server, server.engine.requests[0].request_id)


async def test_a_stream_cancelled_between_events_is_aborted():
    """A client that cancels while events flow frees its request."""
    async with running(FakeEngine(stream_forever)) as server:
        call = call_of(server, "Generate")
        for _ in range(5):
            await call.read()
        call.cancel()
        await settled(server, server.engine.requests[0].request_id)


@pytest.mark.parametrize("rpc", ["Query", "Generate"])
async def test_a_deadline_of_the_client_ends_the_request(rpc):
    """A deadline that passes frees the request; the engine has the deadline from the start."""
    async with running(FakeEngine(hold)) as server:
        for timeout in DEADLINES:
            call = call_of(server, rpc, timeout=timeout)
            failed = await refusal(call if rpc == "Query" else call.read())
            assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if server.engine.requests:
                break
        await settled(server, server.engine.requests[0].request_id)


@pytest.mark.parametrize("rpc", ["Query", "Generate"])
async def test_a_call_without_deadline_gets_the_servers(rpc):
    """The default deadline ends a request that the engine does not end, with RequestInfo."""
    for deadline in DEADLINES:
        engine = FakeEngine(begin)
        async with running(engine, unary_deadline=deadline, stream_deadline=deadline) as server:
            call = call_of(server, rpc)
            failed = await refusal(call if rpc == "Query" else _read_all(call))
            assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if not engine.requests:
                continue
            key = engine.requests[0].request_id
            assert failed.details["RequestInfo"].request_id == key.caller_id
            await settled(server, key)
            return
    raise AssertionError("no request reached the engine")


async def test_a_wait_longer_than_the_deadline_is_refused_at_once():
    """DEADLINE_UNREACHABLE names both times, and the engine gets no request."""
    engine = FakeEngine()
    engine.estimated_wait = 90.0
    async with running(engine) as server:
        failed = await refusal(server.inference.Query(QUERY, timeout=5))
        assert not engine.requests
    assert failed.reason == "DEADLINE_UNREACHABLE"
    metadata = failed.details["ErrorInfo"].metadata
    assert metadata["estimated_wait_ms"] == "90000"
    # On its way a timeout of some seconds is rounded up to hundredths of one.
    assert 0 < int(metadata["time_left_ms"]) <= 5010


async def test_an_answered_request_is_not_aborted():
    """The engine gets no abort for requests that ended by themselves."""
    async with running() as server:
        await server.inference.Query(QUERY)
        check([event async for event in server.inference.Generate(STREAM)], ok=True)
        await settled(server)


async def answered(server):
    """Complete one call of either kind."""
    await call_of(server, "Query")
    check([event async for event in call_of(server, "Generate")], ok=True)


async def refused(server):
    """Fail one call of either kind."""
    await refusal(call_of(server, "Query"))
    await refusal(_read_all(call_of(server, "Generate")))


@pytest.mark.parametrize(("script", "both"), [(answer, answered), (refuse_request, refused)])
async def test_a_call_leaves_nothing_to_collect(script, both):
    """A call is in no reference cycle: all that it held is freed at its end."""
    async with running(FakeEngine(script)) as server:
        await both(server)  # the first ones make what stays
        with no_collections():
            others = remaining(RequestStream)  # other tests' that something still holds
            await both(server)
            await settled(server)
            await until(lambda: remaining(RequestStream).keys() <= others.keys())


async def test_failures_do_not_pile_up():
    """The exception of an abort, which gRPC keeps in the RPC's state, is freed with it."""
    async with running(FakeEngine(refuse_request)) as server:
        with no_collections():
            others = remaining(grpc.aio.AbortError)
            for _ in range(10):
                await refused(server)
            await settled(server)
            # gRPC itself still holds the last RPC or two.
            await until(lambda: len(remaining(grpc.aio.AbortError).keys() - others.keys()) <= 4)


async def test_a_lost_engine_ends_the_stream():
    """ENGINE_LOST in mid-stream is UNAVAILABLE without `finished`."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        call = call_of(server, "Generate")
        grammar = Grammar()
        grammar.feed(await call.read())
        engine.become(EngineState.LOST)
        failed = await refusal(call.read())
        await settled(server)
    grammar.end(ok=False)
    assert failed.code is grpc.StatusCode.UNAVAILABLE
    assert failed.reason == "ENGINE_LOST"
    assert "RetryInfo" in failed.details


async def test_a_reader_that_stops_is_disconnected():
    """A client that takes no message is ABORTED as CLIENT_TOO_SLOW; others are served meanwhile."""
    narrow = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
    engine = FakeEngine(flood)
    async with running(engine, narrow, stall_timeout=0.3) as server:
        call = call_of(server, "Generate")
        grammar = Grammar()
        grammar.feed(await call.read())
        await until(lambda: not engine.streams)
        assert engine.aborted == [engine.requests[0].request_id]
        engine.script = begin
        other = call_of(server, "Generate")
        assert (await other.read()).HasField("started")
        other.cancel()
        failed = await refusal(_feed_all(grammar, call))
    grammar.end(ok=False)
    assert failed.code is grpc.StatusCode.ABORTED
    assert failed.reason == "CLIENT_TOO_SLOW"


CLIENT = """
import asyncio, sys, grpc
from legato.v1 import inference_pb2, inference_pb2_grpc

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(task={"query": {"question": "?"}}))
        await call.read()
        print("reading", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_dead_client_is_aborted(number):
    """A client process that was killed or stopped frees its request."""
    engine = FakeEngine(begin)
    async with running(engine, keepalive_time=1.0, keepalive_timeout=1.0) as server:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CLIENT, f"127.0.0.1:{server.port}"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert client.stdout is not None
            assert await client.stdout.readline() == b"reading\n"
            client.send_signal(number)
            async with asyncio.timeout(30):  # half of what a frozen peer gets without our options
                await settled(server, server.engine.requests[0].request_id)
        finally:
            if client.returncode is None:
                client.kill()
            await client.wait()


async def test_a_request_cancelled_before_it_is_submitted_leaves_nothing():
    """A call that is cancelled during its first steps leaves no stream and no blob."""
    async with running(FakeEngine(hold)) as server:
        for steps in range(40):
            call = server.inference.Query(QUERY)
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
        await until(lambda: not server.engine.streams and len(server.server.requests) == 0)
        assert Counter(server.engine.aborted) == Counter(
            request.request_id for request in server.engine.requests
        )
        assert len(server.engine.blobs) == 0


async def _feed_all(grammar, call):
    while True:
        grammar.feed(await call.read())


async def _read_all(call):
    async for _ in call:
        pass


# ---------------------------------------------------------------- deadlines


def owned(deadline, order, count=1):
    """Return a request in flight with streams that record their ends."""
    active = ActiveRequest(deadline)
    request = Request(request_id=RequestKey("a"), task=QuerySpec(question="?"))
    streams = [
        RequestStream(request, on_abort=order.append, on_stop=order.append) for _ in range(count)
    ]
    for stream in streams:
        active.own(stream)
    return active, streams


async def exceeded(stream):
    """Wait for the stream to end by its deadline."""
    with pytest.raises(DeadlineExceeded):
        await anext(stream)


async def test_each_deadline_is_met_in_its_turn():
    """Earlier deadlines expire first, in whatever order they were set; others are left alone."""
    order: list[RequestStream] = []
    now = time.monotonic()
    _, (late, too_late) = owned(now + 0.2, order, 2)
    ended, (forgotten,) = owned(now + 0.01, order)
    owned(math.inf, order)
    _, (early,) = owned(now + 0.05, order)
    with ended:
        pass
    await exceeded(late)
    assert order == [forgotten, early, late, too_late]
    assert time.monotonic() >= now + 0.2


async def test_a_passed_deadline_ends_later_streams_at_once():
    """A stream that a request gets after its deadline is aborted as those before it."""
    order: list[RequestStream] = []
    active, (first,) = owned(time.monotonic(), order)
    await exceeded(first)
    later = RequestStream(first.request, on_abort=order.append, on_stop=order.append)
    active.own(later)
    await exceeded(later)
    assert order == [first, later]


# ---------------------------------------------------------------- reusable timeout


def run(scenario: Coroutine[object, object, None]) -> None:
    """Run to its end, in virtual time: what passes between two steps is not the machine's."""
    with virtual_time() as loop:
        loop.run_until_complete(scenario)


def test_each_wait_has_its_own_end():
    """Each wait has its own end, whatever earlier waits had."""

    async def scenario():
        with closing(ReusableTimeout()) as timeout:
            for _ in range(2):
                with pytest.raises(TimeoutError), timeout.until(time.monotonic() + 0.02):
                    await asyncio.Event().wait()
                with timeout.until(time.monotonic() + 60):
                    await asyncio.sleep(0.03)
            with timeout.until(math.inf):
                await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(scenario())


def test_a_short_wait_may_follow_a_long_one():
    """A short wait after a long one ends at its own moment."""

    async def scenario():
        with closing(ReusableTimeout()) as timeout:
            with timeout.until(time.monotonic() + 60):
                await asyncio.sleep(0)
            end = time.monotonic() + 0.02
            with pytest.raises(TimeoutError), timeout.until(end):
                await asyncio.sleep(30)
            assert time.monotonic() == pytest.approx(end)

    run(scenario())


def test_time_between_waits_is_not_bounded():
    """Work outside of a wait is not bounded by the wait before."""

    async def scenario():
        with closing(ReusableTimeout()) as timeout:
            with timeout.until(time.monotonic() + 0.02):
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)

    run(scenario())


def test_a_cancellation_stays_a_cancellation():
    """Only the end of a wait becomes a TimeoutError."""

    async def wait():
        with closing(ReusableTimeout()) as timeout, timeout.until(time.monotonic() + 60):
            await asyncio.Event().wait()

    async def scenario():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario())
