"""What an operator stops, drains and watches."""

import collections
import functools
import itertools
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable

import grpc
import pytest
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, task_pb2
from legato_client import Client, QueryTask

from tests.deploy.manifests import expressions, rules, selectors
from tests.e2e.scenes import long_query, long_stream, two_shapes
from tests.e2e.server import RANDOM, SLOWLY, Server, children, exists, failure_of, until
from tests.grammar import check
from tests.service.harness import Scrape

SCENE = two_shapes()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A server that runs one task at a time, and its operator's socket."""
    folder = tmp_path_factory.mktemp("admin")
    socket = f"unix:{folder}/admin.sock"
    with (
        Server(
            folder, *RANDOM, "--max-running", "1", "--admin-listen", socket, environment=SLOWLY
        ) as server,
        grpc.insecure_channel(socket) as channel,
    ):
        yield server, admin_pb2_grpc.AdminServiceStub(channel)


def _append(order, name, _):
    order.append(name)


def named(request, request_id):
    """The request under a name."""
    request.options.request_id = request_id
    return request


def holds(operator, *, running, waiting):
    """Whether the engine's last heartbeat said so."""
    load = operator.GetLoad(admin_pb2.GetLoadRequest())
    return (load.running, load.waiting) == (running, waiting)


def settle(operator):
    """Return once the engine holds nothing."""
    until(
        lambda: (
            holds(operator, running=0, waiting=0)
            and operator.GetLoad(admin_pb2.GetLoadRequest()).kv_used_ratio == 0
        )
    )


def abort(operator, request_id):
    """Stop a request; what it came to."""
    answer = operator.Abort(admin_pb2.AbortRequest(request_id=request_id))
    return answer.aborted, answer.already_finished


@pytest.mark.parametrize("state", ["running", "waiting"])
def test_an_aborted_stream_gives_what_it_had(place, state):
    """Generate ends with its partial text, CANCELLED and OK; the one before it is untouched."""
    server, operator = place
    if state == "waiting":
        blocker = server.inference.Generate(named(long_stream(), f"before-{state}"))
        before = [next(blocker)]
    stream = server.inference.Generate(named(long_stream(image=SCENE.message()), state))
    events = [next(stream)]
    if state == "running":
        while len([event for event in events if event.HasField("text")]) < 5:
            events.append(next(stream))
    assert abort(operator, state) == (1, 0)
    events.extend(stream)
    check(events, ok=True)
    finished = events[-1].finished
    assert finished.info.finish_reason == task_pb2.FINISH_REASON_CANCELLED
    said = "".join(event.text.text for event in events if event.HasField("text"))
    assert finished.result.query.answer == said
    assert bool(said) == (state == "running")
    assert abort(operator, state) == (0, 1)
    if state == "waiting":
        until(lambda: holds(operator, running=1, waiting=0))
        assert abort(operator, f"before-{state}") == (1, 0)
        check([*before, *blocker], ok=True)
    settle(operator)
    assert not server.blobs()


@pytest.mark.parametrize("rpc", ["Query", "RunTasks"])
def test_an_aborted_unary_call_is_preempted(place, rpc):
    """ABORTED PREEMPTED, whatever it was doing, and the engine serves on."""
    server, operator = place
    task = long_stream().task
    asks = {
        "Query": long_query(image=SCENE.message()),
        "RunTasks": inference_pb2.RunTasksRequest(image=SCENE.message(), tasks=[task, task]),
    }
    call = getattr(server.inference, rpc).future(named(asks[rpc], rpc))
    until(lambda: holds(operator, running=1, waiting=0 if rpc == "Query" else 1))
    assert abort(operator, rpc) == (1, 0)
    failed = failure_of(call.result)
    assert failed.code is grpc.StatusCode.ABORTED
    assert failed.reason == "PREEMPTED"
    settle(operator)
    assert not server.blobs()
    probe = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle", max_objects=1)
    assert len(server.inference.Detect(probe).objects) == 1


def test_a_joined_call_survives_the_first(place):
    """Two calls of one id share a run of the real engine; cancelling the first keeps it going."""
    server, operator = place
    asked = named(long_query(), "shared")
    first = server.inference.Query.future(asked)
    until(lambda: holds(operator, running=1, waiting=0))
    second = server.inference.Query.future(asked)
    joined = named(inference_pb2.QueryRequest(question="other"), "shared")
    assert failure_of(lambda: server.inference.Query(joined)).reason == "DUPLICATE_REQUEST"
    first.cancel()
    assert second.result().answer
    settle(operator)


def test_all_are_stopped_at_once(place):
    """Abort(all) ends what runs and what waits, streams well and unary calls as preempted."""
    server, operator = place
    stream = server.inference.Generate(long_stream())
    first = next(stream)
    calls = [server.inference.Query.future(long_query()) for _ in range(3)]
    until(lambda: holds(operator, running=1, waiting=3))
    assert operator.Abort(admin_pb2.AbortRequest(all=True)).aborted == 4
    check([first, *stream], ok=True)
    for call in calls:
        assert failure_of(call.result).reason == "PREEMPTED"
    settle(operator)


