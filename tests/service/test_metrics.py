"""Scrapes of a server after known calls."""

import asyncio
import errno
import os
import time

import grpc
import pytest
from legato.v1 import admin_pb2, inference_pb2, session_pb2, task_pb2
from legato_engine.client.monitor import EngineState
from legato_engine.errors import QueueFull
from legato_engine.ipc.messages import Durations, ImageTotals, SchedulerLoad, StepTotals
from legato_service.metrics.collector import PERIOD, LoopLag
from legato_service.metrics.listener import MAX_CONNECTIONS, MetricsListener
from structlog.testing import capture_logs

from tests.service.fakes import MODEL, TIMINGS, USAGE, FakeEngine
from tests.service.harness import OPENMETRICS, Scrape, get, image_message, refusal, running, scrape

QUERY = "legato.v1.InferenceService/Query"
QUESTION = inference_pb2.QueryRequest(question="what?")


def listening(**settings):
    """A server with an HTTP listener."""
    return running(metrics_listen="127.0.0.1:0", **settings)


async def traffic(server, tenant="", count=1):
    """Ask `count` questions."""
    metadata = (("legato-tenant", tenant),) if tenant else ()
    for _ in range(count):
        await server.inference.Query(QUESTION, metadata=metadata)


async def test_counters_and_histograms_are_those_of_the_calls():
    """Each call and each request counts once, with the times and tokens of the engine."""
    async with listening() as server:
        await traffic(server, count=3)
        await server.inference.Detect(
            inference_pb2.DetectRequest(image=image_message(), object="cup")
        )
        found = await scrape(server.server.metrics_address)
    assert found.value("legato_rpcs_total", method=QUERY, code="OK", reason="") == 3
    assert found.value("grpc_server_call_started_total", grpc_method=QUERY) == 3
    duration = "grpc_server_call_duration_seconds_count"
    assert found.value(duration, grpc_method=QUERY, grpc_status="OK") == 3
    assert found.value("legato_requests_total", skill="query", finish_reason="stop") == 3
    assert found.value("legato_requests_total", skill="detect") == 1
    assert found.value("legato_prompt_tokens_total", skill="query") == 3 * USAGE.input_tokens
    assert found.value("legato_cached_tokens_total", skill="query") == 3 * USAGE.cached_tokens
    for name, seconds in (
        ("queue", TIMINGS.queue),
        ("image", TIMINGS.image),
        ("prefill", TIMINGS.prefill),
        ("first_token", TIMINGS.first_token),
        ("decode", TIMINGS.decode),
        ("token", TIMINGS.decode / (USAGE.output_tokens - 1)),
    ):
        series = f"legato_request_{name}_seconds"
        assert found.value(f"{series}_sum", skill="query") == pytest.approx(3 * seconds)
        assert found.value(f"{series}_bucket", skill="query", le="+Inf") == 3
    assert found.value("legato_request_seconds_count", skill="query") == 3
    assert found.value("legato_wait_estimate_error_seconds_sum") == pytest.approx(4 * TIMINGS.queue)
    ttft = "gen_ai_server_time_to_first_token_seconds_sum"
    assert found.value(ttft, gen_ai_operation_name="query") == pytest.approx(
        3 * TIMINGS.first_token
    )
    assert found.value("vllm:e2e_request_latency_seconds_count", model_name="fake-1") == 4
    assert found.value("vllm:request_success_total", finished_reason="stop") == 4


