"""The middleware of every call: metadata, malformed bytes, ids and log records."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from legato.v1 import inference_pb2, server_pb2, task_pb2
from legato_engine import errors
from legato_service import listeners
from legato_service import logs as configuration
from legato_service.arguments import parse
from legato_service.logs import timestamp
from legato_service.rpc import call as trace_context
from legato_service.rpc.call import Call
from legato_service.rpc.call_log import CallLog

from tests.faults.attacks import Http2
from tests.service.fakes import FakeEngine, answer, begin
from tests.service.harness import image_message, refusal, running, until

QUERY = "/legato.v1.InferenceService/Query"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
QUESTION = inference_pb2.QueryRequest(question="What is the secret?")


_READER = """
import asyncio, os, sys
cores = range(int(sys.argv[1]))
os.sched_getaffinity = lambda _: cores
import legato_service.__main__, grpc

async def answer(request, context):
    return request

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    handler = grpc.unary_unary_rpc_method_handler(answer)
    handlers = grpc.method_handlers_generic_handler("echo", {"Echo": handler})
    server.add_generic_rpc_handlers((handlers,))
    await server.start()
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def lines_of(logs, method=QUERY):
    """Return the records of one method."""
    return [line for line in logs if line["event"] == "rpc_ended" and line["method"] == method]


@pytest.mark.parametrize(
    ("cores", "options", "given", "woken_by_calls"),
    [
        (16, [], None, False),
        (16, [], "event_engine_listener", True),
        (2, [], None, True),
        (2, [], "-event_engine_listener", False),
        (16, ["--latency-policy", "shared"], None, True),
        (2, ["--latency-policy=low-latency"], None, False),
    ],
)
def test_connections_are_read_by_the_event_loop(cores, options, given, woken_by_calls):
    """With low latency grpc's event engine has no part in a call; the environment decides."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {"PYTHONPATH": paths} | ({} if given is None else {"GRPC_EXPERIMENTS": given})
    process = subprocess.Popen(
        [sys.executable, "-c", _READER, str(cores), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    batches, calls = 40, 5  # some thirty wakes a second are the clock's; a call's would be three
    woken = []
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            echo: Any = channel.unary_unary("/echo/Echo")
            echo(b"first")
            for _ in range(batches):
                before = _wakes(process.pid, "event_engine")
                for _ in range(calls):
                    echo(b"again")
                woken.append(_wakes(process.pid, "event_engine") - before)
    finally:
        process.kill()
        _, complaints = process.communicate()
    assert complaints == ""
    quick = sorted(woken)[
        batches // 4
    ]  # others may have been held up, and have many of the clock's
    assert (quick > calls * 3 / 2) == woken_by_calls


def _wakes(pid: int, name: str) -> int:
    """Count how often threads of this name went to sleep."""
    return sum(
        int(re.findall(r"voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text())[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
        if (task / "comm").read_text().strip() == name
    )


async def test_a_request_without_id_gets_one_everywhere():
    """The server's id is in the response, in its trailers and at the engine."""
    async with running() as server:
        call = server.inference.Query(QUESTION)
        info = (await call).info
        assert info.request_id
        assert dict(await call.trailing_metadata())["x-request-id"] == info.request_id
        assert server.engine.requests[0].request_id.caller_id == info.request_id


async def test_the_engine_expects_a_request_before_its_message_is_read():
    """It expects every inference request, also one that cannot be parsed, and nothing else."""
    async with running() as server:
        await server.info.ListModels(server_pb2.ListModelsRequest())
        assert server.engine.expected == 0
        await server.inference.Query(QUESTION)
        malformed = server.channel.unary_unary(QUERY)
        await refusal(malformed(b"\xff"))
        assert server.engine.expected == 2
        assert len(server.engine.requests) == 1


