"""An image in bf16 and in fp8: error against float32, time as graphs, and by part.

The tower with its projector, and the decoder's pass over the positions of one and of two images.

Fp8 is measured without calibration, calibrated on other images of the same kind, and with all
blocks in e4m3 and no calibration. Images are noise, or smooth: random weights turn all tokens of an
image into much the same vector, which noise images share and smooth ones do not.

Also the measurements that its design rests on: scales per row or per tensor, and the fastest
attention for its head size, padded or not.

Shape legend: N crops, T tokens of a crop, D width, H heads, E head dim, M rows, K inputs and O
outputs of a layer; C images of P positions, X text width, L layers.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from legato_engine.device.base import Device
from legato_engine.device.select import open_device
from legato_engine.kernels import ops, reference
from legato_engine.kernels.cuda import fused_attention
from legato_engine.layers.fp8 import Centres, Fp8Linear, Fp8MLP
from legato_engine.layers.linear import Linear
from legato_engine.models.moondream import vision_fp8
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.presets import moondream2_config, tiny_random_config
from legato_engine.models.moondream.text import Text
from legato_engine.models.moondream.vision import Vision
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.paged_attention import KVCache
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import record, shared_options

LIMIT = 0.05  # of the error of fp8 without calibration, and calibrated
CALIBRATED = 0.03  # of the error that calibration may leave beside bf16's
CALIBRATION_IMAGES = 8
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FUSED = "ours"
PADDED = (80, 96, 128)  # head sizes
ROUNDS = 5
PAGE_SIZE = 16  # of keys and values


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """A device, sizes, and how often a graph is replayed in a round of several."""

    device: Device
    config: MoondreamConfig
    repeats: int
    rounds: int

    def random(self, *shape: int) -> torch.Tensor:
        """Return random bf16 values."""
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device.torch_device)

    def timed(self, work: Callable[[], object]) -> float:
        """Return the median milliseconds of a replay of `work`, over rounds of replays."""

        def once() -> None:
            work()

        replay = self.device.capture(once)
        rounds = [self._round(replay) for _ in range(self.rounds + 1)]
        return statistics.median(rounds[1:])

    def _round(self, replay: Callable[[], None]) -> float:
        stream = self.device.compute
        start = stream.record()
        for _ in range(self.repeats):
            stream.submit(replay)
        end = stream.record()
        end.wait()
        started = start.time_ns()
        return (end.time_ns() - started) / self.repeats / 1e6


def tower_flop(config: MoondreamConfig, crops: int) -> float:
    """Count multiplications and additions of the tower and its projector for one image."""
    vision = config.vision
    tokens, dim = vision.num_tokens, vision.dim
    linear = 2 * tokens * dim * (4 * dim + 2 * vision.ff_dim)
    attention = 4 * tokens**2 * dim
    patches = 2 * tokens * 3 * vision.patch_size**2 * dim
    projector = 2 * tokens * vision.proj_inner_dim * (2 * dim + config.text.dim)
    return crops * (vision.num_layers * (linear + attention) + patches) + projector


def tiling_of(crops: int) -> tuple[int, int]:
    """Return rows and columns of tiles, as near a square as possible."""
    tiles = max(crops - 1, 1)
    rows = next(rows for rows in range(math.isqrt(tiles), 0, -1) if tiles % rows == 0)
    return rows, tiles // rows


def noise(crops: int, side: int, device: torch.device) -> torch.Tensor:
    """Return crops of independent pixels."""
    return torch.randint(0, 256, (crops, side, side, 3), dtype=torch.uint8, device=device)


def smooth(crops: int, side: int, device: torch.device) -> torch.Tensor:
    """Return crops of a few soft spots of colour with some noise."""
    spots = torch.rand(crops, 3, 6, 6, device=device)
    shown = F.interpolate(spots, size=side, mode="bicubic", align_corners=True)
    levels = (shown + 0.05 * torch.randn_like(shown)).clamp(0, 1) * 255
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


IMAGES = {"noise": noise, "smooth": smooth}


def towers(bench: Bench, crop_counts: Sequence[int]) -> list[dict[str, object]]:
    """Return errors and times of all towers, for each kind of images and number of crops."""
    device, side = bench.device.torch_device, bench.config.vision.crop_size
    plain = random_weights(bench.config, 0, device, torch.bfloat16).vision
    exact = copy.deepcopy(plain).float()
    rows = list[dict[str, object]]()
    for kind, images in IMAGES.items():
        seen = [images(2, side, device) for _ in range(CALIBRATION_IMAGES)]
        calibration = vision_fp8.calibrate(plain, seen, CALIBRATED, lambda _: None)
        plans: dict[str, tuple[int | None, Sequence[Centres] | None]] = {
            "fp8": (None, None),
            "fp8 calibrated": (calibration.recipe.plain_blocks, calibration.centres),
            "fp8 in all blocks": (0, None),
        }
        measured = {"bf16": plain}
        for name, plan in plans.items():
            measured[name] = copy.deepcopy(plain)
            measured[name].use_fp8(*plan)
        for crops in crop_counts:
            pixels = images(crops, side, device)
            truth = exact(pixels, tiling_of(crops))
            rows += [
                {"images": kind, "crops": crops, "tower": name}
                | tower(bench, vision, pixels, truth)
                for name, vision in measured.items()
            ]
    return rows


def tower(
    bench: Bench, vision: Vision, pixels: torch.Tensor, truth: torch.Tensor
) -> dict[str, object]:
    """Measure a tower; `blocks` are those in e4m3."""
    crops = len(pixels)
    out = vision(pixels, tiling_of(crops))
    milliseconds = bench.timed(functools.partial(vision, pixels, tiling_of(crops)))
    return {
        "blocks": sum(isinstance(module, Fp8MLP) for module in vision.modules()),
        "error": relative(out, truth),
        "ms": milliseconds,
        "tflops": tower_flop(bench.config, crops) / milliseconds / 1e9,
    }


def passes(bench: Bench, crops: int) -> list[dict[str, object]]:
    """Measure the decoder's pass over images; errors are of all keys and of all values."""
    config, device = bench.config, bench.device.torch_device
    network = random_weights(config, 0, device, torch.bfloat16)
    text = network.text
    text.fill(device)
    text.count_apart()
    exact = copy.deepcopy(text).float()
    pixels = noise(crops, config.vision.crop_size, device)
    embedded_TX = network.vision(pixels, tiling_of(crops))
    x_PX = torch.cat([text.wte[config.tokens.bos][None], embedded_TX])
    stacks = {count: torch.stack([x_PX] * count) for count in (1, 2)}
    heads = config.text.num_heads
    truths = {count: image_pass(exact, heads, x_CPX.float())() for count, x_CPX in stacks.items()}
    rows = list[dict[str, object]]()
    for name in ("bf16", "fp8"):
        if name == "fp8":
            text.use_fp8()
        for count, x_CPX in stacks.items():
            work = image_pass(text, heads, x_CPX)
            pairs = zip(("keys", "values"), work(), truths[count], strict=True)
            errors = {f"error of {kind}": relative(ours, truth) for kind, ours, truth in pairs}
            row = {"decoder": name, "images": count, "ms": bench.timed(work)}
            rows.append({**row, **errors})
    return rows


