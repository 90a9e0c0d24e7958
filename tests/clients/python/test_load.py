"""Loads: due times, histograms, and what counts before small servers of known behaviour."""

import contextlib
import dataclasses
import itertools
import json
import statistics
import threading
import time
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc, session_pb2, session_pb2_grpc, task_pb2
from legato_client.cli import main
from legato_client.load.plan import LoadPlan, due_times
from legato_client.load.report import DurationHistogram, LoadResults, Meter, markdown
from legato_client.load.run import LoadFailed, run, send

# ---------------------------------------------------------------- figures
# The arithmetic of a load: due times, histograms, and what counts.


def test_constant_arrivals_are_evenly_spaced_over_all_senders():
    """The senders' shares interleave to one request every 1/rate seconds, and no more."""
    shares = [list(due_times("constant", 10, 1.0, share=i, shares=3)) for i in range(3)]
    assert sorted(itertools.chain(*shares)) == pytest.approx([i / 10 for i in range(10)])


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_callers():
    """Gaps have the mean 1/rate and a standard deviation as large; another seed gives others."""
    times = list(due_times("poisson", 1000, 20.0, share=1, shares=2))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 500, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 500, rel=0.1)
    assert times == list(due_times("poisson", 1000, 20.0, share=1, shares=2))
    assert times != list(due_times("poisson", 1000, 20.0, share=1, shares=2, seed=1))
    assert times != list(due_times("poisson", 1000, 20.0, share=0, shares=2))


def test_percentiles_are_those_of_the_durations():
    """Within a bucket's width of the exact ones, the extremes exact, merged or not."""
    durations = [index / 1000 for index in range(1, 1001)]
    parts = [DurationHistogram(), DurationHistogram()]
    for index, duration in enumerate(durations):
        parts[index % 2].add(duration)
    parts[0].merge(parts[1])
    whole = parts[0]
    for percent in (1, 50, 90, 99, 99.9):
        exact = durations[int(len(durations) * percent / 100) - 1]
        assert exact <= whole.percentile(percent) <= exact * (1 + 1 / 64)
    assert whole.percentile(100) == whole.maximum == 1.0
    assert whole.minimum == 0.001
    assert whole.mean == pytest.approx(0.5005)


def test_an_empty_histogram_has_no_percentiles():
    """Nothing counted is 0 throughout, not an error."""
    assert set(DurationHistogram().summary_ms().values()) == {0}


def test_a_single_duration_is_every_percentile():
    """One duration is never reported as larger than it was."""
    histogram = DurationHistogram()
    histogram.add(0.0123456)
    assert histogram.percentile(50) == histogram.percentile(99.9) == 0.0123456


def test_times_run_from_when_a_request_was_due():
    """A request sent late is charged with the lateness, which is told beside it."""
    now = time.monotonic()
    meter = Meter(now - 10, now + 60)
    watch = meter.expect(now - 2.0)
    watch.message(answers=False)
    watch.message(answers=True)
    watch.message(answers=True)
    watch.end()
    record = meter.record
    assert (record.due, record.completed, record.messages) == (1, 1, 3)
    assert (record.first.count, record.gap.count, record.latency.count) == (1, 1, 1)
    assert min(record.lag.minimum, record.first.minimum, record.latency.minimum) >= 2.0
    assert record.gap.maximum < record.first.minimum


def test_what_was_due_outside_of_the_window_is_no_request_of_it():
    """Its answers count for the throughput when they come within the window, its times never."""
    now = time.monotonic()
    meter = Meter(now - 1, now + 60)
    for due in (now - 2, now + 100):
        watch = meter.expect(due)
        watch.message(answers=True)
        watch.end()
    meter.expect(now - 2).fail("QUEUE_FULL")
    record = meter.record
    assert (record.due, record.latency.count, record.lag.count) == (0, 0, 0)
    assert (record.messages, record.completed, record.errors.total()) == (2, 2, 0)


