"""The playground's handlers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from legato_client import _errors
from legato_client._async_client import AsyncClient
from legato_client._images.sources import CachedImage
from legato_client._proto import skills
from legato_client._proto.pieces import MAX_SECONDS
from legato_client._session.sessions import AsyncSession
from legato_client._types import results, server
from legato_client._types.tasks import Options, Task
from legato_client.web import openapi as http
from legato_client.web import timeline
from legato_client.web.bodies import explained
from legato_client.web.errors import RejectedRequest, response_of, status_of
from legato_client.web.playground import tasks
from legato_client.web.playground.snippets import Connection, code, file_name
from legato_client.web.playground.tasks import invalid
from legato_client.web.server import backend_of

ValueT = TypeVar("ValueT")

MAX_JSON_BYTES = 256 * 1024
MAX_IMAGE_BYTES = 32 * 1024 * 1024


class AskBody(msgspec.Struct):
    """Request about an image; `task` and `options` are in the contract's own JSON."""

    task: dict[str, Any]
    options: dict[str, Any] = {}
    image_id: str | None = None


class CodeBody(AskBody):
    """Request for programs; these show files named `picture` and `pictures`."""

    picture: str | None = None
    pictures: list[str] = []


async def read_body(request: Request, kind: type[ValueT]) -> ValueT:
    async with backend_of(request).bodies.holding(request, MAX_JSON_BYTES) as data:
        return parsed(data, kind)


