"""Commands of service processes to the engine process."""

from __future__ import annotations

from legato_engine.core.images import EncodedImage, RawImage
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request
from legato_engine.core.value import Value


class Submit(Value, frozen=True):
    """Run this request."""

    request: Request


class Abort(Value, frozen=True):
    """Forget a request; unknown ids are ignored."""

    request_id: RequestKey


class Stop(Value, frozen=True):
    """End a request with its partial result, CANCELLED; unknown ids are ignored."""

    request_id: RequestKey


class HoldImage(Value, frozen=True):
    """Prepare an image, then hold it for `ttl` seconds."""

    request_id: RequestKey
    image: EncodedImage | RawImage
    owner: str
    ttl: float
    sha256: str = ""  # hex digest of the blob; empty: not checked
    quota_bytes: int = 0  # of the owner's held images; 0: `image_quota_bytes`


class DropImage(Value, frozen=True):
    """End the hold of `owner` on an image."""

    request_id: RequestKey
    image_id: str
    owner: str


class StopElsewhere(Value, frozen=True):
    """`Stop` matching requests of the other service processes, or all."""

    request_id: RequestKey
    target: RequestKey | None = None


class Expect(Value, frozen=True):
    """A `Submit` may follow: poll for it."""


class WatchTimeline(Value, frozen=True):
    """Send `TimelineBatch`es to this service process, or no more."""

    watching: bool


class SetPipelineDepth(Value, frozen=True):
    """Have at most `depth` launches in flight, from the next step on."""

    depth: int


class Shutdown(Value, frozen=True):
    """Exit with code 0 and finish no request."""


Command = (
    Submit
    | Abort
    | Stop
    | HoldImage
    | DropImage
    | StopElsewhere
    | Expect
    | WatchTimeline
    | SetPipelineDepth
    | Shutdown
)
