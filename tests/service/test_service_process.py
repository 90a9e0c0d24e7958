"""The service process as its supervisor sees it: logs, signals, probes, exit codes."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, task_pb2
from legato_engine.client.monitor import EngineState
from legato_service import probe

from tests.e2e.server import children
from tests.service.access.credentials import HOST, Authority, Files
from tests.service.fakes import FakeEngine
from tests.service.harness import refusal, running

TASK = task_pb2.Task(query=task_pb2.QueryTask(question="wait"))
STREAM = inference_pb2.GenerateRequest(task=TASK)
ENGINE = "tests.service.fake_process"
STILLBORN = "tests.service.fakes"  # a module that exits at once
INFERENCE = "legato.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
HANGS_AFTER = 60.0  # seconds; the slowest test takes a tenth of it
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Process:
    """A service process and its log lines so far."""

    def __init__(self, process):
        self.process = process
        self.lines = []
        self._passed = []  # read while waiting for another event

    async def line(self, event):
        """Return the next log line of this event; fail if the process ends without it.

        Lines of different events are in no order, because each process writes its own.
        """
        for line in self._passed:
            if line["event"] == event:
                self._passed.remove(line)
                return line
        while data := await self.process.stderr.readline():
            line = json.loads(data)
            self.lines.append(line)
            if line["event"] == event:
                return line
            self._passed.append(line)
        raise AssertionError(f"no {event} in {self.lines}")

    async def code(self):
        """Read the rest of the log and return the exit code."""
        self.lines += [json.loads(line) for line in (await self.process.stderr.read()).splitlines()]
        return await self.process.wait()

    async def explain(self):
        """Print the log, and the stacks of the process and its children, which abort."""
        first = self.process.pid
        for pid in (*children(first), first):
            os.kill(pid, signal.SIGABRT)
        sys.stdout.writelines(f"{line}\n" for line in self.lines)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                sys.stdout.write((await self.process.stderr.read()).decode())


@contextlib.asynccontextmanager
async def service(*arguments, engine=ENGINE):
    """A running service process on a free port.

    A test that hangs is ended and shows the stacks of the processes.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.service.fake_service", engine),
        *("--listen", "127.0.0.1:0", "--admin-listen", "same", *arguments),
        env=ENVIRONMENT,
        stderr=asyncio.subprocess.PIPE,
    )
    running = Process(process)
    try:
        async with asyncio.timeout(HANGS_AFTER):
            yield running
    except TimeoutError:
        await running.explain()
        raise
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if process.stderr is not None:
            await process.stderr.read()  # until all its children have closed it


def stub(channel):
    """The inference service of a channel."""
    return inference_pb2_grpc.InferenceServiceStub(channel)


