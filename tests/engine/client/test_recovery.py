"""Lost engines: signs of life, restarts, siblings, and requests that ended engines."""

import asyncio
import pathlib
import signal
import sys
import tempfile
import time

import msgspec
import pytest
from legato_engine.client import monitor, recovery
from legato_engine.client.connection import EngineConnection
from legato_engine.client.engine_client import ChildProcess, RestartBackoff
from legato_engine.client.monitor import TICK, Liveness
from legato_engine.client.recovery import SUSPECT, RefusedRequests, fingerprint
from legato_engine.errors import PoisonedRequest
from legato_engine.images.decoding import content_key, image_id
from legato_engine.ipc.latency_policy import SHARED
from legato_engine.ipc.messages import Heartbeat, SchedulerLoad
from legato_engine.shm import BlobStore, new_namespace
from legato_engine.types import (
    CachedImageRef,
    DetectSpec,
    EncodedImage,
    PixelFormat,
    QuerySpec,
    RawImage,
    Request,
    RequestKey,
    SamplingParams,
)

# ---------------------------------------------------------------- liveness
# Signs of life are missed only while this process could have seen them.


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(monitor, "time", made)
    return made


def beat(step=0, **load):
    """A heartbeat."""
    return Heartbeat(step=step, load=SchedulerLoad(**load), estimated_wait=0.0)


def test_silence_grows_until_a_heartbeat(clock):
    """By the time between two ticks."""
    seen = Liveness()
    for _ in range(10):
        clock.now += TICK
        seen.tick()
    assert seen.silent == pytest.approx(10 * TICK)
    seen.record_heartbeat(beat())
    assert seen.silent == 0


def test_a_pause_of_this_process_is_no_silence(clock):
    """However long it was stopped, one gap counts as two ticks."""
    seen = Liveness()
    clock.now += 90
    seen.tick()
    assert seen.silent == seen.unmoved == pytest.approx(2 * TICK)


def test_an_engine_with_work_must_step(clock):
    """Without one it counts as unmoved, heartbeats or not; an idle one may rest."""
    seen = Liveness()
    for _ in range(10):
        clock.now += TICK
        seen.tick()
        seen.record_heartbeat(beat(step=1, waiting=1))
    assert seen.silent == 0
    assert seen.unmoved == pytest.approx(9 * TICK)
    seen.record_heartbeat(beat(step=2, waiting=1))
    assert seen.unmoved == 0
    clock.now += TICK
    seen.tick()
    seen.record_heartbeat(beat(step=2))
    assert seen.unmoved == 0


# ---------------------------------------------------------------- supervisor
# Restart delays and the child process.


def delays(backoff, count, **how):
    """The delays after as many deaths of this kind."""
    return [backoff.delay(**{"ready": False, "served": False, **how}) for _ in range(count)]


def test_a_process_that_never_got_ready_is_restarted_ever_later():
    """Every crash doubles the delay up to the cap."""
    assert delays(RestartBackoff(first=1, cap=5, ready_cap=2), 5) == [1, 2, 4, 5, 5]


def test_a_process_that_got_ready_and_served_nothing_is_restarted_a_little_later():
    """Up to a lower cap: it starts well."""
    backoff = RestartBackoff(first=1, cap=50, ready_cap=3)
    assert delays(backoff, 4, ready=True) == [1, 2, 3, 3]
    assert delays(backoff, 2) == [6, 12]
    assert delays(backoff, 1, ready=True) == [3]


def test_a_process_that_served_is_restarted_at_once():
    """However often it dies; and the delays start over."""
    backoff = RestartBackoff(first=1, cap=5, ready_cap=2)
    assert delays(backoff, 3) == [1, 2, 4]
    assert delays(backoff, 100, ready=True, served=True) == [0] * 100
    assert delays(backoff, 1) == [1]


async def test_kill_takes_the_whole_group():
    """Children of the engine are killed with it."""
    script = "import subprocess,sys; p=subprocess.Popen(['sleep','60']); p.wait()"
    process = await ChildProcess.spawn([sys.executable, "-c", script])
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert not process.alive
    process.kill()  # again, with no process left


async def test_a_process_that_is_asked_for_its_stacks_goes_on():
    """It writes them and lives."""
    script = (
        "import faulthandler,signal,sys,time; faulthandler.register(signal.SIGUSR2);"
        "sys.stdin.close(); open(sys.argv[1], 'w').close(); time.sleep(60)"
    )
    with tempfile.TemporaryDirectory() as folder:
        mark = pathlib.Path(folder) / "mark"
        process = await ChildProcess.spawn([sys.executable, "-c", script, str(mark)])
        while not mark.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        process.dump_stacks()
        await process.wait_at_most(0.2)
        assert process.alive
        assert process.bytes_read() > 0
        process.kill()
        await process.wait()
        process.dump_stacks()  # without effect


