"""Commands that the engine answers by one report, and who waits for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from legato_engine.core import RequestKey
from legato_engine.errors import LegatoError, from_value
from legato_engine.ipc.messages import (
    Abort,
    DropImage,
    Failed,
    HoldImage,
    ImageDropped,
    ImageHeld,
    StopElsewhere,
    Stopped,
)

Question = HoldImage | DropImage | StopElsewhere
Answer = ImageHeld | ImageDropped | Stopped


class PendingCommands:
    """Belongs to one event loop."""

    def __init__(self, send: Callable[[Question | Abort], None]) -> None:
        self._send = send
        self._waiting: dict[RequestKey, asyncio.Future[Answer]] = {}

    def __len__(self) -> int:
        """Commands without an answer yet."""
        return len(self._waiting)

    async def ask(self, command: Question) -> Answer:
        """The answer; its `Failed` is raised. Who is cancelled meanwhile has the engine forget it.

        Nothing is awaited before the command is sent.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[command.request_id] = answer
        self._send(command)
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(Abort(request_id=command.request_id))
            raise
        finally:
            del self._waiting[command.request_id]

    def settle(self, report: Answer | Failed) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        answer = self._waiting.get(report.request_id)
        if answer is None or answer.done():
            return
        if isinstance(report, Failed):
            answer.set_exception(from_value(report.error))
        else:
            answer.set_result(report)

    def fail(self, error: LegatoError) -> None:
        """No answer will come any more."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