async def test_a_stream_sends_its_id_first():
    """Initial and trailing metadata name the request."""
    task = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))
    async with running() as server:
        call = server.inference.Generate(inference_pb2.GenerateRequest(task=task))
        events = [event async for event in call]
        request_id = events[0].started.request_id
        assert request_id
        for metadata in (await call.initial_metadata(), await call.trailing_metadata()):
            assert dict(metadata)["x-request-id"] == request_id


async def test_malformed_bytes_are_refused():
    """Malformed protobuf is INVALID_ARGUMENT without the parser's text, unary and streamed."""
    async with running() as server:
        calls = [
            server.channel.unary_unary(QUERY)(b"\xff\xff"),
            server.channel.unary_stream("/legato.v1.InferenceService/Generate")(b"\xff").read(),
            server.channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
            )(iter([b"\xff"])).read(),
        ]
        for call in calls:
            failed = await refusal(call)
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
            assert failed.reason == "INVALID_FIELD"
            assert failed.message == "the request is not a valid protobuf message"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "hello",
        TRACE.upper(),
        TRACE[:-1],
        f"{TRACE}-more",
        f"ff{TRACE[2:]}",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
    ],
)
async def test_a_malformed_traceparent_fails_no_call(value):
    """W3C: it is as none."""
    with structlog.testing.capture_logs() as logs:
        async with running() as server:
            await server.inference.Query(QUESTION, metadata=(("traceparent", value),))
    (line,) = lines_of(logs)
    assert (line["code"], line.get("trace_id", "")) == ("OK", "")


async def test_two_traceparents_fail_no_call():
    """The first counts."""
    async with running() as server:
        await server.inference.Query(QUESTION, metadata=(("traceparent", TRACE),) * 2)


def test_a_later_version_of_traceparent_may_be_longer():
    """Parts that a version above 00 appends are ignored."""
    parent = trace_context.parse(f"cc{TRACE[2:]}-more")
    assert parent is not None
    assert parent.trace_id == TRACE[3:35]


async def test_an_rpc_has_one_record():
    """The record has names, times and counts, and neither the prompt nor the answer."""
    with structlog.testing.capture_logs() as logs:
        async with running() as server:
            await server.inference.Query(QUESTION, metadata=(("traceparent", TRACE),))
    (line,) = lines_of(logs)
    assert line["code"] == "OK"
    assert line["trace_id"] == TRACE[3:35]
    assert (line["queue_ms"], line["prefill_ms"], line["decode_ms"]) == (1.0, 3.0, 500.0)
    assert (line["input_tokens"], line["output_tokens"]) == (740, 9)
    assert {"request_id", "total_ms"} <= set(line)
    assert "secret" not in str(line)
    assert "cups" not in str(line)


async def test_a_failure_is_logged_with_its_reason():
    """Code and reason are in the record."""
    with structlog.testing.capture_logs() as logs:
        async with running() as server:
            await refusal(server.inference.Caption(inference_pb2.CaptionRequest()))
    (line,) = lines_of(logs, "/legato.v1.InferenceService/Caption")
    assert (line["code"], line["reason"]) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_a_cancelled_rpc_is_logged():
    """A call that its client cancelled has a record."""
    with structlog.testing.capture_logs() as logs:
        async with running(FakeEngine(begin)) as server:
            call = server.inference.Query(QUESTION)
            await until(lambda: bool(server.engine.streams))
            call.cancel()
            await until(lambda: bool(lines_of(logs)))
    assert lines_of(logs)[0]["code"] == "CANCELLED"


async def test_a_bug_is_only_logged():
    """The log has the exception with the request's id; the client does not."""

    def explode(engine, stream):
        raise ValueError("divided by cheese")

    with structlog.testing.capture_logs() as logs:
        async with running(FakeEngine(explode)) as server:
            failed = await refusal(server.inference.Query(QUESTION))
    (bug,) = [line for line in logs if line["event"] == "uncaught_exception"]
    assert isinstance(bug["exc_info"], ValueError)
    assert bug["request_id"] == failed.details["RequestInfo"].request_id


