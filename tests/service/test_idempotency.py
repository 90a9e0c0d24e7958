"""Request ids of clients: calls join a run, get its kept reply, and are never mixed up."""

import asyncio
import contextvars
import types
from typing import Any

import grpc
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from legato.v1 import inference_pb2, task_pb2
from legato_engine import errors
from legato_engine.types import RequestKey
from legato_service.errors import RequestIdInUse
from legato_service.requests.idempotency import IdempotencyCache, fingerprint
from legato_service.rpc import call

from tests.service.fakes import FakeEngine, answer, begin, done, hold, solution
from tests.service.harness import image_message, refusal, running, until
from tests.service.rpc.test_middleware import lines_of

TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))


def options(request_id="mine"):
    """Return options with an id."""
    return inference_pb2.RequestOptions(request_id=request_id)


QUERY = inference_pb2.QueryRequest(question="How many?", options=options())
OTHER = inference_pb2.QueryRequest(question="How few?", options=options())
STREAM = inference_pb2.GenerateRequest(task=TASK, options=options())
UNARY = {
    "Query": QUERY,
    "Caption": inference_pb2.CaptionRequest(image=image_message(), options=options()),
    "Detect": inference_pb2.DetectRequest(image=image_message(), object="cup", options=options()),
    "Point": inference_pb2.PointRequest(image=image_message(), object="cup", options=options()),
    "Segment": inference_pb2.SegmentRequest(image=image_message(), object="cup", options=options()),
    "RunTasks": inference_pb2.RunTasksRequest(tasks=[TASK], options=options()),
}


async def joined(server, count=2):
    """Wait until `count` calls share a run, whose request has reached the engine."""
    await until(lambda: server.server.idempotency_cache.num_waiting == count)
    await until(lambda: bool(server.engine.streams))


def finish(engine):
    """Complete all requests."""
    for stream in list(engine.streams.values()):
        answer(engine, stream)


@pytest.mark.parametrize("rpc", UNARY)
async def test_calls_of_one_id_and_content_share_a_run(rpc):
    """Both get the same reply of one request; so does a third call a moment later."""
    engine = FakeEngine(hold)
    async with running(engine) as server:
        method = getattr(server.inference, rpc)
        first, second = method(UNARY[rpc]), method(UNARY[rpc])
        await joined(server)
        finish(engine)
        assert await first == await second == await method(UNARY[rpc])
        assert len(engine.requests) == 1
        assert len(server.server.requests) == 0
        assert len(engine.blobs) == 0


async def test_the_log_marks_shared_replies():
    """A joined call and one with a kept reply are marked, and count no tokens as their own."""
    engine = FakeEngine(hold)
    with structlog.testing.capture_logs() as logs:
        async with running(engine) as server:
            first, second = server.inference.Query(QUERY), server.inference.Query(QUERY)
            await joined(server)
            finish(engine)
            await asyncio.gather(first, second)
            await server.inference.Query(QUERY)
            await until(lambda: len(lines_of(logs)) == 3)
    lines = {line.get("reply", ""): line for line in lines_of(logs)}
    assert set(lines) == {"", "joined", "kept"}
    assert {line["request_id"] for line in lines.values()} == {"mine"}
    assert [name for name, line in lines.items() if "output_tokens" in line] == [""]


async def test_other_content_is_refused():
    """Another request or RPC gets ALREADY_EXISTS, during the run and while its reply is kept."""
    engine = FakeEngine(hold)
    detect = inference_pb2.DetectRequest(image=image_message(), object="cup", options=options())
    async with running(engine) as server:
        first = server.inference.Query(QUERY)
        await until(lambda: bool(engine.streams))
        for _ in range(2):
            for attempt in (
                server.inference.Query(OTHER),
                server.inference.Detect(detect),
                server.inference.Generate(STREAM).read(),
            ):
                failed = await refusal(attempt)
                assert failed.code is grpc.StatusCode.ALREADY_EXISTS
                assert failed.reason == "DUPLICATE_REQUEST"
                assert failed.details["ResourceInfo"].resource_name == "mine"
            finish(engine)
            assert (await first).answer
        assert len(engine.requests) == 1


async def test_a_stream_has_its_id_alone():
    """No other call has the id of a stream, while it runs and after it ended well."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        stream = server.inference.Generate(STREAM)
        await stream.read()
        for _ in range(2):
            for attempt in (
                server.inference.Query(QUERY),
                server.inference.Generate(STREAM).read(),
            ):
                assert (await refusal(attempt)).reason == "DUPLICATE_REQUEST"
            for running_stream in list(engine.streams.values()):
                result = solution(running_stream.request.task)[1]
                engine.feed(running_stream, done(running_stream.request, result))
            while await stream.read() is not grpc.aio.EOF:
                pass


@pytest.mark.parametrize("rpc", ["Query", "Generate"])
async def test_a_failure_is_not_kept(rpc):
    """A failed id may be used again, with other content as well."""
    engine = FakeEngine()

    def fail(engine, stream):
        engine.fail(stream, errors.EngineLost("died"))

    engine.script = fail
    async with running(engine) as server:
        ask = {
            "Query": lambda: server.inference.Query(QUERY),
            "Generate": lambda: server.inference.Generate(STREAM).read(),
        }[rpc]
        assert (await refusal(ask())).reason == "ENGINE_LOST"
        engine.script = answer
        assert await ask()
        assert len(engine.requests) == 2


async def test_a_failure_goes_to_all_joined_calls():
    """All joined calls get the run's error, with the id."""
    engine = FakeEngine(hold)
    async with running(engine) as server:
        calls = [server.inference.Query(QUERY) for _ in range(3)]
        await joined(server, 3)
        (stream,) = engine.streams.values()
        engine.fail(stream, errors.QueueFull("full", limit=1))
        for each in calls:
            failed = await refusal(each)
            assert failed.reason == "QUEUE_FULL"
            assert failed.details["RequestInfo"].request_id == "mine"
        assert len(server.server.requests) == 0


