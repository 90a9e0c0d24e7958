"""A service process's connection to the engine, with its open requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

import msgspec

from legato_engine.client.monitor import EngineMonitor, EngineState, HangLimits
from legato_engine.client.recovery import SUSPECT, Recovery, RefusedRequests, can_resume
from legato_engine.client.request_stream import RequestStream, Restage, StreamOutput
from legato_engine.client.timeline_watch import TimelineWatch
from legato_engine.errors import (
    Draining,
    EngineLost,
    ImageNotFound,
    InvalidField,
    LegatoError,
    from_value,
)
from legato_engine.ipc.latency_policy import (
    EXPECTED_REQUEST,
    SHORT_REQUEST,
    BusyPoll,
    LatencyPolicy,
)
from legato_engine.ipc.messages import (
    Abort,
    Command,
    Done,
    DropImage,
    EngineMessage,
    Expect,
    Failed,
    Heartbeat,
    HoldImage,
    ImageDropped,
    ImageHeld,
    Loading,
    OutputDelta,
    PrefillStarted,
    QueuePosition,
    Ready,
    RunningAlone,
    SchedulerLoad,
    SetPipelineDepth,
    Stop,
    StopElsewhere,
    StoppedCalls,
    Submit,
    TimelineBatch,
    WatchTimeline,
)
from legato_engine.ipc.transport import EngineTransport
from legato_engine.shm import BlobStore
from legato_engine.types import CachedImageRef, Request, RequestKey

RepliedCommand = HoldImage | DropImage | StopElsewhere
Reply = ImageHeld | ImageDropped | StoppedCalls


class PendingCommands:
    """Commands without a reply; belongs to one event loop."""

    def __init__(self, send: Callable[[RepliedCommand | Abort], None]) -> None:
        self._send = send
        self._replies: dict[RequestKey, asyncio.Future[Reply]] = {}

    def __len__(self) -> int:
        return len(self._replies)

    async def call(self, command: RepliedCommand) -> Reply:
        """Send `command` and return its reply; abort it in the engine on cancellation.

        Nothing is awaited before the command is sent.

        Raises:
            LegatoError: the error of `Failed`, or of `fail`.
        """
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[command.request_id] = reply
        self._send(command)
        try:
            return await reply
        except asyncio.CancelledError:
            self._send(Abort(request_id=command.request_id))
            raise
        finally:
            del self._replies[command.request_id]
            del reply  # a failed future references the traceback and so this frame

    def resolve(self, output: Reply | Failed) -> None:
        """Deliver a reply; drop it if its caller is gone."""
        reply = self._replies.get(output.request_id)
        if reply is None or reply.done():
            return
        if isinstance(output, Failed):
            reply.set_exception(from_value(output.error))
        else:
            reply.set_result(output)

    def fail(self, error: LegatoError) -> None:
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)


# ---------------------------------------------------------------- siblings


class Siblings(Protocol):
    """Sibling engines, which accept requests that an engine cannot run."""

    def take_over(self, stream: RequestStream) -> bool:
        """Have another engine run an unsent request; return False if none serves."""

    def find_image(self, stream: RequestStream) -> bool:
        """Have an engine run a request whose image the `searched` ones lack.

        Return False if none is left.
        """

    def record_image(
        self, stream: RequestStream, output: PrefillStarted | Done, number: int
    ) -> None:
        """Record that engine `number` has a request's image, as its output says."""


# ---------------------------------------------------------------- connection

_OUTPUTS = (Done, OutputDelta, Failed, PrefillStarted, QueuePosition)
_READY = EngineState.READY  # looking up a member of an enum is slow