def test_priorities_decide_who_goes_first(place):
    """Of two that wait the one of higher priority is answered first, though it came last."""
    server, operator = place
    blocker = server.inference.Generate(named(long_stream(), "blocker"))
    next(blocker)
    order: list[str] = []
    calls = []
    for number, priority in enumerate(("-5", "90")):
        request = inference_pb2.QueryRequest(question="?")
        call = server.inference.Query.future(request, metadata=(("legato-priority", priority),))
        call.add_done_callback(functools.partial(_append, order, priority))
        calls.append(call)
        until(functools.partial(holds, operator, running=1, waiting=number + 1))
    assert abort(operator, "blocker") == (1, 0)
    for call in calls:
        assert call.result() is not None
    until(lambda: len(order) == 2)
    assert order == ["90", "-5"]
    settle(operator)


# ---------------------------------------------------------------- drain
# SIGTERM: what runs is finished, what is new is refused, and nothing stays.

SLOW = ("--model", "null", "--null-step-ms", "50", "--null-objects", "10000")
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")


def test_a_drain_finishes_what_runs(tmp_path):
    """A running stream ends well, a new call gets DRAINING, and the exit code is 0."""
    with Server(tmp_path, "--drain-grace", "60", *SLOW) as server:
        engine = server.engine_pid
        stream = server.inference.Generate(long_stream(max_tokens=150))
        events = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("drain_begun")
        assert not server.is_serving()
        refused = failure_of(lambda: server.inference.Detect(PROBE))
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.reason == "DRAINING"
        check([*events, *stream], ok=True)
        assert server.process.wait() == 0
        assert not exists(engine)
        assert not server.blobs()
        assert server.events("stopped")


def test_a_drain_cuts_at_its_grace(tmp_path):
    """What the grace does not end is cut with a reason; the exit code is still 0."""
    with Server(tmp_path, "--drain-grace", "0.2", *SLOW) as server:
        engine = server.engine_pid
        stream = server.inference.Generate(long_stream())
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert failure_of(lambda: list(stream)).code is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait() == 0
        assert not exists(engine)


@pytest.mark.parametrize(
    ("ended_by", "processes"),
    [
        ("grace", "2"),
        ("second signal", "1"),
        pytest.param("grace", "1", marks=pytest.mark.slow),
        pytest.param("second signal", "2", marks=pytest.mark.slow),
    ],
)
def test_calls_that_a_drain_cuts_are_told_so(tmp_path, ended_by, processes):
    """Streams and unary calls of every process end with DRAINING and a time to retry after."""
    grace = "0.5" if ended_by == "grace" else "60"
    options = ("--drain-grace", grace, "--processes", processes, "--max-running", "8")
    null = ("--model", "null", "--null-step-ms", "1000", "--null-objects", "10000")
    with Server(tmp_path, *options, *null) as server:
        many = [channel_of(server) for _ in range(8)]
        stubs = [inference_pb2_grpc.InferenceServiceStub(each) for each in many]
        streams = [stub.Generate(long_stream()) for stub in stubs[:4]]
        unary = [stub.Query.future(long_query()) for stub in stubs[4:]]
        for stream in streams:
            next(stream)
        until(lambda: server.holds(running=8, waiting=0))
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("drain_begun")
        if ended_by == "second signal":
            server.process.send_signal(signal.SIGTERM)
        reads: list[Callable[[], object]] = [call.result for call in unary]
        reads += [functools.partial(collections.deque, stream) for stream in streams]
        for read in reads:
            failed = failure_of(read)
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert failed.reason == "DRAINING"
            assert failed.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert server.process.wait() == (0 if ended_by == "grace" else 128 + signal.SIGTERM)
        for each in many:
            each.close()


def channel_of(server):
    """A connection of its own, which may be to any of the server's processes."""
    return grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),))


def test_a_drain_without_work_is_short(tmp_path):
    """An idle server leaves by itself, whatever its grace, with a client still connected."""
    null = ("--model", "null", "--drain-grace", "3600")
    with Server(tmp_path, *null) as server, Client(server.address) as client:
        client.server_info()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0


# ---------------------------------------------------------------- metrics
# Metrics, dashboard and timeline of a running server of two service processes.

CONNECTIONS = 16  # all of them on one of two processes is practically impossible
CALLS = 2  # on each
SAMPLING = task_pb2.Sampling(max_tokens=12, temperature=0.0)
OPTIONS = ("--metrics-listen", "127.0.0.1:0", "--processes", "2", "--speculation", "fixed:2")
_SCRAPED_ELSEWHERE = {"instance", "job"}  # labels that Prometheus adds


def scrape(server):
    """Scrape over HTTP."""
    (line,) = server.wait_for("metrics_listening")
    with urllib.request.urlopen(f"http://{line['address']}/metrics", timeout=30) as response:
        return Scrape(response.read().decode())