async def test_a_refused_call_counts_by_its_reason():
    """Refusals are in the RPCs by code and reason, and in the rejections."""

    def full(engine, stream):
        engine.fail(stream, QueueFull("full", limit=1, retry_after_ms=1))

    async with listening(engine=FakeEngine(full)) as server:
        assert (await refusal(server.inference.Query(QUESTION))).reason == "QUEUE_FULL"
        found = await scrape(server.server.metrics_address)
    assert found.value("legato_rpcs_total", code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL") == 1
    assert found.value("legato_admission_rejections_total", reason="QUEUE_FULL") == 1
    assert found.value("legato_admission_rejections_total", reason="DRAINING") == 0


async def test_tasks_of_one_call_are_requests_of_their_own():
    """RunTasks is one RPC with several requests, each by its skill."""
    tasks = [
        task_pb2.Task(caption=task_pb2.CaptionTask()),
        task_pb2.Task(point=task_pb2.PointTask(object="cup")),
    ]
    async with listening() as server:
        await server.inference.RunTasks(
            inference_pb2.RunTasksRequest(image=image_message(), tasks=tasks)
        )
        found = await scrape(server.server.metrics_address)
    assert found.value("legato_rpcs_total") == 1
    assert found.value("legato_requests_total", skill="caption") == 1
    assert found.value("legato_requests_total", skill="point") == 1


async def test_tenants_beyond_the_limit_share_a_label():
    """The number of series does not grow with the number of tenants."""
    async with listening(metrics_tenants=2) as server:
        for number in range(20):
            await traffic(server, tenant=f"tenant-{number}")
        await traffic(server, tenant="tenant-0", count=2)
        await traffic(server)
        found = await scrape(server.server.metrics_address)
    assert found.value("legato_requests_total", tenant="tenant-0") == 3
    assert found.value("legato_requests_total", tenant="tenant-1") == 1
    assert found.value("legato_requests_total", tenant="other") == 18
    assert found.value("legato_requests_total", tenant="") == 1
    tenants = {sample.labels["tenant"] for sample in found.samples if "tenant" in sample.labels}
    assert tenants == {"", "tenant-0", "tenant-1", "other"}


async def test_the_engine_tells_by_its_heartbeats():
    """Load, caches, steps and state are those of the last heartbeat."""
    engine = FakeEngine()
    engine.load = SchedulerLoad(running=3, waiting=2, pages_used=5, prefix_pages=7, pages_total=20)
    engine.step, engine.restarts, engine.estimated_wait = 41, 2, 0.25
    engine.image_totals = ImageTotals(decoded=4, found=6, cached_bytes=100, held_bytes=50)
    counts = (0, 1) + (0,) * 16
    engine.step_totals = StepTotals(
        launches={"decode": 40, "prefill": 1},
        tokens=99,
        forced=5,
        step_times=Durations(counts, 0.001),
        drafted=8,
        accepted=6,
        blocks={4: 2},
    )
    async with listening(engine=engine) as server:
        found = await scrape(server.server.metrics_address)
        engine.become(EngineState.LOST)
        lost = await scrape(server.server.metrics_address)
    for name, value in (
        ("legato_engine_requests_running", 3),
        ("legato_engine_requests_waiting", 2),
        ("legato_kv_pages_used", 5),
        ("legato_kv_pages_cached", 7),
        ("legato_kv_pages_limit", 20),
        ("legato_engine_steps_total", 41),
        ("legato_engine_restarts_total", 2),
        ("legato_engine_estimated_wait_seconds", 0.25),
        ("legato_image_cache_queries_total", 10),
        ("legato_image_cache_hits_total", 6),
        ("legato_images_decoded_total", 4),
        ("legato_image_held_bytes", 50),
        ("legato_engine_tokens_total", 99),
        ("legato_engine_step_seconds_count", 1),
        ("legato_forced_tokens_total", 5),
        ("legato_draft_tokens_total", 8),
        ("legato_draft_tokens_accepted_total", 6),
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("vllm:kv_cache_usage_perc", 0.25),
    ):
        assert found.value(name) == value, name
    assert found.value("legato_draft_blocks_total", size="4") == 2
    assert found.value("legato_engine_launches_total", kind="decode") == 40
    assert found.value("legato_engine_step_seconds_bucket", le="0.0005") == 0
    assert found.value("legato_engine_step_seconds_bucket", le="0.001") == 1
    assert found.value("vllm:cache_config_info", num_gpu_blocks="20", block_size="16") == 1
    assert found.value("legato_model_info", model=MODEL.name, device="cpu") == 1
    assert found.value("legato_engine_state", state="ready") == 1
    assert lost.value("legato_engine_state", state="ready") == 0
    assert lost.value("legato_engine_state", state="lost") == 1


async def test_sessions_count_frames_drops_and_ages():
    """An open session is a gauge; its frames and drops go on counting after its end."""
    opening = session_pb2.SessionOpen(
        standing_tasks=[task_pb2.Task(detect=task_pb2.DetectTask(object="cup"))]
    )

    async def requests(end):
        yield session_pb2.SessionRequest(open=opening)
        frame = session_pb2.Frame(image=image_message())
        frame.stamp.sequence = 1
        yield session_pb2.SessionRequest(frame=frame)
        await end.wait()

    async with listening() as server:
        end = asyncio.Event()
        call = server.sessions.Session(requests(end))
        async for response in call:
            if response.WhichOneof("message") == "result":
                break
        during = await scrape(server.server.metrics_address)
        end.set()
        async for _ in call:
            pass
        after = await scrape(server.server.metrics_address)
    assert during.value("legato_sessions_open") == 1
    assert after.value("legato_sessions_open") == 0
    assert after.value("legato_session_frames_total") == 1
    assert after.value("legato_session_frame_age_seconds_count") == 1
    assert after.value("legato_session_frames_dropped_total") == 0
    assert after.value("legato_requests_total", skill="detect") == 1


async def test_both_formats_and_the_rpc_say_the_same():
    """HTTP and AdminService.GetMetrics give the same names, in both text formats."""
    async with listening() as server:
        await traffic(server)
        address = server.server.metrics_address
        plain = await scrape(address)
        openmetrics = await scrape(address, OPENMETRICS)
        reply = await server.admin.GetMetrics(admin_pb2.GetMetricsRequest())
        other = await server.admin.GetMetrics(admin_pb2.GetMetricsRequest(accept=OPENMETRICS))
    # The scrapes themselves are RPCs too.
    assert Scrape(reply.text).names == plain.names
    assert reply.content_type.startswith("text/plain")
    assert other.content_type.startswith("application/openmetrics-text")
    names = Scrape(other.text, openmetrics=True).names
    assert names == plain.names == openmetrics.names
    assert "vllm:num_requests_running" in names


async def test_aliases_can_be_off():
    """Without them no name is of vLLM's."""
    async with listening(vllm_metrics=False) as server:
        await traffic(server)
        found = await scrape(server.server.metrics_address)
    assert not [name for name in found.names if name.startswith("vllm:")]
    assert "legato_requests_total" in found.names


async def test_without_recording_calls_cost_nothing():
    """By default no call is recorded and nothing listens; the engine's figures are there."""
    async with running() as server:
        await traffic(server)
        assert server.server.metrics_address == ""
        reply = await server.admin.GetMetrics(admin_pb2.GetMetricsRequest())
    names = Scrape(reply.text).names
    assert "legato_engine_requests_running" in names
    assert not names & {"legato_rpcs_total", "legato_requests_total"}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", b"431"),
        (b"\x00\xff\r\n\r\n", b"400"),
    ],
)
async def test_anything_but_a_scrape_is_refused(request_, status):
    """The listener answers nothing else, and goes on."""
    async with listening() as server:
        host, _, port = server.server.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_)
        assert (await reader.readline()).split()[1] == status
        writer.close()
        assert await get(server.server.metrics_address)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics", b"GET /metrics HTTP/1.1\r\n\r\n"])
