"""Benchmarks of a server: its load, its stages, its cost and its start."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc
from legato_engine.telemetry import LANES
from legato_engine.types import QueryOutput, QuerySpec, Request, RequestKey

from benchmarks.serve import start
from benchmarks.serve.contenders import Sample, echo_server, inside_server, one_each, recorded
from benchmarks.serve.cost import _scaled, processes_text, row
from benchmarks.serve.devices import servers
from benchmarks.serve.echo import Answers
from benchmarks.serve.hop import CLIENTS, compare
from benchmarks.serve.inside import InsideEngine
from benchmarks.serve.load import (
    WORKLOADS,
    Ask,
    Call,
    Case,
    Job,
    cached,
    cases,
    mix,
    new,
    summarise,
)
from benchmarks.serve.lone import STAGES, split
from benchmarks.serve.lone import Call as LoneCall

# ---------------------------------------------------------------- load
# Requests of callers, and figures of their calls.


def calls_of(callers: int, count: int, seconds: float) -> list[Call]:
    """Return `count` calls of every caller without a pause; the first and last do not count."""
    return [
        Call(turn * seconds, (turn + 1) * seconds, timed=0 < turn < count - 1, tokens=3)
        for turn in range(count)
        for _ in range(callers)
    ]


def test_requests_per_second_are_those_of_the_steady_state() -> None:
    """Callers that are never idle get callers / latency answers a second."""
    cell = summarise(calls_of(callers=8, count=12, seconds=0.5), load_cpu=0.25)
    assert cell.per_second == pytest.approx(16.0)
    assert (cell.p50, cell.p95, cell.p99) == pytest.approx((500.0, 500.0, 500.0))
    assert (cell.calls, cell.failed, cell.mean_tokens, cell.load_cpu) == (80, 0, 3.0, 0.25)
    assert cell.answered == 96


def test_failures_are_counted_and_have_no_latency() -> None:
    """A failed call is counted and named, timed or not, and moves no percentile."""
    good = calls_of(callers=2, count=10, seconds=1.0)
    broken = [Call(1.0, 90.0, timed=True, error="QueueFull: full"), Call(0, 1, False, error="x")]
    cell = summarise(good + broken, load_cpu=0.0)
    assert cell.failed == 2
    assert cell.p99 == pytest.approx(1000.0)
    assert cell.errors == ("QueueFull: full", "x")


def test_nothing_answered_gives_no_figures() -> None:
    """A cell without answers gives the number of failed calls and divides by nothing."""
    cell = summarise([Call(0, 1, True, error="x")] * 3, load_cpu=0.0)
    assert (cell.calls, cell.failed, cell.per_second) == (0, 3, 0)


def test_shares_are_of_the_timed_calls() -> None:
    """Shares of known images are of the timed calls."""
    calls = [Call(place, place + 1, place > 1, 3, hit=place % 2 == 0) for place in range(6)]
    assert summarise(calls, load_cpu=0.0).hit_share == pytest.approx(0.5)


ASK = Ask(callers=16, calls=300, tokens=3, first=1000)


def timed(jobs: list[Job]) -> list[Job]:
    """Return the calls that count."""
    return [job for job in jobs if job.timed]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
@pytest.mark.parametrize("callers", [1, 4, 64])
def test_as_many_timed_calls_as_asked(name: str, callers: int) -> None:
    """A cell has exactly its calls, with untimed ones before and, for many callers, after."""
    ask = Ask(callers=callers, calls=50, tokens=30, first=7)
    jobs = WORKLOADS[name](ask)
    assert len(jobs) == ask.total
    assert len(timed(jobs)) == 50
    assert not any(job.timed for job in jobs[: ask.lead])
    assert jobs[-1].timed == (callers == 1)
    assert {job.tokens for job in jobs} == {30}


def test_new_never_repeats_an_image() -> None:
    """Every call of `new` has an image of its own."""
    assert len({job.image for job in new(ASK)}) == ASK.total


def test_cached_has_one_image() -> None:
    """Every call of `cached` has the same image."""
    assert {job.image for job in cached(ASK)} == {ASK.first}


def test_mix_asks_five_questions_for_every_three_images() -> None:
    """Two of five timed calls of `mix` are about an image of an earlier call."""
    jobs = mix(Ask(callers=16, calls=3000, tokens=3, first=1))
    seen: set[int] = set()
    repeats = 0
    for job in jobs:
        repeats += job.timed and job.image in seen
        seen.add(job.image)
    assert repeats / 3000 == pytest.approx(0.4, abs=0.02)
    assert max(collections.Counter(job.image for job in jobs).values()) == 2


def test_mix_repeats_when_the_first_answer_is_there() -> None:
    """A repeat comes neither while its image is still being answered nor long after."""
    last: dict[int, int] = {}
    distances = []
    for place, job in enumerate(mix(ASK)):
        if job.image in last:
            distances.append(place - last[job.image])
        last[job.image] = place
    assert min(distances) >= ASK.callers * 0.5
    assert max(distances) <= 4 * ASK.callers


def test_mix_is_the_same_for_the_same_cell() -> None:
    """A cell can be repeated call by call."""
    assert mix(ASK) == mix(ASK)


# ---------------------------------------------------------------- lone
# The stages of a single call.


def span(lane, start, end):
    """A complete event of a timeline, in microseconds."""
    return {"tid": LANES.index(lane), "ts": start, "dur": end - start}


SPANS = [
    span("device compute", 10, 900),  # of the call before
    span("cpu plan", 5000, 5100),
    span("cpu launch", 5100, 7000),
    span("device compute", 5200, 20_000),
    span("device compute", 20_000, 20_010),
    span("device compute", 20_010, 21_000),
    span("device copy", 21_000, 21_500),
    span("device compute", 30_000, 31_000),  # of the next
]


def test_stages_follow_each_other_without_a_gap():
    """The stages add up to the whole call, each part by its own clock."""
    stages = split(LoneCall(start=1000.0, end=22_000.0, picture=3000.0), SPANS)
    expected = {
        "there": 1.0,
        "picture": 3.0,
        "launch": 0.2,
        "prefill": 14.8,
        "decode": 1.0,
        "back": 1.0,
    }
    assert stages == pytest.approx(expected)
    assert tuple(stages) == STAGES
    assert sum(stages.values()) == pytest.approx(21.0)


def test_a_call_that_the_timeline_has_forgotten():
    """A call without a launch in the timeline has no stages."""
    with pytest.raises(ValueError, match="holds no launch"):
        split(LoneCall(start=40_000.0, end=50_000.0, picture=1.0), SPANS)


# ---------------------------------------------------------------- hop


def asks(produced=1, **milliseconds):
    """Return ways that take the same time in every call."""
    ways = {"inside": milliseconds["inside"]}
    for client in CLIENTS:
        ways |= {f"{way} {client}": milliseconds[way] for way in ("through", "bare")}
    return {
        name: lambda kind, tokens, name=name, spent=spent: (
            spent,
            3 if name.startswith("bare") else produced,
        )
        for name, spent in ways.items()
    }


def test_the_hop_is_what_grpc_and_the_process_add():
    """The engine's own time is subtracted, and of the rest a bare server's is gRPC's."""
    row = compare(asks(inside=2.0, through=5.0, bare=1.0), "id", 1, calls=4, block=2)
    assert (row.picture, row.tokens, row.calls, row.in_process) == ("id", 1, 4, 2.0)
    for client in CLIENTS:
        assert (row.hop(client), row.ours(client)) == (3.0, 2.0)