def ask(server):
    """Ask on connections to both processes; half of the calls are refused."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    for number in range(CONNECTIONS):
        with grpc.insecure_channel(server.address, options=options) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for _ in range(CALLS):
                stub.Query(inference_pb2.QueryRequest(question="what?", sampling=SAMPLING))
            with pytest.raises(grpc.RpcError):
                stub.Detect(inference_pb2.DetectRequest(object=f"{number}"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that has answered."""
    with Server(tmp_path_factory.mktemp("metrics"), *OPTIONS) as running:
        running.worker_pids()
        ask(running)
        yield running


@pytest.fixture(scope="module")
def scraped(server):
    """Its metrics after the heartbeat that follows the traffic."""
    server.settle()
    return scrape(server)


def test_the_calls_of_all_processes_add_up(server, scraped):
    """Counters and histograms are those of the known traffic, wherever it went."""
    count = CONNECTIONS * CALLS
    query = {"method": "legato.v1.InferenceService/Query"}
    assert scraped.value("legato_rpcs_total", code="OK", **query) == count
    refused = {"method": "legato.v1.InferenceService/Detect", "reason": "INVALID_FIELD"}
    assert scraped.value("legato_rpcs_total", **refused) == CONNECTIONS
    assert scraped.value("legato_requests_total", skill="query") == count
    assert scraped.value("legato_request_seconds_count", skill="query") == count
    assert scraped.value("vllm:e2e_request_latency_seconds_count") == count
    # Both processes have answered: the first one's own part is less than the sum.
    usage = "legato_process_resident_memory_bytes"
    processes = {s.labels["process"] for s in scraped.samples if s.name == usage}
    assert processes == {"service-0", "service-1", "engine-0"}
    for process in processes:
        assert scraped.value(usage, process=process) > 10e6


def test_engine_and_requests_agree(scraped):
    """The tokens that requests got are those that the engine's launches committed."""
    tokens = scraped.value("legato_output_tokens_total", skill="query")
    assert scraped.value("legato_engine_tokens_total") == tokens > 0
    steps = scraped.value("legato_engine_steps_total")
    assert scraped.value("legato_engine_launches_total") == steps
    assert scraped.value("legato_draft_tokens_total") > 0
    gaps = scraped.value("legato_inter_token_seconds_count")
    assert 0 < gaps <= tokens
    prompt = scraped.value("legato_prompt_tokens_total", skill="query")
    assert scraped.value("legato_prefix_cache_queries_total") == prompt
    cached = scraped.value("legato_cached_tokens_total", skill="query")
    assert scraped.value("legato_prefix_cache_hits_total") == cached


def test_a_worker_answers_for_all(server, scraped):
    """AdminService.GetMetrics gives the same names and sums through either process."""
    for _ in range(8):  # connections go to either
        with Client(server.address) as client:
            found = Scrape(client.metrics())
        assert found.names == scraped.names
        assert found.value("legato_requests_total") == scraped.value("legato_requests_total")


def test_every_name_and_label_of_an_expression_is_in_the_scrape(scraped):
    """A panel or an alert on a metric that does not exist would stay empty unnoticed."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for name, expression in expressions().items():
        for selector in selectors(expression):
            if selector.name in recorded:
                continue
            samples = [sample for sample in scraped.samples if sample.name == selector.name]
            assert samples, (name, selector.name)
            labels = set().union(*(sample.labels for sample in samples)) | _SCRAPED_ELSEWHERE
            assert {matcher.name for matcher in selector.matchers.matchers} <= labels, name


def test_a_dead_worker_goes_on_counting(server):
    """The sums of a scrape do not fall when a worker dies and another takes its place."""
    before = scrape(server).value("legato_rpcs_total", code="OK")
    engine_and_worker = children(server.process.pid)
    (worker,) = server.worker_pids()
    assert worker in engine_and_worker
    subprocess.run(["kill", "-9", str(worker)], check=True)
    server.worker_pids(2)
    assert scrape(server).value("legato_rpcs_total", code="OK") >= before


def test_the_timeline_of_a_running_server(server, tmp_path):
    """`legato trace --server` writes the launches of the requests that run meanwhile."""
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "legato_client.cli", "trace", "--server", server.address]
    command += ["--seconds", "2", "--output", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        with Client(server.address) as client:
            while watching.poll() is None:
                for _ in client.generate(None, QueryTask("what?")):
                    pass
        document = json.loads(watching.communicate()[0])
    assert document["launches"] > 3
    assert document["observed_gain"] is not None
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    named = {lanes[e["tid"]] for e in spans}
    assert {"cpu plan", "cpu commit", "device compute", "slot 0"} <= named
    assert {e["cat"] for e in spans} == {"prefill", "decode"}
    for lane, name in lanes.items():
        own = sorted((e for e in spans if e["tid"] == lane), key=lambda e: e["ts"])
        for before, after in itertools.pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01, name


def test_images_are_counted(server):
    """An image is decoded once; asked about again it is found."""
    before = scrape(server)
    with Client(server.address) as client:
        for _ in range(2):
            client.detect(two_shapes(offset=3).file(), "red circle")
    server.settle()
    after = scrape(server)
    for name, count in (
        ("legato_images_decoded_total", 1),
        ("legato_image_cache_hits_total", 1),
        ("legato_image_cache_queries_total", 2),
    ):
        assert after.value(name) - before.value(name) == count, name
