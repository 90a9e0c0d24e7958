"""The decode step's kernels: checked against torch in float32, and timed as graphs by their parts.

A shape of a step is written as its rows' tokens: `32x1` is a token each of 32 rows, `1x8` the
verification of eight tokens of one, `1x19` a prompt; `4x1@16384` stands at another position than
the other shapes. Names of models that end in kv8 have keys and values in e4m3.

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

import torch
from legato_engine.device.cuda import CudaDevice
from legato_engine.kernels import ops, pages
from legato_engine.kernels.cuda.attention import GROUP
from legato_engine.kernels.cuda.decoder import DEFAULT_STAGES, Stages
from legato_engine.kernels.cuda.streams import tiles_for
from legato_engine.kernels.experts import Routes
from legato_engine.layers.moe import ExpertLinear
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
from legato_engine.models.paged_cache import DecodeBatch, KVCache
from legato_engine.models.step_kernels import StepInputs
from legato_engine.runtime.kv_pool import kv_dtype

from benchmarks import record

SHAPES = "1x1,8x1,16x1,32x1,1x2,1x4,1x8,2x4,8x4,1x19"
LONG_SHAPES = "1x1@5000,8x1@5000,1x1@16384,1x1@32767,4x1@32767"
"""Of models whose contexts are as long."""
LONG_REPEATS = 30

MODELS = {
    "moondream2": moondream2_config,
    "moondream3": moondream3_config,
    "moondream3-e4m3": moondream3_config,
    "moondream3-e4m3-kv8": moondream3_config,
    "legato-tiny": legato_tiny_config,
}
BANDWIDTH = 4.68e12  # bytes a second that one H200 reads at most
BATCHES = (1, 2, 4, 8, 16, 24, 32)  # that the service has
PAGE = 16
CONTEXT = 850
KV_SCALE = 0.02
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
    position: int  # the last of the first row
    rows: int  # that have pages; the last of them is the padding's

    @classmethod
    def make(cls, name: str) -> Bench:
        """Everything on the GPU; pages are dealt in random order."""
        config = MODELS[name]()
        network = random_weights(config, 0, DEVICE, torch.bfloat16)
        if "e4m3" in name:
            _quantise_experts(network)
        if name.endswith("kv8"):
            network.text.use_fp8_kv()
            for tensor_name, tensor in network.text.state_dict().items():
                if tensor_name.endswith(("k_scale", "v_scale")):
                    tensor.fill_(KV_SCALE)
        position = min(CONTEXT, config.text.max_context - 1)
        return cls._over(config, network, position, ROWS)

    @classmethod
    def _over(cls, config: MoondreamConfig, network: Network, position: int, rows: int) -> Bench:
        """With pages for so many rows up to a position."""
        model, text = MoondreamModel(config, network), config.text
        num_pages, scales = position // PAGE + 1, model.kv_scale_L2
        shape = (text.num_layers, rows * num_pages + 1, text.num_heads, PAGE, text.head_dim)
        keys, values = (torch.empty(shape, dtype=kv_dtype(model), device=DEVICE) for _ in range(2))
        for layer in (*keys, *values):
            random = torch.randn(layer.shape, dtype=torch.bfloat16, device=DEVICE)
            layer.copy_(pages.quantise(random, None if scales is None else scales[0, 0]))
        kv = KVCache(keys, values, model.kv_scale_L2)
        assert can_fuse(config, kv, torch.bfloat16), "this GPU or model has no kernels"
        kernels = FusedMoondream(config, network.text, network.region, kv)
        most_pages = -(-text.max_context // PAGE)
        table_RM = torch.zeros(ROWS, most_pages, dtype=torch.int64, device=DEVICE)
        dealt = torch.randperm(rows * num_pages, device=DEVICE) + 1
        table_RM[:rows, :num_pages] = dealt.view(rows, num_pages)
        return cls(config, network, model, kernels, kv, table_RM, position, rows)

    def at(self, position: int, rows: int) -> Bench:
        """The same model with so many rows at another position."""
        return self._over(self.config, self.network, position, rows)

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
        row_B = torch.randperm(self.rows - 1, device=DEVICE)[index_B % (self.rows - 1)]
        row_B = row_B.masked_fill(~is_real_B, self.rows - 1)
        fresh_B = self.position - tokens + 1 - index_B
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
    table_RM = inputs.page_table_RM[:, : bench.position // PAGE + 1]
    where = DecodeBatch(inputs.position_B, table_RM[inputs.row_B])
    x_BD = bench.model.embed(inputs.token_R[inputs.source_B], inputs.payload_R2[inputs.source_B])
    wide = KVCache(*(_numbers_of(bench.kv, cache) for cache in _caches(bench.kv)))
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
    keys, values = (
        _numbers_of(kv, pages.indexable(cache)[at].view(cache.dtype)) for cache in _caches(kv)
    )
    return keys, values


def _caches(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.k_LNHSE, kv.v_LNHSE


def _numbers_of(kv: KVCache, cache: torch.Tensor) -> torch.Tensor:
    """Float32 of what is stored, all in one unit."""
    return cache.float() if kv.scale_L2 is None else cache.float() * KV_SCALE


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


def context_bytes(config: MoondreamConfig, rows: int, position: int, kv_bytes: int = 2) -> int:
    """The keys and values that a step must read, all layers; elements have `kv_bytes`."""
    text = config.text
    return text.num_layers * 2 * text.dim * position * rows * kv_bytes


def floor_ms(
    config: MoondreamConfig, cached: int, touched: Sequence[int], expert_bytes: int
) -> float:
    """The bytes that a step must read over the bandwidth, `cached` ones of keys and values.

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
    return (weights + cached) / BANDWIDTH * 1e3


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
    kv_bytes = bench.kv.k_LNHSE.element_size()
    cached = context_bytes(bench.config, shape[0], bench.position, kv_bytes)
    figures["attend_bytes_per_s"] = cached / figures["attend"] * 1e3
    floor = floor_ms(bench.config, cached, touched, bench.expert_bytes)
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
    exact = None  # its memory is needed
    if arguments.tune:
        tune(bench, device)
    for shape in _shapes(bench.config, arguments):
        step, _, position = shape.partition("@")
        rows, tokens = map(int, step.split("x"))
        if position:
            times = steps(bench.at(int(position), rows + 1), device, (rows, tokens), LONG_REPEATS)
        else:
            times = steps(bench, device, (rows, tokens))
        figures[f"{name} {shape}"] = times
        print(name, shape, _rounded(times))
    return figures


def _shapes(config: MoondreamConfig, arguments: argparse.Namespace) -> list[str]:
    """Those that are asked for, the long ones as far as the model's context reaches."""
    further = [
        shape
        for shape in arguments.long_shapes.split(",")
        if shape and int(shape.partition("@")[2]) < config.text.max_context
    ]
    return [*arguments.shapes.split(","), *further]


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(time, 4) for name, time in times.items()}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _table(figures: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for key, times in figures.items():
        if "step" not in times:
            continue
        model, shape = key.split()
        at = "".join(shape.partition("@")[1:])
        one = figures.get(f"{model} 1x1{at}", times)["step"]
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
    parser.add_argument("--long-shapes", default=LONG_SHAPES, help="those at other positions")
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
