"""`legato quantize`: checkpoints whose decoder is stored in 8 or 4 bits.

One .safetensors file has the checkpoint's other tensors as they were, the codes and scales of each
quantised map row by row, and the recipe in its metadata.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file

from legato_engine.errors import InvalidField, LegatoError
from legato_engine.hub.store import quantize_parser
from legato_engine.kernels.map_codes import KINDS, MapCodes
from legato_engine.kernels.step import FoldedCodes
from legato_engine.models import checkpoint, registry
from legato_engine.models.checkpoint import Destination, TensorHeader
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.family import MoondreamBundle
from legato_engine.models.moondream.model import Network
from legato_engine.models.moondream.weights import (
    RECIPE_KEY,
    empty_network,
    load_weights,
    quantisation_recipe,
    quantised_kind,
    rename,
)

_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130
"""Exit codes, the same as those of the command `legato`."""

_HEADER_BYTES = 1 << 20
_MODE = 0o644
_CPU = torch.device("cpu")


# ---------------------------------------------------------------- quantize


def write(bundle: MoondreamBundle, kind: str, output: Path, progress: registry.Progress) -> int:
    """Quantise a bundle's checkpoint into a file, and return its bytes.

    Raises:
        InvalidField: the checkpoint cannot be quantised.
        OSError: the file cannot be written, or the disk is too small.
    """
    config, weights = bundle.config, bundle.weights
    if weights is None:
        raise InvalidField("random weights have no checkpoint to quantise", field="weights")
    if quantised_kind(weights, config, "auto"):
        problem = f"{weights} is quantised already: use the checkpoint that it was made from"
        raise InvalidField(problem, field="weights")
    kept, num_bytes = _planned(config, weights, kind)
    _require_room(output, num_bytes)
    options = registry.LoadOptions(progress=lambda part: progress(0.5 * part))
    network = load_weights(config, weights, _CPU, torch.bfloat16, options)
    if reason_against := network.text.cannot_quantise():
        raise InvalidField(f"weight_dtype {kind} {reason_against}", field="weight_dtype")
    tensors = _quantised(network, kind, lambda part: progress(0.5 + 0.4 * part))
    del network
    for header in kept:
        tensors[header.name] = torch.empty(header.shape, dtype=header.dtype)
        with checkpoint.opened(header.file) as fill:
            fill(header.name, tensors[header.name])
    version = importlib.metadata.version("legato")
    recipe = quantisation_recipe(kind, _digests(kept), version)
    with _replacing(output) as draft:
        save_file(tensors, draft, {RECIPE_KEY: msgspec.json.encode(recipe).decode()})
    progress(1.0)
    return output.stat().st_size


def _planned(config: MoondreamConfig, weights: Path, kind: str) -> tuple[list[TensorHeader], int]:
    """Return the tensors that stay as they are, and the bytes of the file."""
    network = empty_network(config, torch.bfloat16)
    before = network.state_dict()
    network.text.expect_codes(KINDS[kind])
    after = network.state_dict()
    destination = rename(config.text.num_heads)

    def is_kept(header: TensorHeader) -> bool:
        to = destination(header.name)
        name = to.name if isinstance(to, Destination) else to
        return name not in before or name in after

    kept = [header for header in checkpoint.headers(weights) if is_kept(header)]
    codes = sum(each.nbytes for name, each in after.items() if name not in before)
    return kept, codes + sum(header.num_bytes for header in kept) + _HEADER_BYTES


def _quantised(network: Network, kind: str, progress: registry.Progress) -> dict[str, torch.Tensor]:
    """Quantise layer by layer, and free the weights of each."""
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, codes: MapCodes, folded: FoldedCodes | None = None) -> None:
        assert codes.scales is not None, "only bf16 has no scales"
        tensors[f"{name}.codes"] = codes.codes.contiguous()
        tensors[f"{name}.scales"] = codes.scales.contiguous()
        if folded is not None:
            tensors[f"{name}.bias"] = folded.bias_O.contiguous()

    blocks = list(network.text.text_blocks())
    for index, block in enumerate(blocks):
        codes = block.codes(KINDS[kind])
        add(f"text.blocks.{index}.qkv_fc1", codes.first.map, codes.first)
        add(f"text.blocks.{index}.fc2_proj", codes.second)
        block.expect_codes(KINDS[kind])
        progress((index + 1) / len(blocks))
    head = network.text.codes_of_head(KINDS[kind])
    add("text.head", head.map, head)
    return tensors


def _digests(kept: Sequence[TensorHeader]) -> dict[str, str]:
    digests = {}
    for file in dict.fromkeys(header.file for header in kept):
        with file.open("rb") as data:
            digests[file.name] = hashlib.file_digest(data, "sha256").hexdigest()
    return digests


def _require_room(output: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(output.parent).free
    if num_bytes > free:
        raise OSError(
            f"{output} needs {num_bytes / 1e9:.2f} GB, and {output.parent} has "
            f"{free / 1e9:.2f} GB left"
        )


@contextlib.contextmanager
def _replacing(output: Path) -> Iterator[Path]:
    """Write a file beside `output` that takes its name once it is whole."""
    draft = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        yield draft
        draft.chmod(_MODE)  # safetensors leaves it to its owner
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(output)
    finally:
        draft.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = quantize_parser().parse_args(argv)
    output, kind = Path(arguments.output), arguments.weight_dtype
    out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)

    def fail(message: str, code: int) -> int:
        err.print(f"legato: error: {message}", markup=False, highlight=False)
        return code

    if output.suffix != ".safetensors" or not output.parent.is_dir():
        return fail(f"--output {output} is no .safetensors file in a folder that exists", _WRONG)
    if output.exists() and not (arguments.force and output.is_file()):
        return fail(f"{output} exists: use --force to replace it, or another --output", _WRONG)
    try:
        bundle = registry.resolve(
            arguments.model, arguments.weights, arguments.tokenizer, models=arguments.models
        )
        assert isinstance(bundle, MoondreamBundle), "the parser takes no other model"
        with Progress(console=err, transient=True) as shown:
            task = shown.add_task(f"quantising as {kind}", total=1.0)
            size = write(bundle, kind, output, lambda done: shown.update(task, completed=done))
    except LegatoError as error:
        option = error.metadata.get("field", "weights").replace("_", "-")
        return fail(f"--{option}: {error.message}", _WRONG)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - safetensors has its own of a full disk
        return fail(f"{output} was not written: {error}", _FAILED)
    serve = f"legato serve --model {arguments.model} --weights {output}"
    out.print(f"{output}: {size / 1e9:.3f} GB; {serve}", markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
