"""What requests leave for Python's garbage collector: the engine's collections are rare."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
from legato_engine.core.assembly import Assembly, with_decode_path
from legato_engine.types import CaptionTask, DetectTask, QueryTask, RequestKey, SegmentTask

from tests.engine.engine.core.world import World, png

TASKS = (
    DetectTask(object="x"),
    CaptionTask(),
    QueryTask(question="what?"),
    SegmentTask(object="y"),
)


@contextlib.contextmanager
def unreachable() -> Iterator[list[str]]:
    """The types of the engine's objects that references alone do not free."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        types = [type(each) for each in gc.garbage]
        found += [each.__qualname__ for each in types if each.__module__.startswith("legato_")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def served(world: World, batch: int) -> None:
    """Requests of every kind, one of which is aborted."""
    names = [f"r{batch}-{number}" for number in range(6)]
    for number, name in enumerate(names):
        task = TASKS[number % len(TASKS)]
        image = None if isinstance(task, QueryTask) else world.encoded(png(number % 2))
        world.submit(name, task, image)
    world.core.step()
    world.core.abort(RequestKey(names.pop()))
    world.run(*names)


@pytest.mark.parametrize("path", ["graph", "loop"])
def test_requests_leave_no_cycles(assembly: Assembly, path: str) -> None:
    world = World(with_decode_path(assembly, path))
    served(world, 0)
    with unreachable() as found:
        for batch in range(1, 5):
            served(world, batch)
    assert found == []
    world.close()