@pytest.mark.parametrize("leaver", [0, 1], ids=["first", "joined"])
async def test_a_call_that_leaves_does_not_end_the_run(leaver):
    """The run goes on when the first call leaves, and when the joined one does."""
    engine = FakeEngine(hold)
    async with running(engine) as server:
        calls = [server.inference.Query(QUERY), server.inference.Query(QUERY)]
        await joined(server)
        calls.pop(leaver).cancel()
        await joined(server, 1)
        assert len(engine.streams) == 1
        finish(engine)
        assert (await calls[0]).answer
        assert engine.aborted == []


async def test_the_last_call_to_leave_ends_the_run():
    """With the last call the engine's request is aborted, and the id is free at once."""
    engine = FakeEngine(hold)
    async with running(engine) as server:
        calls = [server.inference.Query(QUERY), server.inference.Query(QUERY)]
        await joined(server)
        await until(lambda: len(engine.streams) == 1)
        for each in calls:
            each.cancel()
        await until(lambda: not engine.streams and len(server.server.requests) == 0)
        assert engine.aborted == [RequestKey("mine")]
        engine.script = answer
        assert (await server.inference.Query(OTHER)).answer


async def test_ids_are_a_tenants_own():
    """Two tenants use one id at the same time, for different requests."""
    engine = FakeEngine(hold)
    async with running(engine) as server:
        one = server.inference.Query(QUERY, metadata=(("legato-tenant", "a"),))
        other = server.inference.Query(OTHER, metadata=(("legato-tenant", "b"),))
        nobodys = server.inference.Query(QUERY)
        await until(lambda: len(engine.streams) == 3)
        assert set(engine.streams) == {RequestKey("mine", tenant) for tenant in ("a", "b", "")}
        finish(engine)
        for each in (one, other, nobodys):
            assert (await each).info.request_id == "mine"


async def test_only_ids_from_clients_are_kept():
    """Ids of the server or of a proxy are not kept, and a proxy's may repeat."""
    engine = FakeEngine(hold)
    proxy = (("x-request-id", "proxy"),)
    without = inference_pb2.QueryRequest(question="How many?")
    async with running(engine) as server:
        calls = [server.inference.Query(without, metadata=proxy) for _ in range(2)]
        await until(lambda: len(engine.streams) == 2)
        finish(engine)
        ids = [(await each).info.request_id for each in calls]
        assert ids.count("proxy") == 1
        assert len(set(ids)) == 2
        assert len(server.server.idempotency_cache) == 0


async def test_a_joined_call_has_its_own_deadline():
    """A joined call ends at its own deadline, and the run goes on."""
    engine = FakeEngine(hold)
    async with running(engine) as server:
        first = server.inference.Query(QUERY)
        await until(lambda: bool(engine.streams))
        failed = await refusal(server.inference.Query(QUERY, timeout=0.1))
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        finish(engine)
        assert (await first).answer


async def test_large_requests_are_distinguished():
    """Bytes beyond those hashed on the event loop count as well."""
    one, other = image_message(), image_message()
    one.encoded.data += bytes(200_000)
    other.encoded.data += bytes(199_999) + b"1"
    async with running() as server:
        request = inference_pb2.CaptionRequest(image=one, options=options())
        assert await server.inference.Caption(request) == await server.inference.Caption(request)
        changed = inference_pb2.CaptionRequest(image=other, options=options())
        assert (await refusal(server.inference.Caption(changed))).reason == "DUPLICATE_REQUEST"
        assert len(server.engine.requests) == 1


# ------------------------------------------------------------ what is kept, and how much


NO_DEADLINE: Any = types.SimpleNamespace(time_remaining=lambda: None)


def reply(size=1):
    """Return a reply of about `size` bytes."""
    return inference_pb2.QueryResponse(answer="x" * size)


async def ask(cache, name, content=b"?", size=1):
    """Make one call; return its reply, and whether it was computed."""
    made = []

    async def work(context):
        made.append(reply(size))
        return made[0]

    context = contextvars.copy_context()
    context.run(call.CURRENT.set, call.Call("test"))
    task = asyncio.get_running_loop().create_task(
        cache.get_or_run(RequestKey(name), content, work, NO_DEADLINE), context=context
    )
    return await task, bool(made)


