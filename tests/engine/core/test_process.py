"""The real engine process with the real client."""

import asyncio
import contextlib
import io
import json
import math
import os
import pathlib
import signal
import subprocess
import sys

import msgspec
import pytest
from legato_engine import failpoints
from legato_engine.client import engine_client
from legato_engine.client.engine_client import EngineClient, EngineLimits
from legato_engine.config import EngineConfig
from legato_engine.errors import ImageUndecodable, PoisonedRequest
from legato_engine.ipc.messages import Done
from legato_engine.telemetry import timeline_path
from legato_engine.types import (
    DetectSpec,
    EncodedImage,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
)
from PIL import Image

from tests.e2e.server import policies

pytestmark = pytest.mark.usefixtures("child_python_path")


CONFIG = EngineConfig(
    model="random-tiny",
    device="cpu",
    threads=1,
    pipeline_depth=2,
    max_running=2,
    heartbeat_interval=0.05,
)

FAILING = """
import sys
from legato_engine.core import process
from legato_engine.core.engine_core import EngineCore
def step(self, real=EngineCore.step):
    if len(self.requests) or not self.scheduler.idle:
        raise RuntimeError("device fault")
    return real(self)
EngineCore.step = step
sys.exit(process.main())
"""

STEP_UNTIL_A_COMMAND = """
import sys
from legato_engine.core import process
from legato_engine.runtime.loops import DecodeLoops
from legato_engine.scheduler.interfaces import LoopPoll
waits = []
def next_outputs(self, slot, end, pause, real=DecodeLoops.next_outputs):
    if waits:
        return real(self, slot, end, pause)
    waits.append(slot)
    while not pause(0.01):
        pass
    return LoopPoll.PENDING
DecodeLoops.next_outputs = next_outputs
sys.exit(process.main())
"""

PARENT = """
import asyncio, sys, time
import msgspec
from legato_engine.client.engine_client import EngineClient
from legato_engine.config import EngineConfig
async def main():
    client = EngineClient(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    await client.start()
    await client.wait_ready()
    print("engine:", client._process.pid, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def running(config=CONFIG, **options):
    """A ready client."""
    client = EngineClient(config, limits=EngineLimits(backoff_first=0.05), **options)
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


def ask(name, image=None, max_tokens=8):
    """Return a detection on an image, or a query."""
    task = DetectSpec(object="cat") if image else QuerySpec(question="hello")
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=RequestKey(name), task=task, image=image, sampling=sampling)


def image(client):
    """Put a small PNG into a blob."""
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(buffer, "PNG")
    return EncodedImage(blob=client.blobs.put(buffer.getvalue()), mime_type="image/png")


def exists(pid):
    """Return whether a process runs and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition):
    """Poll a condition that has no event."""
    while not condition():  # noqa: ASYNC110 - the condition is another process's
        await asyncio.sleep(0.01)


async def test_requests_kill_and_recovery():
    """Requests run, fail alone and go on with the next engine, which gives the same results."""
    async with running() as client:
        assert client.model.name == "random-tiny"
        first = [r async for r in client.submit(ask("a", image(client)))][-1]
        assert isinstance(first, Done)
        broken = EncodedImage(blob=client.blobs.put(b"no image"), mime_type="image/png")
        with pytest.raises(ImageUndecodable):
            [r async for r in client.submit(ask("bad", broken))]
        os.kill(client._process.pid, signal.SIGSTOP)  # so that none is answered before the kill
        streams = [client.submit(ask(f"s{i}", max_tokens=200)) for i in range(4)]
        client._process.kill()
        for stream in streams:
            done = [r async for r in stream][-1]
            assert isinstance(done, Done)
            assert done.resumptions == 1
        again = [r async for r in client.submit(ask("a", image(client)))][-1]
        assert again.result == first.result
        streams = [client.submit(ask(f"s{i}", max_tokens=200)) for i in range(4)]
        for stream in streams:
            stream.abort()
        await until(lambda: client.load.images_cached)
        beat = client.last_heartbeat
        await until(lambda: client.last_heartbeat > beat and _idle(client.load))


def _idle(load):
    return load.running + load.waiting + load.inflight + load.rows_used + load.pages_used == 0


