"""The same unary call by ghz, a foreign load generator, as a check of our own."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from legato.v1 import inference_pb2

from benchmarks import record

NAME = "Query"
CALL = f"legato.v1.InferenceService/{NAME}"
REQUEST = {"question": "What is in the picture?"}
SECONDS = 5


def measure(targets: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return calls a second and latency of each target; empty where ghz is not installed."""
    ghz = shutil.which("ghz")
    if ghz is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        protoset = Path(folder) / "legato.binpb"
        protoset.write_bytes(descriptors(inference_pb2.DESCRIPTOR).SerializeToString())
        return {name: _run(ghz, protoset, target) for name, target in targets.items()}


def text(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Format the figures as Markdown."""
    if not figures:
        return [f"No {NAME} by ghz: nothing checks these figures from outside."]
    rows = [
        [
            name,
            *(f"{found[key]:.{digits}f}" for key, digits in (("rps", 0), ("p50", 2), ("p99", 2))),
        ]
        for name, found in figures.items()
    ]
    heads = ("ghz, Query, 64 in flight", "calls a second", "P50 ms", "P99 ms")
    return [record.table(heads, rows)]


def _run(ghz: str, protoset: Path, target: str) -> dict[str, float]:
    options = [
        *("--insecure", "--protoset", str(protoset), "--call", CALL, "--data", json.dumps(REQUEST)),
        *("--concurrency", "64", "--duration", f"{SECONDS}s", "--duration-stop", "wait"),
        *("--format", "json", target),
    ]
    done = subprocess.run([ghz, *options], capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    percentiles = {
        each["percentage"]: each["latency"] / 1e6 for each in found["latencyDistribution"]
    }
    return {"rps": found["rps"], "p50": percentiles[50], "p99": percentiles[99]}


def descriptors(file: FileDescriptor) -> descriptor_pb2.FileDescriptorSet:
    """Return a proto file with all that it needs, dependencies first."""
    found: dict[str, descriptor_pb2.FileDescriptorProto] = {}

    def add(each: FileDescriptor) -> None:
        for needed in each.dependencies:
            add(needed)
        if each.name not in found:
            found[each.name] = descriptor_pb2.FileDescriptorProto()
            each.CopyToProto(found[each.name])

    add(file)
    return descriptor_pb2.FileDescriptorSet(file=found.values())