class EngineConnection(EngineMonitor):
    """Connection that sends requests to the running engine and routes its outputs.

    Belongs to one event loop. Owns and discards the blobs of submitted requests. Requests that the
    engine cannot run go to a sibling. So do open requests of a lost engine, or they wait for the
    next engine and resume there (`Recovery`).
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
        """Create a connection.

        `worker` is the number of this service process; `refused` is shared by its engines.
        """
        super().__init__(hang_limits, number, device)
        self._worker = worker
        self._sends_at_once, self._polls = policy.send_at_once, policy.busy_poll
        self._busy_poll = BusyPoll()
        self._streams: dict[RequestKey, RequestStream] = {}  # open requests
        self._commands = PendingCommands(self._send)
        self._command_numbers = itertools.count()
        self._endpoint = ""
        self._transport: EngineTransport | None = None
        self.timeline = TimelineWatch(lambda watching: self._send(WatchTimeline(watching=watching)))
        self.blobs = BlobStore(namespace)
        self.recovery = Recovery(self.blobs, refused)
        self.siblings: Siblings | None = None  # None if this is the only engine
        self.num_answered = 0  # requests with a last output
        self.restarts = 0

    # ------------------------------------------------------------ lifecycle

    def connect(self, endpoint: str) -> None:
        """Connect to the sockets in this folder; reconnect whenever an engine is lost.

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
        return self.recovery.num_resumptions

    @property
    def num_poisoned(self) -> int:
        return self.recovery.num_poisoned

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def expect(self) -> None:
        """Announce a request: both processes poll for it instead of sleeping."""
        if self.state is _READY and self._polls and not self._streams:
            self._busy_poll.extend(EXPECTED_REQUEST)
            self._send(Expect())

    def submit(
        self, request: Request, restage: Restage | None = None, *, may_wait: bool = False
    ) -> RequestStream:
        """Send a request and register its stream; its blobs are always discarded.

        The blobs are in `blobs`. `restage` stages the images again: for another engine, or for one
        that does not have an image it names. With `may_wait` the request waits for an engine.

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
            self._discard_blobs(request)
            raise
        stream = RequestStream(request, self._on_abort, self._on_stop, restage)
        self._streams[request.request_id] = stream
        if self.state is _READY:
            self._send_first(stream)
        return stream

    def _send_first(self, stream: RequestStream) -> None:
        """Send a request for the first time.

        A lone one leaves a turn earlier, and so may one without progress, because its call has no
        other.
        """
        stream.is_sent = True
        request = stream.request
        lone = len(self._streams) == 1
        quick = self._sends_at_once and not request.progress
        self._send(Submit(request=request), at_once=lone or quick)
        if not lone:
            self._busy_poll.end()
        elif self._polls:
            self._busy_poll.extend(SHORT_REQUEST)

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
        """Set the pipeline depth from the engine's next step until it ends."""
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
        assert isinstance(reply, StoppedCalls), "the reply to StopElsewhere is Stopped"
        return reply.count

    def _own(self, key: RequestKey) -> RequestKey:
        return msgspec.structs.replace(key, worker=self._worker)

    def _check_open(self, request_id: RequestKey, *, may_wait: bool = False) -> None:
        if self.state is _READY and request_id not in self._streams:
            return
        if self.state in (EngineState.DRAINING, EngineState.STOPPED):
            raise Draining("the server is shutting down")
        if not may_wait:
            self._check_alive()
        if request_id in self._streams:
            raise InvalidField("a request with this id is running", field="options.request_id")

    def _send(self, command: Command, *, at_once: bool = False) -> None:
        if self._transport is not None:
            self._transport.send(command, at_once=at_once)

    def _fail_open(self, error: LegatoError) -> None:
        for stream in list(self._streams.values()):
            self._fail(stream, error)
        self._commands.fail(error)

    # ------------------------------------------------------------ messages

    def _on_message(self, message: EngineMessage) -> None:
        if isinstance(message, _OUTPUTS):  # the usual case
            if not self._feed(message) and isinstance(message, Failed):
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
                self.recovery.set_running_alone(message)
            case ImageHeld() | ImageDropped() | StoppedCalls():
                self._commands.resolve(message)

    def _feed(self, output: StreamOutput | Failed) -> bool:
        """Deliver an output; return False if its request is not open."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return False
        if isinstance(output, Failed) and _names_lost_image(stream, output):
            self._find_image(stream, output)
            return True
        if self.siblings is not None and isinstance(output, (PrefillStarted, Done)):
            self.siblings.record_image(stream, output, self.number)
        stream.feed(output)
        if stream.ended:
            self._answered(stream)
        return True

    # ------------------------------------------------------------ changes of engines

    def _send_waiting(self) -> None:
        for stream in self._waiting():
            self._send_again(stream)

    def adopt(self, stream: RequestStream, *, renew: bool = True) -> None:
        """Run the request of another engine; without `renew`, send it unchanged."""
        stream.on_abort, stream.on_stop = self._on_abort, self._on_stop
        self._streams[stream.request_id] = stream
        self._send_again(stream, renew=renew)

    def offer_waiting(self) -> None:
        """Offer the requests that wait for this engine to its siblings.

        Suspects stay, so that they crash no other engine.
        """
        for stream in self._waiting():
            if self.siblings is None or stream.resumptions >= SUSPECT or not can_resume(stream):
                continue
            self._discard_blobs(stream.request)
            if not self.siblings.take_over(stream):
                return
            del self._streams[stream.request_id]

    def _waiting(self) -> list[RequestStream]:
        return [each for each in self._streams.values() if not each.is_sent]

    def _find_image(self, stream: RequestStream, failed: Failed) -> None:
        """Retry a request whose image is missing: on a sibling, or once with its bytes."""
        again = self.number in stream.searched
        stream.searched += (self.number,)
        self._discard_blobs(stream.request)
        if self.siblings is not None and self.siblings.find_image(stream):
            del self._streams[stream.request_id]
        elif stream.restage is not None and not again:
            self._send_again(stream)
        else:
            stream.feed(failed)
            self._answered(stream)

    def _send_again(self, stream: RequestStream, *, renew: bool = True) -> None:
        try:
            if renew:
                if stream.restage is not None:
                    self._discard_blobs(stream.request)
                stream.request = self.recovery.renew(stream)
        except LegatoError as error:
            self._fail(stream, error)
            return
        stream.is_sent = True
        self._send(Submit(request=stream.request))
        if stream.is_stopped:
            self._send(Stop(request_id=stream.request_id))

    # ------------------------------------------------------------ ends

    def _on_abort(self, stream: RequestStream) -> None:
        self._forget(stream)
        self._send(Abort(request_id=stream.request_id))

    def _on_stop(self, stream: RequestStream) -> None:
        if stream.is_sent:  # otherwise it is sent with its request
            self._send(Stop(request_id=stream.request_id))

    def _answered(self, stream: RequestStream) -> None:
        self.num_answered += 1
        self._forget(stream)

    def _fail(self, stream: RequestStream, error: LegatoError) -> None:
        self._forget(stream)
        stream.fail(error)

    def _discard_blobs(self, request: Request) -> None:
        for blob in request.blobs:
            self.blobs.discard(blob)

    def _forget(self, stream: RequestStream) -> None:
        request = stream.request
        self._streams.pop(request.request_id, None)
        if self._polls and not self._streams:
            self._busy_poll.extend(EXPECTED_REQUEST)
        if request.image is not None:
            self._discard_blobs(request)

    # ------------------------------------------------------------ loss

    def _on_end(self) -> None:
        self._lose(EngineLost("the engine process died"))

    def _lose(self, error: EngineLost) -> None:
        self._disconnect()
        self.step, self.load, self.estimated_wait = 0, SchedulerLoad(), 0.0
        self.progress = Loading(stage="start", fraction=0.0)
        was_ready = self.state in (_READY, EngineState.HUNG)
        if was_ready or self.state is EngineState.STARTING:
            self._set_state(EngineState.LOST)
        if was_ready:
            for stream, failure in list(self.recovery.record_loss(self._streams.values(), error)):
                self._fail(stream, failure)
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
        except OSError as error:  # the first service process is gone; this one is about to end
            self._log.error("engine_unreachable", error=str(error))
            self._fail_open(EngineLost("the engine cannot be reached"))

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def _names_lost_image(stream: RequestStream, failed: Failed) -> bool:
    named = any(isinstance(each, CachedImageRef) for each in stream.request.images)
    return named and failed.error.kind == ImageNotFound.__name__
