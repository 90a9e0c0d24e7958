"""The comparison's arithmetic and its bare server."""

from typing import Any

import grpc
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc

from benchmarks.serve.cases import Case, cases
from benchmarks.serve.contenders import Sample, echo_server, one_each
from benchmarks.serve.cost import row
from benchmarks.serve.echo import Answers
from benchmarks.serve.processes import _scaled, text

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
    _, table = text(found)
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert [row[1:4] for row in rows] == [["bare", "500", "100%"], ["2", "400", "90%"]]
    assert text([]) == ["Several processes were not measured."]
