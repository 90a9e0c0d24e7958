"""The gate of InferenceService: refusals before a message is read, and what they cost nobody."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.v1 import admin_pb2, inference_pb2, inference_pb2_grpc, media_pb2, server_pb2, task_pb2
from legato_engine.errors import EngineLost
from legato_service.listeners import MAX_CALLS_PER_CONNECTION
from legato_service.rpc import gate as gate_module
from legato_service.rpc import middleware
from legato_service.rpc.gate import Gate, ReceiveLimit

from tests.faults.attacks import CONNECTIONS, RST_STREAM, Http2
from tests.service import fakes
from tests.service.fakes import MODEL, FakeEngine
from tests.service.harness import Running, refusal, running, until
from tests.service.session.client import session

QUERY = "/legato.v1.InferenceService/Query"
QUESTION = inference_pb2.QueryRequest(question="What is in the picture?")
GENERATE = inference_pb2.GenerateRequest(
    task=task_pb2.Task(query=task_pb2.QueryTask(question="What?"))
)
LIMIT = 4
RECEIVED = 3  # messages of one connection at a time, if they do not arrive
APART = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own


def gate_of(served: Running) -> Gate:
    """The gate of the main listener."""
    gate = served.server.listeners.main.gate
    assert gate is not None
    return gate


def tenant(name: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a tenant."""
    return (("legato-tenant", name),)


@asynccontextmanager
async def small_service(script: Any = fakes.hold, **settings: Any) -> AsyncIterator[Running]:
    """Serve with an engine that takes `LIMIT` requests and answers none of them by itself."""
    engine = FakeEngine(script)
    engine.model = msgspec.structs.replace(MODEL, max_running=1, max_waiting=LIMIT - 1)
    async with running(engine, **settings) as served:
        yield served


async def fill(served: Running, count: int, name: str = "greedy") -> list[Any]:
    """Open `count` calls that are not answered."""
    calls = [served.inference.Query(QUESTION, metadata=tenant(name)) for _ in range(count)]
    await until(lambda: len(served.engine.streams) == count)
    return calls


async def end(served: Running, calls: list[Any]) -> None:
    """Cancel calls, and wait until the engine knows."""
    for each in calls:
        each.cancel()
    await until(lambda: not served.engine.streams)


async def test_a_call_too_many_is_refused_with_details_before_its_message_is_read() -> None:
    """A message that is no protobuf would get INVALID_ARGUMENT if it were read."""
    async with small_service() as served:
        calls = await fill(served, LIMIT)
        query = served.channel.unary_unary(QUERY)
        with structlog.testing.capture_logs() as logs:
            metadata = (*tenant("greedy"), ("x-request-id", "mine"))
            refused = await refusal(query(b"\xff", metadata=metadata))
            await until(lambda: bool(logs))
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.reason == "QUEUE_FULL"
        assert refused.details["RetryInfo"].retry_delay.ToMilliseconds() >= 50
        assert int(refused.trailers["grpc-retry-pushback-ms"]) >= 50
        assert refused.details["RequestInfo"].request_id == "mine"
        assert refused.trailers["x-request-id"] == "mine"
        (line,) = (each for each in logs if each["event"] == "rpc_ended")
        assert (line["code"], line["reason"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert line["tenant"] == "greedy"
        assert len(served.engine.requests) == LIMIT
        await end(served, calls)
        assert (await refusal(query(b"\xff"))).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_is_refused_likewise() -> None:
    """The details are in the trailers, and no message comes."""
    async with small_service() as served:
        await fill(served, LIMIT)
        stream = served.inference.Generate(GENERATE, metadata=tenant("greedy"))
        assert (await refusal(stream.read())).reason == "QUEUE_FULL"


async def test_a_refused_image_is_not_stored() -> None:
    """Its bytes reach no blob."""
    async with small_service() as served:
        await fill(served, LIMIT)
        image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=bytes(100_000)))
        request = inference_pb2.CaptionRequest(image=image)
        refused = await refusal(served.inference.Caption(request, metadata=tenant("greedy")))
        assert refused.reason == "QUEUE_FULL"
        assert len(served.engine.blobs) == 0


async def test_operators_and_probes_are_never_refused() -> None:
    """Health, load and administration pass a full gate."""
    async with small_service() as served:
        await fill(served, LIMIT)
        query = served.inference.Query(QUESTION, metadata=tenant("greedy"))
        assert (await refusal(query)).reason == "QUEUE_FULL"
        await served.health.Check(health_pb2.HealthCheckRequest())
        await served.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        await served.admin.GetLoad(admin_pb2.GetLoadRequest())


