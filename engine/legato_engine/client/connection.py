"""A service process's door to the engine, and the requests that it runs."""

from __future__ import annotations

import itertools
import time

import msgspec
import structlog

from legato_engine.client.monitor import EngineMonitor, EngineState
from legato_engine.client.pending_commands import PendingCommands
from legato_engine.client.request_stream import RequestStream
from legato_engine.core import WITH_BLOB, Request, RequestKey
from legato_engine.errors import (
    Draining,
    EngineLost,
    InvalidField,
    LegatoError,
)
from legato_engine.ipc.busy_poll import EXPECTED_REQUEST, SHORT_REQUEST, BusyPoll
from legato_engine.ipc.latency_policy import LatencyPolicy
from legato_engine.ipc.messages import (
    Abort,
    Command,
    Delta,
    Done,
    DropImage,
    Expect,
    Failed,
    Heartbeat,
    HoldImage,
    ImageDropped,
    ImageHeld,
    Load,
    Loading,
    Queued,
    Ready,
    Report,
    Started,
    Stop,
    StopElsewhere,
    Stopped,
    Submit,
)
from legato_engine.ipc.transport import EngineLink
from legato_engine.shm.blob_store import BlobStore

_OF_STREAMS = (Done, Delta, Failed, Started, Queued)
_READY = EngineState.READY  # members of an enum are dear to look up
_log = structlog.get_logger()


