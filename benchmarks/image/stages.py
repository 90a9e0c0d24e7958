"""The stages of an image: hash, decode, resize and tile, and the work on the device.

Shape legend: H, W and C rows, columns and channels of an image, N crops, T patches of a crop,
P values of a patch, V the 256 levels of a channel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.device.base import Device
from legato_engine.images.decoding import content_key, decode_encoded, image_id
from legato_engine.images.memory import PixelMemory, Pixels, host_slab
from legato_engine.kernels.images import CutPlan
from legato_engine.models import registry
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.config import VisionConfig
from legato_engine.models.moondream.family import MoondreamBundle
from legato_engine.models.moondream.preprocess import crop_geometry, crop_image, select_tiling
from legato_engine.types import ImageProperties
from PIL import Image

from benchmarks import record
from benchmarks.image.charts import Photographer

SIZES = ((640, 480), (850, 600), (1920, 1080), (4000, 3000))
MAX_PIXELS = 40_000_000
PAUSE = 0.02  # seconds, in which caches and branch predictors forget
Stages = dict[str, float | None]


def host_stages(jpeg: bytes, config: VisionConfig, repeats: int) -> Stages:
    """Return medians in ms of the work of one core before the device starts.

    Decoding is measured three times: back to back; after a pause, as for a single caller; and after
    a pause into memory that was never touched before.
    """
    memory = PixelMemory(host_slab(3 * MAX_PIXELS))
    fresh: list[Pixels] = []

    def decode() -> Pixels:
        return decode_encoded(jpeg, max_pixels=MAX_PIXELS, allocate=memory.allocate)

    def decode_new() -> None:
        fresh.append(decode_encoded(jpeg, max_pixels=MAX_PIXELS))

    image = Image.fromarray(decode())
    return {
        "hash": host_ms(lambda: content_key(jpeg), repeats),
        "decode": host_ms(decode, repeats),
        "decode alone": host_ms(decode, repeats, PAUSE),
        "decode into new memory": host_ms(decode_new, repeats, PAUSE),
        "resize and tile": host_ms(lambda: crop_image(image, config), repeats),
    }


def device_stages(
    assembly: Assembly, pixels_HWC: Pixels, config: VisionConfig, repeats: int
) -> Stages:
    """Return medians in ms on the device; None for a stage that this device or image lacks.

    `picture to embeddings` is the model's own path from the frontend's output.
    """
    height, width = pixels_HWC.shape[:2]
    key = content_key(pixels_HWC.tobytes())
    info = ImageProperties(image_id=image_id(key), width=width, height=height, cache_hit=False)
    prepared = assembly.frontend.prepare_image(pixels_HWC, key, info)
    return {
        **_cut_stages(assembly, pixels_HWC, config, repeats),
        "picture to embeddings": _embed_ms(assembly, prepared, repeats),
    }


def _embed_ms(assembly: Assembly, prepared: PreparedImage, repeats: int) -> float:
    """Measure tower and projection without graphs."""
    device, model, count = assembly.device, assembly.model, prepared.num_crops
    if count == 0:
        return device_ms(device, lambda: model.prefix_embeddings(prepared), repeats)
    encoder = model.image_encoder(device.pinned, 1)
    assert encoder is not None, "images stay uncropped only for an encoder"
    encoder.stage(0, prepared)
    device.compute.submit(lambda: encoder.upload(0))
    device.compute.submit(encoder.cut)

    def embed() -> None:
        encoder.encode(count, gathered=False)
        encoder.finish(0)

    return device_ms(device, embed, repeats)


def _cut_stages(
    assembly: Assembly, pixels_HWC: Pixels, config: VisionConfig, repeats: int
) -> Stages:
    """Measure the upload and the kernels that resize, cut and patch, where there are any."""
    device = assembly.device
    height, width = pixels_HWC.shape[:2]
    tiling = select_tiling(height, width, config)
    plan = CutPlan(height, width, tiling, crop_geometry(config))
    if device.torch_device.type != "cuda" or not plan.fits:
        return {"stage": None, "upload": None, "resize and cut": None}
    from legato_engine.kernels import accelerated
    from legato_engine.kernels.images import MAX_WORDS, NUM_PIXEL_BYTES, HostImage, stage

    host = HostImage(
        device.pinned((NUM_PIXEL_BYTES,), torch.uint8),
        device.pinned((MAX_WORDS,), torch.int32),
    )
    levels_V = torch.linspace(-1, 1, 256, device=device.torch_device).bfloat16()
    pipeline = accelerated.ImagePipeline(crop_geometry(config), levels_V)
    staged = stage(pixels_HWC, plan, host)
    side = config.crop_size // config.patch_size
    shape = (plan.num_crops, side * side, 3 * config.patch_size**2)
    patches_NTP = torch.empty(shape, dtype=levels_V.dtype, device=device.torch_device)
    return {
        "stage": host_ms(lambda: stage(pixels_HWC, plan, host), repeats),
        "upload": device_ms(device, lambda: pipeline.upload(host, staged), repeats),
        "resize and cut": device_ms(device, lambda: pipeline.cut(patches_NTP), repeats),
    }


def host_ms(work: Callable[[], object], repeats: int, pause: float = 0.0) -> float:
    """Return median milliseconds of `work` on this thread, `pause` seconds before each.

    One run before them is not counted.
    """
    times = []
    for _ in range(repeats + 1):
        time.sleep(pause)
        start = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - start) / 1e6)
    return statistics.median(times[1:])


def device_ms(device: Device, work: Callable[[], object], repeats: int) -> float:
    """Return median milliseconds between two events of the compute stream around `work`."""

    def enqueue() -> None:
        work()

    times = []
    for _ in range(repeats + 1):
        before = device.compute.record()
        device.compute.submit(enqueue)
        after = device.compute.record()
        after.wait()
        times.append((after.time_ns() - before.time_ns()) / 1e6)
    return statistics.median(times[1:])


def main(argv: Sequence[str]) -> int:
    """Measure every size and record; without `--device-stages` only the host stages."""
    arguments = _parse(argv)
    bundle = registry.resolve(arguments.model, random_weights=True)
    assert isinstance(bundle, MoondreamBundle), "no other family has random weights"
    config = bundle.config
    assembly = assemble(model_config(arguments)) if arguments.device_stages else None
    photographer = Photographer(0, max(max(size) for size in arguments.sizes))
    rows = []
    failures = []
    for index, size in enumerate(arguments.sizes):
        jpeg = photographer.jpeg(index, size)
        stages = host_stages(jpeg, config.vision, arguments.repeats)
        pixels_HWC = decode_encoded(jpeg, max_pixels=MAX_PIXELS)
        if assembly is not None:
            try:
                stages |= device_stages(assembly, pixels_HWC, config.vision, arguments.repeats)
            except Exception as error:  # noqa: BLE001 - the host's figures are worth keeping
                failures.append(f"{size[0]}x{size[1]}: {type(error).__name__}: {error}")
                print(f"failed: {failures[-1]}")
        tiling = select_tiling(size[1], size[0], config.vision)
        rows.append({"size": size, "jpeg_bytes": len(jpeg), "tiling": tiling, "stages_ms": stages})
    if assembly is not None:
        assembly.device.close()
    names = list(dict.fromkeys(name for row in rows for name in row["stages_ms"]))
    cells = [
        [
            "x".join(map(str, row["size"])),
            "x".join(map(str, row["tiling"])),
            f"{row['jpeg_bytes'] / 1e3:.0f}",
            *(_text(row["stages_ms"].get(name)) for name in names),
        ]
        for row in rows
    ]
    heads = ("image", "tiles", "JPEG kB", *(f"{name}, ms" for name in names))
    title = f"Stages of an image: {config.name} on {arguments.device}, one host thread"
    figures = {"model": config.name, "rows": rows, "failures": failures}
    record.write(arguments.name, title, figures, [record.table(heads, cells)])
    return 1 if failures else 0


def _text(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.2f}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks image", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="image", help="of the record")
    parser.add_argument("--repeats", type=int, default=11, help="timed runs per stage")
    parser.add_argument("--sizes", type=_sizes, default=list(SIZES), help="e.g. 640x480,850x600")
    parser.add_argument("--device-stages", action="store_true", help="load the model and go on")
    return parser.parse_args(argv)


def _sizes(text: str) -> list[tuple[int, int]]:
    pairs = (part.split("x") for part in text.split(","))
    return [(int(width), int(height)) for width, height in pairs]
