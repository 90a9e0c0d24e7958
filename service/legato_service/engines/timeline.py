"""The timelines of several engines as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from legato_engine.client.timeline_watch import TimelineWatch, Watched


async def batches(
    timelines: Sequence[TimelineWatch], seconds: float | None = None
) -> AsyncGenerator[tuple[int, Watched], None]:
    """Yield the batches of so many seconds, or until the generator is closed, with the engine.

    A reader that lags leaves them in each engine's `TimelineWatch`, which drops the oldest.
    """
    merged: asyncio.Queue[tuple[int, Watched] | None] = asyncio.Queue(maxsize=1)
    readers = [
        asyncio.create_task(_read(number, each, seconds, merged))
        for number, each in enumerate(timelines)
    ]
    left = len(readers)
    try:
        while left:
            batch = await merged.get()
            if batch is None:
                left -= 1
            else:
                yield batch
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    number: int,
    timeline: TimelineWatch,
    seconds: float | None,
    merged: asyncio.Queue[tuple[int, Watched] | None],
) -> None:
    async with aclosing(timeline.batches(seconds)) as batches:
        async for batch in batches:
            await merged.put((number, batch))
    await merged.put(None)