async def test_an_unknown_method_is_unimplemented():
    """An RPC that is not in the contract is UNIMPLEMENTED, with a plain status."""
    async with running() as server:
        for method in ("/legato.v1.Nobody/Nothing", "/legato.v1.ImageService/Nothing"):
            failed = await refusal(server.channel.unary_unary(method)(b""))
            assert failed.code is grpc.StatusCode.UNIMPLEMENTED
            assert not failed.details


async def test_a_message_over_the_limit_is_refused_with_details():
    """The transport takes a megabyte more than the limit, so that the refusal has details."""
    image = image_message()
    image.encoded.data += bytes(70_000)
    async with running(max_request_bytes=65_536) as server:
        failed = await refusal(server.inference.Caption(inference_pb2.CaptionRequest(image=image)))
        assert failed.reason == "IMAGE_TOO_LARGE"
        image.encoded.data += bytes(1 << 20)
        failed = await refusal(server.inference.Caption(inference_pb2.CaptionRequest(image=image)))
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_port_that_is_taken_is_an_error():
    """A second server on the same port fails to start instead of taking half of the load."""
    async with running() as server:
        with pytest.raises(OSError, match=r"cannot listen on .*: in use by another process"):
            async with running(listen=f"127.0.0.1:{server.port}"):
                pass


async def test_a_client_may_ping_as_often_as_allowed():
    """A client whose keepalive is faster than gRPC's default of 300 s stays connected."""
    pings = [
        ("grpc.keepalive_time_ms", 200),
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    async with running(FakeEngine(begin), pings, min_client_ping_interval=0.1) as server:
        call = server.inference.Query(QUESTION)
        done, _ = await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=2)
        assert not done
        call.cancel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "0.0.0.0:1"], "--insecure"),
        (["--listen", "example.org:1"], "--insecure"),
        (["--listen", "50051"], "HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], "HOST:PORT"),
        (["--admin-listen", "0.0.0.0:1"], "--insecure"),
        (["--admin-listen", "50052"], "--admin-listen takes HOST:PORT"),
        (["--admin-listen", "unix:"], "unix:PATH"),
        (["--listen", "unix:/tmp/x"], "--listen takes HOST:PORT"),
        (["--max-running", "0"], "at least 1"),
        (["--max-running", "many"], "--max-running: must be a whole number, not 'many'"),
        (["--threads", "-1"], "must not be negative, and is -1"),
        (["--kv-memory-fraction", "1"], "must be above 0 and below 1, and is 1"),
        (["--trace-ratio", "half"], "--trace-ratio: must be a number, not 'half'"),
        (["--max-session-age", "0"], "must be finite and above 0, and is 0"),
        (["--image-ttl", "7200"], "--image-ttl must be at most --image-max-ttl, 3600 s, and is"),
        (["--drain-grace", "-1"], "negative"),
        (["--max-waiting-per-tenant", "-1"], "negative"),
        (["--priority-seconds", "-1"], "negative"),
        (["--priority-seconds", "inf"], "not negative"),
        (["--pipeline-depth", "3"], "invalid choice"),
        (["--adapter-slots", "0"], "at least 1"),
        (["--max-adapter-rank", "513"], "at most 512"),
        (["--speculation", "fixed:0"], "unknown speculation 'fixed:0'"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, capsys):
    """The exit code is 2, and the message gives the reason."""
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments_reach_the_configuration():
    """Service and engine settings come from one command line."""
    line = "--listen [::1]:0 --model phi --threads 2 --max-running 3 --random-weights"
    config = parse(f"{line} --drain-grace 1.5 --pipeline-depth 1".split())
    assert (config.listen, config.drain_grace) == ("[::1]:0", 1.5)
    engine = config.engine
    assert (engine.model, engine.threads, engine.max_running) == ("phi", 2, 3)
    assert engine.random_weights
    assert engine.pipeline_depth == 1
    speculating = parse(["--speculation", "seed", "--draft", "lookup"]).engine
    assert (speculating.speculation, speculating.draft) == ("seed", "lookup")
    shares = parse(["--max-waiting-per-tenant", "4", "--priority-seconds", "0.5"]).engine
    assert (shares.max_waiting_per_tenant, shares.priority_seconds) == (4, 0.5)
    adapters = parse(
        ["--adapters", "a", "--adapter-slots", "3", "--max-adapter-rank", "512"]
    ).engine
    assert (adapters.adapters, adapters.adapter_slots, adapters.max_adapter_rank) == ("a", 3, 512)
    assert parse(["--listen", "0.0.0.0:1", "--insecure"]).insecure
    assert parse(["--drain-delay", "7.5"]).drain_delay == 7.5


def ended(connection):
    """Read a socket until the server ends it."""
    connection.settimeout(60)
    while connection.recv(4096):
        pass


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01"])
async def test_a_connection_that_does_not_begin_is_closed(said):
    """Whatever part of a beginning it sends."""
    async with running(handshake_timeout=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(said)
            await asyncio.to_thread(ended, connection)


async def test_a_connection_without_calls_is_closed():
    """It began well, and is told so by GOAWAY; one with a call stays."""
    async with running(idle_timeout=1) as server:
        address = f"127.0.0.1:{server.port}"
        idle, busy = Http2(address), Http2(address)
        busy.open(QUERY)

        def read_all():
            while True:
                idle.read()

        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(read_all)
        busy.send(6, 0, 0, bytes(8))  # a ping
        await asyncio.to_thread(busy.read)
        for each in (idle, busy):
            each.close()


async def test_connections_beyond_the_limit_are_closed(monkeypatch):
    """Those that are open stay, and another one is taken when one of them ends."""
    monkeypatch.setattr(listeners, "MAX_CONNECTIONS", 2)
    async with running() as server:
        address = ("127.0.0.1", server.port)
        first, second = (Http2(f"127.0.0.1:{server.port}") for _ in range(2))
        for each in (first, second):
            await asyncio.to_thread(each.read)
        with socket.create_connection(address) as third:
            await asyncio.to_thread(ended, third)
        for each in (first, second):
            each.send(6, 0, 0, bytes(8))
            await asyncio.to_thread(each.read)
            each.close()
        await server.inference.Query(QUESTION, wait_for_ready=True)


# ---------------------------------------------------------------- metadata
# Metadata: read once, checked, passed to the engine and to the log.

HOW_MANY = inference_pb2.QueryRequest(question="How many?")
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))
STREAM = inference_pb2.GenerateRequest(task=TASK)
ALL = (
    ("legato-priority", "-7"),
    ("legato-tenant", "arm.1"),
    ("legato-client", "python/0.1"),
    ("x-request-id", "proxy-1"),
)


