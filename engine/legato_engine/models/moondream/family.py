"""Moondream models by name; finding one loads no torch."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from legato_engine.config import LOAD_DEFAULTS, LoadOptions
from legato_engine.errors import InvalidField, ModelNotFound
from legato_engine.models.confidence import read_calibrations
from legato_engine.models.moondream import presets
from legato_engine.models.moondream.config import MoondreamConfig, parse_config
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.tokenizer import BytePairTokenizer, StandInTokenizer
from legato_engine.models.registry import ModelBundle, ModelSource
from legato_engine.models.text import Vocabulary

if TYPE_CHECKING:
    import torch  # loaded by `load` alone

    from legato_engine.kernels.map_codes import CodeFormat
    from legato_engine.models.moondream.model import MoondreamModel, Network
    from legato_engine.models.recipe import Quantisation

_SEED = 0

Preset = Callable[[], MoondreamConfig]
Read = Callable[[ModelSource, Preset], "MoondreamBundle"]
"""Reads the files of a source; the preset is for files without a configuration."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoondreamBundle(ModelBundle):
    """A Moondream."""

    config: MoondreamConfig
    frontend: MoondreamFrontend

    def quantisation(self, code_format: CodeFormat) -> Quantisation:
        from legato_engine.models.moondream.quantised import quantisation
        from legato_engine.models.recipe import require_plain

        return quantisation(self.config, require_plain(self.weights), code_format)

    def load(
        self, device: torch.device, dtype: torch.dtype, options: LoadOptions = LOAD_DEFAULTS
    ) -> MoondreamModel:
        from legato_engine.kernels.cpu.library import library
        from legato_engine.models.moondream import vision_fp8, weights
        from legato_engine.models.moondream.model import MoondreamModel

        weight_dtype, codes = options.weight_dtype, None
        if self.weights is None:
            network = weights.random_weights(self.config, _SEED, device, dtype, options)
        else:
            recipe = weights.quantised_maps(self.config).read(self.weights, weight_dtype)
            if recipe is not None:  # which is not rounded again
                codes = recipe.code_format
                weight_dtype = "auto" if device.type == "cpu" else recipe.kind
            network = weights.load_weights(
                self.config, self.weights, device, dtype, options, codes=codes
            )
        on_cpu = device.type == "cpu"
        if codes is not None and on_cpu:
            network.text.dequantise()
        packs = _packs(weight_dtype, network, device)
        if options.vision_fp8:
            vision_fp8.use_fp8(network.vision, _folder(self.weights))
            if codes is None or on_cpu:
                network.text.use_fp8()  # of values that packing rounds
        if not on_cpu and packs is not None:
            network.quantise(packs)
        if options.vision_fp8:
            network.text.use_fp8()  # of a quantised checkpoint's values
        if options.kv_dtype == "fp8" and network.text.kv_scales() is None:
            network.text.calibrate_kv()
        model = MoondreamModel(self.config, network)
        if on_cpu:
            network.pack(weight_dtype, library(options.cpu_kernels))
        return model


def _packs(weight_dtype: str, network: Network, device: torch.device) -> str | None:
    """Return how a GPU packs the decoder's maps, or None if it keeps the checkpoint's tensors.

    The resident kernel reads these, and so do passes of many tokens, which unpack a packed map each
    time. They are a second copy: where the kernel does not run, or where the GPU has little memory,
    it is not worth its memory.
    """
    from legato_engine.kernels.map_codes import KINDS
    from legato_engine.kernels.step import (
        has_resident_kernel,
        has_room_for_copy,
        has_step_kernels,
    )

    if weight_dtype in KINDS:
        return weight_dtype
    if weight_dtype != "auto" or not has_step_kernels(device) or network.text.cannot_quantise():
        return None
    copied = sum(weight.nbytes for weight in network.text.blocks.parameters())
    is_small = has_room_for_copy(copied, device)
    return None if has_resident_kernel(device) and is_small else "packed"


