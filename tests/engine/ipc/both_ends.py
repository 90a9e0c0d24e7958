"""Both ends of the connections between service processes and an engine, in one process."""

import asyncio
import contextlib
import os

from legato_engine.ipc.messages import Done, Loading, Submit
from legato_engine.ipc.service_connections import ServiceConnections, Subscribers
from legato_engine.ipc.transport import EngineTransport, ListeningSockets
from legato_engine.types import (
    CaptionSpec,
    QueryOutput,
    Request,
    RequestKey,
    RequestTimings,
    TokenUsage,
)
from legato_engine.types import FinishReason as Reason


class BothEnds:
    """An engine's end, and the service processes' ends that `connect` made."""

    def __init__(self):
        self.listeners = ListeningSockets()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.disconnected: list[str] = []  # namespaces
        self.engine = ServiceConnections(
            self.listeners.filenos[0], self.wake, on_disconnect=self.disconnected.append
        )
        self.subscribers = Subscribers(self.listeners.filenos[1])
        self.services: list[Service] = []

    def connect(self):
        """Connect another service process."""
        self.services.append(Service(self.listeners.endpoint))
        return self.services[-1]

    async def received(self, count=1):
        """Wait for the next commands, at least `count`."""
        commands: list[object] = []
        while len(commands) < count:
            await asyncio.sleep(0)  # commands of a turn of the loop are sent at its end
            self.engine.wait(1000)
            commands += self.engine.receive()
        return commands

    def close(self):
        """Close all sockets."""
        for service in self.services:
            service.transport.close()
        self.engine.close(0)
        self.subscribers.close()
        self.listeners.close()
        os.close(self.wake)


class Service:
    """A service process's end, and the messages that it received."""

    def __init__(self, endpoint):
        self.messages: list[object] = []
        self.ends = 0
        self.transport = EngineTransport(endpoint, self.messages.append, self._on_end)

    def _on_end(self):
        self.ends += 1

    async def received(self, count):
        """Wait for `count` messages in all and return them."""
        await until(lambda: len(self.messages) >= count)
        return self.messages

    def submit(self, *names):
        """Submit a request under each name."""
        for name in names:
            self.transport.send(submit(name))


@contextlib.contextmanager
def both_ends():
    """Connections for the length of a block, within a running loop."""
    ends = BothEnds()
    try:
        yield ends
    finally:
        ends.close()


async def until(condition):
    """Run the loop until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)


def as_key(name):
    """The key of a request of the first service process, or the key that is given."""
    return name if isinstance(name, RequestKey) else RequestKey(name)


def submit(name):
    """A request of this name or key."""
    return Submit(request=Request(request_id=as_key(name), task=CaptionSpec()))


def done(name, size=1):
    """Its result."""
    return Done(
        request_id=as_key(name),
        result=QueryOutput(answer="x" * size),
        finish_reason=Reason.STOP,
        usage=TokenUsage(input_tokens=1, output_tokens=1),
        timings=RequestTimings(),
    )


def loading(index=0):
    """A status that differs by `index`."""
    return Loading(stage="x", fraction=float(index))
