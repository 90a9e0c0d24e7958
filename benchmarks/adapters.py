"""What adapters cost in a decode step: by rank, all rows with one adapter or each with its own.

The same step by our kernels and by torch's operations, as graphs. The floor is the bytes that a
step must read, with the matrices of the adapters that its rows name.

Shape legend: R rows of the token state.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence

import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.layers.lora import AdapterBank, MlpWeights
from legato_engine.models.model import DecodeBatch, StepInputs
from legato_engine.models.moondream.fused import FusedMoondream

from benchmarks import record
from benchmarks.kernels import BANDWIDTH, DEVICE, ROWS, Bench, floor_ms, timed

SLOTS = 8


def bank_of(bench: Bench, rank: int) -> AdapterBank:
    """All slots filled with random adapters of one rank."""
    text = bench.config.text
    bank = bench.model.adapter_bank(SLOTS, rank)
    assert bank is not None, "this model takes adapters"
    widths = text.dim, text.ff_dim, text.ff_dim, text.dim
    for slot in range(1, SLOTS + 1):
        shapes = ((text.num_layers, rank, width) for width in widths)
        noise = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes)
        bank.write(slot, MlpWeights(*(each / 64 for each in noise)))
    return bank


def by_torch(bench: Bench, inputs: StepInputs, bank: AdapterBank, slot_R: torch.Tensor) -> None:
    """The step of torch's operations."""
    rows = bank.rows(slot_R[inputs.row_B], bank.max_rank)
    where = DecodeBatch(inputs.position_B, inputs.page_table_RM[inputs.row_B], rows)
    x_BD = bench.model.embed(inputs.token_R[inputs.row_B], inputs.payload_R2[inputs.row_B])
    bench.model.logits(bench.model.decode(x_BD, where, bench.kv))


def measure(
    bench: Bench, device: CudaDevice, rank: int, streams: Sequence[int], torch_too: bool
) -> list[dict]:
    """Milliseconds of steps at one rank, 0 for none."""
    bank = bank_of(bench, rank) if rank else None
    network = bench.network
    kernels = FusedMoondream(bench.config, network.text, network.region, bench.kv, bank)
    rows = []
    no_experts = [0] * bench.config.text.num_layers
    for batch in streams:
        plain_ms = floor_ms(bench.config, batch, no_experts, 0)
        for adapters in sorted({1, min(SLOTS, batch)}) if rank else (0,):
            inputs = bench.inputs(batch)
            slot_R = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
            if bank is not None:
                slot_R[inputs.row_B] = 1 + torch.arange(batch, device=DEVICE) % adapters
                inputs = dataclasses.replace(inputs, adapter_slot_R=slot_R)
            out = bench.empty(batch)
            figures = {
                "rank": rank,
                "streams": batch,
                "adapters": adapters,
                "floor_ms": plain_ms + adapters * _adapter_ms(bench, rank),
                "step_ms": timed(device, functools.partial(kernels.forward, inputs, *out)),
            }
            if bank is not None and torch_too:
                work = functools.partial(by_torch, bench, inputs, bank, slot_R)
                figures["torch_ms"] = timed(device, work, repeats=10)
            rows.append(figures)
    return rows


def _adapter_ms(bench: Bench, rank: int) -> float:
    text = bench.config.text
    return text.num_layers * 2 * rank * (text.dim + text.ff_dim) * 2 / BANDWIDTH * 1e3


def main(argv: Sequence[str]) -> int:
    """Measure and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks adapters", description=__doc__)
    parser.add_argument("--name", default="adapters", help="of the record")
    parser.add_argument("--ranks", type=_numbers, default=[0, 8, 64, 512])
    parser.add_argument("--streams", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--torch", action="store_true", help="torch's operations, too")
    arguments = parser.parse_args(argv)
    device = CudaDevice(0)
    with torch.inference_mode():
        bench = Bench.make("moondream2")
        rows = [
            row
            for rank in arguments.ranks
            for row in measure(bench, device, rank, arguments.streams, arguments.torch)
        ]
    plain = {row["streams"]: row["step_ms"] for row in rows if row["rank"] == 0}
    cells = [
        [
            *(row["rank"], row["streams"], row["adapters"]),
            *(f"{row[key]:.3f}" for key in ("floor_ms", "step_ms")),
            f"{row['step_ms'] - plain.get(row['streams'], row['step_ms']):+.3f}",
            f"{row['torch_ms']:.3f}" if "torch_ms" in row else "-",
        ]
        for row in rows
    ]
    heads = ("rank", "streams", "adapters", "floor ms", "step ms", "more ms", "by torch ms")
    title, table = "Adapters in a decode step: moondream2", record.table(heads, cells)
    record.write(arguments.name, title, {"rows": rows}, [table])
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
