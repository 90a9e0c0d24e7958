"""A TCP proxy that injects the faults of networks."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType

PIECE = 16 * 1024  # bytes
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds


class FaultProxy:
    """Forwards connections to `target` (host:port) from a thread of its own.

    The faults hold for connections that are open and those that follow:

    - `delay`: seconds until a piece of data goes on, in each direction
    - `bandwidth`: bytes a second of each direction of each connection; 0 is without a limit
    - `freeze`, `thaw`: hold all data; both ends still see an open connection (half-open TCP)
    - `reset`: end the open connections by RST, in the middle of whatever is under way
    - `reset_after`: the same as soon as that many bytes of responses have passed
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.delay = 0.0
        self.bandwidth = 0
        self.num_accepted = 0
        self._reset_after = 0
        self._loop = asyncio.new_event_loop()
        self._moving = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fault-proxy", daemon=True
        )
        self.address = ""

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self.address = self._call(self._start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------ faults

    def freeze(self) -> None:
        self._loop.call_soon_threadsafe(self._moving.clear)

    def thaw(self) -> None:
        self._loop.call_soon_threadsafe(self._moving.set)

    def reset(self) -> None:
        self._call(self._reset())

    def reset_after(self, num_bytes: int) -> None:
        """Count from now; 0 ends the fault."""
        self._loop.call_soon_threadsafe(setattr, self, "_reset_after", num_bytes)

    @property
    def num_open(self) -> int:
        """Connections of clients."""
        return len(self._open) // 2

    # ------------------------------------------------------------ the loop's side

    def _call(self, coroutine):
        future: Future[object] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(30)

    async def _start(self) -> str:
        self._moving.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _stop(self) -> None:
        self._server.close()
        await self._reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reset(self) -> None:
        for writer in list(self._open):
            _abort(writer)
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, server_writer}
        with suppress(asyncio.CancelledError):  # which asyncio's streams log as an error
            await asyncio.gather(
                self._forward(reader, server_writer, counts=False),
                self._forward(server_reader, writer, counts=True),
            )
        self._open -= {writer, server_writer}

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(PIECE):
                await self._moving.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.bandwidth:
                    await asyncio.sleep(len(data) / self.bandwidth)
                if counts and self._reset_after:
                    await self._count(len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _count(self, num_bytes: int) -> None:
        self._reset_after -= num_bytes
        if self._reset_after <= 0:
            self._reset_after = 0
            await self._reset()


def _abort(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
