"""The table of requests, their keys, and suspects that run one at a time."""

import concurrent.futures
import math
import threading
from typing import Any

import pytest
from legato_engine.core.preprocessor import Lazy
from legato_engine.core.quarantine import Quarantine
from legato_engine.core.requests import PendingLease, RequestTable, ScheduledRequest
from legato_engine.ipc.messages import Abort, HoldImage, RunningAlone, Stop, Submit
from legato_engine.types import BlobRef, EncodedImage, QuerySpec, Request, RequestKey, Resumed

A, B = RequestKey("a"), RequestKey("b")
IMAGE = EncodedImage(blob=BlobRef(name="", size=0), mime_type="image/png")


class World:
    """A table that counts its calls of `wake`."""

    def __init__(self):
        self.num_wakes = 0
        self.table = RequestTable(wake=self._wake)

    def _wake(self):
        self.num_wakes += 1

    def lease(self, name, *, tenant="", deadline=math.inf):
        """Add a lease whose image is not prepared yet."""
        key = RequestKey(name, tenant)
        command = HoldImage(request_id=key, image=IMAGE, owner=tenant, ttl=1.0)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        entry = PendingLease(
            request_id=key, tenant=tenant, deadline=deadline, command=command, image=future
        )
        self.table.add(entry)
        return entry

    def scheduled(self, name, *, tenant=""):
        """Add a request that the scheduler has."""
        key = RequestKey(name, tenant)
        request = Request(request_id=key, task=QuerySpec(question="?"))
        entry = ScheduledRequest(request_id=key, tenant=tenant, request=request)
        self.table.add(entry)
        return entry


@pytest.fixture
def world():
    """An empty table."""
    return World()


def test_an_id_has_one_entry(world):
    """A second entry of an id is refused until the first is removed."""
    first = world.lease("a")
    with pytest.raises(AssertionError, match="request id a is in use"):
        world.scheduled("a")
    assert A in world.table
    assert world.table.remove(A) is first
    assert world.table.remove(A) is None
    second = world.scheduled("a")
    assert world.table.get(A) is second
    assert (world.table.count(ScheduledRequest), world.table.count(PendingLease)) == (1, 0)


def test_completed_futures_wake_and_are_returned_once(world):
    """Each completion wakes the loop, and its entry is returned in the order of completion."""
    first, second = world.lease("a"), world.lease("b")
    second.image.set_result("image")
    first.image.set_exception(ValueError())
    assert world.num_wakes == 2
    assert world.table.has_completed
    assert list(world.table.completed()) == [second, first]
    assert not world.table.has_completed
    assert list(world.table.completed()) == []


def test_work_of_a_removed_request_is_dropped(world):
    """It is not returned for a later request of the same id either."""
    removed = world.lease("a")
    world.table.remove(A)
    world.lease("a")
    removed.image.set_result("image")
    assert list(world.table.completed()) == []


def test_entries_expire_once_their_deadline_has_passed(world):
    """`next_deadline` is never later than the first deadline."""
    early, late = world.lease("a", deadline=1.0), world.lease("b", deadline=2.0)
    world.lease("c")
    assert world.table.next_deadline == 1.0
    assert world.table.expired(0.9) == []
    assert world.table.expired(1.0) == [early]
    world.table.remove(A)
    assert world.table.next_deadline == 2.0
    assert world.table.expired(5.0) == [late]
    world.table.remove(B)
    assert world.table.next_deadline == math.inf


def test_scheduled_requests_take_no_place_in_the_queue(world):
    """The scheduler counts them itself."""
    world.lease("a", tenant="x")
    world.scheduled("b", tenant="y")
    world.lease("c", tenant="x")
    assert world.table.queued_tenants() == ["x", "x"]


# ---------------------------------------------------------------- request key

