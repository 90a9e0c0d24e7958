"""What tests on a GPU share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def memory_of_its_own() -> Iterator[None]:
    """Return the memory of a module's models and pools, for the next module.

    The first fixture of a module ends last.
    """
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


_LEAST = 40 << 30


@pytest.fixture(autouse=True)
def memory_to_begin_with() -> None:
    """Collect what earlier tests left in cycles, models with their weights among it.

    The traceback of the last failure holds its tensors.
    """
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < _LEAST:
        for name in ("last_exc", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        gc.collect()
        torch.cuda.empty_cache()
