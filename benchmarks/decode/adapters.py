"""Cost of adapters in a decode step: by rank, with one adapter for all rows or one for each.

The same step by our kernels and by torch's operations, as graphs. The floor is the bytes that a
step must read, with the matrices of the adapters that its rows name.

Shape legend: R rows of the token state.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.base import StepInputs
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.decode_step import MoondreamStep
from legato_engine.models.paged_attention import DecodeBatch

from benchmarks import record, shared_options
from benchmarks.decode.kernels import timed
from benchmarks.decode.step_bench import (
    BANDWIDTH,
    DEVICE,
    ROWS,
    Bench,
    context_bytes,
    experts_touched,
    floor_ms,
)

SLOTS = 8


def bank_of(bench: Bench, rank: int) -> AdapterBank:
    """Fill all adapter slots with random adapters of one rank."""
    bank = bench.model.adapter_bank(SLOTS, rank)
    for tensor in bank.weights.tensors:
        for layer in tensor:
            layer[1:].normal_(0, 1 / 64)
    bank.rank_S[1:] = rank
    bank.expert_rank_S[1:] = bank.rows(bank.rank_S, rank).expert_rows.rank
    return bank


def by_torch(bench: Bench, inputs: StepInputs, bank: AdapterBank, slot_R: torch.Tensor) -> None:
    """Return the step by torch's operations."""
    rows = bank.rows(slot_R[inputs.row_B], bank.max_rank)
    where = DecodeBatch(inputs.position_B, inputs.page_table_RM[inputs.row_B], rows)
    x_BD = bench.model.embed(inputs.token_R[inputs.row_B], inputs.payload_R2[inputs.row_B])
    bench.model.logits(bench.model.decode(x_BD, where, bench.kv))


def measure(
    bench: Bench, device: CudaDevice, rank: int, streams: Sequence[int], torch_too: bool
) -> list[dict[str, Any]]:
    """Return milliseconds of steps at one rank; rank 0 is without adapters."""
    bank = bank_of(bench, rank) if rank else None
    network = bench.network
    kernels = MoondreamStep(bench.config, network.text, network.region, bench.kv, bank)
    rows = []
    for batch in streams:
        cached = context_bytes(bench.config, batch, bench.position)
        for adapters in sorted({1, min(SLOTS, batch)}) if rank else (0,):
            torch.manual_seed(batch)  # the same tokens, so nearly the same experts, at all ranks
            inputs = bench.inputs(batch)
            slot_R = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
            if bank is not None:
                slot_R[inputs.row_B] = 1 + torch.arange(batch, device=DEVICE) % adapters
                inputs = dataclasses.replace(inputs, adapter_slot_R=slot_R)
            out = bench.empty(batch)
            step_ms = timed(device, functools.partial(kernels.forward, inputs, *out))
            expert_LBK = None if kernels.expert_LBK is None else kernels.expert_LBK[:, :batch]
            touched = experts_touched(bench.config, expert_LBK)
            figures = {
                "model": bench.config.name,
                "rank": rank,
                "streams": batch,
                "adapters": adapters,
                "floor_ms": floor_ms(bench.config, cached, touched, bench.network.text.kinds)
                + _adapter_ms(bench.config, rank, slot_R[inputs.row_B].tolist(), expert_LBK),
                "step_ms": step_ms,
            }
            if bank is not None and torch_too:
                work = functools.partial(by_torch, bench, inputs, bank, slot_R)
                figures["torch_ms"] = timed(device, work, repeats=10)
            rows.append(figures)
    return rows


def _adapter_ms(
    config: MoondreamConfig, rank: int, slots: Sequence[int], expert_LBK: torch.Tensor | None
) -> float:
    """Return the milliseconds to read the adapters that a step names."""
    text, moe = config.text, config.text.moe
    dense = text.num_layers if moe is None else moe.first_layer
    values = dense * len({*slots}) * 2 * rank * (text.dim + text.ff_dim)
    if moe is not None and expert_LBK is not None:
        each = rank // moe.num_active * (2 * text.dim + 3 * moe.inner_dim)
        for layer in expert_LBK[dense:].tolist():
            values += each * len(
                {(slot, e) for slot, k in zip(slots, layer, strict=True) for e in k}
            )
    return values * 2 / BANDWIDTH * 1e3


def main(argv: Sequence[str]) -> int:
    """Measure and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks adapters", description=__doc__)
    parser.add_argument("--name", default="adapters", help="of the record")
    parser.add_argument("--models", default="moondream2,moondream3", help="by commas")
    parser.add_argument("--ranks", type=shared_options.numbers, default=[0, 8, 64, 512])
    parser.add_argument("--streams", type=shared_options.numbers, default=[1, 8, 32])
    parser.add_argument("--torch", action="store_true", help="torch's operations, too")
    arguments = parser.parse_args(argv)
    device = CudaDevice(0)
    rows, tables = [], []
    for model in arguments.models.split(","):
        with torch.inference_mode():
            bench = Bench.make(model)
            own = [
                row
                for rank in arguments.ranks
                for row in measure(bench, device, rank, arguments.streams, arguments.torch)
            ]
        del bench
        rows += own
        tables += [f"## {model}", _table(own)]
    record.write(arguments.name, "Adapters in a decode step", {"rows": rows}, tables)
    return 0


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    plain = {row["streams"]: row["step_ms"] for row in rows if row["rank"] == 0}
    by_torch = all("torch_ms" in row for row in rows)
    cells = [
        [
            *(row["rank"], row["streams"], row["adapters"]),
            *(f"{row[key]:.3f}" for key in ("floor_ms", "step_ms")),
            f"{row['step_ms'] - plain.get(row['streams'], row['step_ms']):+.3f}",
            *([f"{row['torch_ms']:.3f}"] if by_torch else []),
        ]
        for row in rows
    ]
    heads = ("rank", "streams", "adapters", "floor ms", "step ms", "more ms")
    return record.table((*heads, "by torch ms") if by_torch else heads, cells)
