"""The decode step's kernels: checked against torch in float32, and timed as graphs by their parts.

A shape of a step is written as its rows' tokens: `32x1` is a token each of 32 rows, `1x8` the
verification of eight tokens of one, `1x19` a prompt.

Shape legend: B tokens, D text width, V vocabulary, R rows of the token state and the page table, M
pages per row.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops
from legato_engine.kernels.cuda.attention import GROUP
from legato_engine.kernels.cuda.decoder import DEFAULT_STAGES, Stages
from legato_engine.kernels.cuda.streams import tiles_for
from legato_engine.kernels.experts import Routes
from legato_engine.layers.moe import ExpertLinear
from legato_engine.models.model import DecodeBatch, KVCache, StepInputs
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.fused import FusedMoondream
from legato_engine.models.moondream.fused_sizes import can_fuse
from legato_engine.models.moondream.model import MoondreamModel, Network
from legato_engine.models.moondream.presets import (
    legato_tiny_config,
    moondream2_config,
    moondream3_config,
)
from legato_engine.models.moondream.weights import random_weights

from benchmarks import record

SHAPES = "1x1,8x1,16x1,32x1,1x2,1x4,1x8,2x4,8x4,1x19"


def _moondream3() -> MoondreamConfig:
    """In a context that the kernels of attention have."""
    config = moondream3_config()
    text = msgspec.structs.replace(config.text, max_context=2048)
    return msgspec.structs.replace(config, text=text)


MODELS = {
    "moondream2": moondream2_config,
    "moondream3": _moondream3,
    "moondream3-e4m3": _moondream3,
    "legato-tiny": legato_tiny_config,
}
BANDWIDTH = 4.68e12  # bytes a second that one H200 reads at most
BATCHES = (1, 2, 4, 8, 16, 24, 32)  # that the service has
PAGE = 16
CONTEXT = 850
ROWS = 34
DEVICE = torch.device("cuda")
E4M3, E4M3_MOST = torch.float8_e4m3fn, 448
DEPTHS = {
    1: ((9, 10, 2), (7, 7, 2), (8, 11, 2)),
    8: ((9, 10, 2), (8, 8, 2), (7, 11, 1)),
    32: ((4, 8, 2), (4, 7, 1), (4, 9, 2)),
}
"""By batch, stages of `layer_in`, of `layer_out` and of `attend` to try."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model with random weights, its kernels, and a KV cache of random contexts."""

    config: MoondreamConfig
    network: Network
    model: MoondreamModel
    kernels: FusedMoondream
    kv: KVCache
    table_RM: torch.Tensor

    @classmethod
    def make(cls, name: str) -> Bench:
        """Everything on the GPU; pages are dealt in random order."""
        config = MODELS[name]()
        network = random_weights(config, 0, DEVICE, torch.bfloat16)
        if name.endswith("e4m3"):
            _quantise_experts(network)
        model = MoondreamModel(config, network)
        text = config.text
        pages = -(-text.max_context // PAGE)
        shape = (text.num_layers, ROWS * pages + 1, text.num_heads, PAGE, text.head_dim)
        kv = KVCache(*(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)))
        assert can_fuse(config, kv, torch.bfloat16), "this GPU or model has no kernels"
        kernels = FusedMoondream(config, network.text, network.region, kv)
        table_RM = (torch.randperm(ROWS * pages, device=DEVICE) + 1).view(ROWS, pages)
        return cls(config, network, model, kernels, kv, table_RM)

    def with_stages(self, stages: Stages) -> Bench:
        """The same with rings of other depths."""
        network = self.network
        text, region = network.text, network.region
        kernels = FusedMoondream(self.config, text, region, self.kv, stages=stages)
        return dataclasses.replace(self, kernels=kernels)

    @property
    def expert_bytes(self) -> int:
        """Of a weight of an expert."""
        return 1 if self.network.text.has_fp8_experts else 2

    def inputs(self, rows: int, tokens: int = 1) -> StepInputs:
        """`tokens` of each of `rows` at the benchmark's context, in a random order of rows.

        Padded to a batch that the service has; the last row is the padding's.
        """
        text, special = self.config.text, self.config.tokens
        token_R = torch.randint(10, text.vocab_size, (ROWS,), device=DEVICE)
        token_R[::3], token_R[1::3] = special.coord, special.size
        count = rows * tokens
        batch = next(batch for batch in BATCHES if batch >= count)
        at_B = torch.arange(batch, device=DEVICE)
        is_real_B, index_B = at_B < count, at_B // tokens
        row_B = torch.randperm(ROWS - 1, device=DEVICE)[index_B % (ROWS - 1)]
        row_B = row_B.masked_fill(~is_real_B, ROWS - 1)
        fresh_B = context(self.config) - tokens + 1 - index_B
        return StepInputs(
            source_B=row_B,
            row_B=row_B,
            position_B=(fresh_B + at_B % tokens).masked_fill(~is_real_B, 0),
            fresh_B=fresh_B.masked_fill(~is_real_B, 1),
            prompt_token_B=torch.zeros_like(row_B),
            prompt_payload_B2=torch.zeros(batch, 2, device=DEVICE),
            token_R=token_R,
            payload_R2=torch.rand(ROWS, 2, device=DEVICE),
            page_table_RM=self.table_RM,
            num_groups=rows * -(-tokens // GROUP),
        )

    def empty(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden state and logits that nothing has filled."""
        text = self.config.text
        hidden_BD = torch.full((batch, text.dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        return hidden_BD, torch.full((batch, text.vocab_size), torch.nan, device=DEVICE)


def _quantise_experts(network: Network) -> None:
    """Experts in e4m3, a layer at a time."""
    for module in network.modules():
        if isinstance(module, ExpertLinear):
            weight_XOI = module.weight
            scale_XO = weight_XOI.abs().amax(-1).float() / E4M3_MOST
            module.use_fp8()
            for expert, weight_OI in enumerate(weight_XOI):
                module.weight[expert] = (weight_OI / scale_XO[expert, :, None]).to(E4M3)
            assert module.scale is not None
            module.scale.copy_(scale_XO)


def check(bench: Bench, exact: MoondreamModel, batch: int) -> dict[str, float]:
    """Relative errors of the kernels and of torch in bf16, against `exact` in float32."""
    inputs = bench.inputs(batch).part(slice(0, batch))
    hidden_BD, logits_BV = bench.empty(batch)
    bench.kernels.forward(inputs, hidden_BD, logits_BV)
    ours = _written(bench.kv, inputs)
    where = DecodeBatch(inputs.position_B, inputs.page_table_RM[inputs.row_B])
    x_BD = bench.model.embed(inputs.token_R[inputs.source_B], inputs.payload_R2[inputs.source_B])
    wide = KVCache(bench.kv.k_LNHSE.float(), bench.kv.v_LNHSE.float())
    with _same_experts(bench):
        exact_BD = exact.decode(x_BD.float(), where, wide)
        plain_BD = bench.model.decode(x_BD, where, bench.kv)
    theirs = _written(bench.kv, inputs)
    exact_BV = exact.logits(exact_BD)
    return {
        "hidden": _error(hidden_BD, exact_BD),
        "hidden_torch": _error(plain_BD, exact_BD),
        "logits": _error(logits_BV, exact_BV),
        "logits_torch": _error(bench.model.logits(plain_BD), exact_BV),
        "keys": _error(ours[0], theirs[0]),
        "values": _error(ours[1], theirs[1]),
        "rows_that_differ_alone": _differing(bench, inputs, logits_BV),
        **_check_bins(bench, plain_BD),
    }


@contextlib.contextmanager
def _same_experts(bench: Bench) -> Iterator[None]:
    """Torch takes the experts that the kernels' last step took: near ties fall either way."""
    route, experts_LBK = ops.route, bench.kernels.expert_LBK
    if experts_LBK is None or bench.config.text.moe is None:
        yield
        return
    layers = itertools.cycle(experts_LBK[bench.config.text.moe.first_layer :].long())

    def same(logits_TX: torch.Tensor, num_active: int) -> Routes:
        expert_TK = next(layers)[: len(logits_TX)]
        best_TK = logits_TX.gather(1, expert_TK).float()
        return Routes(expert_TK, best_TK.softmax(-1).to(logits_TX.dtype))

    ops.route = same
    try:
        yield
    finally:
        ops.route = route


def _differing(bench: Bench, inputs: StepInputs, logits_BV: torch.Tensor) -> float:
    """Rows that have other bits alone than they have in the batch."""
    hidden_BD, again_BV = bench.empty(len(logits_BV))
    for at in range(len(logits_BV)):
        one = slice(at, at + 1)
        bench.kernels.forward(inputs.part(one), hidden_BD[one], again_BV[one])
    return float((again_BV != logits_BV).any(-1).sum())


def _check_bins(bench: Bench, hidden_BD: torch.Tensor) -> dict[str, float]:
    """Relative errors of the bins; a batch of one needs the coord's alone."""
    tokens, exact = bench.config.tokens, copy.deepcopy(bench.network.region).float()
    errors = {}
    normed_BD = hidden_BD.float() if exact.ln is None else exact.ln(hidden_BD.float())
    for name, token, decoder in (
        ("coord_bins", tokens.coord, exact.coord_decoder),
        ("size_bins", tokens.size, exact.size_decoder),
    ):
        token_B = torch.full((len(hidden_BD),), token, device=DEVICE)
        bins_BN = bench.kernels.bins(token_B, hidden_BD)[token == tokens.size]
        errors[name] = _error(bins_BN, decoder(normed_BD))
    return errors


def _bad(errors: Mapping[str, float]) -> bool:
    """Whether a check failed."""
    worse = not errors["hidden"] <= 1.5 * errors["hidden_torch"] + 1e-3
    bins = not max(errors["coord_bins"], errors["size_bins"]) < 0.02
    return worse or bins or errors["rows_that_differ_alone"] > 0


def _written(kv: KVCache, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at the tokens' own positions, all layers."""
    page_B = inputs.page_table_RM[inputs.row_B, inputs.position_B // PAGE]
    at = (slice(None), page_B, slice(None), inputs.position_B % PAGE)
    return kv.k_LNHSE[at], kv.v_LNHSE[at]


def _error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()


def timed(device: CudaDevice, work: Callable[[], object], repeats: int = 200) -> float:
    """Median milliseconds of a replay of `work`, back to back with itself."""
    replay = device.capture(work)
    stream = device.compute.stream
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    with torch.cuda.stream(stream):
        for _ in range(5):
            replay()
        for mark in marks:
            mark.record(stream)
            replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def context(config: MoondreamConfig) -> int:
    """The last position of the first row."""
    return min(CONTEXT, config.text.max_context - 1)


def context_bytes(config: MoondreamConfig, rows: int) -> int:
    """The keys and values that a step must read, all layers."""
    text = config.text
    return text.num_layers * 2 * text.dim * context(config) * rows * 2


def floor_ms(
    config: MoondreamConfig, rows: int, touched: Sequence[int], expert_bytes: int
) -> float:
    """The bytes that a step must read over the bandwidth.

    `touched` experts, by layer, whose weights have `expert_bytes`.
    """
    text, values = config.text, 0
    for layer in range(text.num_layers):
        values += 4 * text.dim**2
        if text.tau is not None:
            values += 6 * text.num_heads * text.dim
        if text.moe is None or layer < text.moe.first_layer:
            values += 2 * text.dim * text.ff_dim
        else:
            values += text.moe.num_experts * text.dim
            experts = touched[layer] * 3 * text.dim * text.moe.inner_dim
            values += experts * expert_bytes // 2
    weights = (values + text.vocab_size * text.dim) * 2
    return (weights + context_bytes(config, rows)) / BANDWIDTH * 1e3


def _touched(bench: Bench, batch: int) -> list[int]:
    """Experts that the last step's tokens chose, by layer; those of layers that have any."""
    experts_LBK, moe = bench.kernels.expert_LBK, bench.config.text.moe
    if experts_LBK is None or moe is None:
        return [0] * bench.config.text.num_layers
    counts = [len(layer.unique()) for layer in experts_LBK[:, :batch]]
    return [0] * moe.first_layer + counts[moe.first_layer :]


def steps(
    bench: Bench, device: CudaDevice, shape: tuple[int, int], repeats: int = 200
) -> dict[str, float]:
    """Milliseconds of the step and of its parts alone; the bytes a second that attention reads."""
    inputs = bench.inputs(*shape)
    batch = len(inputs.row_B)
    hidden_BD, logits_BV = (tensor.zero_() for tensor in bench.empty(batch))
    kernels = bench.kernels
    coord_B = torch.full((batch,), bench.config.tokens.coord, device=DEVICE)
    works: dict[str, Callable[[], object]] = {
        "step": lambda: kernels.forward(inputs, hidden_BD, logits_BV),
        "head": lambda: kernels.head(hidden_BD, logits_BV),
        "coord_bins": lambda: kernels.bins(coord_B, hidden_BD),
    }
    for part in kernels.parts:
        works[part.name.lower()] = lambda part=part: kernels.layers(inputs, hidden_BD, (part,))
    kernels.forward(inputs, hidden_BD, logits_BV)
    touched = _touched(bench, batch)
    figures = {name: timed(device, work, repeats) for name, work in works.items()}
    if any(touched):
        figures["experts_touched"] = sum(touched) / sum(map(bool, touched))
    figures["attend_bytes_per_s"] = context_bytes(bench.config, shape[0]) / figures["attend"] * 1e3
    floor = floor_ms(bench.config, shape[0], touched, bench.expert_bytes)
    return {"floor": floor, **figures}


def tune(bench: Bench, device: CudaDevice) -> None:
    """Print step times under other depths of the rings."""
    for batch, depths in DEPTHS.items():
        tiles = tiles_for(batch)
        for first, last, attend in depths:
            stages = dataclasses.replace(
                DEFAULT_STAGES,
                layer_in={**DEFAULT_STAGES.layer_in, tiles: first},
                layer_out={**DEFAULT_STAGES.layer_out, tiles: last},
                attend=attend,
                attend_split=attend,
            )
            times = steps(bench.with_stages(stages), device, (batch, 1), repeats=60)
            print("tune", batch, (first, last, attend), _rounded(times))


def measure(name: str, arguments: argparse.Namespace, device: CudaDevice) -> dict[str, dict]:
    """One model's checks and times, by what they are of."""
    bench = Bench.make(name)
    checks = _numbers(arguments.checks)
    exact = None
    if checks:
        exact = MoondreamModel(bench.config, copy.deepcopy(bench.network).float())
    figures: dict[str, dict] = {}
    for batch in checks:
        assert exact is not None
        figures[f"{name} check {batch}"] = errors = check(bench, exact, batch)
        print(name, batch, {key: f"{value:.2e}" for key, value in errors.items()})
        if _bad(errors):
            print("CHECK FAILED")
    if arguments.tune:
        tune(bench, device)
    for shape in arguments.shapes.split(","):
        rows, tokens = map(int, shape.split("x"))
        figures[f"{name} {shape}"] = times = steps(bench, device, (rows, tokens))
        print(name, shape, _rounded(times))
    return figures


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(time, 4) for name, time in times.items()}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _table(figures: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for key, times in figures.items():
        if "step" not in times:
            continue
        one = figures.get(f"{key.split()[0]} 1x1", times)["step"]
        rows.append(
            (
                key,
                f"{times['floor']:.3f}",
                f"{times['step']:.3f}",
                f"{times['floor'] / times['step']:.0%}",
                f"{times['step'] / one:.2f}",
                f"{times['attend']:.3f}",
                f"{times['attend_bytes_per_s'] / 1e12:.2f}",
            )
        )
    heads = ("model, rows x tokens", "floor ms", "step ms", "of the floor")
    more = ("to one token's", "attention ms", "its TB/s")
    return record.table((*heads, *more), rows)


def main(argv: Sequence[str]) -> int:
    """Check, time, record; 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=__doc__)
    parser.add_argument("--name", default="kernels", help="of the record")
    parser.add_argument("--models", default="moondream2,legato-tiny")
    parser.add_argument("--shapes", default=SHAPES, help="rows x tokens of each")
    parser.add_argument("--checks", default="1,5,8,13,32")
    parser.add_argument("--tune", action="store_true", help="try other depths of the rings")
    arguments = parser.parse_args(argv)
    device = CudaDevice(0)
    figures: dict[str, dict] = {}
    with torch.inference_mode():
        for name in arguments.models.split(","):
            figures |= measure(name, arguments, device)
    record.write(arguments.name, "Kernels of the decode step", figures, [_table(figures)])
    failed = any(_bad(errors) for key, errors in figures.items() if "check" in key)
    print(json.dumps({"failed": failed}))
    return int(failed)