def test_failures_are_counted_by_reason_and_give_no_time():
    """A refusal is quick: it must not make the latencies of answers look better."""
    now = time.monotonic()
    meter = Meter(now - 1, now + 60)
    for reason in ("QUEUE_FULL", "QUEUE_FULL", "DEADLINE_EXCEEDED"):
        meter.expect(now).fail(reason)
    total = LoadResults()
    total.merge(meter.record)
    total.merge(meter.record)
    assert total.errors == {"QUEUE_FULL": 4, "DEADLINE_EXCEEDED": 2}
    assert total.latency.count == 0
    plan = LoadPlan("somewhere", "unary", b"", rate=5, seconds=12, warm_up=2)
    assert "6 of 6 requests failed" in markdown(plan, total)
    assert total.figures(plan.window)["errors"] == dict(total.errors)


# ---------------------------------------------------------------- send
# A load against small servers whose behaviour is known.

STALL = 1.0  # seconds
QUERY = "/legato.v1.InferenceService/Query"
REQUEST = pb.QueryRequest(question="hi").SerializeToString()


class Inference:
    """Answers at once; the question says what else."""

    Caption = Detect = Point = RunTasks = Segment = None  # not requested by any test

    def __init__(self):
        self._turn = threading.Lock()
        self._asked = 0

    def Query(self, request, context):
        """Answer; "stall" delays every call once, "full" refuses."""
        if request.question == "full":
            info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="legato")
            status = status_pb2.Status(code=8, message="full")
            packed = any_pb2.Any()
            packed.Pack(info)
            status.details.append(packed)
            details = ("grpc-status-details-bin", status.SerializeToString())
            context.set_trailing_metadata((details,))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        with self._turn:
            self._asked += 1
            if request.question == "stall" and self._asked == 20:
                time.sleep(STALL)
        return pb.QueryResponse(answer="yes")

    def Generate(self, request, context):
        """`started`, three words, `finished`."""
        yield pb.GenerateResponse(index=0, started=pb.Started())
        for index in range(3):
            yield pb.GenerateResponse(index=1 + index, text=pb.TextDelta(text="word"))
        yield pb.GenerateResponse(index=4, finished=pb.Finished())


class Sessions(session_pb2_grpc.SessionServiceServicer):
    """Two results a frame; every fifth frame is dropped."""

    def __init__(self):
        self.opened = 0

    def Session(self, request_iterator, context):
        """The open, then frames."""
        assert next(request_iterator).open.standing_tasks
        self.opened += 1
        yield session_pb2.SessionResponse(opened=session_pb2.SessionOpened(frame_credits=8))
        for request in request_iterator:
            sequence = request.frame.stamp.sequence
            if sequence % 5 == 0:
                dropped = session_pb2.FrameDropped(
                    sequence=sequence, reason=session_pb2.DROP_REASON_OVERLOADED
                )
                yield session_pb2.SessionResponse(dropped=dropped)
                continue
            for last in (False, True):
                result = session_pb2.FrameResult(stamp=request.frame.stamp, last_for_frame=last)
                yield session_pb2.SessionResponse(result=result)


@pytest.fixture
def sessions():
    """The session service, which counts."""
    return Sessions()


@pytest.fixture
def target(sessions):
    """The address of a server with both services."""
    inference: Any = Inference()  # it has no more than these tests need
    server = grpc.server(futures.ThreadPoolExecutor(32))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    session_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(lambda: server.stop(0).wait())
        yield f"127.0.0.1:{port}"


def sent(plan):
    """The record of a plan that one sender carries out here."""
    return send(plan, 0, time.monotonic() + 0.1)


def looped(plan):
    """The record of a closed loop, in a longer window where a machine came to nothing in time."""
    for factor in (1, 10, 100):
        record = sent(dataclasses.replace(plan, seconds=factor * plan.seconds))
        if record.due > plan.in_flight:
            break
    return record


def question(text):
    """A Query request's bytes."""
    return pb.QueryRequest(question=text).SerializeToString()