def connection(address):
    """A channel with a connection of its own, which may be to any process."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def health(channel: Any) -> Any:
    """The health service of a channel."""
    return health_pb2_grpc.HealthStub(channel)


def question(text):
    """A question to the fake engine."""
    return inference_pb2.QueryRequest(question=text)


@pytest.mark.real_start
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_0(number):
    """The first signal refuses new calls, aborts those that outlast the grace, and exits 0."""
    for grace in ("0.5", "5", "50"):  # a longer one where a new call came when it was over
        async with service("--drain-grace", grace) as running:
            address = (await running.line("ready"))["address"]
            async with grpc.aio.insecure_channel(address) as channel:
                assert (await stub(channel).Query(question("hello"))).answer == "hello"
                waiting = stub(channel).Generate(STREAM)
                assert (await waiting.read()).HasField("started")
                running.process.send_signal(number)
                assert (await running.line("drain_begun"))["in_flight"] == 1
                late = await refusal(stub(channel).Query(question("late")))
                assert (await refusal(waiting.read())).code is grpc.StatusCode.UNAVAILABLE
            assert await running.code() == 0
        assert running.lines[-1]["event"] == "stopped"
        if late.reason == "DRAINING":
            break
    assert late.reason == "DRAINING"


async def test_a_second_signal_ends_the_drain():
    """It ends at once; the exit code names the signal."""
    async with service("--drain-grace", "600") as running:
        address = (await running.line("ready"))["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            waiting = stub(channel).Generate(STREAM)
            assert (await waiting.read()).HasField("started")
            running.process.send_signal(signal.SIGTERM)
            await running.line("drain_begun")
            running.process.send_signal(signal.SIGINT)
            assert await running.code() == 128 + signal.SIGINT
            waiting.cancel()


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_delayed_drain_serves_new_connections(processes):
    """Every process is not ready but alive, and serves."""
    async with service("--drain-delay", "600", "--processes", processes) as running:
        address = (await running.line("ready"))["address"]
        running.process.send_signal(signal.SIGTERM)
        assert (await running.line("drain_delayed"))["seconds"] == 600
        for _ in range(16):  # connections, of both processes
            async with connection(address) as channel:
                request = health_pb2.HealthCheckRequest(service=INFERENCE)
                async for each in health(channel).Watch(request):
                    if each.status == NOT_SERVING:  # the worker is told a moment later
                        break
                alive = await health(channel).Check(health_pb2.HealthCheckRequest())
                assert alive.status == SERVING
                assert (await stub(channel).Query(question("hello"))).answer == "hello"


async def test_a_drain_begins_after_its_delay():
    """By itself, without another signal."""
    async with service("--drain-delay", "0.1", "--drain-grace", "60") as running:
        await running.line("ready")
        running.process.send_signal(signal.SIGTERM)
        await running.line("drain_delayed")
        await running.line("drain_begun")
        assert await running.code() == 0


async def test_a_second_signal_skips_the_delay():
    """The drain begins at once with its whole grace, and a third signal ends it."""
    async with service("--drain-delay", "600", "--drain-grace", "600") as running:
        address = (await running.line("ready"))["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            waiting = stub(channel).Generate(STREAM)
            assert (await waiting.read()).HasField("started")
            running.process.send_signal(signal.SIGTERM)
            await running.line("drain_delayed")
            running.process.send_signal(signal.SIGTERM)
            assert 590 < (await running.line("drain_begun"))["grace"] <= 600
            running.process.send_signal(signal.SIGINT)
            assert await running.code() == 128 + signal.SIGINT
            waiting.cancel()


async def test_an_operators_drain_ends_the_delay():
    """It begins at once, and the next signal ends it."""
    async with service("--drain-delay", "600", "--drain-grace", "600") as running:
        address = (await running.line("ready"))["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            waiting = stub(channel).Generate(STREAM)
            assert (await waiting.read()).HasField("started")
            running.process.send_signal(signal.SIGTERM)
            await running.line("drain_delayed")
            await admin(channel).Drain(drain_in(600))
            await running.line("drain_begun")  # of the operator
            await running.line("drain_begun")  # of the signal, whose delay has ended
            running.process.send_signal(signal.SIGINT)
            assert await running.code() == 128 + signal.SIGINT
            waiting.cancel()


async def test_a_signal_while_the_model_loads_exits_0():
    """The process need not be ready, and then has no delay."""
    async with service("--drain-delay", "600", engine=STILLBORN) as running:
        await running.line("loading")
        running.process.send_signal(signal.SIGTERM)
        assert await running.code() == 0


async def test_an_engine_that_never_gets_ready_fails_the_start():
    """The process exits with code 1 after several attempts."""
    async with service(engine=STILLBORN) as running:
        await running.line("engine_never_ready")
        assert await running.code() == 1


def admin(channel):
    """The admin service of a channel."""
    return admin_pb2_grpc.AdminServiceStub(channel)


def drain_in(seconds):
    """A Drain with this grace."""
    return admin_pb2.DrainRequest(grace=duration_pb2.Duration(seconds=seconds))


async def test_an_operators_drain_ends_the_process():
    """As after SIGTERM, the process exits 0 when no request is open."""
    async with service() as running:
        address = (await running.line("ready"))["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            waiting = stub(channel).Generate(STREAM)
            assert (await waiting.read()).HasField("started")
            await admin(channel).Drain(drain_in(600))
            assert (
                590 < (await running.line("drain_begun"))["grace"] <= 600
            )  # the rest of the grace
            assert (await refusal(stub(channel).Query(question("hello")))).reason == "DRAINING"
            waiting.cancel()
            assert await running.code() == 0


async def test_a_signal_shortens_an_operators_drain():
    """The first signal applies the server's own grace."""
    async with service("--drain-grace", "0.2") as running:
        address = (await running.line("ready"))["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            waiting = stub(channel).Generate(STREAM)
            assert (await waiting.read()).HasField("started")
            await admin(channel).Drain(drain_in(600))
            await running.line("drain_begun")
            running.process.send_signal(signal.SIGTERM)
            assert (await running.line("drain_begun"))["grace"] <= 0.2
            assert await running.code() == 0


async def test_a_listener_that_all_can_use_is_warned_of():
    """Once for the lack of credentials and once for that of TLS."""
    options = ("--listen", "0.0.0.0:0", "--insecure", "--admin-listen", "off")
    async with service(*options) as running:
        for event in ("unauthenticated_listener", "unencrypted_listener"):
            assert (await running.line(event))["address"].startswith("0.0.0.0:")
        await running.line("ready")
        assert "--admin-listen" in (await running.line("admin_disabled"))["reason"]


@pytest.mark.parametrize("option", ["--tokens", "--tls-cert"])
async def test_files_that_cannot_be_used_fail_the_start(tmp_path, option):
    """The exit code is 1, and one log line tells the reason."""
    file = tmp_path / "file"
    file.write_text("nothing")
    options = [option, str(file)]
    if option == "--tls-cert":
        options += ["--tls-key", str(file)]
    async with service(*options) as running:
        assert str(file) in (await running.line("configuration_rejected"))["reason"]
        assert await running.code() == 1


async def test_the_admin_address_is_logged(tmp_path):
    """Also of a unix socket."""
    async with service("--admin-listen", f"unix:{tmp_path}/admin.sock") as running:
        assert (await running.line("admin_listening"))["address"] == f"unix:{tmp_path}/admin.sock"


async def test_a_taken_port_fails_the_start():
    """The exit code is 1, and a log line names the address."""
    async with service() as first:
        address = (await first.line("ready"))["address"]
        async with service("--listen", address) as second:
            assert (await second.line("listen_failed"))["listen"] == address
            assert await second.code() == 1


def test_the_service_loads_no_torch():
    """So that it starts fast and stays small."""
    modules = "legato_service.__main__, legato_service.process"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)


