"""A service process's connection to the engine."""

from __future__ import annotations

import itertools

import msgspec

from legato_engine.client.monitor import EngineMonitor, EngineState, HangLimits
from legato_engine.client.open_requests import OpenRequests
from legato_engine.client.pending_commands import PendingCommands
from legato_engine.client.recovery import Recovery
from legato_engine.client.refused_requests import RefusedRequests
from legato_engine.client.request_stream import RequestStream, Restage
from legato_engine.client.siblings import Siblings
from legato_engine.client.timeline_watch import TimelineWatch
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request
from legato_engine.errors import (
    Draining,
    EngineLost,
    InvalidField,
    LegatoError,
)
from legato_engine.ipc.commands import (
    Command,
    DropImage,
    Expect,
    HoldImage,
    SetPipelineDepth,
    StopElsewhere,
    WatchTimeline,
)
from legato_engine.ipc.figures import Load
from legato_engine.ipc.latency_policy import LatencyPolicy
from legato_engine.ipc.messages import (
    Delta,
    Done,
    EngineMessage,
    Failed,
    Heartbeat,
    ImageDropped,
    ImageHeld,
    Loading,
    Queued,
    Ready,
    RunningAlone,
    Started,
    Stopped,
    TimelineBatch,
)
from legato_engine.ipc.transport import EngineTransport
from legato_engine.shm.blob_store import BlobStore

_OUTPUTS = (Done, Delta, Failed, Started, Queued)
_READY = EngineState.READY  # looking up a member of an enum is slow


