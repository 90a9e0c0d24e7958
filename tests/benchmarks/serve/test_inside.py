"""The service with the null engine in its own process."""

from legato_engine.types import QueryResult, QueryTask, Request, RequestKey

from benchmarks.serve.cases import cases
from benchmarks.serve.contenders import inside_server, recorded
from benchmarks.serve.inside import InsideEngine


def request():
    """Return a question without an image."""
    return Request(request_id=RequestKey("one"), task=QueryTask(question="?"))


async def test_a_request_runs_in_the_event_loop_and_is_forgotten():
    """The same id may then come again."""
    engine = InsideEngine()
    for _ in range(2):
        stream = engine.submit(request())
        assert engine.num_open == 1
        done = await stream.done()
        assert isinstance(done.result, QueryResult)
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
