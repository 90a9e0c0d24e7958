"""Commands with one reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from legato_engine.core.request_key import RequestKey
from legato_engine.errors import LegatoError, from_value
from legato_engine.ipc.commands import Abort, DropImage, HoldImage, StopElsewhere
from legato_engine.ipc.messages import Failed, ImageDropped, ImageHeld, Stopped

RepliedCommand = HoldImage | DropImage | StopElsewhere
Reply = ImageHeld | ImageDropped | Stopped


class PendingCommands:
    """Commands without a reply yet. Belongs to one event loop."""

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
            del reply  # a failed one holds the traceback, and with it this frame

    def resolve(self, output: Reply | Failed) -> None:
        """Deliver a reply; drop it when its caller is gone."""
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
