"""Install the built wheels as a user would, and look at what came.

Run by `make wheel-check`. The light client goes into clean venvs, one for each major version of the
protobuf runtime that the stubs promise to work with; then the model's wheel is opened.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

PROTOBUF_MAJORS = (6, 7)
LIGHT_LIMIT = 6 * 1024 * 1024  # bytes of its own, bytecode too, that `pip install legato` may bring
WEIGHTS = (".safetensors", ".pt", ".bin", ".npz")
TINY_FILES = (
    "config.json",
    "tokenizer.json",
    "model.safetensors",
    "draft.safetensors",
    "adapters/hazard.safetensors",
    "MODEL_CARD.md",
)

# Run in the clean venv: everything a light client imports, and what must not have come along.
PROBE = """
import importlib, importlib.metadata, importlib.util, pathlib
for noun in "media geometry task inference session image server admin error".split():
    importlib.import_module(f"legato.v1.{noun}_pb2")
    importlib.import_module(f"legato.v1.{noun}_pb2_grpc")
importlib.import_module("legato_client")
for name in ("torch", "transformers", "numpy", "legato_tiny"):
    assert importlib.util.find_spec(name) is None, f"{name} came with the light client"
files = importlib.metadata.files("legato")
sources = {file.name for file in files if "legato_engine/kernels/cuda/sources" in str(file)}
assert {"layer_maps.cu", "skinny_gemm.cuh"} <= sources, "the kernels' sources are missing"
for file in files:
    print(pathlib.Path(file.locate()).stat().st_size, file)
"""


def only(folder: Path, pattern: str) -> Path:
    """The one file of this pattern."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"expected one {pattern} in {folder}, found {len(found)}: run `make wheel`")
    return found[0]


def check_light(wheel: Path, protobuf_major: int) -> None:
    """`pip install legato` works beside this protobuf, is small, brings no torch, no weights."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, str(wheel), f"protobuf=={protobuf_major}.*"], check=True, env=environment
        )
        probe = subprocess.run(
            [python, "-c", PROBE],
            check=True,
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
    total = 0
    for line in probe.stdout.splitlines():
        size, name = line.split(" ", 1)
        total += int(size)
        if name.endswith(WEIGHTS):
            sys.exit(f"{wheel.name} carries weights: {name}")
    if total >= LIGHT_LIMIT:
        sys.exit(f"{wheel.name} puts {total} bytes on the disk, {LIGHT_LIMIT} are allowed")
    print(
        f"{wheel.name}: light client works with protobuf {protobuf_major}, "
        f"{total / 1024:.0f} KiB installed"
    )


def check_tiny(wheel: Path) -> None:
    """The model's wheel holds the model."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    missing = [name for name in TINY_FILES if not sizes.get(f"legato_tiny/{name}")]
    if missing:
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
    print(f"{wheel.name}: {sizes['legato_tiny/model.safetensors'] / 2**20:.1f} MiB of weights")


def main() -> None:
    """Check both wheels; exit with a sentence at the first thing wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, help="the folder that `make wheel` filled")
    wheels = parser.parse_args().wheels
    for major in PROTOBUF_MAJORS:
        check_light(only(wheels, "legato-*.whl"), major)
    check_tiny(only(wheels, "legato_tiny-*.whl"))


if __name__ == "__main__":
    main()
