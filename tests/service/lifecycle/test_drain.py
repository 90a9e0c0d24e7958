"""Draining: admitted requests finish, new ones are refused."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2
from legato.v1 import image_pb2, inference_pb2, media_pb2, server_pb2, session_pb2, task_pb2

from tests.grammar import Grammar
from tests.service.fakes import FakeEngine, answer, begin, delta, done, solution
from tests.service.harness import image_message, refusal, running, until

QUESTION = inference_pb2.QueryRequest(question="How many?")
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))
STREAM = inference_pb2.GenerateRequest(task=TASK)
INFERENCE = "legato.v1.InferenceService"


async def test_a_drain_finishes_open_calls_and_refuses_new_ones():
    """Open calls succeed, new ones fail with DRAINING, and health reports NOT_SERVING first."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        unary = server.inference.Query(QUESTION)
        stream = server.inference.Generate(STREAM)
        grammar = Grammar()
        grammar.feed(await stream.read())
        await until(lambda: len(engine.streams) == 2)
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        draining = asyncio.create_task(server.server.drain(60))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        failed = await refusal(server.inference.Query(QUESTION))
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "DRAINING"
        assert "RetryInfo" in failed.details
        assert await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())

        for each in list(engine.streams.values()):
            events, result = solution(each.request.task)
            engine.feed(each, delta(each.request, *events), done(each.request, result))
        assert await draining
        assert (await unary).answer
        while (event := await stream.read()) is not grpc.aio.EOF:
            grammar.feed(event)
        grammar.end(ok=True)
        watch.cancel()


async def test_a_drain_lasts_no_longer_than_its_grace():
    """Calls that do not end in time are aborted when the server stops."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        call = server.inference.Query(QUESTION)
        await until(lambda: bool(engine.streams))
        assert not await server.server.drain(0.05)
        await server.server.stop()
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        await until(lambda: not engine.streams)
    assert engine.aborted == [engine.requests[0].request_id]


async def test_what_the_grace_does_not_end_is_told_so():
    """Unary calls, streams, uploads and sessions end with DRAINING and a time to retry after."""
    engine = FakeEngine(begin)
    async with running(engine) as server:
        calls = await one_of_each(server, engine)
        assert not await server.server.drain(0.05)
        stopping = asyncio.create_task(server.server.stop())
        for call in calls:
            failed = await refusal(last_message(call))
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert failed.reason == "DRAINING"
            assert failed.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        await stopping
        await until(lambda: not engine.streams)


async def one_of_each(server, engine):
    """A call of every kind that the engine does not end."""
    stamp = media_pb2.FrameStamp(sequence=1)
    frame = session_pb2.Frame(stamp=stamp, image=image_message(), extra_tasks=[TASK])
    opening = session_pb2.SessionOpen(session_name="s")
    session = server.sessions.Session()
    await session.write(session_pb2.SessionRequest(open=opening))
    await session.write(session_pb2.SessionRequest(frame=frame))
    upload = server.images.PutImage()
    header = image_pb2.PutImageHeader(mime_type="image/png")
    await upload.write(image_pb2.PutImageRequest(header=header))
    stream = server.inference.Generate(STREAM)
    assert await stream.read()
    tasks = inference_pb2.RunTasksRequest(tasks=[TASK, TASK], image=image_message())
    unary = [server.inference.Query(QUESTION), server.inference.RunTasks(tasks)]
    await until(lambda: len(engine.streams) >= 4)
    return [session, stream, upload, *unary]


async def last_message(call):
    """Read to the end."""
    if not hasattr(call, "read"):
        return await call
    while await call.read() is not grpc.aio.EOF:
        pass
    return None


async def test_an_idle_server_drains_at_once():
    """It has nothing to wait for."""
    async with running(FakeEngine(answer)) as server:
        assert await server.server.drain(0)
