"""Writes the locks of the images: `make image-lock`, which needs the package index.

All follow one resolution, so that images differ in nothing but what they leave out:

- cuda.txt: all that `legato-server` requires
- cpu.txt: without torch, whose build for CPUs is another one, and without what drives a GPU
- null.txt: without what models need
- build.txt: what builds the wheels and installs the others

The hashes are those of every machine's wheels, and each package must have one for arm64 too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = Path(__file__).with_name("locks")
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_28"
ARM64 = "aarch64-manylinux_2_36"  # that of the Containerfile's Debian
_OWN = re.compile(r"legato(-\w+)?(\[|==)")
_MODEL = re.compile(r"(torch|transformers|tokenizers|safetensors|cuda-bindings|huggingface-hub)\b")
_GPU = re.compile(r"torch$|triton$|nvidia-|cuda-")


def main() -> int:
    client, server = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in (".", "service")
    )
    wanted = [
        *client["project"]["dependencies"],
        *client["project"]["optional-dependencies"]["cli"],
        *server["project"]["dependencies"],
    ]
    wanted = [each for each in wanted if not _OWN.match(each)]
    everything = _resolved(wanted)
    _write("cuda.txt", everything)
    _write("cpu.txt", {name: each for name, each in everything.items() if not _GPU.match(name)})
    _write("null.txt", _resolved([each for each in wanted if not _MODEL.match(each)], "cuda.txt"))
    _write("build.txt", _resolved([*client["build-system"]["requires"], "uv"]))
    return 0


def _resolved(requirements: list[str], constraints: str = "") -> dict[str, str]:
    """Return the lines of each package with its hashes, by name."""
    command = ["uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--generate-hashes", "--python-version", PYTHON, "--python-platform", PLATFORM]
    if constraints:
        command += ["--constraint", str(LOCKS / constraints)]
    done = subprocess.run(
        command, input="\n".join(requirements), stdout=subprocess.PIPE, check=True, text=True
    )
    blocks = re.split(r"^(?=\S)", done.stdout, flags=re.MULTILINE)[1:]
    return {block.partition("==")[0]: block for block in blocks}


def _write(name: str, blocks: dict[str, str]) -> None:
    header = f"# Written by `make image-lock` for Python {PYTHON} and {PLATFORM}.\n"
    (LOCKS / name).write_text(header + "".join(blocks.values()))
    _check_arm64(LOCKS / name)


def _check_arm64(lock: Path) -> None:
    """Raise CalledProcessError unless wheels for arm64 can be installed from it."""
    with tempfile.TemporaryDirectory() as target:
        command = ["uv", "pip", "install", "--dry-run", "--quiet", "--target", target]
        command += ["--python-version", PYTHON, "--python-platform", ARM64]
        command += ["--only-binary", ":all:", "--require-hashes", "-r", str(lock)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
