"""Models by name; finding one loads no torch.

A family is a function `(source: ModelSource) -> ModelBundle`, imported on first use.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from legato_engine.config import LOAD_DEFAULTS, MODELS, LoadOptions
from legato_engine.errors import ModelNotFound
from legato_engine.hub import store
from legato_engine.models.frontend import ModelFrontend
from legato_engine.models.gguf import is_gguf
from legato_engine.models.untrusted import refusing

if TYPE_CHECKING:
    import torch

    from legato_engine.kernels.map_codes import CodeFormat
    from legato_engine.models.base import Model
    from legato_engine.models.recipe import Quantisation

DEFAULT = "legato-tiny"

_MOONDREAM = "legato_engine.models.moondream.family:find"
_QWEN3_VL = "legato_engine.models.qwen3_vl.family:find"
_FAMILIES = {
    "legato-tiny": _MOONDREAM,
    "moondream2": _MOONDREAM,
    "moondream3": _MOONDREAM,
    "moondream3.1": _MOONDREAM,
    "gguf": "legato_engine.models.decoder.families:find_gguf",
    "llama": "legato_engine.models.decoder.families:find_llama",
    "phi": "legato_engine.models.decoder.families:find_phi",
    "qwen": "legato_engine.models.decoder.families:find_qwen",
    "qwen3-vl": _QWEN3_VL,
    "smollm2-135m": "legato_engine.models.decoder.families:find_llama",
    "qwen3-0.6b": "legato_engine.models.decoder.families:find_qwen",
    "random-tiny": _MOONDREAM,
    "random-tiny3": _MOONDREAM,
    "random-tiny-vl": _QWEN3_VL,
}


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's name and files; the family chooses what is empty or 0."""

    name: str
    weights: str = ""
    tokenizer: str = ""
    random_weights: bool = False
    max_context: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelBundle(abc.ABC):
    """A model whose configuration is read and whose weights are not.

    `weights`: a file or folder, None for random ones; a folder of `adapters` and the file of a
    `draft` may be beside them. `max_context`: positions of a sequence, generated ones included.
    """

    frontend: ModelFrontend
    weights: Path | None
    max_context: int
    adapters: Path | None = None
    draft: Path | None = None

    @abc.abstractmethod
    def load(
        self, device: torch.device, dtype: torch.dtype, options: LoadOptions = LOAD_DEFAULTS
    ) -> Model:
        """Load the weights.

        Raises:
            InvalidField: the weights do not fit the model or the memory, fp8 cannot run, or scales
                are missing.
        """

    @abc.abstractmethod
    def quantisation(self, code_format: CodeFormat) -> Quantisation:
        """Plan a quantised checkpoint.

        Raises:
            InvalidField: the checkpoint cannot be quantised so.
        """


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
