"""`legato trace --server`, `legato metrics` and `legato status` against a fake AdminService."""

from __future__ import annotations

import dataclasses
import json
from concurrent import futures

import grpc
import pytest
from legato.v1 import admin_pb2, admin_pb2_grpc
from legato_client import TimelineSpan, TimelineUpdate
from legato_client._proto import responses as admin_convert
from legato_client.cli import main, trace
from legato_client.cli.trace import SlotView
from legato_engine import telemetry
from legato_engine.ipc.messages import TimelineBatch
from legato_service.convert import responses

from tests.engine.test_telemetry import make_step

STEPS = [make_step(1000 + index, zombies=index % 2) for index in range(6)]


def messages():
    """The steps as the server sends them, three launches a message."""
    maker = telemetry.SpanMaker()
    for first in (0, 3):
        spans = [span for step in STEPS[first : first + 3] for span in maker.spans(step)]
        message = responses.timeline(TimelineBatch(spans=tuple(spans)))
        message.decode_steps.predicted_gain = 0.25
        message.decode_steps.observed_gain = 0.125
        message.engine_started_ns, message.pipeline_depth = 1, 2
        message.lost_launches = 6 if first == 0 else 0
        yield message


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Notes how long a caller watches."""

    seconds = 0.0
    is_idle = False

    def GetLoad(self, request, context):
        engines = [
            admin_pb2.EngineLoad(device="cuda:0", state="serving", running=2, kv_used_ratio=0.5),
            admin_pb2.EngineLoad(device="cuda:1", state="lost", restarts=1),
        ]
        engines[0].estimated_wait.FromMilliseconds(1250)
        return admin_pb2.GetLoadResponse(engine_state="serving", sessions=4, engines=engines)

    def Abort(self, request, context):
        raise NotImplementedError

    Drain = SetPipelineDepth = Abort

    def WatchTimeline(self, request, context):
        self.seconds = request.duration.ToMilliseconds() / 1000
        for message in messages():
            if self.is_idle:
                message.ClearField("spans")
            yield message

    def GetMetrics(self, request, context):
        return admin_pb2.GetMetricsResponse(text="# HELP a b\na 1.0\nc 2.0\n")


@pytest.fixture
def admin():
    """The fake and its address."""
    fake = FakeAdmin()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield fake, f"127.0.0.1:{port}"
    server.stop(None).wait()


def comparable(events):
    """Events in an order of their own, times to a nanosecond."""
    rounded = [
        {key: round(value, 3) if key in ("ts", "dur") else value for key, value in event.items()}
        for event in events
    ]
    return sorted(json.dumps(event, sort_keys=True) for event in rounded)


def test_the_file_is_what_the_engine_itself_would_write(tmp_path, admin, capsys):
    """Spans that travelled give the same events as the engine's own dump, and the gains."""
    fake, address = admin
    path = tmp_path / "trace.json"
    options = ["--server", address, "--seconds", "1.5", "--output", str(path)]
    assert main(["trace", *options]) == 0
    assert fake.seconds == 1.5
    written = json.loads(path.read_text())
    assert written["displayTimeUnit"] == "ms"
    assert comparable(written["traceEvents"]) == comparable(telemetry.trace_events(STEPS))
    assert trace.LANES == telemetry.LANES
    out = capsys.readouterr().out
    assert "6 launches" in out
    assert "+25.0% predicted, +12.5% observed" in out


def test_no_gain_is_told_of_no_launches(tmp_path, admin, capsys):
    """The gains that the server tells are then of launches before."""
    fake, address = admin
    fake.is_idle = True
    assert main(["trace", "--server", address, "--output", str(tmp_path / "trace.json")]) == 0
    out = capsys.readouterr().out
    assert "0 launches in" in out
    assert "nothing ran" in out
    assert "gain over" not in out


