"""A value computed on first use, shared between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Lazy(Generic[T]):
    """The result of `compute`, which the first `get` runs while others wait."""

    __slots__ = ("_compute", "_lock", "_value")

    def __init__(self, compute: Callable[[], T]) -> None:
        self._lock = threading.Lock()
        self._compute: Callable[[], T] | None = compute
        self._value: T | None = None

    @property
    def is_computed(self) -> bool:
        return self._compute is None

    def get(self) -> T:
        with self._lock:
            if self._compute is not None:
                self._value = self._compute()
                self._compute = None
            return cast("T", self._value)
