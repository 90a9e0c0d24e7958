"""SessionService over the wire: opening, frames, tasks and the end."""

import asyncio

import grpc
import pytest
from google.protobuf import duration_pb2, timestamp_pb2
from legato.v1 import inference_pb2, media_pb2, session_pb2, task_pb2
from legato_engine import core
from legato_engine.client import EngineState
from legato_engine.errors import ImageUndecodable, QueueFull
from legato_service.arguments import parse

from tests.service.fakes import FakeEngine, answer, begin, hold, refuse
from tests.service.harness import picture, refusal, running, until
from tests.service.session.client import DETECT, QUERY, SessionClient, opening, session

ERROR = "error"
EVERY = session_pb2.FRAME_POLICY_EVERY_FRAME
PREEMPT = session_pb2.FRAME_POLICY_PREEMPT
SUPERSEDED = task_pb2.FINISH_REASON_SUPERSEDED
CANCELLED = task_pb2.FINISH_REASON_CANCELLED


def seconds(value):
    """A duration."""
    message = duration_pb2.Duration()
    message.FromMilliseconds(round(value * 1000))
    return message


def reason_of(result):
    """The reason of a failed task."""
    from google.rpc import error_details_pb2

    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in result.error.details)
    return info.reason


async def settled(server):
    """Nothing is held any more: no session, no request, no picture."""
    await until(lambda: server.server.num_in_flight == 0 and len(server.server.sessions) == 0)
    assert not server.engine.streams
    assert len(server.engine.blobs) == 0


async def begun(server, count=1):
    """So many requests have reached the engine."""
    await until(lambda: len(server.engine.requests) >= count)


def answer_all(engine):
    """What the engine holds, it answers."""
    for stream in list(engine.streams.values()):
        answer(engine, stream)


# ---------------------------------------------------------------- opening


async def test_a_session_is_opened_on_its_terms():
    """`opened` tells the id, the model and what was granted; health and the list know of it."""
    async with (
        running() as server,
        session(server, max_in_flight=100, frame_policy=EVERY) as client,
    ):
        opened = client.opened
        assert opened.session_id
        assert opened.model == "fake-1"
        assert opened.max_in_flight == 8
        assert opened.frame_credits >= 1
        assert opened.heartbeat_interval.ToMilliseconds() == 10_000
        assert opened.contract_revision >= 1
        assert len(server.server.sessions) == 1
        await client.done()
        await client.end()
        await settled(server)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"frame": {"stamp": {"sequence": 1}}}, "open"),
        ({"grant": {"responses": 1}}, "open"),
        ({}, "open"),
    ],
)
async def test_nothing_comes_before_the_opening(message, field):
    """Another first message is SESSION_PROTOCOL, by its field."""
    async with running() as server:
        client = SessionClient(server.sessions.Session())
        await client.say(**message)
        failed = await client.failure()
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.reason == "SESSION_PROTOCOL"
    assert failed.details["BadRequest"].field_violations[0].field == field


async def test_a_session_that_is_not_opened_ends():
    """A client that says nothing, or leaves at once, is told what was missing."""
    async with running(session_open_timeout=0.05) as server:
        failed = await SessionClient(server.sessions.Session()).failure()
        assert failed.reason == "SESSION_PROTOCOL"
        client = SessionClient(server.sessions.Session())
        await client.done()
        assert (await client.failure()).reason == "SESSION_PROTOCOL"
        await settled(server)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "other"}, "MODEL_NOT_FOUND"),
        ({"adapter": "cups@12"}, "ADAPTER_NOT_FOUND"),
        ({"session_name": "x" * 65}, "INVALID_FIELD"),
        ({"frame_policy": 9}, "INVALID_FIELD"),
        ({"max_frame_age": seconds(-1)}, "INVALID_FIELD"),
        ({"heartbeat_interval": seconds(0)}, "INVALID_FIELD"),
        ({"standing_tasks": [DETECT, DETECT]}, "INVALID_FIELD"),
        ({"standing_tasks": [task_pb2.Task()]}, "INVALID_FIELD"),
        ({"standing_tasks": [QUERY] * 33}, "INVALID_FIELD"),
    ],
)
async def test_an_opening_that_makes_no_sense_ends_with_its_own_status(fields, reason):
    """What is wrong for every frame is told at once."""
    async with running() as server:
        client = SessionClient(server.sessions.Session())
        await client.say(open=opening(**fields))
        assert (await client.failure()).reason == reason
        await settled(server)