@pytest.fixture
def under_batch():
    """Have processes that this one starts begin under SCHED_BATCH."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.mark.real_start
@pytest.mark.usefixtures("under_batch")
async def test_only_the_service_stops_it(monkeypatch):
    """The engine ignores SIGTERM and SIGINT; after `Shutdown` it exits with code 0.

    With a device it runs under SCHED_OTHER, whatever it was started under.
    """
    monkeypatch.setattr(engine_client, "_SHUTDOWN_GRACE", math.inf)
    async with running() as client:
        process = client._process
        assert policies(process.pid) == {os.SCHED_OTHER}
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(process.pid, number)
        assert isinstance([r async for r in client.submit(ask("a"))][-1], Done)
        await client.close()
        assert await process.wait() == 0


async def test_timeline_on_request():
    """On SIGUSR1 the engine writes its timeline and keeps serving."""
    async with running() as client:
        pid = client._process.pid
        [r async for r in client.submit(ask("a"))]
        os.kill(pid, signal.SIGUSR1)
        path = timeline_path(pid)
        await until(path.exists)
        assert isinstance([r async for r in client.submit(ask("b"))][-1], Done)
        assert json.loads(path.read_text())["traceEvents"]
        path.unlink()


async def test_decode_steps_are_in_the_heartbeat():
    """The last heartbeat of an engine that becomes idle has all of its steps.

    It has the pipeline's depth if that was changed.
    """
    async with running() as client:
        at_first = client.load
        assert at_first.decode_steps is None
        done = [r async for r in client.submit(ask("a", max_tokens=12))][-1]
        assert isinstance(done, Done)
        await until(lambda: client.load.decode_steps is not None and _idle(client.load))
        steps = client.load.decode_steps
        assert steps is not None
        assert 0 < steps.num_steps <= 12
        assert steps.num_tokens == done.usage.output_tokens
        assert steps.rows == 1
        assert min(steps.step_ms, steps.forward_ms, steps.sampling_ms, steps.blocking_ms) > 0
        assert client.load.pipeline_depth == 2
        client.set_pipeline_depth(1)
        await until(lambda: client.load.pipeline_depth == 1)
        assert isinstance([r async for r in client.submit(ask("b"))][-1], Done)


async def test_a_command_is_read_while_a_loop_is_in_a_step():
    """The step ends when another request has come: the engine does not wait for its end first."""
    config = msgspec.structs.replace(CONFIG, decode_path="loop")
    command = (sys.executable, "-c", STEP_UNTIL_A_COMMAND)
    async with running(config, command=command) as client:
        first = asyncio.create_task(_answer(client, ask("a", max_tokens=40)))
        others: list[asyncio.Task[object]] = []
        while not first.done():
            others.append(asyncio.create_task(_answer(client, ask(f"b{len(others)}"))))
            await asyncio.sleep(0.1)
        assert all(isinstance(each, Done) for each in await asyncio.gather(first, *others))


async def _answer(client, request):
    return [r async for r in client.submit(request)][-1]


@pytest.mark.slow
async def test_a_fault_in_a_step_is_fatal():
    """An exception in a step ends the process, not the service; its request is poisoned at last."""
    async with running(command=(sys.executable, "-c", FAILING)) as client:
        process = client._process
        with pytest.raises(PoisonedRequest):
            [r async for r in client.submit(ask("a"))]
        assert await process.wait() == 1
        await client.wait_ready()


def test_engine_dies_with_its_service():
    """When the service is killed, its engine exits."""
    config = msgspec.json.encode(CONFIG).decode()
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, config], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        said = next((line for line in service.stdout if line.startswith("engine:")), None)
        service.kill()
    assert said is not None
    engine = int(said.split()[1])
    asyncio.run(until(lambda: not exists(engine)))


def test_modules_of_the_service_load_no_torch():
    """Modules that the service imports do not import torch."""
    script = (
        "import sys, legato_engine.client.engine_client;"
        "import legato_engine.images.decoding, legato_engine.shm;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.real_start
@pytest.mark.usefixtures("under_batch")
async def test_an_engine_without_a_device_inherits_the_scheduling_policy():
    async with running(msgspec.structs.replace(CONFIG, model="null")) as client:
        assert policies(client._process.pid) == {os.SCHED_BATCH}


async def test_a_slow_image_does_not_make_the_engine_look_stuck(monkeypatch):
    """An image that takes longer than a step may is prepared, not mistaken for a stuck step."""
    monkeypatch.setenv(failpoints.VARIABLE, "decode.begin=sleep(4.5)@1")
    client = EngineClient(CONFIG, limits=EngineLimits(backoff_first=0.05, stuck=3))
    await client.start()
    try:
        await client.wait_ready()
        done = [output async for output in client.submit(ask("a", image(client)))][-1]
        assert isinstance(done, Done)
        assert done.timings.image > 4
        assert client.restarts == 0
    finally:
        await client.close()


async def test_an_engine_that_hangs_in_a_launch_leaves_its_stacks(monkeypatch, tmp_path):
    """It writes them before it is killed."""
    monkeypatch.setenv("LEGATO_FAILPOINTS", "engine.launch=hang@9")
    config = msgspec.structs.replace(CONFIG, crash_folder=str(tmp_path / "crashes"))
    client = EngineClient(config, limits=EngineLimits(stuck=3.0))
    await client.start()
    try:
        await client.wait_ready()
        stream = client.submit(ask("a", max_tokens=200))
        await until(lambda: client.restarts == 1)
        stream.abort()
    finally:
        await client.close()
    (bundle,) = (tmp_path / "crashes").iterdir()
    assert "_hang" in (bundle / "stacks.txt").read_text()
    assert json.loads((bundle / "bundle.json").read_text())["signal"] == "SIGKILL"


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ("", '"event": "one"'),
        ("'info', for_people=True", "one"),
        ("'warning', for_people=True", ""),
        ("'warning'", ""),
    ],
)
def test_logs_are_as_the_service_asks(settings, shown):
    """Logs are JSON, or lines for people, each in place of a progress bar.

    Nothing below the level is shown, the standard library's included.
    """
    program = (
        f"from legato_engine.core.process import configure_logging; configure_logging({settings});"
        "import logging, structlog; structlog.get_logger().info('one', of=2);"
        "logging.getLogger('other').info('one'); structlog.get_logger().error('two')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    start = "\r\x1b[2K" if "for_people" in settings else ""
    lines = done.stderr.decode().rstrip("\n").split("\n")
    assert all(line.startswith(start) for line in lines)
    assert len(lines) == (3 if shown else 1)
    assert all(shown in line for line in lines[:-1])
    assert "two" in lines[-1]
    assert all(("{" in line) == ("for_people" not in settings) for line in lines)