def test_json(tmp_path, admin, capsys):
    """`--json` prints one document."""
    path = tmp_path / "trace.json"
    assert main(["trace", f"--server={admin[1]}", "--json", "--output", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["launches"], document["observed_gain"]) == (6, 0.125)


def test_follow(admin, capsys):
    """A line for each slot, the device and the host, with the gains and what was lost."""
    fake, address = admin
    assert main(["trace", "--server", address, "--follow", "--seconds", "3"]) == 0
    assert fake.seconds == 3
    first, second, device, host = capsys.readouterr().out.splitlines()[-4:]
    assert first.startswith("slot 0")
    assert "decode 1004, 2 rows" in first
    assert second.startswith("slot 1")
    assert "decode 1005, 2 rows" in second
    assert "gain +25.0% predicted, +12.5% observed" in device
    assert host.endswith("6 launches lost")


def test_shares_of_a_slot_are_of_the_time_that_passed():
    """Each look begins where the one before ended; another engine is told."""
    view = SlotView()
    spans = [TimelineSpan("slot 0", "held", 1.0, 1.0, 4, "decode", 3, 0, 0)]
    spans += [TimelineSpan("device compute", "forward", 1.0, 0.5, 4, "decode", 3, 0, 0)]
    update = TimelineUpdate(tuple(spans), None, engine_started=1.0, pipeline_depth=2)
    view.add(TimelineUpdate((), None))
    assert view.lines() == []
    view.add(update)
    slot, _, device, host = view.lines()
    assert view.lines() == []
    assert "forward  50%" in slot
    assert "forward  50%" in device
    assert "started again" not in host
    later = [dataclasses.replace(span, start=span.start + 3) for span in spans]
    view.add(dataclasses.replace(update, spans=tuple(later), engine_started=2.0))
    slot, *_, host = view.lines()
    assert "forward  17%" in slot  # half a second of three
    assert host.endswith("started again")


def test_engines_are_processes_of_the_timeline():
    """Lanes and arrows of two engines do not meet, and each has its name."""
    batch = TimelineBatch(spans=tuple(telemetry.SpanMaker().spans(STEPS[0])))
    updates = [admin_convert.timeline(responses.timeline(batch, engine)) for engine in (0, 1)]
    events = trace.trace(span for each in updates for span in each.spans)["traceEvents"]
    names = {
        (each["pid"], each["args"]["name"]) for each in events if each["name"] == "process_name"
    }
    assert names == {(1, "engine-0"), (2, "engine-1")}
    arrows = [
        {each["id"] for each in events if each.get("bp") and each["pid"] == pid} for pid in (1, 2)
    ]
    assert arrows[0]
    assert not arrows[0] & arrows[1]


def test_status(admin, capsys):
    """One line for each engine."""
    assert main(["status", "--server", admin[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "serving, 4 sessions" in lines[0]
    assert [line.split() for line in lines[-2:]] == [
        ["0", "cuda:0", "serving", "2", "0", "1.25", "s", "50%", "0"],
        ["1", "cuda:1", "lost", "0", "0", "-", "0%", "1"],
    ]
    assert main(["status", "--server", admin[1], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["device"] for each in document["load"]["engines"]] == ["cuda:0", "cuda:1"]


def test_metrics(admin, capsys):
    """The text is printed as it is, or the lines that match."""
    assert main(["metrics", "--server", admin[1]]) == 0
    assert capsys.readouterr().out == "# HELP a b\na 1.0\nc 2.0\n"
    assert main(["metrics", "--server", admin[1], "--match", "c "]) == 0
    assert capsys.readouterr().out == "c 2.0\n"


@pytest.mark.parametrize("words", [["metrics"], ["trace", "--seconds", "1"]])
def test_the_operators_socket_is_found(words, tmp_path, admin, monkeypatch):
    """The address that callers use is enough on the server's own host."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def found(server):
        asked.append(server)
        return admin[1]

    monkeypatch.setattr("legato_client.cli.arguments.admin_target", found)
    assert main([*words, "--server", "localhost:1"]) == 0
    assert asked == ["localhost:1"]


def test_a_token_goes_to_the_server_itself(tmp_path, admin, monkeypatch, capsys):
    monkeypatch.setattr("legato_client.cli.arguments.admin_target", lambda _: "localhost:1")
    (tmp_path / "token").write_text("legato_a_secret")
    options = ["--server", admin[1], "--token-file", str(tmp_path / "token")]
    assert main(["metrics", *options]) == 0
