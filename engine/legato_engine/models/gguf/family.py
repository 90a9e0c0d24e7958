"""Models of GGUF files, by the architecture that the file names."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

from legato_engine.models.bundle import ModelBundle, ModelSource
from legato_engine.models.gguf.config import ARCHITECTURES, hub_config
from legato_engine.models.gguf.reader import read_gguf

_NAMES = dict(zip(ARCHITECTURES, ("llama", "qwen", "qwen"), strict=True))


def find(source: ModelSource) -> ModelBundle:
    """Find the model of a GGUF file.

    Raises:
        InvalidField: the file is damaged, or its architecture is not implemented.
    """
    file = read_gguf(Path(source.weights))
    hub_config(file)
    name = _NAMES[file.architecture]
    family = importlib.import_module(f"legato_engine.models.{name}.family")
    found: ModelBundle = family.find(dataclasses.replace(source, name=name))
    return found