def ask(server, rpc, metadata):
    """Start a call of any kind, to be awaited."""
    if rpc == "Query":
        return server.inference.Query(HOW_MANY, metadata=metadata)
    if rpc == "RunTasks":
        several = inference_pb2.RunTasksRequest(tasks=[TASK, TASK])
        return server.inference.RunTasks(several, metadata=metadata)
    return server.inference.Generate(STREAM, metadata=metadata).read()


@pytest.mark.parametrize("rpc", ["Query", "RunTasks", "Generate"])
async def test_priority_and_tenant_reach_the_engine(rpc):
    """Every request of the call carries them, whatever the RPC; without metadata the defaults."""
    async with running() as server:
        await ask(server, rpc, ALL)
        assert server.engine.requests
        for request in server.engine.requests:
            assert (request.priority, request.tenant) == (-7, "arm.1")
        server.engine.requests.clear()
        await ask(server, rpc, ())
        for request in server.engine.requests:
            assert (request.priority, request.tenant) == (0, "")


async def test_metadata_is_in_the_log_line():
    """The record of a call has the values of its metadata, and no empty fields."""
    with structlog.testing.capture_logs() as logs:
        async with running() as server:
            await ask(server, "Query", ALL)
            await ask(server, "Query", ())
    record, silent = lines_of(logs)
    assert (record["tenant"], record["priority"], record["client"]) == ("arm.1", -7, "python/0.1")
    assert record["request_id"] == "proxy-1"
    assert not {"tenant", "priority", "client", "trace_id", "previous_attempts"} & set(silent)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("legato-priority", "101"),
        ("legato-priority", "-101"),
        ("legato-priority", "1.5"),
        ("legato-priority", ""),
        ("legato-priority", "+1"),
        ("legato-priority", "1000000000000000000000"),
        ("legato-tenant", ""),
        ("legato-tenant", "a b"),
        ("legato-tenant", "x" * 65),
        ("legato-client", "x" * 129),
        ("x-request-id", "a/b"),
        ("x-request-id", "x" * 65),
    ],
)
async def test_malformed_metadata_is_refused_by_its_key(key, value):
    """INVALID_FIELD names the metadata key, and the engine gets no request."""
    async with running() as server:
        failed = await refusal(ask(server, "Query", ((key, value),)))
        assert not server.engine.requests
    assert failed.reason == "INVALID_FIELD"
    assert failed.details["BadRequest"].field_violations[0].field == f"metadata.{key}"
    assert failed.details["ErrorInfo"].metadata["field"] == f"metadata.{key}"


