"""Suspects run one at a time, and everything else waits."""

import pytest
from legato_engine.core.quarantine import Quarantine
from legato_engine.ipc.messages import Abort, HoldImage, RunningAlone, Stop, Submit
from legato_engine.types import BlobRef, EncodedImage, QueryTask, Request, RequestKey, Resumed


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
    request = Request(request_id=RequestKey(name), task=QueryTask(question="?"), resumed=resumed)
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
