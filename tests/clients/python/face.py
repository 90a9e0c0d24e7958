"""Both clients in the same words."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from legato_client import Answer, AsyncClient, AsyncSession, Client


class Face:
    """Calls either client in the same words, so that every rule is tested on both."""

    def __init__(self, kind: str, target: str, timeout: float) -> None:
        self._blocking = kind == "sync"
        self._target, self._timeout = target, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._blocking:
                with Client(self._target, timeout=self._timeout) as client:
                    answer = getattr(client, name)(*args, **kwargs)
                    return list(answer) if inspect.isgenerator(answer) else answer
            return asyncio.run(self._call(name, args, kwargs))

        return call

    async def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        async with AsyncClient(self._target, timeout=self._timeout) as client:
            answer = getattr(client, name)(*args, **kwargs)
            if inspect.isasyncgen(answer):
                return [event async for event in answer]
            return await answer


class AwaitedSession:
    """An `AsyncSession` in the words of a `Session`; its loop runs in a thread of its own."""

    def __init__(self, session: AsyncSession, loop: asyncio.AbstractEventLoop) -> None:
        self._session, self._loop = session, loop

    def __iter__(self) -> Iterator[Answer]:
        return self

    def __next__(self) -> Answer:
        try:
            return self.wait(self._session.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._session, name)
        return (lambda *a, **k: self.wait(value(*a, **k))) if callable(value) else value

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The value of a coroutine of that loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@contextlib.contextmanager
def session_of(kind: str, target: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """A session of either client, "sync" or "async", opened."""
    if kind == "sync":
        with Client(target) as client, client.session(*args, **kwargs) as session:
            yield session
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        awaited = AsyncClient(target)
        face = AwaitedSession(awaited.session(*args, **kwargs), loop)
        face.wait(face._session.__aenter__())
        try:
            yield face
        finally:
            face.wait(face._session.__aexit__(None, None, None))
    finally:
        asyncio.run_coroutine_threadsafe(awaited.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# ---------------------------------------------------------------- waiting


def until(condition: Callable[[], object]) -> None:
    """Return once `condition` holds; the test's own timeout bounds it."""
    while not condition():
        time.sleep(0.005)