async def test_a_repeated_key_is_refused():
    """A key with two values is ambiguous."""
    twice = (("legato-tenant", "a"), ("legato-tenant", "b"))
    async with running() as server:
        failed = await refusal(ask(server, "Query", twice))
    assert failed.details["BadRequest"].field_violations[0].field == "metadata.legato-tenant"


async def test_the_limits_of_metadata_are_accepted():
    """The least and the greatest of every key pass."""
    edges = (
        (("legato-priority", "-100"), ("legato-tenant", "a"), ("legato-client", "")),
        (("legato-priority", "100"), ("legato-tenant", "x" * 64), ("legato-client", "x" * 128)),
    )
    async with running() as server:
        for metadata in edges:
            assert (await ask(server, "Query", metadata)).answer
        assert [request.priority for request in server.engine.requests] == [-100, 100]


async def test_metadata_is_read_for_every_rpc():
    """An RPC that does not use the engine refuses malformed metadata too, and echoes the id."""
    async with running() as server:
        call = server.info.GetServerInfo(
            server_pb2.GetServerInfoRequest(), metadata=(("x-request-id", "mine"),)
        )
        await call
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"


async def test_an_exceeded_quota_is_described():
    """RESOURCE_EXHAUSTED carries the quota, its owner and the retry delay."""
    engine_error = errors.QuotaExceeded(
        "at most 2 requests of a tenant may wait",
        quota="waiting_per_tenant",
        tenant="arm.1",
        limit=2,
        actual=2,
        retry_after_ms=500,
    )

    def refuse(engine, stream):
        engine.fail(stream, engine_error)

    async with running(FakeEngine(refuse)) as server:
        failed = await refusal(ask(server, "Query", ALL))
    assert failed.reason == "QUOTA_EXCEEDED"
    assert failed.details["QuotaFailure"].violations[0].subject == "tenant:arm.1"
    assert failed.details["ErrorInfo"].metadata["limit"] == "2"
    assert 400 <= failed.details["RetryInfo"].retry_delay.ToMilliseconds() <= 600
    assert 400 <= int(failed.trailers["grpc-retry-pushback-ms"]) <= 600


async def test_a_high_priority_is_judged_by_the_engine():
    """The service's estimate is for the end of the queue, so it refuses no higher priorities."""
    engine = FakeEngine()
    engine.estimated_wait = 90.0
    async with running(engine) as server:
        high = (("legato-priority", "1"),)
        assert (await server.inference.Query(HOW_MANY, timeout=5, metadata=high)).answer
        failed = await refusal(server.inference.Query(HOW_MANY, timeout=5))
    assert failed.reason == "DEADLINE_UNREACHABLE"


