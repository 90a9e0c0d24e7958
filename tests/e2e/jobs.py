"""A mixed bag of requests, for tests that compare answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from legato_client import (
    AsyncClient,
    CaptionTask,
    Client,
    DetectTask,
    LegatoError,
    PointTask,
    QueryTask,
    Result,
    Sampling,
    SegmentTask,
    Task,
)
from PIL import Image

from tests.e2e.scenes import many_circles, two_shapes

WILD = Sampling(temperature=2.0, top_p=1.0, max_tokens=30, seed=11)
Job = tuple[Image.Image | None, Task]
Answer = tuple[object, ...]


def jobs() -> list[Job]:
    """Every skill on three images, greedy and sampled; 24 of them."""
    images = [two_shapes().image, two_shapes(offset=40).image, many_circles(5).image]
    tasks: list[Task] = [
        DetectTask("red circle"),
        PointTask("red circle"),
        SegmentTask("blue square"),
        CaptionTask("short"),
        QueryTask("How many circles are there?"),
        QueryTask("What is in the image?", sampling=WILD),
        CaptionTask("long", sampling=WILD),
    ]
    bag: list[Job] = [(image, task) for image in images for task in tasks]
    return bag + [(None, QueryTask(text, sampling=WILD)) for text in ("one", "two", "three")]


def ask(client: Client, job: Job) -> Answer:
    """The answer to a job."""
    return said(*client.run_tasks(job[0], [job[1]]))


async def ask_async(client: AsyncClient, job: Job) -> Answer:
    """The answer to a job."""
    return said(*await client.run_tasks(job[0], [job[1]]))


async def ask_all(address: str, bag: Iterable[Job]) -> list[Answer]:
    """The answers to jobs that are all sent at once."""
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(ask_async(client, job) for job in bag))


def said(result: Result | LegatoError) -> Answer:
    """What a result says, without what it cost."""
    assert not isinstance(result, LegatoError), result
    names = ("answer", "reasoning", "caption", "objects", "points", "segments")
    return tuple(getattr(result, name, None) for name in names)