def find(source: ModelSource) -> ModelBundle:
    """Find a Moondream.

    - `legato-tiny`: `weights` is a folder of config.json, model.safetensors, tokenizer.json and
      optionally adapters and draft.safetensors; by default that of the package legato-tiny, whose
      other files a weights file takes.
    - `moondream2`, `moondream3`, `moondream3.1`: a `weights` file or folder and a `tokenizer` file.
    - `random-tiny`, `random-tiny3`: always random weights.

    With `random_weights` nothing is read, and text is made of bytes.

    Raises:
        ModelNotFound: the package legato-tiny is not installed.
        InvalidField: a file is missing or wrong, or the model lacks this `max_context`.
    """
    preset, read = _NAMES[source.name]
    if source.random_weights or read is None:
        return _bundle(source, preset(), StandInTokenizer(), None)
    return read(source, preset)


def _read_shipped(source: ModelSource, _: Preset) -> MoondreamBundle:
    given = Path(source.weights) if source.weights else None
    is_file = given is not None and given.is_file()
    folder = shipped("legato_tiny") if given is None or is_file else given
    try:
        config = parse_config((folder / "config.json").read_bytes())
    except OSError as error:
        problem = f"no config.json in {folder}: {error.strerror}"
        raise InvalidField(problem, field="weights") from None
    path = Path(source.tokenizer) if source.tokenizer else folder / "tokenizer.json"
    tokenizer = BytePairTokenizer(path, is_shipped=not source.tokenizer and given is not folder)
    bundle = _bundle(source, config, tokenizer, folder)
    adapters, draft = folder / "adapters", folder / "draft.safetensors"
    return dataclasses.replace(
        bundle,
        weights=given or folder,
        adapters=adapters if adapters.is_dir() else None,
        draft=draft if draft.is_file() else None,
    )


def _read_published(source: ModelSource, preset: Preset) -> MoondreamBundle:
    if not source.weights:
        raise InvalidField(f"{source.name} needs a weights file or folder", field="weights")
    if not source.tokenizer:
        raise InvalidField(f"{source.name} needs a tokenizer.json", field="tokenizer")
    text = BytePairTokenizer(Path(source.tokenizer))
    return _bundle(source, preset(), text, Path(source.weights))


def _bundle(
    source: ModelSource, config: MoondreamConfig, tokenizer: Vocabulary, weights: Path | None
) -> MoondreamBundle:
    config = _limited(config, source.max_context)
    if isinstance(tokenizer, BytePairTokenizer) and tokenizer.num_ids > config.text.vocab_size:
        raise InvalidField(
            f"the tokenizer has the id {tokenizer.num_ids - 1}, the model's vocabulary ends before "
            f"{config.text.vocab_size}",
            field="tokenizer",
        )
    folder = _folder(weights)
    calibrations = None if folder is None else read_calibrations(folder)
    frontend = MoondreamFrontend(config, tokenizer, calibrations=calibrations)
    return MoondreamBundle(
        frontend=frontend, weights=weights, max_context=config.text.max_context, config=config
    )


def _folder(weights: Path | None) -> Path | None:
    return weights if weights is None or weights.is_dir() else weights.parent


def _limited(config: MoondreamConfig, max_context: int) -> MoondreamConfig:
    if not max_context:
        return config
    if not config.prefix_length < max_context <= config.text.max_context:
        raise InvalidField(
            f"{config.name} has a context of {config.prefix_length + 1} to "
            f"{config.text.max_context} positions, not {max_context}",
            field="max_context",
        )
    text = msgspec.structs.replace(config.text, max_context=max_context)
    return msgspec.structs.replace(config, text=text)


def shipped(package: str) -> Path:
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise ModelNotFound(
            f"the package {package.replace('_', '-')} is not installed; install it or give weights",
            resource=package,
        ) from None
    return Path(module.path())


_NAMES: dict[str, tuple[Preset, Read | None]] = {
    "legato-tiny": (presets.legato_tiny_config, _read_shipped),
    "moondream2": (presets.moondream2_config, _read_published),
    "moondream3": (presets.moondream3_config, _read_published),
    "moondream3.1": (presets.moondream3_1_config, _read_published),
    "random-tiny": (presets.tiny_random_config, None),
    "random-tiny3": (presets.tiny_random3_config, None),
}
