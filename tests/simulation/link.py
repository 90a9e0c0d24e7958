"""Connections between service processes and the engine, in memory.

A message arrives a random moment after it was sent, in order. What a dying engine had not flushed
is lost, and so are the commands that it had not received; the service then sees the end.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

from legato_engine.ipc.messages import (
    FINAL,
    Abort,
    Command,
    EngineMessage,
    Heartbeat,
    Loading,
    Ready,
    RunningAlone,
    Shutdown,
    Stop,
    Submit,
    decode_command,
    decode_engine_message,
    encode,
)
from legato_engine.types import RequestKey

TICK = 1e-9  # seconds


class Wire:
    """One direction of a connection."""

    def __init__(
        self, chance: random.Random, delay: float, arrived: Callable[[bytes], None]
    ) -> None:
        self._chance = chance
        self._delay = delay  # seconds at most
        self._arrived = arrived
        self._last = 0.0
        self.cut = False

    def send(self, frame: bytes) -> None:
        loop = asyncio.get_running_loop()
        # Timers of one moment have no order.
        now = loop.time()
        self._last = max(self._last + TICK, now + self._chance.uniform(0, self._delay))
        loop.call_at(self._last, self._deliver, frame)

    def _deliver(self, frame: bytes) -> None:
        if not self.cut:
            self._arrived(frame)

    @property
    def last(self) -> float:
        """When the latest message arrives."""
        return self._last


class Network:
    """Where service processes find the engine; one connection waits for each of them."""

    def __init__(self, chance: random.Random, delay: float = 0.002) -> None:
        self.chance = chance
        self.delay = delay
        self.transports: list[SimulatedTransport] = []
        self.engine: EngineEnd | None = None

    def connect(self, transport: SimulatedTransport) -> None:
        self.transports.append(transport)
        if self.engine is not None:
            self.engine.accept(transport)

    def disconnect(self, transport: SimulatedTransport) -> None:
        if transport in self.transports:
            self.transports.remove(transport)
            if self.engine is not None:
                self.engine.lost(transport)


class SimulatedTransport:
    """Has the interface of `EngineTransport`; `endpoint` is the network."""

    def __init__(
        self,
        endpoint: Network,
        on_message: Callable[[EngineMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        self._network = endpoint
        self._on_message = on_message
        self._on_end = on_end
        self._closed = False
        self._commands: Wire | None = None
        self._early: list[bytes] = []  # sent while no engine runs
        self.incoming = Wire(endpoint.chance, endpoint.delay, self._arrived)
        endpoint.connect(self)

    def attach(self, commands: Wire) -> None:
        self._commands = commands
        early, self._early = self._early, []
        for frame in early:
            commands.send(frame)

    def send(self, command: Command, *, at_once: bool = False) -> None:
        if self._closed:
            return
        if self._commands is None:
            self._early.append(encode(command))
        else:
            self._commands.send(encode(command))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.incoming.cut = True
            self._network.disconnect(self)

    def engine_died(self) -> None:
        """End after the messages that are under way."""
        if self in self._network.transports:
            self._network.transports.remove(self)
        loop = asyncio.get_running_loop()
        loop.call_at(max(self.incoming.last + TICK, loop.time()), self._ended)

    def _arrived(self, frame: bytes) -> None:
        if not self._closed:
            self._on_message(decode_engine_message(frame))

    def _ended(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_end()


class EngineEnd:
    """The engine's end of all connections; what `ServiceConnections` does."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._wires: dict[SimulatedTransport, Wire] = {}
        self._commands: deque[tuple[SimulatedTransport, Command]] = deque()
        self._owners: dict[RequestKey, SimulatedTransport] = {}
        self._unsent: list[tuple[SimulatedTransport, bytes]] = []
        self._status: Loading | Ready | None = None
        self.arrived = asyncio.Event()

    def open(self) -> None:
        assert self._network.engine is None, "two engines at once"
        self._network.engine = self
        for transport in list(self._network.transports):
            self.accept(transport)

    def accept(self, transport: SimulatedTransport) -> None:
        network = self._network
        wire = Wire(network.chance, network.delay, lambda frame: self._received(transport, frame))
        self._wires[transport] = wire
        transport.attach(wire)
        if self._status is not None:
            transport.incoming.send(encode(self._status))

    def lost(self, transport: SimulatedTransport) -> None:
        """A service process has gone: its open requests are aborted."""
        wire = self._wires.pop(transport, None)
        if wire is None:
            return
        wire.cut = True
        for key in [key for key, owner in self._owners.items() if owner is transport]:
            del self._owners[key]
            self._commands.append((transport, Abort(request_id=key)))
        self.arrived.set()

    def broadcast(self, message: Loading | Ready | Heartbeat | RunningAlone) -> None:
        if isinstance(message, (Loading, Ready)):
            self._status = message
        for transport in self._wires:
            transport.incoming.send(encode(message))

    def post(self, output: EngineMessage) -> None:
        """Send with the next `flush`."""
        owner = self._owners.get(output.request_id)  # type: ignore[union-attr,arg-type]
        if owner is None:
            return
        self._unsent.append((owner, encode(output)))
        if isinstance(output, FINAL):
            del self._owners[output.request_id]

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for transport, frame in unsent:
            if transport in self._wires:
                transport.incoming.send(frame)

    def receive(self) -> list[Command]:
        commands, self._commands = self._commands, deque()
        self.arrived.clear()
        return [command for _, command in commands if self._register(_, command)]

    def die(self) -> None:
        self._network.engine = None
        for wire in self._wires.values():
            wire.cut = True
        for transport in list(self._wires):
            transport.engine_died()
        self._wires.clear()

    def _register(self, transport: SimulatedTransport, command: Command) -> bool:
        match command:
            case Submit(request=request):
                if transport not in self._wires:
                    return False
                assert request.request_id not in self._owners, "a request id is used twice"
                self._owners[request.request_id] = transport
            case Abort(request_id=request_id):
                self._owners.pop(request_id, None)
            case Stop(request_id=request_id):
                return request_id in self._owners
            case Shutdown():
                return False
        return True

    def _received(self, transport: SimulatedTransport, frame: bytes) -> None:
        self._commands.append((transport, decode_command(frame)))
        self.arrived.set()
