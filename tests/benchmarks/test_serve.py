"""The comparison's arithmetic and its bare server."""

from typing import Any

import grpc
from legato.v1 import inference_pb2 as pb
from legato.v1 import inference_pb2_grpc

from benchmarks.echo import Answers
from benchmarks.serve import Case, Sample, _one_each, cases, echo_server, row
from benchmarks.serve_processes import Scaled, text

STREAM = [
    pb.GenerateResponse(index=0, started=pb.Started(model="null")),
    pb.GenerateResponse(index=1, text=pb.TextDelta(text="nobody looked at it")),
    pb.GenerateResponse(index=2, finished=pb.Finished()),
]


def sample(per_second, cpu_us):
    """A turn."""
    return Sample(per_second, 1.0, cpu_us, 5.0, 0.5, 1.0)


def test_joined_words_are_replayed_one_by_one():
    """The bare server sends a message a word, whatever ours had joined, with gapless indices."""
    messages = [pb.GenerateResponse.FromString(data) for data in _one_each(STREAM)]
    assert [message.index for message in messages] == list(range(6))
    assert "".join(m.text.text for m in messages).split() == ["nobody", "looked", "at", "it"]
    assert messages[0].HasField("started")
    assert messages[-1].HasField("finished")


def test_the_bare_server_says_what_it_was_given():
    """Unary answers by RPC, streams by task, unchanged."""
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
    *("request", "counted", "bare a second", "inside a second", "share inside"),
    *("legato a second", "share", "bare", "inside", "service", "engine", "messages"),
)


def test_shares_are_medians_of_turns_that_met_the_same_machine():
    """A turn is compared with its neighbour, so that a machine that slows down is nobody's loss."""
    bare = [sample(1000, 100), sample(500, 200), sample(250, 400)]
    inside = [sample(900, 110), sample(450, 220), sample(225, 440)]
    whole = [sample(800, 125), sample(400, 250), sample(100, 1000)]
    turns = {"bare": bare, "inside": inside, "legato": whole}
    cells = dict(
        zip(COLUMNS, row(Case("Query", "Query", pb.QueryRequest(), 1), turns), strict=True)
    )
    assert (cells["share inside"], cells["share"]) == ("90%", "80%")
    assert (cells["bare a second"], cells["service"]) == ("500", "250.0")


def test_processes_are_compared_with_the_fewest():
    """Each case's rates stand beside that of its own first row."""
    found = [
        Scaled(case, count, per_second, 1.0, 200.0, 10.0, 0.5)
        for case, first in (("Query", 1000.0), ("Detect", 500.0))
        for count, per_second in ((1, first), (4, first * 3))
    ]
    _, table = text(found)
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert [row[3] for row in rows] == ["1.00", "3.00"] * 2
    assert text([]) == ["Several processes were not measured."]
