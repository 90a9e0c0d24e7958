"""Allocates what a runner's launches share."""

from __future__ import annotations

from collections.abc import Sequence

from legato_engine.device.base import Device
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import Model
from legato_engine.models.paged_cache import KVCache
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.draft_state import DraftState
from legato_engine.runtime.graph_runner import GraphRunner
from legato_engine.runtime.resources import Resources
from legato_engine.runtime.row_state import RowState
from legato_engine.runtime.sampler import constraint_table, successor_table
from legato_engine.scheduler.loops import pages_begun
from legato_engine.scheduler.pipeline import NUM_SLOTS
from legato_engine.speculative.block_policy import BlockPolicy
from legato_engine.speculative.proposer import Proposer


def allocate(
    model: Model,
    device: Device,
    kv: KVCache,
    drafts: DraftState | None,
    *,
    max_running: int,
    buckets: Sequence[int],
    adapters: AdapterBank | None,
    max_prompts: int,
    max_images: int,
    loops: bool,
    graphs: GraphRunner,
) -> Resources:
    """Return slots for launches of up to `buckets[-1]` tokens, and the state of `max_running` rows.

    Slots have room for `max_prompts` prompts and `max_images` images, and with `loops` for the
    pages that begin in a loop.
    """
    max_pages = -(-model.max_context // kv.page_size)
    max_block = 0 if drafts is None else drafts.max_block
    slots = tuple(
        DecodeSlot(
            device,
            max_rows=buckets[-1],
            max_pages=max_pages,
            max_prompt=model.max_context,
            max_prompts=max_prompts,
            max_images=max_images,
            width=model.width,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            max_drafting=0 if drafts is None else max_running,
            max_grown=pages_begun(max_running, kv.page_size, max_block) if loops else 0,
        )
        for _ in range(NUM_SLOTS)
    )
    constraints_CV = constraint_table(model.constraints, model.vocab_size)
    return Resources(
        model=model,
        device=device,
        kv=kv,
        state=RowState(max_running, max_pages, device.torch_device, drafts),
        slots=slots,
        bank=adapters,
        buckets=tuple(buckets),
        constraints_CV=constraints_CV.to(device.torch_device),
        successor_C2=successor_table(model.constraints).to(device.torch_device),
        graphs=graphs,
    )


def draft_state(
    model: Model,
    device: Device,
    proposer: Proposer | None,
    policy: BlockPolicy | None,
    max_running: int,
) -> DraftState | None:
    """None without a `proposer`."""
    if proposer is None:
        return None
    assert policy is not None, "a proposer without a block policy"
    return DraftState(
        proposer,
        policy,
        num_rows=max_running,
        max_context=model.max_context,
        vocab_size=model.vocab_size,
        width=model.width,
        dtype=model.dtype,
        device=device.torch_device,
    )