async def test_no_more_sessions_than_allowed():
    """Beyond the limit a session is refused with QUEUE_FULL, until one has ended."""
    async with running(max_sessions=1) as server:
        async with session(server):
            failed = await SessionClient(server.sessions.Session()).failure()
            assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failed.reason == "QUEUE_FULL"
            assert failed.details["ErrorInfo"].metadata["limit"] == "1"
        await settled(server)
        async with session(server):
            pass


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"open": {}}, "SESSION_PROTOCOL"),
        ({}, "SESSION_PROTOCOL"),
        ({"frame": {}}, "SESSION_PROTOCOL"),
        ({"frame": {"stamp": {"sequence": 1}}}, "SESSION_PROTOCOL"),
        ({"cancel": {}}, "INVALID_FIELD"),
        ({"grant": {}}, "INVALID_FIELD"),
        ({"update": {"standing_tasks": [{}]}}, "INVALID_FIELD"),
    ],
)
async def test_a_breach_ends_the_session(message, reason):
    """A message out of order, or without its content, ends everything, and nothing is left."""
    async with running(FakeEngine(hold)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        await client.say(**message)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.reason == reason
        await settled(server)


# ---------------------------------------------------------------- frames and tasks


async def test_a_frame_gets_all_its_results():
    """Stamps come back verbatim; the bytes reach the engine once; the last result says so."""
    stamp = media_pb2.FrameStamp(
        frame_id="cam/left", sequence=7, capture_time=timestamp_pb2.Timestamp(seconds=5, nanos=1)
    )
    async with (
        running() as server,
        session(server, standing_tasks=[DETECT, QUERY], stream_deltas=True) as client,
    ):
        await client.frame(7, stamp=stamp)
        await client.done()
        await client.end()
        cups, count = sorted(client.results[7], key=lambda each: each.task_id != "cups")
        assert len(cups.detect.objects) == 2
        assert count.query.answer == "Three red cups."
        assert cups.finish_reason == count.finish_reason == task_pb2.FINISH_REASON_STOP
        assert client.accepted == [7]
        assert [type(each.image) for each in server.engine.requests] == [
            core.EncodedImage,
            core.CachedImage,
        ]
        text = client.deltas[7, "count"].of("text")
        assert "".join(each.text.text for each in text) == "Three red cups."
        assert len(client.deltas[7, "cups"].of("object")) == 2
        await settled(server)


async def test_without_deltas_only_results_come():
    """A session that asked for none gets one result for each task, and the engine tells no more."""
    async with running() as server, session(server) as client:
        await client.frame(1)
        await client.outcome(1)
        assert client.kinds() == ["opened", "accepted", "result"]
        assert not server.engine.requests[0].deltas


async def test_frames_bring_tasks():
    """Extra tasks follow the standing ones, or stand alone."""
    async with running() as server, session(server) as client:
        await client.frame(1, extra_tasks=[QUERY])
        await client.outcome(1)
        await client.frame(2, extra_tasks=[QUERY], skip_standing_tasks=True)
        await client.outcome(2)
        assert {each.task_id for each in client.results[1]} == {"cups", "count"}
        assert [each.task_id for each in client.results[2]] == ["count"]


async def test_tasks_are_replaced_from_the_next_frame_on():
    """UpdateTasks leaves the frames before it alone."""
    async with running(FakeEngine(begin)) as server, session(server) as client:
        await client.frame(1)
        await client.say(update=session_pb2.UpdateTasks(standing_tasks=[QUERY]))
        await client.frame(2)
        await begun(server)
        server.engine.script = answer
        answer_all(server.engine)
        await client.done()
        await client.end()
        assert [each.task_id for each in client.results[1]] == ["cups"]
        assert [each.task_id for each in client.results[2]] == ["count"]


BAD = media_pb2.Image(encoded=media_pb2.EncodedImage(data=b"no picture"))
NAMELESS = task_pb2.Task(task_id="x")


@pytest.mark.parametrize(
    ("frame", "results"),
    [
        ({"image": BAD}, {"cups": "IMAGE_UNDECODABLE"}),
        ({"image": None}, {"cups": "INVALID_FIELD"}),
        ({"extra_tasks": [NAMELESS]}, {"cups": None, "x": "INVALID_FIELD"}),
        ({"extra_tasks": [DETECT]}, {"": "INVALID_FIELD"}),
        ({"extra_tasks": [task_pb2.Task()] * 40}, {"": "INVALID_FIELD"}),
        ({"skip_standing_tasks": True}, {"": "INVALID_FIELD"}),
    ],
)
async def test_a_bad_frame_fails_by_itself(frame, results):
    """A bad picture or task is a result with `error`; the session goes on."""
    async with running() as server, session(server) as client:
        await client.frame(1, **frame)
        await client.outcome(1)
        got = {
            each.task_id: reason_of(each) if each.WhichOneof("result") == ERROR else None
            for each in client.results[1]
        }
        assert got == results
        await client.frame(2)
        await client.done()
        await client.end()
        assert client.results[2][0].detect.objects
        await settled(server)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ImageUndecodable("cut"), "IMAGE_UNDECODABLE"), (QueueFull(), "QUEUE_FULL")],
)
async def test_what_is_wrong_with_the_picture_fails_all_its_tasks(error, reason):
    """The engine is not shown the same picture again for the tasks that follow."""
    async with (
        running(FakeEngine(refuse(error))) as server,
        session(server, standing_tasks=[DETECT, QUERY]) as client,
    ):
        await client.frame(1)
        await client.outcome(1)
        assert [reason_of(each) for each in client.results[1]] == [reason, reason]
        assert len(server.engine.requests) == 1


