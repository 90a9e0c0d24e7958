"""`legato quantize`: checkpoints whose decoder is stored in 8 or 4 bits, and calibrations.

Tensors that are not quantised stay as they were. The codes and scales of each map are stored row
by row, the recipe in the metadata of the .safetensors file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file

from legato_engine import config
from legato_engine.errors import InvalidField, LegatoError
from legato_engine.hub.store import quantize_parser
from legato_engine.images.decoding import decode_encoded
from legato_engine.kernels.map_codes import GROUP, KINDS, CodeFormat, format_of
from legato_engine.models import checkpoint, registry
from legato_engine.models.checkpoint import TensorHeader
from legato_engine.models.moondream import vision_fp8
from legato_engine.models.moondream.family import MoondreamBundle
from legato_engine.models.moondream.preprocess import crop_image
from legato_engine.models.moondream.weights import load_weights
from legato_engine.models.recipe import RECIPE_KEY, require_plain
from legato_engine.models.registry import ModelBundle

_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130
"""Exit codes, the same as those of the command `legato`."""

_IMAGES = (".jpg", ".jpeg", ".png", ".webp")
_MAX_IMAGES, _MAX_PIXELS = 64, 64_000_000
_HEADER_BYTES = 1 << 20
_MODE = 0o644
_WEIGHTS = "model.safetensors"
_SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "preprocessor_config.json"),
)
"""Files of a text model's folder beside its weights."""


def write(
    bundle: ModelBundle, code_format: CodeFormat, output: Path, progress: config.Progress
) -> int:
    """Quantise a bundle's checkpoint into a file, and return its bytes.

    Raises:
        InvalidField: the checkpoint cannot be quantised.
        OSError: the file cannot be written, or the disk is too small.
    """
    weights = require_plain(bundle.weights)
    quantisation = bundle.quantisation(code_format)
    kept = quantisation.kept
    num_kept = sum(header.num_bytes for header in kept)
    _require_room(output, quantisation.num_bytes + num_kept + _HEADER_BYTES)
    tensors = quantisation.codes(lambda part: progress(0.9 * part))
    for header in kept:
        tensors[header.name] = checkpoint.read(header)
    version = importlib.metadata.version("legato")
    recipe = quantisation.recipe(_digests(checkpoint.headers(weights)), version)
    with _replacing(output) as draft:
        save_file(tensors, draft, {RECIPE_KEY: msgspec.json.encode(recipe).decode()})
    progress(1.0)
    return output.stat().st_size


def calibrate(
    bundle: ModelBundle, folder: Path, limit: float, output: Path, progress: config.Progress
) -> str:
    """Calibrate a vision tower for fp8 into a file, and return what that found.

    Raises:
        InvalidField: the model has no such tower, or the folder lacks images.
        OSError: the file cannot be written.
    """
    weights, cpu = require_plain(bundle.weights), torch.device("cpu")
    if not isinstance(bundle, MoondreamBundle):
        raise InvalidField("only the tower of a Moondream can be fp8", field="images")
    names = sorted(file for file in folder.glob("*") if file.suffix.lower() in _IMAGES)
    images = []
    for file in names[:_MAX_IMAGES]:
        try:
            pixels_HWC = decode_encoded(file.read_bytes(), max_pixels=_MAX_PIXELS)
        except LegatoError as error:
            raise InvalidField(f"{file}: {error.message}", field="images") from None
        crops = crop_image(Image.fromarray(pixels_HWC), bundle.config.vision).pixels_NHWC
        ends = crops[:: max(len(crops) - 1, 1)]  # the whole image, and its last tile
        images.append(torch.from_numpy(ends.copy()))
    vision = load_weights(bundle.config, weights, cpu, torch.bfloat16).vision.float()
    calibration = vision_fp8.calibrate(vision, images, limit, progress)
    with _replacing(output) as draft:
        calibration.save(draft)
    recipe = calibration.recipe
    kept = f"{recipe.plain_blocks} of {len(vision.blocks)} blocks stay as they are"
    return f"{kept}, error {recipe.error:.3f} on {len(images) // 2} of {len(images)} images"