def test_answers_of_different_lengths_are_not_compared():
    """A hop is computed for equal work only."""
    ways = asks(inside=2.0, through=5.0, bare=1.0)
    ways["inside"] = lambda kind, tokens: (2.0, 9)
    with pytest.raises(ValueError, match="different lengths"):
        compare(ways, "id", 1, calls=4, block=2)


# ---------------------------------------------------------------- inside
# The service with the null engine in its own process.


def request():
    """Return a question without an image."""
    return Request(request_id=RequestKey("one"), task=QuerySpec(question="?"))


async def test_a_request_runs_in_the_event_loop_and_is_forgotten():
    """The same id may then come again."""
    engine = InsideEngine()
    for _ in range(2):
        stream = engine.submit(request())
        assert engine.num_open == 1
        done = await stream.done()
        assert isinstance(done.result, QueryOutput)
        assert done.result.answer
        assert engine.num_open == 0
    assert engine.step > 0


async def test_an_aborted_request_is_forgotten():
    """Its caller has gone."""
    engine = InsideEngine()
    engine.submit(request()).abort()
    assert engine.num_open == 0


def test_it_answers_whatever_is_compared():
    """Each kind of request is answered through gRPC, streams to their end."""
    with inside_server() as server:
        answers = recorded(server.target, cases(3))
    assert all(answers.unary[name] for name in ("Query", "Detect"))
    first_and_last = 2
    assert len(answers.streams["point"]) == len(answers.streams["query"]) == 3 + first_and_last


# ---------------------------------------------------------------- cost
# The comparison's arithmetic and its bare server.

STREAM = [
    pb.GenerateResponse(index=0, started=pb.Started(model="null")),
    pb.GenerateResponse(index=1, text=pb.TextDelta(text="nobody looked at it")),
    pb.GenerateResponse(index=2, finished=pb.Finished()),
]


def sample(per_second, cpu_us):
    """Return a turn."""
    return Sample(per_second, 1.0, cpu_us, 5.0, 0.5, 1.0)


