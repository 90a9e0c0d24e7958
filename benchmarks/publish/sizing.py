"""GPUs, cores, memory and network for cameras, from the records that docs/scaling.md cites."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence

from benchmarks.publish.records import Records, sources
from benchmarks.record import ROOT, table

BUSY = 0.7  # of GPUs and cores, so that a burst or a lost engine finds room
ENGINE_GIB = 8  # of a host's memory for an engine and its service process: a judgement
SESSION_KIB = 37
GPUS_OF_HOST = 8
ENVOY_CALLS = 4000  # a second of small calls, by a proxy, a client and two servers on two cores
SERVICE = "serve_2cores_i_2026-11-22"
SOURCES = ("h200/e2e", "h200/e2e_photos", "h200/image", SERVICE)
HEADS = (
    *("cameras", "frames/s each", "image", "frames/s", "GPUs", "hosts of 8", "cores"),
    *("memory, GiB", "network in, Gb/s", "proxies"),
)
LIMIT_HEADS = (
    *("image", "JPEG kB", "cores a GPU", "of them decoding", "Mb/s a GPU"),
    *("GPUs a service process", "GPUs on 10 Gb/s", "what ends first on a host of 8"),
)
EXAMPLES = (
    (10, 5.0, "640x480"),
    (100, 2.0, "850x600"),
    (100, 5.0, "1920x1080"),
    (1000, 1.0, "1920x1080"),
    (1000, 5.0, "850x600"),
    (200, 0.2, "4000x3000"),
    (10_000, 1.0, "1920x1080"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What a new image of a size takes: bytes, seconds of cores, calls of a service process."""

    size: str
    jpeg_bytes: int
    decode: float
    service: float
    calls: float
    is_extrapolated: bool

    @property
    def cores(self) -> float:
        """Seconds of cores in all, without the engine's own loop."""
        return self.decode + self.service


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """What frames a second need, at `BUSY`."""

    frames: float
    gpus: int
    hosts: int
    cores: int
    memory_gib: int
    network_gbps: float
    proxies: int


def frames(records: Records) -> dict[str, Frame]:
    """Return the measured sizes of images, by name."""
    query, detect = (
        next(
            row
            for row in records.figures(SERVICE)["processes"]
            if row["case"] == case and row["processes"] == 1
        )
        for case in ("Query", "Detect, 112 KiB JPEG")
    )
    none, some = (row["service_cpu_us"] + row["engine_cpu_us"] for row in (query, detect))
    largest = records.figures("h200/e2e_photos")["jpeg_bytes"]
    found = {}
    for row in records.rows("h200/image"):
        name = "x".join(map(str, row["size"]))
        size, stages = row["jpeg_bytes"], row["stages_ms"]
        found[name] = Frame(
            size=name,
            jpeg_bytes=size,
            decode=(stages["decode"] + stages["hash"]) / 1e3,
            service=(none + (some - none) * size / (112 * 1024)) / 1e6,
            calls=1 / host_call(records, size),
            is_extrapolated=size > largest,
        )
    return found


def host_call(records: Records, jpeg_bytes: float) -> float:
    """Return the seconds between answers of one service and engine process, for known images.

    A line through the records of charts and of photographs, with 64 callers each.
    """
    small, large = records.figures("h200/e2e"), records.figures("h200/e2e_photos")
    first, second = (
        1.0 / records.row(name, workload="cached", callers=64, tokens=3)["per_second"]
        for name in ("h200/e2e", "h200/e2e_photos")
    )
    slope = (second - first) / (large["jpeg_bytes"] - small["jpeg_bytes"])
    seconds: float = first + slope * (jpeg_bytes - small["jpeg_bytes"])
    return seconds


def gpu_rate(records: Records) -> float:
    """Frames a second of a GPU that is always busy, with three tokens each."""
    rate: float = records.row("h200/e2e", workload="new", callers=64, tokens=3)["per_second"]
    return rate


def deployment(records: Records, cameras: int, each: float, size: str) -> Deployment:
    """Size a deployment.

    Raises:
        KeyError: No image of that size was measured.
    """
    frame, rate = frames(records)[size], cameras * each
    gpus = max(1, math.ceil(rate / (gpu_rate(records) * BUSY)))
    memory = gpus * ENGINE_GIB + cameras * SESSION_KIB / 1024**2
    return Deployment(
        frames=rate,
        gpus=gpus,
        hosts=math.ceil(gpus / GPUS_OF_HOST),
        cores=gpus + math.ceil(rate * frame.cores / BUSY),
        memory_gib=math.ceil(memory),
        network_gbps=rate * frame.jpeg_bytes * 8 / 1e9,
        proxies=math.ceil(rate / (ENVOY_CALLS * BUSY)),
    )


