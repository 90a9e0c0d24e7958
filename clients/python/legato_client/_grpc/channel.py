"""Channels: options, service configuration, methods, wire format.

`service_config.json` is for clients in any language. gRPC retries a stream only while no response
has begun, so one policy serves every method: a session's first response comes before any frame is
sent, and an upload sent twice is one image.

The health check and `round_robin` are for names of several servers: one that says NOT_SERVING gets
no calls while another serves. A single server's own answer says why it does not serve and when to
come back.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from google.protobuf.message import DecodeError, Message
from legato.v1 import admin_pb2, image_pb2, inference_pb2, media_pb2, server_pb2, session_pb2

from legato_client._errors import InternalError, InvalidArgument
from legato_client._proto import responses, skills
from legato_client._proto.pieces import read
from legato_client._types import results, server
from legato_client._version import CONTRACT_REVISION, version

_FILE = "service_config.json"
_FOR_SEVERAL = ("healthCheckConfig", "loadBalancingConfig")
_SEVERAL_SCHEMES = ("dns:", "xds:")


def load() -> dict[str, Any]:
    text = importlib.resources.files("legato_client").joinpath(_FILE).read_text("utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def of_target(target: str) -> str:
    """Return the configuration for a server, or for several.

    Those are a list of addresses ("ipv4:10.0.0.1:50051,10.0.0.2:50051") or a name with the scheme
    "dns:" or "xds:".
    """
    config = load()
    if not ("," in target or target.startswith(_SEVERAL_SCHEMES)):
        for key in _FOR_SEVERAL:
            del config[key]
    return json.dumps(config)


# ---------------------------------------------------------------- affinity

# Metadata by which a proxy routes calls about one image, or of one session, to one server.

KEY = "legato-affinity"


def of(request: Message) -> str:
    """Return the image id that a server must hold, or the session's name; empty: any server."""
    image = getattr(request, "image", None)
    match request:
        case session_pb2.SessionOpen():
            name = request.session_name
        case image_pb2.DeleteImageRequest():
            name = request.image_id
        case _:
            name = image.image_id if isinstance(image, media_pb2.Image) else ""
    return quote(name, safe="")  # metadata is printable ASCII


# ---------------------------------------------------------------- channel

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT = 60.0  # seconds, unary
DEFAULT_STREAM_TIMEOUT = 600.0  # seconds, Generate from start to end
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_ATTEMPTS: int = load()["methodConfig"][0]["retryPolicy"]["maxAttempts"]
COMMON_REQUEST_BYTES = 4 * 1024 * 1024  # any gRPC server takes this by default

_OTHER_TARGET = re.compile(
    r"(unix|unix-abstract|vsock|ipv4|ipv6|dns|xds|google-c2p):(?!\d+$)|.*:///"
)

Metadata = tuple[tuple[str, str], ...]
ChannelOptions = tuple[tuple[str, Any], ...]


def full_target(target: str) -> str:
    """Return a gRPC target; a host without a port gets the port of `DEFAULT_TARGET`.

    Raises:
        ValueError: a URL of HTTP, or a port that is no number.
    """
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() in ("http", "https", "grpc", "grpcs"):
        address = rest.rstrip("/")
        raise ValueError(f"a server is HOST:PORT and no URL: {address!r} instead of {target!r}")
    if _OTHER_TARGET.match(target):
        return target
    host, port = host_and_port(target)
    if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"a server is HOST:PORT, not {target!r}")
    return f"{host}:{port}"


def host_and_port(target: str) -> tuple[str, str]:
    """Split a target, without a port that of `DEFAULT_TARGET`; IPv6 addresses get brackets."""
    default = DEFAULT_TARGET.rpartition(":")[2]
    if target.startswith("["):
        host, _, after = target.partition("]")
        return f"{host}]", after.removeprefix(":") if after else default
    if target.count(":") > 1:
        return f"[{target}]", default
    host, separator, port = target.partition(":")
    return host, port if separator else default


