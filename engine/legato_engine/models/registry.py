"""Names to models: where configuration, tokenizer and weights come from.

Resolving a name loads no torch; loading does.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from legato_engine.errors import InvalidField, ModelNotFound
from legato_engine.models.moondream import presets
from legato_engine.models.moondream.config import MoondreamConfig, parse_config
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.tokenizer import BytePairTokenizer, StandInTokenizer, Tokenizer

if TYPE_CHECKING:
    import torch  # only `load` needs it, and only when called

    from legato_engine.models.checkpoint import Progress
    from legato_engine.models.moondream.model import MoondreamModel

_SEED = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelBundle:
    """A model that is found but not loaded. `weights` None: random ones."""

    config: MoondreamConfig
    frontend: MoondreamFrontend
    weights: Path | None

    @property
    def max_context(self) -> int:
        """Positions of one sequence, generated ones included."""
        return self.config.text.max_context

    def load(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        vision_fp8: bool = False,
        memory: int | None = None,
        progress: Progress = lambda fraction: None,
    ) -> MoondreamModel:
        """The model on a device, its vision tower in fp8 if asked.

        Raises `InvalidField` when the weights do not fit it, or not into `memory` bytes (None: that
        is not asked), or the device or tower cannot be fp8.
        """
        from legato_engine.models.moondream import weights
        from legato_engine.models.moondream.model import MoondreamModel

        if self.weights is None:
            network = weights.random_weights(
                self.config, _SEED, device, dtype, memory=memory, progress=progress
            )
        else:
            network = weights.load_weights(
                self.config, self.weights, device, dtype, memory=memory, progress=progress
            )
        if vision_fp8:
            network.vision.use_fp8()
        return MoondreamModel(self.config, network)


def resolve(
    name: str, weights: str = "", tokenizer: str = "", *, random_weights: bool = False
) -> ModelBundle:
    """Find a model by name.

    `legato-tiny`: `weights` is a folder of config.json, model.safetensors and tokenizer.json, by
    default the one that the package legato-tiny brings. `moondream2`: `weights` is a .safetensors
    file or a folder, `tokenizer` a tokenizer.json. `random-tiny` has random weights always. With
    `random_weights` nothing is read, and text is made of bytes.

    Raises `ModelNotFound` for an unknown name, `InvalidField` for files that are missing or wrong.
    """
    if name not in _RESOLVERS:
        raise ModelNotFound(
            f"no model is called {name!r}; there are {', '.join(sorted(_RESOLVERS))}",
            resource=name,
        )
    preset, find = _RESOLVERS[name]
    if random_weights or find is None:
        return _bundle(preset(), StandInTokenizer(), None)
    return find(weights, tokenizer)


def _find_legato_tiny(weights: str, tokenizer: str) -> ModelBundle:
    folder = Path(weights) if weights else _shipped("legato_tiny")
    try:
        config = parse_config((folder / "config.json").read_bytes())
    except OSError as error:
        problem = f"no config.json in {folder}: {error.strerror}"
        raise InvalidField(problem, field="weights") from None
    text = BytePairTokenizer(Path(tokenizer) if tokenizer else folder / "tokenizer.json")
    return _bundle(config, text, folder)


def _find_moondream2(weights: str, tokenizer: str) -> ModelBundle:
    if not weights:
        raise InvalidField("moondream2 needs a safetensors file or folder", field="weights")
    if not tokenizer:
        raise InvalidField("moondream2 needs a tokenizer.json", field="tokenizer")
    return _bundle(presets.moondream2_config(), BytePairTokenizer(Path(tokenizer)), Path(weights))


def _bundle(config: MoondreamConfig, tokenizer: Tokenizer, weights: Path | None) -> ModelBundle:
    return ModelBundle(config, MoondreamFrontend(config, tokenizer), weights)


def _shipped(package: str) -> Path:
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise ModelNotFound(
            f"the package {package.replace('_', '-')} is not installed; install it or give weights",
            resource=package,
        ) from None
    return Path(module.path())


_RESOLVERS: dict[
    str, tuple[Callable[[], MoondreamConfig], Callable[[str, str], ModelBundle] | None]
] = {
    "legato-tiny": (presets.legato_tiny_config, _find_legato_tiny),
    "moondream2": (presets.moondream2_config, _find_moondream2),
    "random-tiny": (presets.tiny_random_config, None),
}