async def test_a_bug_fails_the_frame_only():
    """An exception nobody expected is INTERNAL for its frame, and tells nothing."""

    def explode(engine, stream):
        raise ValueError("secret")

    async with running(FakeEngine(explode)) as server, session(server) as client:
        await client.frame(1)
        await client.outcome(1)
        (result,) = client.results[1]
        assert reason_of(result) == "INTERNAL"
        assert "secret" not in str(result)
        server.engine.streams.clear()
        server.engine.script = answer
        await client.frame(2)
        await client.done()
        await client.end()


async def test_a_lost_engine_fails_the_frames_and_not_the_session():
    """ENGINE_LOST is in the results; once there is an engine again, frames are answered."""
    async with running(FakeEngine(begin)) as server, session(server, max_in_flight=2) as client:
        await client.frame(1)
        await client.frame(2)
        await begun(server, 2)
        server.engine.become(EngineState.LOST)
        await client.frame(3)
        await client.outcome(1, 2, 3)
        for sequence in (1, 2, 3):
            assert reason_of(client.results[sequence][0]) == "ENGINE_LOST"
        server.engine.script = answer
        server.engine.become(EngineState.READY)
        await client.frame(4)
        await client.done()
        await client.end()
        assert client.results[4][0].detect.objects
        await settled(server)


# ---------------------------------------------------------------- stopping


async def test_preempted_work_gives_what_it_has():
    """The older frame's results come partial, SUPERSEDED, those not begun included."""
    async with (
        running(FakeEngine(hold)) as server,
        session(server, frame_policy=PREEMPT, standing_tasks=[DETECT, QUERY]) as client,
    ):
        await client.frame(1)
        await begun(server)
        server.engine.script = answer
        await client.frame(2)
        await client.done()
        await client.end()
        assert [each.finish_reason for each in client.results[1]] == [SUPERSEDED, SUPERSEDED]
        assert {each.WhichOneof("result") for each in client.results[1]} == {"detect", "query"}
        assert len(client.results[2]) == 2
        await settled(server)


async def test_a_running_task_is_cancelled_alone():
    """Its result is partial and CANCELLED, its sibling's is whole; the waiting frame is dropped."""
    tasks = [DETECT, QUERY]
    async with (
        running(FakeEngine(begin)) as server,
        session(server, standing_tasks=tasks) as client,
    ):
        await client.frame(1)
        await begun(server, 2)
        await client.frame(2)
        await client.say(cancel=session_pb2.CancelFrame(task_id="count"))
        await client.say(cancel=session_pb2.CancelFrame(sequence=2))
        await client.say(cancel=session_pb2.CancelFrame(sequence=2))
        await client.hear(lambda: client.results[1] and 2 in client.dropped)
        assert client.dropped[2].reason == session_pb2.DROP_REASON_CANCELLED
        assert client.results[1][0].finish_reason == CANCELLED
        answer_all(server.engine)
        await client.done()
        await client.end()
        assert client.results[1][1].detect.objects
        await settled(server)