def parsed(text: str | bytes | bytearray, kind: type[ValueT]) -> ValueT:
    """Parse a JSON object. Raises InvalidArgument."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        problem, field = explained(str(error))
        raise invalid(field or "message", problem) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _errors.InvalidArgument("the request is not JSON") from None


# ---------------------------------------------------------------- guard

# Allowed callers of the playground, and its page's policies.
#
# The process acts with its own credential, so it answers its own page only: another site that the
# same browser shows must neither call it nor frame it.

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_SAFE_METHODS = ("GET", "HEAD")
_OWN_SITES = ("same-origin", "none")
_FOREIGN = "requests of other sites are refused"


class Guard:
    """Middleware that refuses requests of other sites and adds the page's policies.

    Browsers tell the site that a request comes from; programs do not. All but a link that is
    followed must come from this host or from a program.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if _is_foreign(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": _FOREIGN})
                return
            refusal = RejectedRequest(_FOREIGN, status=HTTPStatus.FORBIDDEN, code="forbidden")
            await response_of(refusal)(scope, receive, send)
            return

        async def send_with_policies(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await self._app(scope, receive, send_with_policies)


def _is_foreign(scope: Scope) -> bool:
    """Return whether another site makes the request, other than by a link to the page."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None and _host_of(origin) != headers.get("host", "").lower():
        return True
    follows_link = (
        scope["type"] == "http"
        and scope["method"] in _SAFE_METHODS
        and headers.get("sec-fetch-mode") == "navigate"
    )
    return not follows_link and headers.get("sec-fetch-site", "none") not in _OWN_SITES


def _host_of(origin: str) -> str:
    """Return the origin's host; empty if it is no origin, as `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


# ---------------------------------------------------------------- answers

# Events, results and failures as the JSON objects that the page reads.
#
# An object's `type` says what it is; its other keys are the fields of the client's value of that
# name. Coordinates are fractions of the image, times are in seconds.

Json = dict[str, Any]

_EVENTS: dict[type[results.Event], str] = {
    results.Queued: "queued",
    results.Started: "started",
    results.TextDelta: "text",
    results.ReasoningDelta: "reasoning",
    results.Detection: "object",
    results.PointedObject: "point",
    results.OutlineDelta: "outline",
    results.TokensDelta: "tokens",
}

_REMEDIES = {
    "INVALID_FIELD": "Correct it and ask again.",
    "IMAGE_UNDECODABLE": "Choose a whole JPEG, PNG or WebP file.",
    "IMAGE_TOO_LARGE": "Choose a smaller image.",
    "IMAGE_NOT_FOUND": "The server no longer holds the image: choose it again.",
    "MODEL_NOT_FOUND": "Choose a model that this server serves.",
    "ADAPTER_NOT_FOUND": "Leave the adapter empty, or name one that this server has.",
    "TASK_UNSUPPORTED": "This model lacks the skill: choose another skill or another model.",
    "PROMPT_TOO_LONG": "Shorten the question or the conversation, or lower max tokens.",
    "QUEUE_FULL": "The server is full: ask again in a moment.",
    "QUOTA_EXCEEDED": "This caller's share is used up: ask less often.",
    "CLIENT_TOO_SLOW": "The answer was not read quickly enough: ask for less.",
    "DEADLINE_UNREACHABLE": "The wait would be longer than the time allowed: ask again later.",
    "DUPLICATE_REQUEST": "A request of this id is known: ask again without it.",
    "ENGINE_STARTING": "The model is loading: ask again in a moment.",
    "ENGINE_LOST": "The engine is being started again: ask again in a moment.",
    "DRAINING": "The server is shutting down: ask another one.",
    "PREEMPTED": "An operator stopped the request: ask again if it still matters.",
    "SHM_REFUSED": "This server reads no shared memory: send the bytes.",
    "SHM_TORN": "The image changed while it was read: send it again.",
    "SESSION_PROTOCOL": "Start the session again.",
    "UNAUTHENTICATED": "Start the playground with a valid token (--token-file).",
    "FORBIDDEN": "Start the playground with a token that has the scope.",
    "INTERNAL": "This is a bug of the server: report it with the request's id.",
    "POISONED": "The engine died of this request: do not send it again, report it.",
    "NUMERIC": "The model computed no numbers for this request: report it.",
}
"""Hints by the contract's `ErrorReason`."""

_BY_CLASS: tuple[tuple[type[_errors.LegatoError], str], ...] = (
    (_errors.InvalidArgument, "Change the request and ask again."),
    (_errors.Unavailable, "Is the server running, and is --server its address?"),
    (_errors.Unauthenticated, _REMEDIES["UNAUTHENTICATED"]),
    (_errors.PermissionDenied, _REMEDIES["FORBIDDEN"]),
)


def event_json(value: results.Event) -> Json:
    if isinstance(value, results.Finished):
        return {"type": "finished", "result": result(value.result)}
    return {"type": _EVENTS[type(value)], **dataclasses.asdict(value)}


def result(value: results.Result) -> Json:
    return {"type": skills.of(value).name, **dataclasses.asdict(value)}


def failure_json(error: _errors.LegatoError) -> Json:
    """Return a failure with a hint on what to do, which may be empty.

    gRPC's own message of a lost connection is the `detail`.
    """
    is_lost = isinstance(error, _errors.Unavailable) and not error.reason
    return {
        "type": "failed",
        "message": "the server does not answer" if is_lost else error.message,
        "detail": error.message if is_lost else "",
        "code": error.code,
        "reason": error.reason,
        "request_id": error.request_id,
        "fields": [dataclasses.asdict(each) for each in error.field_violations],
        "retry_after": error.retry_after,
        "hint": hint(error),
    }


def hint(error: _errors.LegatoError) -> str:
    """Return a remedy for a failure as a sentence, or ""."""
    if error.reason in _REMEDIES:
        return _REMEDIES[error.reason]
    return next((text for kind, text in _BY_CLASS if isinstance(error, kind)), "")


# ---------------------------------------------------------------- questions

IMAGE_TTL = 600.0
"""Seconds for which the server holds an image; the page uploads an expired one again."""

Handler = Callable[[Request], Awaitable[Response]]


def report_failures(handler: Handler) -> Handler:
    """Wrap a handler so that its failures look to the page like those of a stream."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except _errors.LegatoError as error:
            return JSONResponse(failure_json(error), status_of(error))
        except RejectedRequest as refusal:
            failure = failure_json(_errors.LegatoError(refusal.message, code=refusal.code.upper()))
            return JSONResponse(failure, refusal.status)

    return handle


async def describe_server(request: Request, connection: Connection) -> Response:
    client = backend_of(request).client
    info, models = await client.server_info(), await client.models()
    return JSONResponse(
        {
            "server": {"name": info.name, "version": info.version, "target": connection.target},
            "limits": dataclasses.asdict(info.limits),
            "models": [server.model_document(model) for model in models],
            "max_picture_bytes": MAX_IMAGE_BYTES,
        }
    )


async def upload(request: Request) -> Response:
    """Upload an image, which the server decodes; the answer names it in later requests."""
    client = backend_of(request).client
    async with backend_of(request).bodies.holding(request, MAX_IMAGE_BYTES) as data:
        held = await client.put_image(bytes(data), ttl=IMAGE_TTL)
    return JSONResponse({"image_id": held.image_id, "width": held.width, "height": held.height})


async def generate(request: Request) -> Response:
    """Stream the events of one task as JSON lines; leaving cancels the work on the server."""
    client = backend_of(request).client
    body = await read_body(request, AskBody)
    image_id, options = body.image_id, tasks.read_options(body.options)
    task = tasks.read_task(body.task)
    image = None if image_id is None else CachedImage(image_id)
    lines = _lines(client, image, task, options)
    return StreamingResponse(lines, media_type="application/x-ndjson")


async def show_snippets(request: Request, connection: Connection) -> Response:
    body = await read_body(request, CodeBody)
    files = [file_name(name, number) for number, name in enumerate(body.pictures, 1)]
    task, options = tasks.read_task(body.task, files), tasks.read_options(body.options)
    return JSONResponse(dataclasses.asdict(code(connection, body.picture, task, options)))


async def _lines(
    client: AsyncClient, image: CachedImage | None, task: Task, options: Options
) -> AsyncIterator[str]:
    try:
        async with contextlib.aclosing(client.generate(image, task, options=options)) as events:
            async for event in events:
                yield _line(event_json(event))
    except _errors.LegatoError as error:
        yield _line(failure_json(error))


def _line(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, default=list) + "\n"  # a token has bytes


# ---------------------------------------------------------------- live

# A session between the page's websocket and the server.
#
# The page says `open` as JSON, then sends frames: 8 bytes with the time of capture in milliseconds
# since the Unix epoch, 4 bytes with the sequence, both little-endian (a double and an unsigned
# integer), and the image's file. `finish` as JSON waits for frames in flight. Nothing waits here:
# without a credit of the server a frame is left out, and the page sends a newer one.

MAX_FRAME_BYTES = 4 * 1024 * 1024
_MAX_TASKS = 8
_HEAD = struct.Struct("<dI")
_CLOSED_NORMALLY = 1000
_MAX_SESSIONS = 8  # a websocket holds a frame or two while it waits
_OPEN_TIMEOUT = 30.0  # seconds until the page sends the session's settings


class Opening(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a session."""

    tasks: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=_MAX_TASKS)]
    policy: server.FramePolicy | None = None
    max_frame_age: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None = None
    model: str | None = None


