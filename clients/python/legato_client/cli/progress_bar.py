"""A bar that rich draws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from rich import progress
from rich.console import Console


@contextlib.contextmanager
def bar(out: TextIO, what: str, total: int | None, done: int) -> Iterator[Callable[[], None]]:
    """Yield a function that counts one more, for any thread; `total` is None if unknown."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(file=out)) as shown:
        task = shown.add_task(what, total=total, completed=done)
        yield lambda: shown.advance(task)