# ---------------------------------------------------------------- siblings
# Requests that an engine cannot run go to its siblings.


class FakeSiblings:
    """Takes requests while it `serves`."""

    def __init__(self):
        self.serves = True
        self.taken = []

    def take_over(self, stream):
        if self.serves:
            self.taken.append(stream.request_id.caller_id)
        return self.serves

    def find_image(self, stream):
        return False

    def record_image(self, stream, output, number):
        pass


@pytest.fixture
def connection():
    """To an engine that is not ready."""
    made = EngineConnection(new_namespace(), SHARED)
    made.siblings = FakeSiblings()
    yield made
    made.blobs.close()


def waiting(connection, name, restage=None, image=None):
    request = Request(request_id=RequestKey(name), task=QuerySpec(question="?"), image=image)
    return connection.submit(request, restage, may_wait=True)


def test_those_that_wait_are_offered_in_their_order(connection):
    """A suspect stays, and so does one whose image cannot be staged again."""
    image = EncodedImage(blob=connection.blobs.put(b"image"), mime_type="image/png")
    waiting(connection, "first")
    waiting(connection, "suspect").resumptions = SUSPECT
    waiting(connection, "bytes gone", image=image)
    waiting(connection, "last")
    connection.offer_waiting()
    assert connection.siblings.taken == ["first", "last"]
    assert connection.num_open == 2


def test_an_offered_image_leaves_no_blob(connection):
    """The sibling stages its own."""

    def stage(blobs):
        return EncodedImage(blob=blobs.put(b"image"), mime_type="image/png")

    waiting(connection, "a", stage, stage(connection.blobs))
    assert len(connection.blobs) == 1
    connection.offer_waiting()
    assert connection.siblings.taken == ["a"]
    assert len(connection.blobs) == 0


def test_they_go_on_waiting_while_no_sibling_serves(connection):
    """None is lost."""
    connection.siblings.serves = False
    waiting(connection, "a")
    connection.offer_waiting()
    assert connection.num_open == 1
    connection.siblings.serves = True
    connection.offer_waiting()
    assert (connection.siblings.taken, connection.num_open) == (["a"], 0)


# ---------------------------------------------------------------- refused requests
# Requests that ended engines are known again by their content.

SIZES = pytest.mark.parametrize("size", [10, 5_000_000], ids=["segment", "file"])


@pytest.fixture
def blobs():
    """A store of blobs."""
    store = BlobStore(new_namespace())
    yield store
    store.close()


def request(blobs, data=b"picture", **fields):
    """A request with an image of these bytes."""
    image = EncodedImage(blob=blobs.put(data), mime_type="image/png")
    made = Request(request_id=RequestKey("a"), task=QuerySpec(question="?"), image=image)
    return msgspec.structs.replace(made, **fields)


@SIZES
def test_the_same_content_is_refused(blobs, size):
    """Whatever its id; other words, sampling, adapter or image pass."""
    refused = RefusedRequests()
    data = b"x" * size
    refused.add(fingerprint(request(blobs, data), blobs))
    with pytest.raises(PoisonedRequest):
        refused.check(request(blobs, data, request_id=RequestKey("b")), blobs)
    named = CachedImageRef(image_id=image_id(content_key(data)))
    with pytest.raises(PoisonedRequest):
        refused.check(request(blobs, data, image=named), blobs)
    refused.check(request(blobs, data + b"y"), blobs)
    refused.check(request(blobs, data, task=QuerySpec(question="!")), blobs)
    refused.check(request(blobs, data, task=DetectSpec(object="?")), blobs)
    refused.check(request(blobs, data, sampling=SamplingParams(max_tokens=3)), blobs)
    refused.check(request(blobs, data, adapter="a"), blobs)
    refused.check(request(blobs, data, image=None), blobs)


def test_raw_pixels_differ_by_their_layout(blobs):
    """The same bytes in another layout are another image."""
    refused = RefusedRequests()

    def raw(width):
        return RawImage(
            blob=blobs.put(b"x" * 12), width=width, height=1, row_stride=6, format=PixelFormat.RGB8
        )

    refused.add(fingerprint(request(blobs, image=raw(2)), blobs))
    with pytest.raises(PoisonedRequest):
        refused.check(request(blobs, image=raw(2)), blobs)
    refused.check(request(blobs, image=raw(1)), blobs)


def test_it_is_refused_for_a_while(blobs, monkeypatch):
    """After that the request is tried again."""
    refused = RefusedRequests()
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    refused.add(fingerprint(request(blobs), blobs))
    now[0] += recovery.REFUSAL - 1
    with pytest.raises(PoisonedRequest):
        refused.check(request(blobs), blobs)
    now[0] += 2
    refused.check(request(blobs), blobs)
    assert len(refused) == 0