def channel_options(max_message_bytes: int, target: str) -> ChannelOptions:
    return (
        ("grpc.service_config", of_target(target)),
        ("grpc.enable_retries", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A restarted server is found within half a second, not after the default's two minutes: a
        # refused connection costs next to nothing.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        # Slower than the fastest ping a Legato server allows (10 s). The ping timeout finds a
        # frozen peer; the keep-alive timeout alone only finds a vanished host.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
    )


def call_metadata(priority: int | None, tenant: str | None, extra: Metadata) -> Metadata:
    """Return the call's metadata, with lower-case keys as gRPC demands."""
    client = f"python/{version()}/{CONTRACT_REVISION}"
    own = (("legato-client", client), ("legato-priority", priority), ("legato-tenant", tenant))
    return tuple((name, str(value)) for name, value in own if value is not None) + extra


def check_size(num_bytes: int, limit: int) -> None:
    """Check the size of a request. Raises InvalidArgument, which names the way around the limit."""
    if num_bytes > limit:
        raise InvalidArgument(
            f"the request has {num_bytes} bytes, the limit is {limit}: upload the image with "
            "`put_image`, which takes larger ones, and ask about what it returns; or send it as a "
            "JPEG file",
            reason="IMAGE_TOO_LARGE",
            metadata={"limit": str(limit), "actual": str(num_bytes)},
        )


class Deadline:
    """A point in time that all attempts of a call share."""

    def __init__(self, timeout: float) -> None:
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


# ---------------------------------------------------------------- wire

_FIELDS = {  # of `Image.source`: the number of `data` in it, and its own
    "encoded": (media_pb2.EncodedImage.DATA_FIELD_NUMBER, media_pb2.Image.ENCODED_FIELD_NUMBER),
    "raw": (media_pb2.RawImage.DATA_FIELD_NUMBER, media_pb2.Image.RAW_FIELD_NUMBER),
}
_LENGTH_DELIMITED = 2


def to_bytes(request: Message, file: bytes | None = None) -> bytes:
    """Serialize a request with one copy of its image's bytes; `request` must not be used again.

    `file` is an encoded image that the message lacks. protobuf copies a large field several times
    while it encodes, so the image's bytes are appended as a second `image` field, which a parser
    merges into the first.
    """
    if file is not None:
        number = request.DESCRIPTOR.fields_by_name["image"].number
        return _ending_with(file, (*_FIELDS["encoded"], number), request)
    path, image = _image_of(request)
    source = image.WhichOneof("source") if image is not None else None
    if image is None or source not in _FIELDS:
        return request.SerializeToString()
    holder: media_pb2.EncodedImage | media_pb2.RawImage = getattr(image, source)
    data = holder.data
    holder.ClearField("data")
    return _ending_with(data, (*_FIELDS[source], *path), request)


def _ending_with(data: bytes, path: tuple[int, ...], request: Message) -> bytes:
    """Return the fields of `path`, innermost first."""
    tail_size, headers = len(data), b""
    for number in path:
        header = _header(number, tail_size)
        headers = header + headers
        tail_size += len(header)
    return b"".join((request.SerializeToString(), headers, data))


def _image_of(request: Message) -> tuple[tuple[int, ...], media_pb2.Image | None]:
    """Return the fields that lead to the image, innermost first."""
    if isinstance(request, session_pb2.SessionRequest):
        path = (session_pb2.Frame.IMAGE_FIELD_NUMBER, session_pb2.SessionRequest.FRAME_FIELD_NUMBER)
        return path, request.frame.image if request.HasField("frame") else None
    image = getattr(request, "image", None)
    if not isinstance(image, media_pb2.Image):
        return (), None
    return (request.DESCRIPTOR.fields_by_name["image"].number,), image


def _header(number: int, size: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


# ---------------------------------------------------------------- methods

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")


@dataclasses.dataclass(frozen=True, slots=True)
class StubMethod(Generic[ResponseT, ValueT]):
    """RPC definition; `parse` turns its response into a value."""

    path: str
    response: type[ResponseT]
    parse: Callable[[ResponseT], ValueT]


def message_of(kind: type[ResponseT], data: bytes) -> ResponseT:
    """Parse a response. gRPC's own parsing gives None for damaged bytes in asyncio.

    Raises:
        InternalError: the bytes are no message.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InternalError("the server's answer is malformed") from None


def _answer(skill: skills.AnySkill, response: Any) -> Any:
    return skill.read(response, read(results.ResponseInfo, response.info))


def _nothing(_response: Message) -> None:
    pass


_INFERENCE = "/legato.v1.InferenceService/"
_ADMIN = "/legato.v1.AdminService/"
_IMAGE = "/legato.v1.ImageService/"
_SERVER = "/legato.v1.ServerService/"

SESSION_PATH = "/legato.v1.SessionService/Session"

OF_SKILLS: Mapping[str, StubMethod[Any, Any]] = {
    skill.name: StubMethod(
        f"{_INFERENCE}{skill.name.capitalize()}",
        skill.response,
        partial(_answer, skill),
    )
    for skill in skills.SKILLS
}
"""Each skill's own call, by the skill's name."""
RUN_TASKS = StubMethod(_INFERENCE + "RunTasks", inference_pb2.RunTasksResponse, responses.run_tasks)
GENERATE = StubMethod(_INFERENCE + "Generate", inference_pb2.GenerateResponse, responses.event_of)
PUT_IMAGE = StubMethod(_IMAGE + "PutImage", image_pb2.PutImageResponse, responses.held_image)
DELETE_IMAGE = StubMethod(_IMAGE + "DeleteImage", image_pb2.DeleteImageResponse, _nothing)
GET_SERVER_INFO = StubMethod(
    _SERVER + "GetServerInfo", server_pb2.GetServerInfoResponse, partial(read, server.ServerInfo)
)
LIST_MODELS = StubMethod(_SERVER + "ListModels", server_pb2.ListModelsResponse, responses.models)
GET_LOAD = StubMethod(_ADMIN + "GetLoad", admin_pb2.GetLoadResponse, partial(read, server.Load))
ABORT = StubMethod(_ADMIN + "Abort", admin_pb2.AbortResponse, partial(read, server.AbortCount))
GET_METRICS = StubMethod(
    _ADMIN + "GetMetrics", admin_pb2.GetMetricsResponse, lambda each: each.text
)
WATCH_TIMELINE = StubMethod(
    _ADMIN + "WatchTimeline", admin_pb2.WatchTimelineResponse, responses.timeline
)
SET_PIPELINE_DEPTH = StubMethod(
    _ADMIN + "SetPipelineDepth", admin_pb2.SetPipelineDepthResponse, _nothing
)
DRAIN = StubMethod(_ADMIN + "Drain", admin_pb2.DrainResponse, partial(read, server.Unfinished))
