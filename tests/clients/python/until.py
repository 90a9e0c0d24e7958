"""Waiting in tests."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object]) -> None:
    """Return once `condition` holds; the test's own timeout bounds it."""
    while not condition():
        time.sleep(0.005)
