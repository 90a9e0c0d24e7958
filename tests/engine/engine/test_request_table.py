"""The table of requests: ids, completion, deadlines and capacity."""

import concurrent.futures
import math
from typing import Any

import pytest
from legato_engine.core.requests import PendingLease, RequestTable, ScheduledRequest
from legato_engine.ipc.messages import HoldImage
from legato_engine.types import BlobRef, EncodedImage, QueryTask, Request, RequestKey

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
        request = Request(request_id=key, task=QueryTask(question="?"))
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