@pytest.mark.parametrize("how", ["answered", "cancelled", "failed"])
async def test_every_end_gives_the_place_back(how: str) -> None:
    """Thrice as many calls as places, one after the other."""
    async with small_service() as served:
        engine = served.engine
        calls = await fill(served, LIMIT - 1)
        for _ in range(3 * LIMIT):
            call = served.inference.Query(QUESTION)
            await until(lambda: len(engine.streams) == LIMIT)
            stream = list(engine.streams.values())[-1]
            if how == "answered":
                fakes.answer(engine, stream)
                await call
            elif how == "cancelled":
                call.cancel()
            else:
                fakes.refuse(EngineLost("lost"))(engine, stream)
                await refusal(call)
            await until(lambda: len(engine.streams) == LIMIT - 1)
        await end(served, calls)
        gate = gate_of(served)
        await until(lambda: not gate.calls_by_tenant)
        assert gate.num_unsubmitted == 0


async def test_a_call_that_is_cancelled_before_it_is_read_gives_its_place_back() -> None:
    """A call whose message never comes takes a place only while it lasts."""
    async with small_service() as served:
        query = served.channel.stream_unary(QUERY)  # sends headers without a message
        calls = [query() for _ in range(LIMIT)]
        gate = gate_of(served)
        await until(lambda: gate.num_unsubmitted == RECEIVED)
        for each in calls:
            each.cancel()
        await until(lambda: gate.num_unsubmitted == 0)


async def test_an_unread_stream_takes_no_place_once_the_engine_has_ended_it() -> None:
    """Callers that do not read take no places of others."""
    async with small_service(fakes.answer) as served:
        streams = list[Any]()
        for _ in range(3 * LIMIT):  # together there are too many before the first has ended
            streams.append(served.inference.Generate(GENERATE))
            await until(lambda: len(served.engine.requests) == len(streams))
        await served.inference.Query(QUESTION)
        for each in streams:
            each.cancel()


async def test_a_tenant_below_its_share_passes_a_full_gate() -> None:
    """Also a higher priority passes. The engine decides whose request gives way."""
    async with small_service() as served:
        await fill(served, LIMIT)  # a reserve of 2, of which priorities get 1
        urgent = (*tenant("greedy"), ("legato-priority", "1"))
        call = served.inference.Generate(GENERATE, metadata=urgent)
        await until(lambda: len(served.engine.streams) == LIMIT + 1)
        for metadata in (urgent, tenant("greedy")):
            refused = await refusal(served.inference.Query(QUESTION, metadata=metadata))
            assert refused.reason == "QUEUE_FULL"
        small = served.inference.Query(QUESTION, metadata=tenant("small"))
        await until(lambda: len(served.engine.streams) == LIMIT + 2)
        for name in ("small", "new"):  # the reserve is used up
            refused = await refusal(served.inference.Query(QUESTION, metadata=tenant(name)))
            assert refused.reason == "QUEUE_FULL"
        for stream in list(served.engine.streams.values()):
            fakes.answer(served.engine, stream)
        assert (await small).answer
        assert (await call.read()).HasField("started")
        call.cancel()


async def test_a_malformed_call_gets_its_own_error_at_a_full_gate() -> None:
    """It is told what is wrong, not to come again."""
    async with small_service() as served:
        await fill(served, LIMIT)
        metadata = (("legato-priority", "high"),)
        refused = await refusal(served.inference.Query(QUESTION, metadata=metadata))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("calls", [1000, pytest.param(4000, marks=pytest.mark.slow)])
async def test_a_burst_is_answered_with_statuses_of_ours(calls: int) -> None:
    """GRPC itself drops or refuses none of so many at once, which one connection carries."""
    async with small_service(fakes.answer) as served:
        query = served.channel.unary_unary(QUERY)
        data = QUESTION.SerializeToString()

        async def one() -> str:
            try:
                await query(data)
            except grpc.aio.AioRpcError as error:
                trailers = dict(error.trailing_metadata() or ())
                return f"{error.code().name} {'grpc-status-details-bin' in trailers}"
            return "OK"

        counts = Counter(await asyncio.gather(*(one() for _ in range(calls))))
        assert set(counts) <= {"OK", "RESOURCE_EXHAUSTED True"}
        assert counts["OK"]


