"""Metrics, dashboard and timeline of a running server of two service processes."""

import itertools
import json
import subprocess
import sys
import urllib.request

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc, task_pb2
from legato_client import Client, QueryTask

from tests.deploy.expressions import expressions, rules, selectors
from tests.e2e.scenes import two_shapes
from tests.e2e.server import Server, children, until
from tests.service.metrics.scrapes import Scrape

CONNECTIONS = 16  # all of them on one of two processes is practically impossible
CALLS = 2  # on each
SAMPLING = task_pb2.Sampling(max_tokens=12, temperature=0.0)
OPTIONS = ("--metrics-listen", "127.0.0.1:0", "--processes", "2", "--speculation", "fixed:2")
_SCRAPED_ELSEWHERE = {"instance", "job"}  # labels that Prometheus adds


def scrape(server):
    """Scrape over HTTP."""
    (line,) = server.events("metrics_listening")
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
        until(lambda: running.events("worker_ready"))
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


@pytest.mark.parametrize("name", expressions())
def test_every_name_and_label_of_an_expression_is_in_the_scrape(scraped, name):
    """A panel or an alert on a metric that does not exist would stay empty unnoticed."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for selector in selectors(expressions()[name]):
        if selector.name in recorded:
            continue
        samples = [sample for sample in scraped.samples if sample.name == selector.name]
        assert samples, selector.name
        labels = set().union(*(sample.labels for sample in samples)) | _SCRAPED_ELSEWHERE
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels


def test_a_dead_worker_goes_on_counting(server):
    """The sums of a scrape do not fall when a worker dies and another takes its place."""
    before = scrape(server).value("legato_rpcs_total", code="OK")
    engine_and_worker = children(server.process.pid)
    (worker,) = {line["pid"] for line in server.events("worker_ready")}
    assert worker in engine_and_worker
    subprocess.run(["kill", "-9", str(worker)], check=True)
    until(lambda: len(server.events("worker_ready")) == 2)
    assert scrape(server).value("legato_rpcs_total", code="OK") >= before


def test_the_timeline_of_a_running_server(server, tmp_path):
    """`legato trace --server` writes the launches of the requests that run meanwhile."""
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "legato_client.cli", "trace", "--server", server.address]
    command += ["--seconds", "4", "--output", str(path), "--json"]
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
