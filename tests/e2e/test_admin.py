"""What an operator stops ends as the contract says, and the engine holds nothing of it."""

import functools

import grpc
import pytest
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, task_pb2

from tests.e2e.scenes import long_query, long_stream, two_shapes
from tests.e2e.server import SLOWLY, Server, failure_of, until
from tests.grammar import check

SCENE = two_shapes()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A server that runs one task at a time, and its operator's socket."""
    folder = tmp_path_factory.mktemp("admin")
    socket = f"unix:{folder}/admin.sock"
    with (
        Server(
            folder, "--max-running", "1", "--admin-listen", socket, environment=SLOWLY
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
    probe = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")
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