async def test_a_reply_expires():
    """An expired reply is computed anew."""
    cache = IdempotencyCache(keep=0.0)
    assert (await ask(cache, "a"))[1]
    assert (await ask(cache, "a"))[1]
    cache = IdempotencyCache(keep=60.0)
    assert (await ask(cache, "a"))[1]
    assert not (await ask(cache, "a"))[1]


async def test_replies_are_bounded_in_number():
    """The least recently used is dropped first."""
    cache = IdempotencyCache(max_replies=2)
    for name in ("a", "b", "a", "c"):
        await ask(cache, name)
    assert len(cache) == 2
    assert not (await ask(cache, "a"))[1]
    assert (await ask(cache, "b"))[1]


async def test_replies_are_bounded_in_bytes():
    """Large replies displace older ones; one above the bound is not kept at all."""
    cache = IdempotencyCache(max_bytes=1000)
    for name in ("a", "b", "c"):
        await ask(cache, name, size=400)
    assert len(cache) == 2
    await ask(cache, "d", size=2000)
    assert len(cache) == 0
    assert (await ask(cache, "d", size=2000))[1]


async def test_an_abandoned_run_is_not_joined():
    """A call waits for the end of an abandoned run and starts a new one."""
    cache = IdempotencyCache()
    release = asyncio.Event()
    begun: list[int] = []

    async def work(context):
        begun.append(len(begun))
        if len(begun) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                await release.wait()
        return reply()

    call.CURRENT.set(call.Call("test"))
    first = asyncio.create_task(cache.get_or_run(RequestKey("a"), b"?", work, NO_DEADLINE))
    await until(lambda: bool(begun))
    first.cancel()
    second = asyncio.create_task(cache.get_or_run(RequestKey("a"), b"!", work, NO_DEADLINE))
    await asyncio.gather(first, return_exceptions=True)
    assert len(begun) == 1
    release.set()
    assert await second == reply()
    assert begun == [0, 1]


async def test_a_stream_that_failed_frees_its_name():
    """`exclusive` keeps the name only after a block that ended well."""
    cache = IdempotencyCache()
    with pytest.raises(ValueError, match="bad"), cache.exclusive(RequestKey("a")):
        raise ValueError("bad")
    with cache.exclusive(RequestKey("a")):
        pass
    with pytest.raises(RequestIdInUse), cache.exclusive(RequestKey("a")):
        pass


async def test_a_fingerprint_is_of_method_and_bytes():
    """Fingerprints are equal only for equal methods and bytes of any length."""
    for size in (0, 10, 100_000):
        data = bytes(size)
        assert await fingerprint("/a", data) == await fingerprint("/a", bytes(size))
        assert await fingerprint("/a", data) != await fingerprint("/b", data)
        assert await fingerprint("/a", data) != await fingerprint("/a", data + b"1")


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "leave", "end", "fail"]), st.integers(0, 5)),
    max_size=30,
)


class Walk:
    """Calls that start, leave and end at random, and the runs that they share."""

    def __init__(self):
        self.cache = IdempotencyCache()
        self.live: dict[str, asyncio.Future[None]] = {}
        self.calls: list[tuple[str, asyncio.Task[inference_pb2.QueryResponse]]] = []

    def ask(self, number):
        """Call with one of two names and one of two contents."""
        name, content = "ab"[number % 2], b"!?"[number // 3 :][:1]

        async def work(context):
            assert name not in self.live, "two runs of one name"
            self.live[name] = asyncio.get_running_loop().create_future()
            try:
                await self.live[name]
            finally:
                del self.live[name]
            return inference_pb2.QueryResponse(answer=f"{name}{content.decode()}")

        request = self.cache.get_or_run(RequestKey(name), content, work, NO_DEADLINE)
        self.calls.append((f"{name}{content.decode()}", asyncio.create_task(request)))

    def leave(self, number):
        """Cancel a call."""
        if self.calls:
            self.calls[number % len(self.calls)][1].cancel()

    def end(self, number, error=None):
        """End a run."""
        future = self.live.get("ab"[number % 2])
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    async def settle(self):
        """Let all tasks run; there are runs only while calls wait."""
        for _ in range(6):
            await asyncio.sleep(0)
        waiting = sum(not task.done() for _, task in self.calls)
        assert self.cache.num_waiting == waiting
        assert bool(self.live) == bool(waiting)


async def walk(drawn):
    """Take the steps, then end all runs."""
    call.CURRENT.set(call.Call("test"))
    world = Walk()
    for what, number in drawn:
        if what == "fail":
            world.end(number, errors.EngineLost("died"))
        else:
            getattr(world, what)(number)
        await world.settle()
    world.end(0)
    world.end(1)
    await world.settle()
    assert not world.live
    for expected, task in world.calls:
        assert task.done()
        if not task.cancelled() and task.exception() is None:
            assert task.result().answer == expected
        elif not task.cancelled():
            assert isinstance(task.exception(), (RequestIdInUse, errors.EngineLost))


@given(drawn=steps)
def test_any_walk_gives_each_call_its_own_reply(drawn):
    """There is one run a name, none without a call, and each call gets its own reply."""
    asyncio.run(walk(drawn))