class EngineConnection(EngineMonitor):
    """Hands requests to whichever engine runs, and routes its reports.

    All methods belong to one event loop. Picture bytes are handed over through `blobs`; a blob
    named by a submitted request is this connection's to discard. `number` tells this process from
    the others before the same engine; the first is 0.
    """

    def __init__(self, namespace: str, policy: LatencyPolicy, number: int = 0) -> None:
        super().__init__()
        self._number = number
        self._streams: dict[RequestKey, RequestStream] = {}
        self._calls = PendingCommands(self._send)
        self._call_numbers = itertools.count()
        self._endpoint = ""
        self._link: EngineLink | None = None
        self._policy = policy
        self._busy_poll = BusyPoll()
        self.blobs = BlobStore(namespace)

    # ------------------------------------------------------------ life

    def connect(self, endpoint: str) -> None:
        """Knock at the doors in this folder, now and whenever an engine is lost.

        Raises `OSError` when there are none.
        """
        self._endpoint = endpoint
        self._link = EngineLink(endpoint, self._on_report, self._on_end)
        self.last_heartbeat = time.monotonic()

    def drain(self) -> None:
        """Take no new requests; those that run go on. An engine lost from now on stays down."""
        if self.state is not EngineState.STOPPED:
            self._set_state(EngineState.DRAINING)

    async def close(self) -> None:
        """Hang up; open streams fail with `Draining`. Idempotent."""
        if self.state is EngineState.STOPPED:
            return
        self._set_state(EngineState.STOPPED)
        self._fail_open(Draining("the server is shutting down"))
        self._hang_up()
        self.blobs.close()

    # ------------------------------------------------------------ requests

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended."""
        return len(self._streams)

    def expect(self) -> None:
        """A request is about to come: an engine that sleeps wakes up meanwhile, where cores abound.

        Nor does this process's loop sleep, until shortly behind the end of the request, or until
        that is not a short one: who has an answer often asks again at once. Harmless when none
        comes.
        """
        if self._policy.busy_poll and not self._streams and self.state is EngineState.READY:
            self._send(Expect())
            self._busy_poll.extend(EXPECTED_REQUEST)

    def submit(self, request: Request) -> RequestStream:
        """Hand a request to the engine; the stream is registered before anything is awaited.

        Raises `EngineStarting`, `EngineLost`, `Draining`, or `InvalidField` when a request with
        this id is open. The blob is discarded in every case.
        """
        if self._number:
            key = self._own(request.request_id)
            request = msgspec.structs.replace(request, request_id=key)
        try:
            self._check_open(request.request_id)
        except LegatoError:
            self._discard_blob(request)
            raise
        stream = RequestStream(request, on_abort=self._on_abort, on_stop=self._on_stop)
        self._streams[request.request_id] = stream
        # Several requests of a turn leave together; of a lone one the engine hears a turn earlier,
        # and where cores abound of one whose progress nobody reads, as it is a call's only one.
        lone = len(self._streams) == 1
        quick = self._policy.send_at_once and not request.progress
        self._send(Submit(request=request), at_once=lone or quick)
        if not lone:
            self._busy_poll.end()
        elif self._policy.busy_poll:
            self._busy_poll.extend(SHORT_REQUEST)
        return stream

    async def hold(self, command: HoldImage) -> ImageHeld:
        """Have the engine hold a picture; its blob is discarded in every case.

        A caller that is cancelled has the engine forget it, unless it is held by then: it then
        stays for its time. Raises as `submit`, what is wrong with the picture, and `QuotaExceeded`.
        """
        try:
            key = self._own(command.request_id)
            self._check_open(key)
            held = await self._calls.ask(msgspec.structs.replace(command, request_id=key))
        finally:
            self.blobs.discard(command.image.blob)
        assert isinstance(held, ImageHeld), "the engine answers a hold with what is held"
        return held

    async def drop(self, command: DropImage) -> None:
        """Have the engine hold a picture no longer. Raises as `submit`, and `ImageNotFound`."""
        key = self._own(command.request_id)
        self._check_open(key)
        await self._calls.ask(msgspec.structs.replace(command, request_id=key))

    async def stop_elsewhere(self, target: RequestKey | None = None) -> int:
        """Stop requests that came through other processes: those of an id, or all; how many.

        `target` is as in `messages.StopElsewhere`. They end as after `RequestStream.stop`. Raises
        `EngineStarting` or `EngineLost`, also when the engine dies before it answers.
        """
        self._check_alive()
        if self._link is None:
            raise EngineLost("there is no engine any more")
        number = next(self._call_numbers)
        key = RequestKey(f"?{number}", worker=self._number)  # no caller's id holds a `?`
        answer = await self._calls.ask(StopElsewhere(request_id=key, target=target))
        assert isinstance(answer, Stopped), "the engine answers with what it stopped"
        return answer.count

    def _own(self, key: RequestKey) -> RequestKey:
        """The key as the engine knows it, which tells the service processes apart."""
        return msgspec.structs.replace(key, worker=self._number)

    def _check_open(self, request_id: RequestKey) -> None:
        if self.state is _READY and request_id not in self._streams:
            return
        if self.state in (EngineState.DRAINING, EngineState.STOPPED):
            raise Draining("the server is shutting down")
        self._check_alive()
        if request_id in self._streams:
            raise InvalidField("a request with this id is running", field="options.request_id")

    def _on_abort(self, stream: RequestStream) -> None:
        self._forget(stream)
        self._send(Abort(request_id=stream.request_id))

    def _on_stop(self, stream: RequestStream) -> None:
        self._send(Stop(request_id=stream.request_id))

    def _send(self, command: Command, *, at_once: bool = False) -> None:
        if self._link is not None:
            self._link.send(command, at_once=at_once)

    def _forget(self, stream: RequestStream) -> None:
        request = stream.request
        self._streams.pop(request.request_id, None)
        if self._policy.busy_poll and not self._streams:
            self._busy_poll.extend(EXPECTED_REQUEST)
        if request.image is not None:
            self._discard_blob(request)

    def _discard_blob(self, request: Request) -> None:
        if isinstance(request.image, WITH_BLOB):
            self.blobs.discard(request.image.blob)

    def _fail_open(self, error: LegatoError) -> None:
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.fail(error)
        self._calls.fail(error)

    # ------------------------------------------------------------ reports

    def _on_report(self, report: Report) -> None:
        if isinstance(report, _OF_STREAMS):  # nearly all
            stream = self._streams.get(report.request_id)
            if stream is not None:  # else aborted a moment ago
                stream.feed(report)
                if stream.ended:
                    self._forget(stream)
            elif isinstance(report, Failed):
                self._calls.settle(report)
            return
        match report:
            case Heartbeat():
                self._on_heartbeat(report)
            case Loading():
                self._on_loading(report)
            case Ready():
                self._on_ready(report)
            case ImageHeld() | ImageDropped() | Stopped():
                self._calls.settle(report)

    # ------------------------------------------------------------ loss

    def _on_end(self) -> None:
        """The engine hung up: it is dead, or dies."""
        self._lose(EngineLost("the engine process died"))

    def _lose(self, error: EngineLost) -> None:
        """Fail what is open, and knock for the next engine. Last words are heard before."""
        self._hang_up()
        self.step, self.load, self.estimated_wait = 0, Load(), 0.0
        self.progress = Loading(stage="start", fraction=0.0)
        if self.state in (EngineState.STARTING, EngineState.READY):
            self._set_state(EngineState.LOST)
        self._fail_open(error)
        self.blobs.renew()
        if self.state is EngineState.LOST:
            self._knock_again()

    def _knock_again(self) -> None:
        try:
            self.connect(self._endpoint)
        except OSError as error:  # whoever runs the engines is gone, and ends this process too
            _log.error("no engine to connect to", error=str(error))

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
