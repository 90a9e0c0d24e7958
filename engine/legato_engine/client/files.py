"""Files that an engine will read, looked for before it is started."""

from __future__ import annotations

from pathlib import Path

from legato_engine.config import EngineConfig
from legato_engine.errors import InvalidField
from legato_engine.hub import catalog, store

_FIELDS = ("weights", "tokenizer", "adapters", "refiner")


def require_files(config: EngineConfig) -> None:
    """Check that they are there: an engine loads its libraries for seconds before it misses them.

    Raises:
        InvalidField: one is not, or the model was not pulled.
    """
    for field in _FIELDS:
        path = getattr(config, field)
        if path and not Path(path).exists():
            raise InvalidField(f"no such file or folder: {path}", field=field)
    given = config.weights or config.tokenizer or config.random_weights
    if config.model in catalog.MODELS and not given:
        store.find(config.models, config.model)
