"""The open requests of a connection."""

from __future__ import annotations

from typing import Protocol

from legato_engine.client.recovery import SUSPECT, Recovery, can_resume
from legato_engine.client.request_stream import RequestStream, Restage, StreamOutput
from legato_engine.client.siblings import Siblings
from legato_engine.core.images import WITH_BLOB, CachedImage
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request
from legato_engine.errors import EngineLost, ImageNotFound, LegatoError
from legato_engine.ipc.busy_poll import EXPECTED_REQUEST, SHORT_REQUEST, BusyPoll
from legato_engine.ipc.commands import Abort, Command, Stop, Submit
from legato_engine.ipc.latency_policy import LatencyPolicy
from legato_engine.ipc.messages import Done, Failed, Started
from legato_engine.shm.blob_store import BlobStore


class Send(Protocol):
    """Sends a command, `at_once` or with the event loop's next turn."""

    def __call__(self, command: Command, *, at_once: bool = False) -> None: ...


class OpenRequests:
    """Those that one engine has or that wait for it, each until its last output.

    Belongs to one event loop, and discards the blobs of requests that end or leave. A request that
    its engine cannot run goes to a sibling, or waits for the next engine.
    """

    def __init__(
        self,
        number: int,
        policy: LatencyPolicy,
        blobs: BlobStore,
        recovery: Recovery,
        send: Send,
    ) -> None:
        """`number` is the engine's among its siblings."""
        self._number = number
        self._blobs = blobs
        self._recovery = recovery
        self._send = send
        self._sends_at_once, self._polls = policy.send_at_once, policy.busy_poll
        self._busy_poll = BusyPoll()
        self._streams: dict[RequestKey, RequestStream] = {}
        self.siblings: Siblings | None = None  # None: this is the only engine
        self.num_answered = 0  # requests that engines ended

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    def poll_ahead(self) -> bool:
        """Poll for a request that is about to come, if this process polls and has no other."""
        if not self._polls or self._streams:
            return False
        self._busy_poll.extend(EXPECTED_REQUEST)
        return True

    def add(self, request: Request, restage: Restage | None) -> RequestStream:
        """Register a request that is not sent yet."""
        stream = RequestStream(request, self._on_abort, self._on_stop, restage)
        self._streams[request.request_id] = stream
        return stream

    def send(self, stream: RequestStream) -> None:
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

    def feed(self, output: StreamOutput | Failed) -> bool:
        """Deliver an output; False: it is of no open request."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return False
        if isinstance(output, Failed) and _names_lost_image(stream, output):
            self._find_image(stream, output)
            return True
        if self.siblings is not None and isinstance(output, (Started, Done)):
            self.siblings.saw(stream, output, self._number)
        stream.feed(output)
        if stream.ended:
            self._answered(stream)
        return True

    def fail(self, error: LegatoError) -> None:
        for stream in list(self._streams.values()):
            self._fail(stream, error)

    def discard_blob(self, request: Request) -> None:
        if isinstance(request.image, WITH_BLOB):
            self._blobs.discard(request.image.blob)

    # ------------------------------------------------------------ changes of engines

    def lost(self, error: EngineLost) -> None:
        """Have requests wait for the next engine; those end that cannot go on there."""
        for stream, failure in list(self._recovery.lost(self._streams.values(), error)):
            self._fail(stream, failure)

    def send_waiting(self) -> None:
        for stream in self._waiting():
            self._send_again(stream)

    def adopt(self, stream: RequestStream, *, renew: bool) -> None:
        """Run the request of another engine; without `renew` it is sent as it is."""
        stream.on_abort, stream.on_stop = self._on_abort, self._on_stop
        self._streams[stream.request_id] = stream
        self._send_again(stream, renew=renew)

    def offer_waiting(self) -> None:
        """Give the requests that wait for this engine to its siblings.

        Those that may have ended it stay, so that they end no other.
        """
        for stream in self._waiting():
            if self.siblings is None or stream.resumptions >= SUSPECT or not can_resume(stream):
                continue
            self.discard_blob(stream.request)
            if not self.siblings.take_over(stream):
                return
            del self._streams[stream.request_id]

    def _waiting(self) -> list[RequestStream]:
        return [each for each in self._streams.values() if not each.is_sent]

    def _find_image(self, stream: RequestStream, failed: Failed) -> None:
        """Another engine may have the image, or the caller its bytes."""
        stream.searched += (self._number,)
        if self.siblings is not None and self.siblings.find_image(stream):
            del self._streams[stream.request_id]
        elif stream.restage is not None:
            self._send_again(stream)
        else:
            stream.feed(failed)
            self._answered(stream)

    def _send_again(self, stream: RequestStream, *, renew: bool = True) -> None:
        try:
            if renew:
                if stream.restage is not None:
                    self.discard_blob(stream.request)
                stream.request = self._recovery.renew(stream)
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
        if stream.is_sent:  # else with its request
            self._send(Stop(request_id=stream.request_id))

    def _answered(self, stream: RequestStream) -> None:
        self.num_answered += 1
        self._forget(stream)

    def _fail(self, stream: RequestStream, error: LegatoError) -> None:
        self._forget(stream)
        stream.fail(error)

    def _forget(self, stream: RequestStream) -> None:
        request = stream.request
        self._streams.pop(request.request_id, None)
        if self._polls and not self._streams:
            self._busy_poll.extend(EXPECTED_REQUEST)
        if request.image is not None:
            self.discard_blob(request)


def _names_lost_image(stream: RequestStream, failed: Failed) -> bool:
    named = isinstance(stream.request.image, CachedImage)
    return named and failed.error.kind == ImageNotFound.__name__
