"""Configurations that no restart would make servable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from legato_engine.errors import InvalidField, LegatoError, ModelNotFound
from legato_engine.models.untrusted import is_out_of_memory


class UnservableConfig(Exception):
    """The configuration cannot be served."""

    def __init__(self, cause: LegatoError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def unservable() -> Iterator[None]:
    """Raise `UnservableConfig` for errors of a load that another one would repeat."""
    try:
        yield
    except (InvalidField, ModelNotFound) as error:
        raise UnservableConfig(error) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = " ".join(str(error).split()) or "no memory"
        problem = f"memory ran out while the model was loaded: {text[:300]}"
        raise UnservableConfig(InvalidField(problem, field="device")) from None