def deployment_row(records: Records, cameras: int, each: float, size: str) -> list[str]:
    """Return the cells of `HEADS`."""
    need = deployment(records, cameras, each, size)
    return [
        *(f"{cameras:,}", f"{each:g}", size, f"{need.frames:,.0f}", f"{need.gpus:,}"),
        *(f"{need.hosts:,}", f"{need.cores:,}", f"{need.memory_gib:,}"),
        *(f"{need.network_gbps:.2f}", f"{need.proxies}"),
    ]


def steps(records: Records, cameras: int, each: float, size: str) -> list[list[str]]:
    """Return how a deployment is sized: what, how, how much."""
    need, full = deployment(records, cameras, each, size), gpu_rate(records)
    frame = frames(records)[size]
    spent = f"{frame.decode * 1e3:.1f} ms of decoding and {frame.service * 1e3:.1f} ms"
    return [
        ["frames a second", f"{cameras:,} cameras x {each:g}", f"{need.frames:,.0f}"],
        ["of one GPU", f"{full:.0f} measured x {BUSY:g} busy", f"{full * BUSY:.0f}"],
        ["GPUs", "rounded up", str(need.gpus)],
        ["cores for engines", "one each, their loop polls", str(need.gpus)],
        [
            "cores for frames",
            f"{spent} of service each, {BUSY:g} busy",
            str(need.cores - need.gpus),
        ],
        [
            "memory, GiB",
            f"{ENGINE_GIB} an engine, {SESSION_KIB} KiB a session",
            str(need.memory_gib),
        ],
        [
            "network in",
            f"{frame.jpeg_bytes / 1e3:,.0f} kB a frame",
            f"{need.network_gbps:.1f} Gb/s",
        ],
    ]


def limit_row(records: Records, frame: Frame) -> list[str]:
    """Return the cells of `LIMIT_HEADS`: what a GPU that is always busy needs of its host."""
    rate = gpu_rate(records)
    bits = rate * frame.jpeg_bytes * 8
    by_service, by_network = frame.calls / rate, 10e9 / bits
    names = {"a service process": by_service, "a link of 10 Gb/s": by_network}
    first = min(names, key=lambda name: names[name])
    enough = names[first] >= GPUS_OF_HOST
    return [
        *(frame.size, f"{frame.jpeg_bytes / 1e3:,.0f}"),
        *(f"{1 + rate * frame.cores:.1f}", f"{rate * frame.decode:.1f}", f"{bits / 1e6:,.0f}"),
        f"{by_service:.0f}{' (extrapolated)' if frame.is_extrapolated else ''}",
        f"{by_network:.0f}",
        "the GPUs" if enough else first,
    ]


def deployments_table(records: Records) -> str:
    """Cameras at frames a second, each frame a new image with one question."""
    lines = [deployment_row(records, *example) for example in EXAMPLES]
    return table(HEADS, lines) + sources(records, *SOURCES)


def example_table(records: Records) -> str:
    """One of the deployments, step by step."""
    lines = steps(records, *EXAMPLES[2])
    return table(
        ("100 cameras, five frames of 1920x1080 a second", "from", "need"), lines
    ) + sources(records, *SOURCES)


def limits_table(records: Records) -> str:
    """Format the host resources that a busy GPU needs, by size of the image."""
    lines = [limit_row(records, frame) for frame in frames(records).values()]
    known = [
        (figures["jpeg_bytes"] / 1e3, row["per_second"])
        for name in ("h200/e2e", "h200/e2e_photos")
        for figures in (records.figures(name),)
        for row in (records.row(name, workload="cached", callers=64, tokens=3),)
    ]
    rates = " and ".join(f"{rate:,.0f} of {size:.0f} kB" for size, rate in known)
    few = ENVOY_CALLS / known[0][1]
    text = (
        f"\n\nQuestions about known images, a second, of one service process and one GPU: {rates}. "
        f"There {few:.1f} GPUs fill a proxy of {ENVOY_CALLS:,} calls a second."
    )
    return table(LIMIT_HEADS, lines) + text + sources(records, *SOURCES)


def main(argv: Sequence[str]) -> int:
    """Print a row for a deployment."""
    records = Records(ROOT)
    parser = argparse.ArgumentParser(prog="python -m benchmarks sizing", description=__doc__)
    parser.add_argument("--cameras", type=int, required=True)
    parser.add_argument("--frames-per-second", type=float, required=True, help="of each camera")
    parser.add_argument("--size", choices=sorted(frames(records)), default="850x600")
    arguments = parser.parse_args(argv)
    cells = (arguments.cameras, arguments.frames_per_second, arguments.size)
    print(table(HEADS, [deployment_row(records, *cells)]))
    return 0


TABLES: dict[str, Callable[[Records], str]] = {
    "sizing_deployments": deployments_table,
    "sizing_example": example_table,
    "sizing_limits": limits_table,
}