def image_pass(
    text: Text, heads: int, x_CPX: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return work that fills and returns the keys and values of images, in pages of their own."""
    images, length, width = x_CPX.shape
    pages_CM = torch.arange(1, 1 - images * (length // -PAGE_SIZE), device=x_CPX.device)
    pages_CM = pages_CM.view(images, -1)
    shape = (len(text.blocks), 1 + pages_CM.numel(), heads, PAGE_SIZE, width // heads)
    kv = KVCache(x_CPX.new_zeros(shape), x_CPX.new_zeros(shape))

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        text.cache_stacked(x_CPX, pages_CM, kv)
        return kv.k_LNHSE, kv.v_LNHSE

    return work


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the norm of the difference over that of the truth."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def layers(bench: Bench, crops: int) -> list[dict[str, object]]:
    """Measure the layers of a block: bf16, and e4m3 with either scales."""
    vision = bench.config.vision
    rows, dim = vision.num_tokens * crops, vision.dim
    shapes = {
        "qkv": (rows, dim, 3 * dim),
        "proj": (rows, dim, dim),
        "fc1": (rows, dim, vision.ff_dim),
        "fc2": (rows, vision.ff_dim, dim),
    }
    return [layer(bench, name, *shape) for name, shape in shapes.items()]


def layer(bench: Bench, name: str, rows: int, inputs: int, outputs: int) -> dict[str, object]:
    """Return milliseconds of one layer's multiplication, without the quantisation of its input."""
    x_MK = bench.random(rows, inputs)
    linear = Linear(inputs, outputs).to(x_MK.device, torch.bfloat16)
    fp8 = Fp8Linear(linear)
    quantised = ops.quantise(x_MK)
    one = torch.ones((), device=x_MK.device)

    def by_tensor() -> torch.Tensor:
        return torch._scaled_mm(
            quantised.values,
            fp8.weight.t(),
            scale_a=one,
            scale_b=one,
            bias=linear.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    times = {
        "bf16_ms": bench.timed(lambda: linear(x_MK)),
        "fp8_rowwise_ms": bench.timed(lambda: fp8.multiply(quantised)),
        "fp8_tensorwise_ms": bench.timed(by_tensor),
    }
    flop = 2 * rows * inputs * outputs
    rates = {key.replace("_ms", "_tflops"): flop / ms / 1e9 for key, ms in times.items()}
    return {"layer": name, "shape": (rows, inputs, outputs), **times, **rates}


def steps(bench: Bench, crops: int) -> list[dict[str, object]]:
    """Measure quantising kernels beside what they replace in bf16 and in torch."""
    vision = bench.config.vision
    rows = vision.num_tokens * crops
    x_MD, x_MF = bench.random(rows, vision.dim), bench.random(rows, vision.ff_dim)
    y_MD, centre_F = bench.random(rows, vision.dim), bench.random(vision.ff_dim)
    ln = torch.nn.LayerNorm(vision.dim, device=x_MD.device, dtype=torch.bfloat16)
    works: dict[str, dict[str, Callable[[], object]]] = {
        "norm": {
            "bf16_ms": lambda: ops.add_norm(x_MD, y_MD, ln),
            "kernel_ms": lambda: ops.add_norm_quantised(x_MD, y_MD, ln),
            "torch_ms": lambda: reference.add_norm_quantised(x_MD, y_MD, ln),
        },
        "gelu": {
            "bf16_ms": lambda: F.gelu(x_MF, approximate="tanh"),
            "kernel_ms": lambda: ops.quantise_gelu(x_MF, centre_F),
            "torch_ms": lambda: reference.quantise_gelu(x_MF, centre_F),
        },
        "plain": {
            "kernel_ms": lambda: ops.quantise(x_MD),
            "torch_ms": lambda: reference.quantise(x_MD),
        },
    }
    return [
        {"step": step, **{name: bench.timed(work) for name, work in each.items()}}
        for step, each in works.items()
    ]


def attentions(bench: Bench, crops: int) -> list[dict[str, object]]:
    """Measure every attention at every head size; unsupported sizes are marked."""
    head = bench.config.vision.dim // bench.config.vision.num_heads
    sizes = (head, *(size for size in PADDED if size > head))
    names = (FUSED, *BACKENDS)
    return [attention(bench, crops, name, size) for size in sizes for name in names]


def attention(bench: Bench, crops: int, name: str, size: int) -> dict[str, object]:
    """Measure one attention on heads in the layout of the projection, padded to `size`."""
    vision = bench.config.vision
    head = vision.dim // vision.num_heads
    heads_NT3HE = bench.random(crops, vision.num_tokens, 3, vision.num_heads, size)
    heads_NT3HE[..., head:] = 0
    q_NHTE, k_NHTE, v_NHTE = heads_NT3HE.permute(2, 0, 3, 1, 4).unbind(0)

    def work() -> torch.Tensor:
        if name == FUSED:
            return _fused(heads_NT3HE)
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q_NHTE, k_NHTE, v_NHTE, scale=head**-0.5)

    row: dict[str, object] = {"attention": name, "head": size}
    try:
        work()
        row["ms"] = milliseconds = bench.timed(work)
    except RuntimeError as error:  # what SDPA raises for sizes that a backend does not take
        row["failed"] = str(error).partition("\n")[0][:200]
        return row
    row["tflops"] = 4 * crops * vision.num_tokens**2 * vision.dim / milliseconds / 1e9
    return row


def _fused(heads_NT3HE: torch.Tensor) -> torch.Tensor:
    heads = heads_NT3HE.unbind(2)
    if not fused_attention.can_attend(*heads):
        raise RuntimeError("not a size of ours")
    return fused_attention.attend(*heads)


PARTS = {"passes": passes, "layers": layers, "steps": steps, "attentions": attentions}


def main(argv: Sequence[str]) -> int:
    """Measure, record; 1 if the error of fp8, calibrated or not, is more than the limit."""
    arguments = _parse(argv)
    device = open_device(arguments.device)
    on_cpu = device.torch_device.type == "cpu"
    config = tiny_random_config() if on_cpu else moondream2_config()
    crop_counts = arguments.crops or ([3, 5] if on_cpu else [9, 13])
    bench = Bench(device, config, *((1, 1) if on_cpu else (arguments.repeats, ROUNDS)))
    with torch.inference_mode():
        figures: dict[str, Any] = {"towers": towers(bench, crop_counts)}
        print(_table(figures["towers"]), flush=True)
        for name, part in PARTS.items():
            figures[name] = part(bench, crop_counts[0])
            print(_table(figures[name]), flush=True)
    device.close()
    rows = figures["towers"]
    bound = ("fp8", "fp8 calibrated")
    failed = [row for row in rows if row["tower"] in bound and not row["error"] <= arguments.limit]
    figures |= {"limit": arguments.limit, "failed": failed}
    title = f"An image in fp8: {config.name} on {device.name}, random weights"
    tables = [_table(figures[part]) for part in ("towers", *PARTS)]
    record.write(arguments.name, title, figures, tables)
    for row in failed:
        what = f"{row['tower']}, {row['crops']} crops, {row['images']} images"
        print(f"FAILED: the error is {row['error']:.3f}, over {arguments.limit}: {what}")
    return int(bool(failed))


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    heads = list(dict.fromkeys(head for row in rows for head in row))
    return record.table(heads, [[_text(row.get(head)) for head in heads] for row in rows])


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fp8", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: a dry run at sizes of no meaning")
    parser.add_argument("--name", default="fp8", help="of the record")
    parser.add_argument(
        "--crops", type=shared_options.numbers, help="e.g. 9,13; the parts are of the first"
    )
    parser.add_argument("--repeats", type=int, default=20, help="replays in a round")
    parser.add_argument("--limit", type=float, default=LIMIT, help="of the error of fp8")
    return parser.parse_args(argv)