class Sessions:
    """Handler of a limited number of sessions, each from its `open` until either side ends it."""

    def __init__(self) -> None:
        self._num_open = 0

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept()
        self._num_open += 1
        try:
            if self._num_open > _MAX_SESSIONS:
                raise _errors.Busy(
                    f"the playground has {_MAX_SESSIONS} sessions, which is its limit"
                )
            await _session(websocket)
        except _errors.LegatoError as error:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await websocket.send_json(failure_json(error))
                await websocket.close(_CLOSED_NORMALLY)
        except WebSocketDisconnect:
            return
        finally:
            self._num_open -= 1


async def _session(websocket: WebSocket) -> None:
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT):
            opening = await _receive(websocket, Opening)
    except TimeoutError:
        raise _errors.DeadlineExceeded(f"no `open` came within {_OPEN_TIMEOUT:g} s") from None
    if isinstance(opening, bytes):
        raise tasks.invalid("message", "must open the session")
    try:
        session: AsyncSession = websocket.state.backend.client.session(
            [tasks.read_task(each) for each in opening.tasks],
            policy=opening.policy or "latest_wins",
            max_frame_age=opening.max_frame_age,
            model=opening.model or "",
            when_full="drop",
        )
    except ValueError as error:
        raise _errors.InvalidArgument(str(error)) from None
    async with session as running:
        await _serve(websocket, running)
    await websocket.close(_CLOSED_NORMALLY)