def _digests(stored: Sequence[TensorHeader]) -> dict[str, str]:
    digests = {}
    for file in dict.fromkeys(header.file for header in stored):
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


@contextlib.contextmanager
def _folder(output: Path, settings: Mapping[str, Path]) -> Iterator[Path]:
    """Make a folder of a text model's settings; remove a new one if its weights fail."""
    is_new = not output.exists()
    output.mkdir(exist_ok=True)
    try:
        yield output / _WEIGHTS
        for name, file in settings.items():
            with _replacing(output / name) as draft:
                shutil.copyfile(file, draft)
    except BaseException:
        if is_new:
            shutil.rmtree(output, ignore_errors=True)
        raise


def _settings(folder: Path, tokenizer: str) -> dict[str, Path]:
    """Return the files that a folder of quantised weights needs, by name."""
    files = [folder / name for name in _SETTINGS if (folder / name).is_file()]
    found = {file.name: file for file in (*files, *folder.glob("LICENSE*"))}
    return found | ({"tokenizer.json": Path(tokenizer)} if tokenizer else {})


def _wrong_options(arguments: argparse.Namespace, output: Path, *, is_file: bool) -> str | None:
    """Return why options contradict each other or the output, or None."""
    if not (arguments.weight_dtype or arguments.images):
        return "give --weight-dtype to round weights, or --images to calibrate a vision tower"
    if arguments.group_size and arguments.weight_dtype != "int4":
        made = arguments.weight_dtype or "a calibration"
        return f"--group-size is for int4: {made} has none"
    if arguments.images and output.name != vision_fp8.FILE_NAME:
        return f"--output {output}: a server looks for {vision_fp8.FILE_NAME} only"
    if is_file != (output.suffix == ".safetensors") or not output.parent.is_dir():
        kind = "no .safetensors file" if is_file else "not the name of a folder"
        return f"--output {output} is {kind} in a folder that exists"
    fits = output.is_file() if is_file else output.is_dir()
    if output.exists() and not (arguments.force and fits):
        return f"{output} exists: use --force to replace it, or another --output"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = quantize_parser().parse_args(argv)
    output, kind = Path(arguments.output), arguments.weight_dtype
    out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)

    def fail(message: str, code: int) -> int:
        err.print(f"legato: error: {message}", markup=False, highlight=False)
        return code

    is_text = registry.may_have_chat_template(arguments.model, arguments.weights)
    is_file = bool(arguments.images) or not is_text
    if wrong := _wrong_options(arguments, output, is_file=is_file):
        return fail(wrong, _WRONG)
    try:
        bundle = registry.resolve(
            arguments.model, arguments.weights, arguments.tokenizer, models=arguments.models
        )
        source = require_plain(bundle.weights)
        if not is_file and output.exists() and output.samefile(source):
            return fail(f"--output {output} has the weights to quantise: use another", _WRONG)
        settings = {} if is_file else _settings(source, arguments.tokenizer)
        target = contextlib.nullcontext(output) if is_file else _folder(output, settings)
        with Progress(console=err, transient=True) as shown, target as file:
            told = f"quantising as {kind}" if kind else "calibrating"
            task = shown.add_task(told, total=1.0)

            def progress(done: float) -> None:
                shown.update(task, completed=done)

            if kind is None:
                folder, limit = Path(arguments.images), arguments.vision_error
                found = calibrate(bundle, folder, limit, file, progress)
                serve = f"legato serve --model {arguments.model} --vision-dtype fp8"
            else:
                code_format = format_of(KINDS[kind], arguments.group_size or GROUP)
                found = f"{write(bundle, code_format, file, progress) / 1e9:.3f} GB"
                serve = f"legato serve --model {arguments.model} --weights {output}"
    except LegatoError as error:
        option = error.metadata.get("field", "weights").replace("_", "-")
        return fail(f"--{option}: {error.message}", _WRONG)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - safetensors has its own of a full disk
        return fail(f"{output} was not written: {error}", _FAILED)
    out.print(f"{output}: {found}; {serve}", markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
