"""Names to models: the table of families, each a folder that knows where its files are.

A family is a module with `find(source: ModelSource) -> ModelBundle`. None is imported before it is
asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from legato_engine.errors import ModelNotFound
from legato_engine.models.bundle import ModelBundle, ModelSource

_FAMILIES = {
    "legato-tiny": "legato_engine.models.moondream.family",
    "moondream2": "legato_engine.models.moondream.family",
    "moondream3": "legato_engine.models.moondream.family",
    "moondream3.1": "legato_engine.models.moondream.family",
    "llama": "legato_engine.models.llama.family",
    "phi": "legato_engine.models.phi.family",
    "qwen": "legato_engine.models.qwen.family",
    "random-tiny": "legato_engine.models.moondream.family",
    "random-tiny3": "legato_engine.models.moondream.family",
}


def resolve(
    name: str,
    weights: str = "",
    tokenizer: str = "",
    *,
    random_weights: bool = False,
    max_context: int = 0,
) -> ModelBundle:
    """Find a model by name; what its files are is told where its family is.

    Raises `ModelNotFound` for an unknown name, `InvalidField` for files that are missing or wrong.
    """
    if name not in _FAMILIES:
        raise ModelNotFound(
            f"no model is called {name!r}; there are {', '.join(sorted(_FAMILIES))}",
            resource=name,
        )
    find: Callable[[ModelSource], ModelBundle] = importlib.import_module(_FAMILIES[name]).find
    return find(ModelSource(name, weights, tokenizer, random_weights, max_context))
