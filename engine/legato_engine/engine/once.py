"""A value that is made by whoever asks for it first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Once(Generic[T]):
    """What `make` returns, made once on whichever thread asks first; the others wait for that.

    A `make` that raises is asked again by the next.
    """

    __slots__ = ("_lock", "_make", "_value")

    def __init__(self, make: Callable[[], T]) -> None:
        self._lock = threading.Lock()
        self._make: Callable[[], T] | None = make
        self._value: T | None = None

    @property
    def made(self) -> bool:
        """Whether the value is there."""
        return self._make is None

    def get(self) -> T:
        """The value. Raises what making it raises."""
        with self._lock:
            if self._make is not None:
                self._value = self._make()
                self._make = None  # nor is kept alive what it is made of
            return cast("T", self._value)
