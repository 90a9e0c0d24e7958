"""What all launches of one runner share."""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.device.base import Device, Stream
from legato_engine.layers.lora import AdaptedRows, AdapterBank
from legato_engine.models.model import Model
from legato_engine.models.paged_cache import KVCache
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.graph_runner import GraphRunner
from legato_engine.runtime.row_state import RowState


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """The model, its device and all tensors at fixed addresses that launches read and write.

    Contents change only on the compute stream, except host sides of a slot, which its launch owns.

    Shape legend: C constraints, V vocabulary.
    """

    model: Model
    device: Device
    kv: KVCache
    state: RowState
    slots: tuple[DecodeSlot, ...]
    bank: AdapterBank | None  # None: no row has an adapter
    buckets: tuple[int, ...]  # tokens, ascending
    constraints_CV: torch.Tensor  # float32, added to logits
    successor_C2: torch.Tensor  # of `successor_table`
    graphs: GraphRunner

    @property
    def compute(self) -> Stream:
        return self.device.compute

    @property
    def ranks(self) -> tuple[int, ...]:
        """0: without adapters."""
        return (0,) if self.bank is None else (0, *self.bank.ranks)

    def rank(self, adapter_rank: int) -> int:
        return 0 if self.bank is None else self.bank.bucket(adapter_rank)

    def adapters(self, slot_T: torch.Tensor, rank: int) -> AdaptedRows | None:
        """None if `rank` is 0."""
        if not rank:
            return None
        assert self.bank is not None, f"rank {rank} without an adapter bank"
        return self.bank.rows(slot_T, rank)