async def _receive(websocket: WebSocket, kind: type[ValueT]) -> bytes | ValueT:
    """Receive a frame or a JSON object.

    Raises InvalidArgument, and WebSocketDisconnect at the end.
    """
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", _CLOSED_NORMALLY))
    data: bytes | None = message.get("bytes")
    return parsed(message.get("text") or "", kind) if data is None else data


async def _serve(websocket: WebSocket, running: AsyncSession) -> None:
    """Serve both directions; raise what ended the session, unless it ended well."""
    terms = dataclasses.asdict(running.terms)
    await websocket.send_json({"type": "opened", **terms, "credits": running.credits})
    reading = asyncio.create_task(_read_page(websocket, running))
    writing = asyncio.create_task(_tell_page(websocket, running))
    try:
        await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
        await writing
    finally:
        for task in (reading, writing):
            task.cancel()
        await asyncio.gather(reading, writing, return_exceptions=True)


async def _read_page(websocket: WebSocket, running: AsyncSession) -> None:
    """Read the page's messages until it has said that it is finished."""
    while True:
        message = await _receive(websocket, dict[str, Any])
        if isinstance(message, bytes):
            await _send_frame(websocket, running, message)
            continue
        if message != {"finish": True}:
            raise tasks.invalid("message", "must be a frame, or finish")
        await running.finish()
        return


async def _send_frame(websocket: WebSocket, running: AsyncSession, data: bytes) -> None:
    if not _HEAD.size < len(data) <= MAX_FRAME_BYTES:
        raise tasks.invalid("frame", f"must have {_HEAD.size + 1} to {MAX_FRAME_BYTES} bytes")
    captured, sequence = _HEAD.unpack_from(data)
    if not 0 <= captured < 1e14 or sequence == 0:
        raise tasks.invalid("frame", "has no time of capture, or no sequence")
    stamp = results.FrameStamp("playground", round(captured * 1e6), sequence)
    sent = await running.send(data[_HEAD.size :], stamp=stamp)
    if sent is None:
        await websocket.send_json({"type": "left_out", "sequence": sequence, **_counts(running)})


async def _tell_page(websocket: WebSocket, running: AsyncSession) -> None:
    async for answer in running:
        await websocket.send_json({**answer_of(answer), **_counts(running)})
    await websocket.send_json({"type": "ended", **_counts(running)})


def _counts(running: AsyncSession) -> Json:
    return {"stats": dataclasses.asdict(running.stats), "credits": running.credits}


def answer_of(answer: server.Answer) -> Json:
    match answer:
        case server.FrameResult():
            found = answer.outcome
            return {
                "type": "result",
                "sequence": answer.sequence,
                "task_id": answer.task_id,
                "last": answer.last_for_frame,
                "outcome": failure_json(found)
                if isinstance(found, _errors.LegatoError)
                else result(found),
            }
        case server.FrameDropped():
            return {"type": "dropped", **dataclasses.asdict(answer)}
        case server.FrameDelta():
            event = event_json(answer.event)
            about = {"sequence": answer.sequence, "task_id": answer.task_id}
            return {"type": "delta", **about, "event": event}
        case server.GoAway():
            reason = failure_json(answer.reason) if answer.reason else None
            return {"type": "go_away", "time_left": answer.time_left, "reason": reason}


# ---------------------------------------------------------------- routes

STATIC = Path(__file__).parents[1] / "static"


def routes(connection: Connection, operator: Callable[[], str] | None = None) -> list[BaseRoute]:
    """Return routes for the page, its files, its requests and `legato http`; needs `Guard`.

    `connection` is how the programs that the page shows reach the server. `operator` returns the
    target of AdminService, "" where it is the server's own; None keeps the page from changing the
    pipeline's depth.
    """
    describe = functools.partial(describe_server, connection=connection)
    snippets = functools.partial(show_snippets, connection=connection)
    own = [
        Route("/", _page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/playground/server", report_failures(describe)),
        Route("/playground/pictures", report_failures(upload), methods=["POST"]),
        Route("/playground/generate", report_failures(generate), methods=["POST"]),
        Route("/playground/code", report_failures(snippets), methods=["POST"]),
        WebSocketRoute("/playground/session", Sessions().serve),
    ]
    return [*own, *timeline.routes(operator), *http.routes()]


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")