def test_help_names_every_option():
    """`--help` lists the options."""
    shown = subprocess.run(
        [sys.executable, "-m", "legato_service", "--help"],
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for option in ("--listen", "--weights", "--pipeline-depth", "--drain-grace", "--insecure"):
        assert option in shown


@pytest.mark.real_start
@pytest.mark.parametrize(("level", "ready"), [("info", True), ("warning", False)])
def test_engines_log_as_the_service_does(level, ready):
    """On a terminal no line is JSON, and below `--log-level` no engine says anything."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "legato_service", "--model", "null", "--log-level", level]
    command += ["--listen", "127.0.0.1:0", "--admin-listen", "off"]
    with subprocess.Popen(command, stdout=end, stderr=end, stdin=end) as process:
        os.close(end)
        said = _until(terminal, b"legato detect")
        process.send_signal(signal.SIGTERM)
        said += _until(terminal, None)
    os.close(terminal)
    assert process.returncode == 0
    assert not [line for line in said.splitlines() if line.startswith(b"{")]
    assert (b"engine_ready" in said) == ready


def _until(terminal, text):
    """Read a terminal until `text` came, or its other end is closed."""
    said = b""
    while text is None or text not in said:
        try:
            said += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    return said


# ---------------------------------------------------------------- the probe of containers


def probed(*options):
    """Its exit code, from another thread, because the server runs in this one."""
    return asyncio.to_thread(probe.main, ["--timeout", "20", *options])


async def test_exit_codes_follow_the_health(capsys):
    """0 for SERVING, 1 for NOT_SERVING or an unknown service; the process is alive throughout."""
    engine = FakeEngine()
    async with running(engine) as server:
        for state, expected in ((EngineState.READY, 0), (EngineState.LOST, 1)):
            engine.become(state)
            ready = await probed("--address", f"127.0.0.1:{server.port}", "--service", INFERENCE)
            alive = await probed("--address", f"127.0.0.1:{server.port}")
            assert (ready, alive) == (expected, 0)
        assert await probed("--address", f"127.0.0.1:{server.port}", "--service", "nobody") == 1
    assert "\nNOT_SERVING\n" in capsys.readouterr().out


async def test_no_answer_is_a_failure_of_its_own(capsys):
    """A closed port is 3, and the output names the address."""
    assert await asyncio.to_thread(probe.main, ["--address", "127.0.0.1:9", "--timeout", "1"]) == 3
    assert "127.0.0.1:9" in capsys.readouterr().out


async def test_a_listener_with_tls_and_certificates_of_clients(tmp_path):
    """With its files a probe is answered; without TLS, or a certificate of its own, it is not."""
    authority = Authority()
    files = Files(tmp_path, authority.server(), authority.pem)
    own = authority.client("probe.example")
    (tmp_path / "own.pem").write_bytes(own.chain)
    (tmp_path / "own.key").write_bytes(own.key)
    settings: dict[str, Any] = {**files.settings}
    async with running(**settings) as server:
        trusting = ["--address", f"127.0.0.1:{server.port}", "--ca", str(files.ca)]
        certified = ["--cert", str(tmp_path / "own.pem"), "--key", str(tmp_path / "own.key")]
        assert await probed(*trusting, *certified, "--server-name", HOST) == 0
        assert await probed(*trusting[:2], "--timeout", "1") == 3
        assert await probed(*trusting, "--timeout", "1") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "here"], "--address takes HOST:PORT"),
        (["--cert", "cert.pem"], "--cert and --key"),
        (["--timeout", "0"], "--timeout must be positive"),
        (["--ca", "missing.pem"], "missing.pem"),
    ],
)
def test_wrong_options(options, message, capsys):
    """They are exit code 2 and name the option or the file."""
    with pytest.raises(SystemExit) as caught:
        probe.main(options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