class EngineConnection(EngineMonitor):
    """Sends requests to the running engine and routes its outputs.

    Belongs to one event loop. Owns and discards the blobs of submitted requests. Open requests of a
    lost engine go on with a sibling, or wait for the next engine and go on there (`Recovery`).
    """

    def __init__(
        self,
        namespace: str,
        policy: LatencyPolicy,
        worker: int = 0,
        hang_limits: HangLimits | None = None,
        *,
        number: int = 0,
        device: str = "",
        refused: RefusedRequests | None = None,
    ) -> None:
        """`worker` is the number of this service process; `refused` is shared by its engines."""
        super().__init__(hang_limits, number, device)
        self._worker = worker
        self._commands = PendingCommands(self._send)
        self._command_numbers = itertools.count()
        self._endpoint = ""
        self._transport: EngineTransport | None = None
        self.timeline = TimelineWatch(lambda watching: self._send(WatchTimeline(watching=watching)))
        self.blobs = BlobStore(namespace)
        self.recovery = Recovery(self.blobs, refused)
        self._requests = OpenRequests(number, policy, self.blobs, self.recovery, self._send)
        self.restarts = 0

    # ------------------------------------------------------------ lifecycle

    def connect(self, endpoint: str) -> None:
        """Connect to the sockets in this folder, now and again whenever an engine is lost.

        Raises:
            OSError: nothing listens there.
        """
        self._endpoint = endpoint
        self._transport = EngineTransport(endpoint, self._on_message, self._on_end)
        self._watch_liveness()

    def drain(self) -> None:
        """Refuse new requests and finish the open ones; a lost engine is not restarted."""
        has_engine = self.state not in (EngineState.STARTING, EngineState.LOST)
        if self.state is not EngineState.STOPPED:
            self._set_state(EngineState.DRAINING)
        if not has_engine:
            self._fail_open(Draining("the server is shutting down"))

    async def close(self) -> None:
        """Disconnect; open streams fail with `Draining`. Idempotent."""
        if self.state is EngineState.STOPPED:
            return
        self._set_state(EngineState.STOPPED)
        self._end_watch()
        self._fail_open(Draining("the server is shutting down"))
        self._disconnect()
        self.blobs.close()

    # ------------------------------------------------------------ requests

    @property
    def resumptions(self) -> int:
        """Requests that this process submitted again to another engine."""
        return self.recovery.num_resumptions

    @property
    def num_poisoned(self) -> int:
        """Requests that ended because they had ended engines."""
        return self.recovery.num_poisoned

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def num_answered(self) -> int:
        """Requests that engines ended."""
        return self._requests.num_answered

    @property
    def siblings(self) -> Siblings | None:
        """None: this is the only engine."""
        return self._requests.siblings

    @siblings.setter
    def siblings(self, siblings: Siblings | None) -> None:
        self._requests.siblings = siblings

    def expect(self) -> None:
        """Announce a request, so that both processes poll for it instead of sleeping."""
        if self.state is _READY and self._requests.poll_ahead():
            self._send(Expect())

    def submit(
        self, request: Request, restage: Restage | None = None, *, may_wait: bool = False
    ) -> RequestStream:
        """Send a request and register its stream; its blob is always discarded.

        The blob is in `blobs`. `restage` stages the image again: for another engine, or for one
        that does not have the image it names. With `may_wait` the request waits for an engine.

        Raises:
            EngineStarting: the engine is not ready yet.
            EngineLost: the engine is being restarted.
            Draining: the server is shutting down.
            InvalidField: a request with this id is open.
            Poisoned: the request has ended engines.
        """
        if self._worker:
            key = self._own(request.request_id)
            request = msgspec.structs.replace(request, request_id=key)
        try:
            self._check_open(request.request_id, may_wait=may_wait)
            if self.recovery.refused:
                self.recovery.refused.check(request, self.blobs)
        except LegatoError:
            self._requests.discard_blob(request)
            raise
        stream = self._requests.add(request, restage)
        if self.state is _READY:
            self._requests.send(stream)
        return stream

    def adopt(self, stream: RequestStream, *, renew: bool = True) -> None:
        """Run the request of another engine, from here on with this one's blobs.

        Without `renew` it is sent as it is.
        """
        self._requests.adopt(stream, renew=renew)

    def offer_waiting(self) -> None:
        """Give the requests that wait for this engine to its siblings."""
        self._requests.offer_waiting()

    async def hold(self, command: HoldImage) -> ImageHeld:
        """Have the engine hold an image; its blob is always discarded.

        Cancellation aborts the command, but does not end a hold.

        Raises:
            QuotaExceeded: the owner's quota of bytes is used up.
            InvalidRequest: the image cannot be decoded or is too large.
            LegatoError: as `submit`.
        """
        try:
            command = msgspec.structs.replace(command, request_id=self._own(command.request_id))
            self._check_open(command.request_id)
            held = await self._commands.call(command)
        finally:
            self.blobs.discard(command.image.blob)
        assert isinstance(held, ImageHeld), "the reply to HoldImage is ImageHeld"
        return held

    async def drop(self, command: DropImage) -> None:
        """End the owner's hold on an image.

        Raises:
            ImageNotFound: the owner holds no such image.
            LegatoError: as `submit`.
        """
        key = self._own(command.request_id)
        self._check_open(key)
        await self._commands.call(msgspec.structs.replace(command, request_id=key))

    def set_pipeline_depth(self, depth: int) -> None:
        """From the engine's next step on, until this engine ends."""
        self._send(SetPipelineDepth(depth=depth))

    async def stop_elsewhere(self, target: RequestKey | None = None) -> int:
        """Stop matching requests of other service processes, or all; return how many.

        Raises:
            EngineStarting, EngineLost: there is no engine, or it died before its reply.
        """
        self._check_alive()
        if self._transport is None:
            raise EngineLost("the engine has ended")
        number = next(self._command_numbers)
        key = RequestKey(f"?{number}", worker=self._worker)  # no caller's id holds a `?`
        reply = await self._commands.call(StopElsewhere(request_id=key, target=target))
        assert isinstance(reply, Stopped), "the reply to StopElsewhere is Stopped"
        return reply.count

    def _own(self, key: RequestKey) -> RequestKey:
        return msgspec.structs.replace(key, worker=self._worker)

    def _check_open(self, request_id: RequestKey, *, may_wait: bool = False) -> None:
        if self.state is _READY and request_id not in self._requests:
            return
        if self.state in (EngineState.DRAINING, EngineState.STOPPED):
            raise Draining("the server is shutting down")
        if not may_wait:
            self._check_alive()
        if request_id in self._requests:
            raise InvalidField("a request with this id is running", field="options.request_id")

    def _send(self, command: Command, *, at_once: bool = False) -> None:
        if self._transport is not None:
            self._transport.send(command, at_once=at_once)

    def _fail_open(self, error: LegatoError) -> None:
        self._requests.fail(error)
        self._commands.fail(error)

    # ------------------------------------------------------------ messages

    def _on_message(self, message: EngineMessage) -> None:
        if isinstance(message, _OUTPUTS):  # nearly all
            if not self._requests.feed(message) and isinstance(message, Failed):
                self._commands.resolve(message)
            return
        match message:
            case Heartbeat():
                self._on_heartbeat(message)
            case Loading():
                self._on_loading(message)
            case Ready():
                self._on_ready(message)
                self.timeline.renew()
            case TimelineBatch():
                self.timeline.deliver(message)
            case RunningAlone():
                self.recovery.running_alone(message)
            case ImageHeld() | ImageDropped() | Stopped():
                self._commands.resolve(message)

    def _send_waiting(self) -> None:
        self._requests.send_waiting()

    # ------------------------------------------------------------ loss

    def _on_end(self) -> None:
        self._lose(EngineLost("the engine process died"))

    def _lose(self, error: EngineLost) -> None:
        self._disconnect()
        self.step, self.load, self.estimated_wait = 0, Load(), 0.0
        self.progress = Loading(stage="start", fraction=0.0)
        was_ready = self.state in (_READY, EngineState.HUNG)
        if was_ready or self.state is EngineState.STARTING:
            self._set_state(EngineState.LOST)
        if was_ready:
            self._requests.lost(error)
            self._commands.fail(error)
        elif self.state is not EngineState.LOST:
            self._fail_open(error)
        self.offer_waiting()
        self.blobs.retire_segments()
        if self.state is EngineState.LOST:
            self._reconnect()

    def _reconnect(self) -> None:
        try:
            self.connect(self._endpoint)
        except OSError as error:  # the first service process is gone, and ends this one
            self._log.error("engine_unreachable", error=str(error))
            self._fail_open(EngineLost("the engine cannot be reached"))

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
