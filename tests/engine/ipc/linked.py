"""Both ends of links between service processes and an engine, in one process."""

import asyncio
import contextlib
import os

from legato_engine.core import CaptionTask, QueryResult, Request, RequestKey, Timings, Usage
from legato_engine.core import FinishReason as Reason
from legato_engine.ipc.links import Links
from legato_engine.ipc.messages import Done, Loading, Submit
from legato_engine.ipc.subscribers import Subscribers
from legato_engine.ipc.transport import EngineLink, ListeningSockets


class Linked:
    """An engine's end, and the service ends that `knock` made with what they were told."""

    def __init__(self):
        self.doors = ListeningSockets()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.gone: list[str] = []  # namespaces of those who hung up
        self.engine = Links(self.doors.filenos[0], self.wake, on_gone=self.gone.append)
        self.audience = Subscribers(self.doors.filenos[1])
        self.services: list[Service] = []

    def knock(self):
        """A service process that connects."""
        self.services.append(Service(self.doors.endpoint))
        return self.services[-1]

    async def received(self, count=1):
        """The next commands, at least so many."""
        commands: list[object] = []
        while len(commands) < count:
            await asyncio.sleep(0)  # what a turn of the loop asked leaves at its end
            self.engine.wait(1000)
            commands += self.engine.receive()
        return commands

    def close(self):
        """Everything."""
        for service in self.services:
            service.link.close()
        self.engine.close(0)
        self.audience.close()
        self.doors.close()
        os.close(self.wake)


class Service:
    """A service's end, and what it was told."""

    def __init__(self, endpoint):
        self.reports: list[object] = []
        self.ends = 0
        self.link = EngineLink(endpoint, self.reports.append, self._on_end)

    def _on_end(self):
        self.ends += 1

    async def told(self, count):
        """Wait until so many reports came."""
        await until(lambda: len(self.reports) >= count)
        return self.reports

    def submit(self, *names):
        """Ask something under each name."""
        for name in names:
            self.link.send(submit(name))


@contextlib.contextmanager
def linked():
    """For the length of a block within a running loop."""
    ends = Linked()
    try:
        yield ends
    finally:
        ends.close()


async def until(condition):
    """Let the loop run until it holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


def as_key(name):
    """The key of a request of the first service process, or the key that is given."""
    return name if isinstance(name, RequestKey) else RequestKey(name)


def submit(name):
    """A request of this name or key."""
    return Submit(request=Request(request_id=as_key(name), task=CaptionTask()))


def done(name, size=1):
    """Its result."""
    return Done(
        request_id=as_key(name),
        result=QueryResult(answer="x" * size),
        finish_reason=Reason.STOP,
        usage=Usage(input_tokens=1, output_tokens=1),
        timings=Timings(),
    )


def loading(index=0):
    """A status that can be told from others."""
    return Loading(stage="x", fraction=float(index))