async def test_calls_beyond_those_of_a_connection_wait_in_the_client() -> None:
    """Each that ends lets the next one come."""
    engine = FakeEngine(fakes.hold)
    async with running(engine) as served:
        calls = [served.inference.Query(QUESTION) for _ in range(MAX_CALLS_PER_CONNECTION + 2)]
        await until(lambda: len(engine.streams) == MAX_CALLS_PER_CONNECTION)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", APART) as another:
            health: Any = health_pb2_grpc.HealthStub(another)
            for _ in range(10):
                await health.Check(health_pb2.HealthCheckRequest())
        assert len(engine.streams) == MAX_CALLS_PER_CONNECTION
        for _ in range(2):
            fakes.answer(engine, next(iter(engine.streams.values())))
        await until(lambda: len(engine.requests) == len(calls))
        for each in calls:
            each.cancel()


async def test_a_burst_of_reset_calls_is_refused_before_it_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for those that a connection may have, and twice as many that are not cleaned up yet."""
    entered = 0
    enter = Gate.enter

    def counted(gate: Gate, task: asyncio.Task[object]) -> Any:
        nonlocal entered
        entered += 1
        return enter(gate, task)

    monkeypatch.setattr(Gate, "enter", counted)
    async with running(FakeEngine(fakes.answer)) as served:
        connection = Http2(f"127.0.0.1:{served.port}")
        connection.read()
        with connection.at_once():
            for _ in range(20 * MAX_CALLS_PER_CONNECTION):
                stream = connection.open(QUERY)
                connection.send(RST_STREAM, 0, stream, struct.pack(">I", 8))
        await until(lambda: entered > 0)
        await served.inference.Query(QUESTION)  # behind them
        await until(lambda: gate_of(served).num_unsubmitted == 0)
        connection.close()
        assert entered <= 4 * MAX_CALLS_PER_CONNECTION
        await served.inference.Query(QUESTION)


async def test_memory_is_given_back_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, after the last of them; not after a few."""
    monkeypatch.setattr(gate_module, "QUIET_DELAY", 0.0)
    monkeypatch.setattr(gate_module, "MANY_CALLS", LIMIT)
    given: list[None] = []
    async with small_service() as served:
        gate = gate_of(served)
        monkeypatch.setattr(gate, "_on_quiet", lambda: given.append(None))
        await end(served, await fill(served, LIMIT - 1))
        await until(lambda: not gate.calls_by_tenant)
        calls = await fill(served, LIMIT)
        assert not given
        await end(served, calls)
        await until(lambda: bool(given))
    assert len(given) == 1


async def silent() -> AsyncIterator[bytes]:
    """A message that never comes."""
    await asyncio.Event().wait()
    yield b""


async def test_calls_whose_message_does_not_arrive_keep_nobody_out() -> None:
    """They have their places for a second, and each until it is ended a moment later."""
    async with small_service(fakes.answer, stall_timeout=1.5) as served:
        start = served.channel.stream_unary(QUERY)
        calls = [start(silent()) for _ in range(3 * LIMIT)]
        await until(lambda: gate_of(served).num_unsubmitted >= RECEIVED)
        await until(lambda: gate_of(served).num_unsubmitted == 0)
        await served.inference.Query(QUESTION)
        for call in calls:
            call.cancel()
        await until(lambda: not gate_of(served).calls_by_tenant)
        assert gate_of(served).num_unsubmitted == 0


async def test_calls_without_a_message_are_ended() -> None:
    """Each has `stall_timeout` to bring its message; also the first of a process."""
    async with running(FakeEngine(fakes.answer), stall_timeout=0.5) as served:
        start = served.channel.stream_unary(QUERY)
        calls = [start(silent()) for _ in range(6)]
        for call in calls:
            assert (await refusal(call)).reason == "CLIENT_TOO_SLOW"
        await served.inference.Query(QUESTION)
        assert (await served.health.Check(health_pb2.HealthCheckRequest())).status


async def test_a_call_that_ends_without_a_message_is_refused() -> None:
    """It gets a status, not silence."""
    async with running(FakeEngine(fakes.answer)) as served:
        refused = await refusal(served.channel.stream_unary(QUERY)(iter(())))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_arrives_late_is_answered() -> None:
    """Its call has a place again when it is read."""
    begun = asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        await begun.wait()
        await until(lambda: gate_of(served).num_unsubmitted == 0)
        yield QUESTION.SerializeToString()

    async with running(FakeEngine(fakes.answer)) as served:
        call = served.channel.stream_unary(QUERY)(late())
        await until(lambda: gate_of(served).num_unsubmitted == 1)
        begun.set()
        response = inference_pb2.QueryResponse.FromString(await call)
        assert response.answer
        assert gate_of(served).num_unsubmitted == 0


# ---------------------------------------------------------------- places to receive messages


