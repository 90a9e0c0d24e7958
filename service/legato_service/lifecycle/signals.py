"""Signals that end the service."""

from __future__ import annotations

import asyncio
import signal


class Signals:
    """SIGTERM and SIGINT, one after the other. Needs a running loop."""

    def __init__(self) -> None:
        self._received = asyncio.Semaphore(0)
        self.number = 0  # of the last one
        self.cut = asyncio.Event()  # set by the one that ends the drain
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self.number = number
        self._received.release()

    async def next(self) -> bool:
        """Wait for the first one that no call has returned for; one waiter at a time."""
        return await self._received.acquire()