async def test_retries_are_counted():
    """The attempts that gRPC counts are in the log record."""

    def fail_once(engine, stream):
        if len(engine.requests) == 1:
            engine.fail(stream, errors.EngineLost("died", retry_after_ms=1))
        else:
            answer(engine, stream)

    policy = {
        "maxAttempts": 2,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    options = [("grpc.service_config", json.dumps(config))]
    with structlog.testing.capture_logs() as logs:
        async with running(FakeEngine(fail_once), options) as server:
            await server.inference.Query(HOW_MANY)
    first, second = lines_of(logs)
    assert "previous_attempts" not in first
    assert second["previous_attempts"] == 1


# ---------------------------------------------------------------- call
# The ids that the service gives to requests.

FORK = """
import os
from legato_service.rpc.call import Call

Call("/a.B/C")
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, ",".join(Call("/a.B/C").request_id for _ in range(100)).encode())
    os._exit(0)
os.wait()
print(os.read(read, 10_000).decode())
print(",".join(Call("/a.B/C").request_id for _ in range(100)))
"""


def test_every_call_has_an_id_of_its_own() -> None:
    ids = [Call("/a.B/C").request_id for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {len(each) for each in ids} == {32}


def test_a_forked_process_gives_other_ids() -> None:
    """Ids are drawn in advance, and what was drawn stays with the parent."""
    told = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=True
    ).stdout
    theirs, ours = (line.split(",") for line in told.splitlines())
    assert len(theirs) == len(ours) == 100
    assert not set(theirs) & set(ours)


# ---------------------------------------------------------------- call log
# Log records of calls, written in batches.


async def test_records_keep_their_order_and_time():
    """A record has the time and the place of its call's end, however late it is written."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        bounds = [time.time_ns()]
        for number in range(3):
            call_log.record(Call(QUERY, request_id=str(number)), "OK")
            bounds.append(time.time_ns())
        assert not logs
        call_log.flush()
    assert [line["request_id"] for line in logs] == ["0", "1", "2"]
    for line, earliest, latest in zip(logs, bounds, bounds[1:], strict=False):
        assert timestamp(earliest) <= line["timestamp"] <= timestamp(latest)


async def test_a_record_is_written_once():
    """A second flush does not repeat records."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        for name in ("a", "b"):
            call_log.record(Call(QUERY, request_id=name), "OK")
            call_log.flush()
    assert [line["request_id"] for line in logs] == ["a", "b"]


async def test_nothing_waits_after_closing():
    """Closing writes waiting records; later ones are written at once."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        call_log.record(Call(QUERY, request_id="before"), "OK")
        call_log.close()
        call_log.record(Call(QUERY, request_id="after"), "CANCELLED")
        assert [line["request_id"] for line in logs] == ["before", "after"]


async def test_an_ended_call_holds_no_image():
    """The bytes of a request are freed at its end, and do not wait for the record."""
    call = Call(QUERY)
    call.received = b"picture"
    CallLog().record(call, "OK")
    assert call.received == b""


async def test_health_checks_are_at_debug_level():
    """Calls of every second are at debug level; the others are not."""
    call_log = CallLog()
    with structlog.testing.capture_logs() as logs:
        call_log.record(Call("/grpc.health.v1.Health/Check"), "OK")
        call_log.record(Call(QUERY), "OK")
        call_log.flush()
    assert [line["log_level"] for line in logs] == ["debug", "info"]


class Nowhere:
    """Takes lines and keeps none."""

    def later(self, *lines):
        """Forget them."""


def test_batches_of_any_size_leave_no_memory():
    """CPython keeps thousands of tuples of each size that were made longer and then cut."""
    logger = configuration.JsonLogger(Nowhere(), [], {})
    record = configuration.LogRecord("rpc_ended", "info", "now")
    chance = random.Random(1)

    def growth():
        before = sys.getallocatedblocks()
        for _ in range(2000):
            configuration.write(logger, [record] * chance.randint(1, 9))
        return sys.getallocatedblocks() - before

    growth()
    assert min(growth() for _ in range(3)) < 200  # other threads of the process may allocate, too
