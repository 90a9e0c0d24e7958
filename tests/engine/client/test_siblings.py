"""Requests that an engine cannot run go to its siblings."""

import pytest
from legato_engine.client.connection import EngineConnection
from legato_engine.client.recovery import SUSPECT
from legato_engine.ipc.latency_policy import SHARED
from legato_engine.shm import new_namespace
from legato_engine.types import EncodedImage, QueryTask, Request, RequestKey


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
    request = Request(request_id=RequestKey(name), task=QueryTask(question="?"), image=image)
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