def test_joined_words_are_replayed_one_by_one():
    """The bare server sends one message a word, however ours merged them, with gapless indices."""
    messages = [pb.GenerateResponse.FromString(data) for data in one_each(STREAM)]
    assert [message.index for message in messages] == list(range(6))
    assert "".join(m.text.text for m in messages).split() == ["nobody", "looked", "at", "it"]
    assert messages[0].HasField("started")
    assert messages[-1].HasField("finished")


def test_the_bare_server_says_what_it_was_given():
    """The bare server sends given unary answers by RPC and streams by task, unchanged."""
    answer = pb.QueryResponse(answer="yes")
    words: Any = cases(3)[-1].request
    recorded = Answers(
        {"Query": answer.SerializeToString()}, {"query": [m.SerializeToString() for m in STREAM]}
    )
    with echo_server(recorded) as bare, grpc.insecure_channel(bare.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert stub.Query(pb.QueryRequest(question="anything"), wait_for_ready=True) == answer
        assert list(stub.Generate(words)) == STREAM


COLUMNS = (
    *("request", "counted", "bare a second", "tuned a second", "inside a second", "share inside"),
    *("legato a second", "share", "bare", "tuned", "inside", "service", "engine", "messages"),
)


def test_shares_are_medians_of_turns_that_met_the_same_machine():
    """A turn is compared with its neighbour, so that a machine that slows down affects both."""
    bare = [sample(1000, 100), sample(500, 200), sample(250, 400)]
    inside = [sample(900, 110), sample(450, 220), sample(225, 440)]
    whole = [sample(800, 125), sample(400, 250), sample(100, 1000)]
    tuned = [sample(1200, 80), sample(600, 160), sample(300, 320)]
    turns = {"bare": bare, "tuned": tuned, "inside": inside, "legato": whole}
    cells = dict(
        zip(COLUMNS, row(Case("Query", "Query", pb.QueryRequest(), 1), turns), strict=True)
    )
    assert (cells["share inside"], cells["share"]) == ("90%", "80%")
    assert (cells["bare a second"], cells["service"]) == ("500", "250.0")
    assert (cells["tuned a second"], cells["tuned"]) == ("600", "160.0")


def test_processes_are_compared_with_the_bare_server():
    """Each number of processes is compared in turns that met the same load."""
    turns = {
        0: [sample(1000, 200), sample(500, 200), sample(100, 200)],
        2: [sample(900, 200), sample(400, 200), sample(90, 200)],
    }
    found = _scaled("Query", turns)
    _, table = processes_text(found)
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert [row[1:4] for row in rows] == [["bare", "500", "100%"], ["2", "400", "90%"]]
    assert processes_text([]) == ["Several processes were not measured."]


# ---------------------------------------------------------------- devices


def test_the_servers_differ_in_their_engines_only():
    """The same model and service processes; one without affinity."""
    one, several, without = servers("cuda:1,cuda:3", 2, ["--model", "null"]).values()
    common = ["--processes", "2", "--model", "null"]
    assert one == ["--device", "cuda:1", *common]
    assert several == ["--devices", "cuda:1,cuda:3", *common]
    assert without == ["--devices", "cuda:1,cuda:3", "--affinity", "off", *common]


# ---------------------------------------------------------------- start
# What a start is measured by.


def test_each_model_starts_with_speculation_and_without():
    """A file is served in float32 and in 8 bits."""
    cases = start.cases_of(Path("a.gguf"))
    assert len(cases) == 6
    assert sum("budget" in options for options in cases.values()) == 3
    assert cases["a.gguf, int8"] == ("--weights", "a.gguf", "--weight-dtype", "int8")
    assert len(start.cases_of(None)) == 2


def test_a_stage_without_an_event_ends_as_it_begins():
    """A model's description may be read between two looks at the engine."""
    seen = {"start": 1.0, "weights": 5.0, "ready": 8.0}
    assert start.with_unseen(seen) == {
        "start": 1.0,
        "device": 5.0,
        "weights": 5.0,
        "warm-up": 8.0,
        "ready": 8.0,
    }


def test_the_table_has_medians():
    """One turn of three that was disturbed does not show."""
    turns = [
        start.Start(
            dict.fromkeys(start.STAGES, seconds),
            seconds,
            {"Rss": 3, "Pss": 2, "Uss": 1},
            {"Rss": 6, "Pss": 4, "Uss": 2},
        )
        for seconds in (1.0, 9.0, 2.0)
    ]
    row = start.table({"tiny": turns}).splitlines()[-1]
    assert row == "| tiny | 2.0 | 2.0 | 2.0 | 2.0 | 2.0 | 2.0 | 3 | 1 | 4 |"


def test_memory_and_processor_time_are_those_of_the_process():
    """What is its own is part of what it shares, and that of what it holds."""
    held = start.memory_mib(os.getpid())
    assert 0 < held["Uss"] <= held["Pss"] <= held["Rss"]
    assert start.cpu_seconds(os.getpid()) > 0
    assert os.getpid() in start.descendants(os.getpid())
