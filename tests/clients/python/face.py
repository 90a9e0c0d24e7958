"""Both clients in the same words."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from legato_client import AsyncClient, Client


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
