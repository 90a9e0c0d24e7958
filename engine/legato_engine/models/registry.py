"""Models by name.

A family is a function `(source: ModelSource) -> ModelBundle`, imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from legato_engine.config import MODELS
from legato_engine.errors import ModelNotFound
from legato_engine.hub import store
from legato_engine.models.bundle import ModelBundle, ModelSource
from legato_engine.models.gguf.reader import is_gguf
from legato_engine.models.untrusted import refusing

DEFAULT = "legato-tiny"

_MOONDREAM = "legato_engine.models.moondream.family:find"
_FAMILIES = {
    "legato-tiny": _MOONDREAM,
    "moondream2": _MOONDREAM,
    "moondream3": _MOONDREAM,
    "moondream3.1": _MOONDREAM,
    "gguf": "legato_engine.models.gguf.config:find",
    "llama": "legato_engine.models.decoder.families:find_llama",
    "phi": "legato_engine.models.decoder.families:find_phi",
    "qwen": "legato_engine.models.decoder.families:find_qwen",
    "smollm2-135m": "legato_engine.models.decoder.families:find_llama",
    "qwen3-0.6b": "legato_engine.models.decoder.families:find_qwen",
    "random-tiny": _MOONDREAM,
    "random-tiny3": _MOONDREAM,
}


def may_have_chat_template(name: str, weights: str) -> bool:
    """Return whether the name is a text model, whose files may bring a chat template."""
    return is_gguf(weights) or _FAMILIES.get(name, _MOONDREAM) != _MOONDREAM


def tokenizer_path(name: str, weights: str, tokenizer: str, models: str = "") -> Path | None:
    """Return the tokenizer.json that `resolve` will read, unless it is shipped or in a GGUF."""
    if tokenizer:
        return Path(tokenizer)
    if name in store.MODELS and not weights:
        return store.model_folder(models, name) / "tokenizer.json"
    return Path(weights) / "tokenizer.json" if Path(weights).is_dir() and weights else None


def resolve(
    name: str,
    weights: str = "",
    tokenizer: str = "",
    *,
    random_weights: bool = False,
    max_context: int = 0,
    models: str = "",
) -> ModelBundle:
    """Find a model by name.

    One that `legato pull` knows is taken from `models` by default. The default name with a GGUF
    file is the model that the file names.

    Raises:
        ModelNotFound: the name is unknown.
        InvalidField: a file is missing or wrong.
    """
    if name == DEFAULT and is_gguf(weights):
        name = "gguf"
    if name not in _FAMILIES:
        raise ModelNotFound(
            f"no model is called {name!r}; there are {', '.join(MODELS)}",
            resource=name,
        )
    if name in store.MODELS and not (weights or tokenizer or random_weights):
        folder = store.find(models, name)
        weights, tokenizer = str(folder), str(folder / "tokenizer.json")
    module, _, function = _FAMILIES[name].partition(":")
    find: Callable[[ModelSource], ModelBundle] = getattr(importlib.import_module(module), function)
    with refusing(weights or name, "weights"):
        return find(ModelSource(name, weights, tokenizer, random_weights, max_context))