async def test_silent_connections_leave_room_for_the_scraper(sent):
    """However many send nothing, half a request, or one whose answer they do not read."""
    async with listening() as server:
        host, _, port = server.server.metrics_address.rpartition(":")
        silent = []
        for _ in range(3 * MAX_CONNECTIONS):
            _, writer = await asyncio.open_connection(host, int(port), limit=1)
            writer.write(sent)
            silent.append(writer)
        for _ in range(5):
            assert (await get(server.server.metrics_address)).startswith(b"HTTP/1.1 200")
        for writer in silent:
            writer.transport.abort()


async def test_half_a_request_ends_its_connection(monkeypatch):
    """A scraper sends its request at once: what does not come soon is not waited for."""
    monkeypatch.setattr("legato_service.metrics.listener.HEAD_TIMEOUT", 0.1)
    async with listening() as server:
        host, _, port = server.server.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_failed_accepts_are_logged_now_and_then(monkeypatch):
    """Without free descriptors the listener tries again, and says so once in a while."""
    tried: list[None] = []
    enough = asyncio.Event()

    async def no_descriptor(_listening):
        tried.append(None)
        if len(tried) == 1000:
            enough.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def scrape(_accept):
        raise AssertionError("nothing was accepted")

    monkeypatch.setattr("legato_service.metrics.listener._ACCEPT_PAUSE", 0.0)
    monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", no_descriptor, raising=False)
    listener = MetricsListener(scrape)
    with capture_logs() as logs:
        await listener.start("127.0.0.1:0")
        await enough.wait()
        listener.close()
    assert [(each["event"], each["error"]) for each in logs] == [
        ("metrics_accept_failed", "EMFILE")
    ]


async def test_head_has_no_body():
    """HEAD answers as GET does, without the text."""
    async with listening() as server:
        response = await get(server.server.metrics_address, method="HEAD")
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b""


async def test_the_admin_listener_has_the_rpc():
    """GetMetrics is an operator's call: it is where AdminService is."""
    async with listening(admin_listen="127.0.0.1:0") as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.admin.GetMetrics(admin_pb2.GetMetricsRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stall_of_the_event_loop_is_reported():
    """The longest stall is told to within the period of its measurement, and forgotten later."""
    lag = LoopLag(lambda: None)
    lag.start()
    await asyncio.sleep(2 * PERIOD)
    time.sleep(0.2)  # noqa: ASYNC251 - the stall
    await asyncio.sleep(2 * PERIOD)
    lag.close()
    assert lag.longest_stall >= 0.2 - 1.5 * PERIOD
    assert sum(lag.histogram.counts) >= 2
