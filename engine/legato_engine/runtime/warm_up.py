"""Construction and warm-up of a model runner."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from legato_engine.config import (
    AUTO_PATH,
    LOOKUP_DRAFT,
    LOOP_PATHS,
    RESIDENT_PATH,
    EngineConfig,
    max_block_size,
)
from legato_engine.device.base import Device
from legato_engine.errors import InvalidField
from legato_engine.kernels.accelerated import LookupKernel
from legato_engine.kernels.proposer import LookupProposer, Proposer
from legato_engine.layers.lora import AdapterBank
from legato_engine.models import registry
from legato_engine.models.base import MaskRefiner, Model
from legato_engine.models.paged_attention import KVCache
from legato_engine.runtime.calibration import Progress
from legato_engine.runtime.drafting import DraftModel
from legato_engine.runtime.kv_pool import decode_buckets
from legato_engine.runtime.model_runner import ModelRunner
from legato_engine.speculation import TokenBudgetPolicy, block_policy

_WARM = 0.2  # the share of a warm-up before costs are measured


def warm_runner(
    config: EngineConfig,
    model: Model,
    device: Device,
    kv: KVCache,
    *,
    bank: AdapterBank | None,
    refiner: MaskRefiner | None,
    draft: Path | None,
    proposer: Proposer | None = None,
    progress: Progress = lambda fraction: None,
) -> ModelRunner:
    """Build and warm a runner.

    Measures its step costs if the speculation policy needs them, and decode paths left to
    autotuning.

    Draft tokens come from `proposer`, else the configured draft, else `draft`, the model's file.
    `progress` is called with the fraction done.

    Raises:
        InvalidField: the speculation setting is unknown, or the draft cannot be used.
    """
    if proposer is None:
        proposer = _proposer(config, draft, model, device, kv)
    policy = block_policy(config.speculation)
    block = 0 if policy is None else policy.max_block
    runner = ModelRunner(
        model,
        device,
        kv,
        max_running=config.max_running,
        buckets=decode_buckets(device, config.max_running * (1 + block)),
        cuda_graphs=config.cuda_graphs,
        adapters=bank,
        proposer=proposer if block else None,
        block_policy=policy,
        max_prompts=config.max_prefill_rows,
        max_images=config.images_per_launch,
        max_image_bytes=config.image_cache_bytes,
        refiner=refiner,
        loops=None if config.decode_path == AUTO_PATH else config.decode_path in LOOP_PATHS,
        megakernel=None if config.decode_path == AUTO_PATH else config.decode_path == RESIDENT_PATH,
    )
    progress(0.0)
    runner.warm_up()
    progress(_WARM)
    if isinstance(policy, TokenBudgetPolicy):
        costs = runner.costs().table(lambda done: progress(_WARM + (1 - _WARM) * done))
        runner.set_costs(dataclasses.replace(policy, costs=costs))
    runner.choose_paths()
    return runner


def _proposer(
    config: EngineConfig, draft: Path | None, model: Model, device: Device, kv: KVCache
) -> Proposer | None:
    if not max_block_size(config.speculation):
        return None
    name, colon, folder = config.draft.partition(":")
    if colon:
        drafting = registry.resolve(name, folder).load(device.torch_device, model.dtype)
        rows, vocab_size = config.max_running, model.vocab_size
        return DraftModel(drafting, device, num_rows=rows, vocab_size=vocab_size)
    path = Path(config.draft) if config.draft else draft
    if path is None or config.draft == LOOKUP_DRAFT:
        return LookupKernel() if device.torch_device.type == "cuda" else LookupProposer()
    proposer = model.draft_proposer(path, kv)
    if proposer is None:
        raise InvalidField("the model takes no draft", field="draft")
    return proposer