class Incomplete:
    """A connection whose calls each send a message but for its last byte."""

    def __init__(self, port: int) -> None:
        self._connection = Http2(f"127.0.0.1:{port}")
        self._connection.read()

    def begin(self, count: int) -> list[int]:
        """Begin calls, and return their streams."""
        streams = [self._connection.open(QUERY) for _ in range(count)]
        for stream in streams:
            self._connection.push(stream, struct.pack(">BI", 0, 1_000_000) + bytes(1000))
        return streams

    async def wait_ended(self, count: int) -> None:
        """Return once the server has ended so many calls."""
        known = set(self._connection.windows)
        while len(known - set(self._connection.windows)) < count:
            await asyncio.to_thread(self._connection.read)

    def close(self) -> None:
        self._connection.close()


def limit_of(served: Running) -> ReceiveLimit:
    """The places of the main listener."""
    return served.server.listeners.main.receive_limit


async def test_incomplete_messages_of_a_few_connections_leave_a_place_for_others() -> None:
    """Eight messages are received at a time, and four greedy connections get six or seven."""
    async with running(FakeEngine(fakes.answer)) as served:
        attackers = [Incomplete(served.port) for _ in range(4)]
        for each in attackers:
            each.begin(16)
        await until(lambda: limit_of(served).num_free <= 2)
        assert limit_of(served).is_wanted
        for _ in range(3):
            await served.inference.Query(QUESTION)
            assert 1 <= limit_of(served).num_free <= 2
        for each in attackers:
            each.close()
        await until(lambda: limit_of(served).num_free == 8)
        assert not limit_of(served).is_wanted


async def test_a_late_message_gives_its_place_to_a_waiting_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a waiting call it has `stall_timeout`."""
    monkeypatch.setattr(middleware, "_LATE_FOR_OTHERS", 0.1)
    async with running(FakeEngine(fakes.answer)) as served:
        attacker = Incomplete(served.port)
        attacker.begin(4)  # one of them waits
        await until(lambda: limit_of(served).is_wanted)
        await asyncio.wait_for(attacker.wait_ended(1), 60)
        attacker.close()
        await until(lambda: limit_of(served).num_free == 8)


async def test_a_connection_whose_large_message_was_refused_waits() -> None:
    """Others do not; of those that a proxy names, only the one that sent it does."""
    large = inference_pb2.QueryRequest(question="x" * 8_000_000)
    async with running(FakeEngine(fakes.answer)) as served:
        named = (("x-forwarded-for", "10.0.0.9, 10.0.0.1"),)
        assert (await refusal(served.inference.Query(large, metadata=named))).reason
        await served.inference.Query(QUESTION)
        limit = limit_of(served)
        assert limit.num_paused == 1
        waiting = served.inference.Query(QUESTION, metadata=(("x-forwarded-for", "10.0.0.1"),))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", APART) as another:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(another)
            await stub.Query(QUESTION)
        assert (await waiting).answer  # after the pause
        assert limit.num_paused == 0


async def test_a_waiting_call_that_is_cancelled_takes_no_place() -> None:
    """Also one whose place came at the same time."""
    limit = ReceiveLimit(2)
    assert limit.take("a", "a")
    first, second = (asyncio.create_task(limit.wait("a", "a")) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    limit.give_back("a")
    first.cancel()  # its place is there
    await asyncio.wait({first})
    assert limit.num_free == 2
    assert not limit.is_wanted


# ---------------------------------------------------------------- unfinished messages of streams


async def test_unfinished_frames_end_the_sessions_of_the_sender_that_has_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sessions of others stay, also those that bring more, a whole frame at a time."""
    monkeypatch.setattr(gate_module, "UNFINISHED_BYTES", 16 * 2**20)
    attack = CONNECTIONS["incomplete frames of sessions"]
    large = media_pb2.Image(encoded=media_pb2.EncodedImage(data=bytes(4 * 2**20)))
    async with running(FakeEngine(fakes.answer)) as served, session(served) as other:
        with structlog.testing.capture_logs() as logs:
            for number in range(6):
                await other.frame(number, image=large)
                await other.outcome(number)
            assert not [each for each in logs if each["event"] == "rpc_ended"]
            connection = Http2(f"127.0.0.1:{served.port}")
            connection.read()
            attacking = asyncio.create_task(asyncio.to_thread(attack, connection))
            await until(lambda: any(each["event"] == "rpc_ended" for each in logs))
            assert {each["reason"] for each in logs if each["event"] == "rpc_ended"} == {
                "CLIENT_TOO_SLOW"
            }
            await other.frame(6)
            await other.outcome(6)
            connection.close()
            await asyncio.wait({attacking})
            assert isinstance(attacking.exception(), OSError)