async def test_a_frame_that_runs_is_cancelled():
    """All its results come, CANCELLED."""
    async with running(FakeEngine(hold)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        await client.say(cancel=session_pb2.CancelFrame(sequence=1))
        await client.done()
        await client.end()
        assert [each.finish_reason for each in client.results[1]] == [CANCELLED]


async def test_a_frame_that_gets_too_old_is_dropped():
    """From its capture time on; what runs of it is aborted."""
    async with (
        running(FakeEngine(hold)) as server,
        session(server, max_frame_age=seconds(0.2)) as client,
    ):
        await client.frame(1)
        await client.outcome(1)
        assert client.dropped[1].reason == session_pb2.DROP_REASON_TOO_OLD
        await until(lambda: not server.engine.streams)
        stamp = media_pb2.FrameStamp(sequence=2)
        stamp.capture_time.GetCurrentTime()
        old = media_pb2.FrameStamp(sequence=3)
        old.capture_time.FromNanoseconds(stamp.capture_time.ToNanoseconds() - 10**9)
        await client.frame(2, stamp=stamp)
        await client.frame(3, stamp=old)
        await client.outcome(3)
        assert client.dropped[3].reason == session_pb2.DROP_REASON_TOO_OLD
        await settled_frames(server)


async def settled_frames(server):
    """The engine runs nothing and holds no picture."""
    await until(lambda: not server.engine.streams and len(server.engine.blobs) == 0)


# ---------------------------------------------------------------- silence and load


async def test_silence_is_broken_by_heartbeats():
    """At least every 100 ms where less was asked; `index` counts them too."""
    async with running() as server, session(server, heartbeat_interval=seconds(0.001)) as client:
        assert client.opened.heartbeat_interval.ToMilliseconds() == 100
        await client.hear(lambda: client.kinds().count("heartbeat") >= 3)
        await client.done()
        await client.end()


async def test_an_idle_session_is_not_cut():
    """Neither the default deadlines nor the limit on slow readers end it."""
    limits = {"unary_deadline": 0.05, "stream_deadline": 0.05, "stall_timeout": 0.05}
    async with (
        running(**limits) as server,
        session(server, heartbeat_interval=seconds(0.1)) as client,
    ):
        await client.hear(lambda: client.kinds().count("heartbeat") >= 3)
        await client.frame(1)
        await client.outcome(1)


async def test_a_deadline_of_the_client_ends_it():
    """The caller's own deadline holds, and frees what runs."""
    async with running(FakeEngine(hold)) as server:
        client = SessionClient(server.sessions.Session(timeout=0.5))
        await client.say(open=opening())
        await client.frame(1)
        assert (await client.failure()).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await settled(server)


async def test_answers_wait_for_credits():
    """Without credits results wait, the oldest are lost as drops; a grant brings what is left."""
    async with (
        running() as server,
        session(server, frame_policy=EVERY, response_credits=1) as client,
    ):
        for sequence in range(1, 41):
            await client.frame(sequence)
            await client.hear(lambda seen=sequence: seen in client.accepted)
        assert len(client.whole) == 1
        assert {each.reason for each in client.dropped.values()} == {
            session_pb2.DROP_REASON_OVERLOADED
        }
        await client.say(grant=session_pb2.GrantCredits(responses=2))
        await client.hear(lambda: len(client.whole) == 3)
        await client.done()
        await client.end()
        assert client.dropped
        await settled(server)


async def test_a_client_that_grants_nothing_is_given_up():
    """ABORTED CLIENT_TOO_SLOW once results waited for as long as may be."""
    async with running(stall_timeout=0.1) as server, session(server, response_credits=1) as client:
        await client.frame(1)
        await client.outcome(1)
        await client.frame(2)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.ABORTED
        assert failed.reason == "CLIENT_TOO_SLOW"
        await settled(server)


async def test_load_counts_the_sessions():
    """GetLoad tells how many are open."""
    from legato.v1 import admin_pb2

    async with running() as server:
        async with session(server), session(server):
            load = await server.admin.GetLoad(admin_pb2.GetLoadRequest())
            assert load.sessions == 2
        await settled(server)


# ---------------------------------------------------------------- the end


async def test_half_close_finishes_what_came_before():
    """Running and waiting frames are answered, then the session ends with OK."""
    async with running(FakeEngine(begin)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        await client.frame(2)
        await client.done()
        server.engine.script = answer
        answer_all(server.engine)
        await client.end()
        assert client.whole == {1, 2}
        await settled(server)


@pytest.mark.parametrize("way", ["cancel", "close"])
async def test_a_client_that_leaves_frees_everything(way):
    """Cancelling the call, or closing its channel, aborts all that runs and waits."""
    async with running(FakeEngine(begin)) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            there = type(server)(server.server, server.engine, server.port, channel)
            async with session(there, max_in_flight=2, standing_tasks=[DETECT, QUERY]) as client:
                for sequence in range(1, 6):
                    await client.frame(sequence)
                await begun(server, 4)
                if way == "cancel":
                    client.call.cancel()
                else:
                    await channel.close()
                await settled(server)
        assert sorted(server.engine.aborted) == sorted(
            asked.request_id for asked in server.engine.requests
        )


async def test_sessions_cancelled_at_any_step_leave_nothing():
    """Wherever in its first steps a cancellation hits a session, nothing stays."""
    async with running(FakeEngine(hold)) as server:
        for steps in range(0, 60, 3):
            call = server.sessions.Session()
            await call.write(session_pb2.SessionRequest(open=opening()))
            stamp = media_pb2.FrameStamp(sequence=1)
            frame = session_pb2.Frame(stamp=stamp, image=picture())
            await call.write(session_pb2.SessionRequest(frame=frame))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
        await settled(server)


async def test_a_drain_says_go_away():
    """Sessions hear why, later frames are dropped, running work ends well, then UNAVAILABLE."""
    async with running(FakeEngine(begin)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        draining = asyncio.create_task(server.server.drain(60))
        await client.hear(lambda: "go_away" in client.kinds())
        (away,) = [each.go_away for each in client.messages if each.HasField("go_away")]
        assert away.time_left.ToMilliseconds() == 60_000
        assert away.reason.code == grpc.StatusCode.UNAVAILABLE.value[0]
        await client.frame(2)
        await client.outcome(2)
        assert client.dropped[2].reason == session_pb2.DROP_REASON_GOING_AWAY
        assert client.dropped[2].frame_credits == 0
        answer_all(server.engine)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "DRAINING"
        client.balance()
        assert await draining
        refused = await refusal(server.inference.Query(inference_pb2.QueryRequest(question="?")))
        assert refused.reason == "DRAINING"


async def test_a_drain_outlasts_no_grace():
    """Work that does not end in time is stopped with what it has, and the drain succeeds."""
    async with running(FakeEngine(hold)) as server, session(server, max_in_flight=1) as client:
        await client.frame(1)
        await begun(server)
        await client.frame(2)
        await until(lambda: len(client.sent) == 2)
        assert await server.server.drain(1.2)
        assert (await client.failure()).reason == "DRAINING"
        client.balance()
        assert client.results[1][0].finish_reason == CANCELLED
        await settled(server)


async def test_a_session_has_a_greatest_age():
    """It is told to go away with an OK reason, and ends with OK."""
    async with running(max_session_age=0.1) as server, session(server) as client:
        await client.end()
        assert client.kinds()[-1] == "go_away"
        assert client.messages[-1].go_away.reason.code == 0
        await settled(server)


async def test_an_operator_ends_a_session():
    """ABORTED PREEMPTED for the one named, and for all; a name that is no session's says so."""
    async with running(FakeEngine(begin)) as server:
        async with session(server) as one, session(server) as two, session(server) as three:
            await one.frame(1)
            await begun(server)
            registry = server.server.sessions
            assert registry.abort(one.opened.session_id)
            failed = await one.failure()
            assert failed.code is grpc.StatusCode.ABORTED
            assert failed.reason == "PREEMPTED"
            await until(lambda: not server.engine.streams)
            assert not registry.abort(one.opened.session_id)
            assert registry.abort_all() == 2
            for each in (two, three):
                assert (await each.failure()).reason == "PREEMPTED"
        await settled(server)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--max-sessions", "0"], "at least 1"), (["--max-session-age", "0"], "positive")],
)
def test_senseless_settings_are_refused(arguments, message, capsys):
    """The exit code is 2 and the message says why."""
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err
