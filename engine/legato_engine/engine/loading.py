"""Loads a model and assembles its engine, from a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from legato_engine.config import EngineConfig, check
from legato_engine.device.base import Device
from legato_engine.device.host import available_memory
from legato_engine.device.select import open_device
from legato_engine.engine.assembly import Assembly
from legato_engine.engine.warm_up import warm_up
from legato_engine.errors import InvalidField
from legato_engine.kernels.cpu.library import take_threads
from legato_engine.layers.lora import AdapterBank
from legato_engine.models import registry
from legato_engine.models.bundle import ModelBundle
from legato_engine.models.capabilities import MaskRefiner
from legato_engine.models.model import Model
from legato_engine.runtime.kv_pool import allocate, num_pages_for
from legato_engine.runtime.warm_runner import warm_runner
from legato_engine.scheduler.sink import SilentSink
from legato_engine.speculative.proposer import Proposer

Progress = Callable[[str, float], None]
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_WEIGHTS_FROM, _WEIGHTS_SHARE = 0.1, 0.6


def assemble(config: EngineConfig, progress: Progress = lambda stage, fraction: None) -> Assembly:
    """Load the model on its device, build the runner and warm it up.

    Raises:
        LegatoError: the model or device does not exist, or a setting cannot be served.
        OSError: a file is missing.
    """
    check(config)
    progress("device", 0.0)
    device = open_device(config.device, config.threads)
    bundle = registry.resolve(
        config.model,
        weights=config.weights,
        tokenizer=config.tokenizer,
        random_weights=config.random_weights,
        max_context=config.max_context,
        models=config.models,
    )
    progress("weights", _WEIGHTS_FROM)
    dtype = _dtype(config.dtype, device)
    folders = _adapter_folders(config, bundle)
    free = device.free_memory()
    model = bundle.load(
        device.torch_device,
        dtype,
        vision_fp8=config.vision_dtype == "fp8",
        kv_dtype=config.kv_dtype,
        weight_dtype=_weight_dtype(config.weight_dtype, device),
        cpu_kernels=config.cpu_kernels,
        memory=available_memory() if free is None else free,
        progress=lambda done: progress("weights", _WEIGHTS_FROM + done * _WEIGHTS_SHARE),
    )
    if model.capabilities.own_threads:
        device.compute.submit(take_threads)
    progress("warm-up", _WEIGHTS_FROM + _WEIGHTS_SHARE)
    warm, rest = _WEIGHTS_FROM + _WEIGHTS_SHARE, 1.0 - _WEIGHTS_FROM - _WEIGHTS_SHARE
    assembly = _with_runner(
        config, bundle, model, device, folders, lambda done: progress("warm-up", warm + done * rest)
    )
    progress("ready", 1.0)
    return assembly


def speculating(assembly: Assembly, setting: str, proposer: Proposer | None = None) -> Assembly:
    """Return the same model and KV cache with another `speculation`; use one of both at a time.

    Raises:
        InvalidField: the setting is unknown, or the draft cannot be used.
    """
    config = msgspec.structs.replace(assembly.config, speculation=setting)
    return _rerunning(assembly, config, proposer)


def with_decode_path(assembly: Assembly, path: str) -> Assembly:
    """Return the same model and KV cache with another `decode_path`; use one of both at a time.

    Raises:
        InvalidField: the path is unknown, or excluded by another setting.
    """
    config = msgspec.structs.replace(assembly.config, decode_path=path)
    check(config)
    return _rerunning(assembly, config)


def _rerunning(
    assembly: Assembly, config: EngineConfig, proposer: Proposer | None = None
) -> Assembly:
    runner = warm_runner(
        config,
        assembly.model,
        assembly.device,
        assembly.kv,
        bank=assembly.bank,
        refiner=assembly.refiner,
        draft=assembly.draft,
        proposer=proposer,
    )
    return dataclasses.replace(assembly, config=config, runner=runner)


def _with_runner(
    config: EngineConfig,
    bundle: ModelBundle,
    model: Model,
    device: Device,
    folders: tuple[Path, ...],
    progress: Callable[[float], None],
) -> Assembly:
    # Allocated before the KV cache, which takes a share of the free memory.
    bank = _adapter_bank(config, bundle, model) if folders else None
    refiner = _refiner(config, bundle, model)
    num_pages = config.num_pages or num_pages_for(
        model, device, config.page_size, config.max_running, config.kv_memory_fraction
    )
    kv = allocate(model, device, num_pages, config.page_size)
    runner = warm_runner(
        config,
        model,
        device,
        kv,
        bank=bank,
        refiner=refiner,
        draft=bundle.draft,
        progress=progress,
    )
    frontend = bundle.frontend.keeping_images() if refiner else bundle.frontend
    if runner.encodes_images:
        frontend = frontend.resizing_on_device()
    assembly = Assembly(
        config,
        frontend,
        model,
        device,
        runner,
        kv,
        num_pages,
        folders,
        bank,
        bundle.draft,
        refiner,
    )
    warm_up(frontend, assembly.scheduler(SilentSink(), pipeline_depth=config.pipeline_depth))
    return assembly


def _adapter_bank(config: EngineConfig, bundle: ModelBundle, model: Model) -> AdapterBank | None:
    support = model.capabilities.adapters
    if support is not None:
        return support.adapter_bank(config.adapter_slots, config.max_adapter_rank)
    if config.adapters:
        raise InvalidField(f"{bundle.frontend.name} takes no adapters", field="adapters")
    return None


def _refiner(config: EngineConfig, bundle: ModelBundle, model: Model) -> MaskRefiner | None:
    if not config.refiner:
        return None
    refiners = model.capabilities.refiners
    if refiners is None:
        raise InvalidField(f"{bundle.frontend.name} takes no refiner", field="refiner")
    return refiners.mask_refiner(Path(config.refiner))


def _adapter_folders(config: EngineConfig, bundle: ModelBundle) -> tuple[Path, ...]:
    given = Path(config.adapters) if config.adapters else None
    if given is not None and not given.is_dir():
        raise InvalidField(f"{given} is not a folder", field="adapters")
    return tuple(folder for folder in (given, bundle.adapters) if folder is not None)


def _weight_dtype(name: str, device: Device) -> str:
    if name in ("int8", "int4") and device.torch_device.type != "cpu":
        raise InvalidField(f"{name} runs on a CPU only, not on {device.name}", field="weight_dtype")
    return name


def _dtype(name: str, device: Device) -> torch.dtype:
    if name == "auto":
        name = "f32" if device.torch_device.type == "cpu" else "bf16"
    return _DTYPES[name]