def test_a_stall_is_charged_with_everybody_it_would_have_kept_waiting(target):
    """Coordinated omission: requests that were due in a stall of a second waited for its rest."""
    plan = LoadPlan(
        target,
        "unary",
        question("stall"),
        QUERY,
        rate=50,
        arrivals="constant",
        seconds=2.0,
        warm_up=0.0,
    )
    record = sent(plan)
    assert record.due == record.latency.count == 100
    # 50 of the 100 fall into the stall, evenly: half of these waited half of it or longer.
    assert record.latency.percentile(80) >= STALL / 2
    assert record.latency.percentile(95) >= STALL * 0.8
    assert record.latency.maximum >= STALL * 0.98


def test_a_closed_loop_asks_again_when_it_is_answered(target):
    """Callers go on until the end; the answers within the window make the throughput."""
    plan = LoadPlan(target, "unary", REQUEST, QUERY, in_flight=3, seconds=0.5, warm_up=0.1)
    record = looped(plan)
    assert record.due > 3
    assert record.latency.count == record.due
    assert record.completed == record.messages > 0
    assert record.errors.total() == 0


def test_streams_are_timed_event_by_event(target):
    """The first delta makes the first answer, `started` does not; the rest are gaps."""
    record = looped(LoadPlan(target, "stream", b"", in_flight=1, seconds=0.5, warm_up=0.0))
    assert record.first.count == record.latency.count == record.due > 0
    assert record.gap.count == 3 * record.due
    assert record.messages >= 5 * (record.due - 1)


def test_failures_are_told_by_the_servers_reason(target):
    """The reason in the details where there is one, the status where there is none."""
    plan = LoadPlan(target, "unary", question("full"), QUERY, rate=20, seconds=0.5, warm_up=0.0)
    record = sent(plan)
    assert set(record.errors) == {"QUEUE_FULL"}
    nobody = LoadPlan("127.0.0.1:1", "unary", REQUEST, QUERY, rate=20, seconds=0.5, warm_up=0.0)
    assert set(sent(nobody).errors) == {"UNAVAILABLE"}


def test_frames_of_a_session_end_with_their_last_result_or_a_drop(target, sessions):
    """Every session is opened; a frame has its results' times, a dropped one its reason."""
    task = task_pb2.Task(caption=task_pb2.CaptionTask())
    opening = session_pb2.SessionRequest(open=session_pb2.SessionOpen(standing_tasks=[task]))
    plan = LoadPlan(
        target,
        "session",
        opening.SerializeToString(),
        sessions=2,
        rate=50,
        arrivals="constant",
        seconds=0.6,
        warm_up=0.0,
    )
    record = sent(plan)
    assert sessions.opened == 2
    assert record.due == 30
    assert record.errors == {"OVERLOADED": 6}
    assert record.latency.count == record.gap.count == 24


def test_several_processes_share_a_plan(target):
    """What all senders saw is added up."""
    plan = LoadPlan(
        target,
        "unary",
        REQUEST,
        QUERY,
        rate=40,
        arrivals="constant",
        seconds=0.5,
        warm_up=0.0,
        senders=2,
    )
    record = run(plan)
    assert record.due == record.latency.count == 20


def test_sessions_that_cannot_be_opened_end_the_load():
    """The load says why instead of reporting figures of nothing."""
    plan = LoadPlan("127.0.0.1:1", "session", b"", rate=1, seconds=1, warm_up=0)
    with pytest.raises(LoadFailed, match="UNAVAILABLE"):
        run(plan)


def test_the_command_reports_json_and_writes_files(target, tmp_path, capsys):
    """One JSON document on stdout; the same figures and a Markdown table in files."""
    options = ["--server", target, "--rate", "20", "--seconds", "0.5", "--warm-up", "0", "--json"]
    assert main(["load", *options, "--output", str(tmp_path / "load")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["due"] == figures["latency_ms"]["count"] > 0
    assert figures["plan"]["rate"] == 20
    assert json.loads((tmp_path / "load.json").read_text()) == figures
    assert "| latency |" in (tmp_path / "load.md").read_text()


@pytest.mark.parametrize(
    "options", [["--warm-up", "9", "--seconds", "9"], ["--image", "/no/such/file"], ["--rate", "0"]]
)
def test_options_that_make_no_plan_are_usage_errors(options, capsys):
    """Nothing is sent."""
    assert main(["load", *options]) == 2
    assert capsys.readouterr().err
