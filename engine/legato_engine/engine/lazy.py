"""A value computed on first use, shared between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Lazy(Generic[T]):
    """The result of `compute`, which the first `get` runs while others wait.

    If `compute` raises, the next `get` runs it again.
    """

    __slots__ = ("_compute", "_lock", "_value")

    def __init__(self, compute: Callable[[], T]) -> None:
        self._lock = threading.Lock()
        self._compute: Callable[[], T] | None = compute
        self._value: T | None = None

    @property
    def is_computed(self) -> bool:
        """Whether `get` returns without computing."""
        return self._compute is None

    def get(self) -> T:
        """Return the value. Raises as `compute`."""
        with self._lock:
            if self._compute is not None:
                self._value = self._compute()
                self._compute = None  # frees what the closure holds
            return cast("T", self._value)
