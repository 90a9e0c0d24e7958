"""Installs the built wheels as users would, and looks at what came."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from release import build
from release.build import ALL, CLIENT, ROOT, SERVER, TINY, Environment, ReleaseError, run

PROTOBUF_MAJORS = (6, 7)  # those that the stubs promise to work with
CLIENT_LIMIT = 7 * 512 * 1024  # bytes on the disk of `pip install legato`, bytecode and page too
WEIGHTS = (".safetensors", ".pt", ".bin", ".npz")

# What each wheel must have besides its modules.
CONTENTS = {
    CLIENT: (
        "legato/v1/descriptor.binpb",
        "legato_client/py.typed",
        "legato_client/web/static/index.html",
        "legato_client/web/static/app.js",
        "legato_client/web/static/timeline.js",
        "legato_client/web/static/samples/scene.jpg",
        "legato_client/web/static/drawings/dog.webp",
        "licenses/LICENSE",
        "licenses/clients/python/legato_client/web/static/samples/LICENSE-fluent-emoji",
    ),
    SERVER: (
        "legato_service/__main__.py",
        "legato_engine/kernels/cpu/sources/decoder.cpp",
        "legato_engine/kernels/cpu/sources/pool.h",
        "legato_engine/kernels/cuda/sources/layer_maps.cu",
        "legato_engine/kernels/cuda/sources/skinny_gemm.cuh",
        "licenses/LICENSE",
    ),
    TINY: (
        "legato_tiny/config.json",
        "legato_tiny/tokenizer.json",
        "legato_tiny/model.safetensors",
        "legato_tiny/draft.safetensors",
        "legato_tiny/adapters/hazard.safetensors",
        "legato_tiny/MODEL_CARD.md",
        "licenses/LICENSE",
        "licenses/NOTICE",
        "licenses/legato_tiny/samples/LICENSE-fluent-emoji",
    ),
}

# Run where only the client is installed: all that it imports, and what must not have come along.
CLIENT_PROBE = """
import importlib, importlib.metadata, importlib.util, pathlib
for noun in "media geometry task inference session image server admin error".split():
    importlib.import_module(f"legato.v1.{noun}_pb2")
for noun in "inference session image server admin".split():
    importlib.import_module(f"legato.v1.{noun}_pb2_grpc")
importlib.import_module("legato_client")
for name in ("torch", "transformers", "numpy", "legato_tiny", "legato_service", "legato_engine"):
    assert importlib.util.find_spec(name) is None, f"{name} came with the light client"
files = importlib.metadata.files("legato")
print(sum(pathlib.Path(file.locate()).stat().st_size for file in files))
"""

# Run where the server is installed: each package lies in this environment, not in a source tree.
SERVER_PROBE = """
import importlib.util, pathlib, sys
for name in ("legato", "legato_client", "legato_service", "legato_engine", "legato_tiny"):
    found = pathlib.Path(importlib.util.find_spec(name).submodule_search_locations[0])
    assert found.is_relative_to(sys.prefix), f"{name} is imported from {found}"
"""


def check_contents(dist: Path, version: str) -> None:
    """Open the wheels.

    Raises:
        ReleaseError: A file is missing or empty, or a wheel other than the model's has weights.
    """
    for distribution, needed in CONTENTS.items():
        wheel = distribution.wheel(version)
        with zipfile.ZipFile(dist / wheel) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
        licences = f"{distribution.stem}-{version}.dist-info/licenses/"
        for name in needed:
            path = name.replace("licenses/", licences, 1)
            if not sizes.get(path) and not (path in sizes and name.endswith("py.typed")):
                raise ReleaseError(f"{wheel} lacks {name}")
        carried = [name for name in sizes if name.endswith(WEIGHTS)]
        if carried and distribution is not TINY:
            raise ReleaseError(f"{wheel} carries weights: {', '.join(carried)}")


def check_client(dist: Path, version: str, protobuf_major: int, folder: Path) -> int:
    """Install the client alone, with its dependencies from the package index.

    Returns:
        Its size on the disk, in bytes.

    Raises:
        ReleaseError: It does not work beside this protobuf, is large, or brings the server.
    """
    clean = Environment(folder)
    clean.install(dist / CLIENT.wheel(version), f"protobuf=={protobuf_major}.*")
    size = int(clean.run(clean.python, "-c", CLIENT_PROBE))
    if size > CLIENT_LIMIT:
        raise ReleaseError(f"the client takes {size} bytes on the disk, {CLIENT_LIMIT} are allowed")
    return size


def install_server(dist: Path, version: str, folder: Path) -> Environment:
    """Install `legato[engine]` from the wheels, offline; its dependencies are lent.

    Raises:
        ReleaseError: A dependency is missing or too old.
    """
    root = f"{CLIENT.name}[engine]=={version}"
    clean = Environment(folder)
    clean.lend(build.dependencies([dist / each.wheel(version) for each in ALL], root))
    clean.install("--no-compile", "--no-index", "--find-links", dist, root)
    return clean


def check_server(clean: Environment) -> None:
    """Run the demo: the installed server starts, answers, and its result is drawn.

    Raises:
        ReleaseError: A package is imported from elsewhere, or the demo failed.
    """
    clean.run(clean.python, "-c", SERVER_PROBE)
    drawn = clean.folder / "demo.png"
    clean.run(clean.bin / "legato", "demo", "--output", drawn)
    if not drawn.is_file():
        raise ReleaseError("`legato demo` drew nothing")


def describe(installed: Environment, output: Path, epoch: str) -> None:
    """Write the bill of materials of an installed server, in CycloneDX's JSON.

    Raises:
        ReleaseError: It could not be written, or names files of this machine.
    """
    program = Path(sys.executable).with_name("cyclonedx-py")
    project = ROOT / SERVER.folder / "pyproject.toml"
    options: list[str | Path] = ["--pyproject", project, "--output-reproducible", "--no-validate"]
    command = [program, "environment", *options, "--output-file", output, installed.python]
    run(command, installed.folder, {"SOURCE_DATE_EPOCH": epoch})
    if "file://" in output.read_text():
        raise ReleaseError(f"{output.name} names files of this machine")
