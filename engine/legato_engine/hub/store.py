"""Published models: the catalog, the local store, `legato models`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from legato_engine.errors import InvalidField

_MANIFEST = "legato.json"


class StoredFile(msgspec.Struct, frozen=True):
    """A file whose size and hash were checked."""

    name: str
    size: int
    sha256: str
    repository: str
    commit: str


class Manifest(msgspec.Struct, frozen=True):
    """Record of what was pulled and when (RFC 3339)."""

    model: str
    licence: str
    pulled: str
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(each.size for each in self.files)

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f"{each.repository}@{each.commit}" for each in self.files))


def default_folder() -> Path:
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "legato" / "models"


def model_folder(models: str, name: str) -> Path:
    """Return a model's folder; an empty `models` means the default folder."""
    return (Path(models) if models else default_folder()) / name


def read_manifest(folder: Path) -> Manifest | None:
    """Read a folder's manifest, or return None if the model is incomplete."""
    try:
        return msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, last: its existence means that all files are complete."""
    draft = folder / f"{_MANIFEST}.part"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    draft.replace(folder / _MANIFEST)


def find(models: str, name: str) -> Path:
    """Return the folder of a pulled model, without downloads or hash checks.

    Raises:
        InvalidField: it was not pulled, or a file is gone or has another size.
    """
    folder = model_folder(models, name)
    manifest = read_manifest(folder)
    if manifest is None:
        problem = f"{name} is not at {folder}: `legato pull {name}` fetches it, or give its files"
        raise InvalidField(problem, field="weights")
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            problem = f"{path} is not as it was pulled: `legato pull {name}` again"
            raise InvalidField(problem, field="weights")
    return folder


# ---------------------------------------------------------------- catalog

# A revision is a commit of the repository, and the hashes are the hub's. If no commit is known, the
# revision is a branch, and the first pull records the commit.

INDEX = "model.safetensors.index.json"
"""Index file of a sharded model."""


@dataclasses.dataclass(frozen=True, slots=True)
class RepositoryFiles:
    """Files of one repository; a name that ends in * matches any number of files."""

    repository: str
    revision: str
    files: tuple[str, ...]
    sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return any(
            name.startswith(each[:-1]) if each.endswith("*") else name == each
            for each in self.files
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """Published model; bytes are of the weights in memory, 0 if the form does not exist."""

    name: str
    family: str  # of `--model`
    sources: tuple[RepositoryFiles, ...]
    licence: str
    bf16_bytes: int
    fp8_bytes: int = 0
    stored_fp8: bool = False  # the published file is that of `fp8_bytes`
    rounded_bytes: tuple[tuple[str, int], ...] = ()
    """Bytes on a GPU by `--weight-dtype`, the largest first, without KV cache and buffers."""


_MOONDREAM = ("config.json", "model.safetensors", INDEX, "LICENSE*")
_TEXT = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE*",
)
_STARMIE = RepositoryFiles(
    "moondream/starmie-v1",
    "35192e10a54e36eabe0a7cc57a2c1aab371cafc5",
    ("tokenizer.json",),
    {"tokenizer.json": "0512fdcac4a5f9e7746cbefce4a468dc93bf0f93f11e701b84f8b31bff199e9c"},
)
_BSL = "Business Source License 1.1 with an additional use grant: read it before you serve others"


def _text_model(
    name: str,
    family: str,
    repository: str,
    revision: str,
    sha256: str,
    num_bytes: int,
    *rounded: int,
) -> Published:
    files = RepositoryFiles(repository, revision, _TEXT, {"model.safetensors": sha256})
    forms = tuple(zip(("int8", "int4"), rounded, strict=True))  # counted, not measured
    return Published(name, family, (files,), "Apache-2.0", num_bytes, rounded_bytes=forms)


_ALL = (
    Published(
        "moondream2",
        "moondream2",
        (
            RepositoryFiles(
                "vikhyatk/moondream2",
                "9a7d4024050840e001defacec2b00727e89149e6",  # the tag 2025-06-21
                _MOONDREAM,
                {
                    "model.safetensors": (
                        "70a7d94c0c8349eb58ed2d9e636ef2d0916960f321ecabeac6354b8ba3d7403f"
                    )
                },
            ),
            _STARMIE,
        ),
        "Apache-2.0; its tokenizer's repository names none",
        bf16_bytes=3_854_538_968,
        # GiB of benchmarks/results/h200/portable_formats_hopper.json
        rounded_bytes=(("int8", int(2.53 * 2**30)), ("int4", int(2.0 * 2**30))),
    ),
    Published(
        "moondream3",
        "moondream3",
        (
            RepositoryFiles(
                "moondream/moondream3-preview",
                "5112966d1a723413b1c9a1e8bea272b72e647b35",
                _MOONDREAM,
            ),
            _STARMIE,
        ),
        _BSL,
        bf16_bytes=18_500_000_000,
        fp8_bytes=10_500_000_000,
        # counted, not measured
        rounded_bytes=(("int8", 9_870_000_000), ("int4", 5_820_000_000)),
    ),
    Published(
        "moondream3.1",
        "moondream3.1",
        (RepositoryFiles("moondream/moondream3.1-9B-A2B", "main", _MOONDREAM), _STARMIE),
        "not known here: the repository says",
        bf16_bytes=18_500_000_000,
        fp8_bytes=10_500_000_000,
        stored_fp8=True,
    ),
    _text_model(
        "smollm2-135m",
        "llama",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "12fd25f77366fa6b3b4b768ec3050bf629380bac",
        "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
        269_060_552,
        191_991_936,
        141_603_456,
    ),
    _text_model(
        "qwen3-0.6b",
        "qwen",
        "Qwen/Qwen3-0.6B",
        "c1899de289a04d12100db370d81485cdf75e47ca",
        "f47f71177f32bcd101b7573ec9171e6a57f4f4d31148d38e382306f42996874b",
        1_503_300_328,
        909_264_384,
        701_449_728,
    ),
)

MODELS = {each.name: each for each in _ALL}


# ---------------------------------------------------------------- options


_QUANTISED = (
    *("legato-tiny", "moondream2", "moondream3", "moondream3.1"),
    *("smollm2-135m", "qwen3-0.6b", "llama", "phi", "qwen", "qwen3-vl"),
)

Kind = Callable[..., argparse.ArgumentParser]


def pull_parser(kind: Kind = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = kind(
        allow_abbrev=False,
        prog="legato pull",
        description="Download the weights of a model from Hugging Face, or from HF_ENDPOINT, so "
        "that `legato serve --model NAME` finds them. An interrupted download continues.",
    )
    parser.add_argument("model", choices=sorted(MODELS), metavar="NAME", help=", ".join(MODELS))
    _add_folder(parser)
    return parser


def quantize_parser(kind: Kind = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = kind(
        allow_abbrev=False,
        prog="legato quantize",
        description="Round the decoder's weights once, as `legato serve --weight-dtype` does on a "
        "GPU at each start, and write a smaller checkpoint that `legato serve --weights` takes. Of "
        "a text model or Qwen3-VL it is a folder, of a Moondream one file. With --images, "
        "calibrate the vision tower of a Moondream for `legato serve --vision-dtype fp8`.",
    )
    add = parser.add_argument
    add("--model", choices=_QUANTISED, required=True, metavar="NAME", help=", ".join(_QUANTISED))
    add(
        "--weights",
        default="",
        metavar="PATH",
        help="weights to quantise: a folder, or of a Moondream also a .safetensors or .pt file; "
        "default: those of `legato pull`",
    )
    add("--tokenizer", default="", metavar="FILE", help="the model's tokenizer.json")
    _add_folder(parser)
    made = parser.add_mutually_exclusive_group()  # the command requires one
    made.add_argument(
        "--weight-dtype",
        choices=("fp8", "int8", "int4"),
        help="number format of the decoder's layers and experts; the head of int4 is int8",
    )
    made.add_argument(
        "--images",
        metavar="FOLDER",
        help="calibrate the vision tower with its images, of the kind that will be asked about: 2 "
        "to 64, every other one to measure the error",
    )
    add(
        "--vision-error",
        type=float,
        default=0.03,
        metavar="0..1",
        help="with --images, the error of embeddings that fp8 may add, default 0.03; a smaller one "
        "leaves more blocks as they are",
    )
    add(
        "--group-size",
        type=int,
        choices=(64, 128),
        help="inputs that share a scale of int4, default 64; 128 is smaller and less exact",
    )
    add(
        "--output",
        required=True,
        metavar="PATH",
        help="folder to write, or of a Moondream the .safetensors file; with --images "
        "vision_fp8.safetensors in the folder of the weights to serve",
    )
    add("--force", action="store_true", help="replace what exists")
    return parser


def models_parser(kind: Kind = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = kind(
        allow_abbrev=False,
        prog="legato models",
        description="List the models that can be pulled: which are on this machine, from where, "
        "and which fit.",
    )
    _add_folder(parser)
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="say what fits a GPU with so much free memory, in GB, instead of this machine",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        default="",
        metavar="FOLDER",
        help="folder of pulled models, default ~/.local/share/legato/models",
    )
