"""A session between the page's websocket and the server.

The page says `open` as JSON, then sends frames: 8 bytes with the time of capture in milliseconds
since the Unix epoch, 4 bytes with the sequence, both little-endian (a double and an unsigned
integer), and the picture's file. `finish` as JSON asks for what is under way. Nothing waits here:
without a credit of the server a frame is left out, and the page sends a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import struct
from typing import Any, cast

from starlette.websockets import WebSocket, WebSocketDisconnect

from legato_client._async_client import AsyncClient
from legato_client._convert.pieces import MAX_SECONDS
from legato_client._errors import Busy, DeadlineExceeded, InvalidArgument, LegatoError
from legato_client._session.async_session import AsyncSession
from legato_client._values.results import FrameStamp, Result
from legato_client._values.session import (
    Answer,
    FrameDelta,
    FrameDropped,
    FramePolicy,
    FrameResult,
    GoAway,
    SessionStats,
)
from legato_client.web.playground import answers, bodies, tasks
from legato_client.web.playground.answers import Json

MAX_FRAME_BYTES = 4 * 1024 * 1024
_MAX_TASKS = 8
_HEAD = struct.Struct("<dI")
_SETTINGS = ("tasks", "policy", "max_frame_age", "model")
_CLOSED_NORMALLY = 1000
_MAX_SESSIONS = 8  # a websocket holds a frame or two while it waits
_OPEN_TIMEOUT = 30.0  # seconds until the page says what the session is for


class Sessions:
    """Serves a limited number of sessions, each from its `open` until either side ends it."""

    def __init__(self, limit: int = _MAX_SESSIONS) -> None:
        self._limit = limit
        self._num_open = 0

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept()
        self._num_open += 1
        try:
            if self._num_open > self._limit:
                raise Busy(f"the playground has {self._limit} sessions, which is its limit")
            await _session(websocket)
        except LegatoError as error:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await websocket.send_json(answers.failure(error))
                await websocket.close(_CLOSED_NORMALLY)
        except WebSocketDisconnect:
            return
        finally:
            self._num_open -= 1


async def _session(websocket: WebSocket) -> None:
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT):
            opening = await _receive(websocket)
    except TimeoutError:
        raise DeadlineExceeded(f"no `open` came within {_OPEN_TIMEOUT:g} s") from None
    async with _open(websocket.state.backend.client, opening) as running:
        await _serve(websocket, running)
    await websocket.close(_CLOSED_NORMALLY)


async def _receive(websocket: WebSocket) -> bytes | dict[str, Any]:
    """A frame, or a JSON object; raises InvalidArgument, and WebSocketDisconnect at the end."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", _CLOSED_NORMALLY))
    data: bytes | None = message.get("bytes")
    return bodies.json_object(message.get("text") or "") if data is None else data


def _open(client: AsyncClient, opening: bytes | dict[str, Any]) -> AsyncSession:
    """Raises InvalidArgument."""
    if isinstance(opening, bytes):
        raise tasks.invalid("message", "must open the session")
    if unknown := opening.keys() - set(_SETTINGS):
        raise tasks.invalid(min(unknown), "is no setting of a session")
    wanted = opening.get("tasks")
    if not isinstance(wanted, list) or not 1 <= len(wanted) <= _MAX_TASKS:
        raise tasks.invalid("tasks", f"must be a list of 1 to {_MAX_TASKS} tasks")
    age = opening.get("max_frame_age")
    if age is not None and not (isinstance(age, int | float) and 0 < age <= MAX_SECONDS):
        raise tasks.invalid(
            "max_frame_age", f"must be a number of seconds above 0, at most {MAX_SECONDS}"
        )
    try:
        return client.session(
            [tasks.read_task(each) for each in wanted],
            policy=cast(FramePolicy, bodies.text_of(opening, "policy") or "latest_wins"),
            max_frame_age=age,
            model=bodies.text_of(opening, "model") or "",
            when_full="drop",
        )
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


async def _serve(websocket: WebSocket, running: AsyncSession) -> None:
    """Both directions at once; raises what ended the session, if it did not end well."""
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
    """Returns once the page has said that it is finished."""
    while True:
        message = await _receive(websocket)
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
    stamp = FrameStamp("playground", round(captured * 1e6), sequence)
    sent = await running.send(data[_HEAD.size :], stamp=stamp)
    if sent is None:
        await websocket.send_json(
            {"type": "left_out", "sequence": sequence, **_counts(running.stats, running.credits)}
        )


async def _tell_page(websocket: WebSocket, running: AsyncSession) -> None:
    async for answer in running:
        counts = _counts(running.stats, running.credits)
        await websocket.send_json({**answer_of(answer), **counts})
    await websocket.send_json({"type": "ended", **_counts(running.stats, running.credits)})


def _counts(stats: SessionStats, credits: int) -> Json:
    return {"stats": dataclasses.asdict(stats), "credits": credits}


def answer_of(answer: Answer) -> Json:
    """What a session says of a frame, as the page reads it."""
    match answer:
        case FrameResult():
            return {
                "type": "result",
                "sequence": answer.sequence,
                "task_id": answer.task_id,
                "last": answer.last_for_frame,
                "outcome": _outcome(answer.outcome),
            }
        case FrameDropped():
            return {"type": "dropped", **dataclasses.asdict(answer)}
        case FrameDelta():
            event = answers.event(answer.event)
            told = {"sequence": answer.sequence, "task_id": answer.task_id}
            return {"type": "delta", **told, "event": event}
        case GoAway():
            reason = answers.failure(answer.reason) if answer.reason else None
            return {"type": "go_away", "time_left": answer.time_left, "reason": reason}


def _outcome(outcome: Result | LegatoError) -> Json:
    if isinstance(outcome, LegatoError):
        return answers.failure(outcome)
    return answers.result(outcome)