KEYS = {
    "a": RequestKey("a"),
    "a#0": RequestKey("a", part="0"),
    "some/a": RequestKey("a", "some"),
    "some/a#7": RequestKey("a", "some", "7"),
    "a.b:c-d#3.1": RequestKey("a.b:c-d", part="3.1"),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_name_is_the_same_from_every_service_process(name):
    """Tenant, caller's id and part make the name, which seeds derive from; the worker does not."""
    key = KEYS[name]
    from_worker = RequestKey(key.caller_id, key.tenant, key.part, worker=3)
    assert key.name == from_worker.name == name
    assert key != from_worker


def test_the_parts_of_a_call_share_its_key():
    """A call is one request to its caller, however many parts it has."""
    key = RequestKey("a", "shop", worker=1)
    assert {key.with_part(part).call for part in ("", "0", "7.1")} == {key}


def test_a_target_without_a_tenant_means_every_tenants():
    """Part and worker do not matter to an operator."""
    part = RequestKey("a", "shop", "0", worker=1)
    assert part.matches(RequestKey("a"))
    assert part.matches(RequestKey("a", "shop"))
    assert not part.matches(RequestKey("a", "other"))
    assert not part.matches(RequestKey("b", "shop"))
    assert not RequestKey("a").matches(RequestKey("a", "shop"))


# ---------------------------------------------------------------- quarantine
# Suspects run one at a time, and everything else waits.


class Core:
    """An engine that does what the test says."""

    def __init__(self):
        self.idle = True
        self.log = []
        self.quarantine = Quarantine(lambda: self.idle, self.apply, self.announce)

    def apply(self, command):
        """Begin what is submitted."""
        if isinstance(command, Submit):
            self.idle = False
            self.log.append(command.request.request_id.caller_id)
        else:
            self.log.append(f"{type(command).__name__} {command.request_id.caller_id}")

    def announce(self, message):
        """Note it where it was sent."""
        key = message.request_id
        self.log.append(("alone", key and key.caller_id, message.fingerprint, message.is_last))

    def receive(self, *commands):
        """Receive these and step."""
        for command in commands:
            self.quarantine.receive(command)
        self.quarantine.advance()

    def finish(self):
        """End what runs."""
        self.idle = True
        self.quarantine.advance()


def submit(name, resumed=None):
    """A submission."""
    request = Request(request_id=RequestKey(name), task=QuerySpec(question="?"), resumed=resumed)
    return Submit(request=request)


def suspect(name, *, is_last=False):
    """A submission that must run alone."""
    resumed = Resumed(arrival=1.0, alone=True, fingerprint=f"of {name}", is_last=is_last)
    return submit(name, resumed)


def hold(name):
    """An image to hold."""
    image = EncodedImage(blob=BlobRef(name="x", size=1), mime_type="image/png")
    return HoldImage(request_id=RequestKey(name), image=image, owner="me", ttl=1.0)


@pytest.fixture
def core():
    """An idle engine."""
    return Core()


def test_without_suspects_nothing_waits(core):
    """A resumed request that is no suspect is like any other."""
    core.receive(submit("a"), submit("b", Resumed(arrival=1.0)), hold("h"))
    assert core.log == ["a", "b", "HoldImage h"]


def test_suspects_run_one_at_a_time(core):
    """Each is announced before it begins; then what was held back begins in order."""
    core.receive(suspect("a"), submit("b"), suspect("c", is_last=True), hold("h"))
    first = [("alone", "a", "of a", False), "a"]
    assert core.log == first
    assert core.quarantine.num_held == 3
    core.receive(submit("d"))
    assert core.log == first, "nothing begins beside it"
    core.finish()
    second = [("alone", "c", "of c", True), "c"]
    assert core.log == first + second
    core.finish()
    assert core.log == [*first, *second, ("alone", None, "", False), "b", "HoldImage h", "d"]
    core.log.clear()
    core.receive(submit("e"))
    assert core.log == ["e"]


def test_a_suspect_waits_for_what_runs(core):
    """Requests that came before it end first; none begins meanwhile."""
    core.receive(submit("a"))
    core.receive(suspect("b"), submit("c"))
    assert core.log == ["a"]
    core.finish()
    assert core.log == ["a", ("alone", "b", "of b", False), "b"]


def test_waiting_requests_may_end(core):
    """Aborted ones never begin, stopped ones begin and are stopped; those that run get both."""
    core.receive(submit("a"))
    core.receive(suspect("b"), suspect("c"), submit("d"), submit("e"))
    for name in ("b", "d"):
        core.receive(Abort(request_id=RequestKey(name)))
    for name in ("a", "c", "e"):
        core.receive(Stop(request_id=RequestKey(name)))
    assert core.log == ["a", "Stop a"]
    core.finish()
    core.finish()
    assert [each for each in core.log if isinstance(each, str)] == [
        *("a", "Stop a"),
        *("c", "Stop c"),
        *("e", "Stop e"),
    ]
    assert RunningAlone(request_id=None) not in core.log


# ---------------------------------------------------------------- values computed on first use


def test_the_first_thread_computes():
    """A second thread waits for the first, and both get the same value."""
    begun, go = threading.Event(), threading.Event()
    computed: list[object] = []
    got: list[object] = []

    def compute() -> object:
        begun.set()
        assert go.wait(30)
        computed.append(object())
        return computed[-1]

    lazy: Lazy[object] = Lazy(compute)
    threads = [threading.Thread(target=lambda: got.append(lazy.get())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    seen = [lazy.is_computed]
    go.set()
    for thread in threads:
        thread.join()
    assert [*seen, lazy.is_computed] == [False, True]
    assert got == computed * 2


def test_a_failed_computation_is_repeated():
    """An error is raised to the caller of `get`; the next call computes again."""
    lazy = Lazy(iter([7]).__next__)
    nothing: list[int] = []
    late = Lazy(iter(nothing).__next__)
    for _ in range(2):
        with pytest.raises(StopIteration):
            late.get()
        assert lazy.get() == 7
