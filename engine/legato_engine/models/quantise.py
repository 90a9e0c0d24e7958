"""`legato quantize`: checkpoints whose decoder is stored in 8 or 4 bits.

Tensors that are not quantised stay as they were. The codes and scales of each map are stored row
by row, the recipe in the metadata of the .safetensors file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file

from legato_engine.errors import LegatoError
from legato_engine.hub.store import quantize_parser
from legato_engine.kernels.map_codes import GROUP, KINDS, CodeFormat, format_of
from legato_engine.models import checkpoint, registry
from legato_engine.models.checkpoint import TensorHeader
from legato_engine.models.recipe import RECIPE_KEY, require_plain
from legato_engine.models.registry import ModelBundle

_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130
"""Exit codes, the same as those of the command `legato`."""

_HEADER_BYTES = 1 << 20
_MODE = 0o644
_WEIGHTS = "model.safetensors"
_SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "preprocessor_config.json"),
)
"""Files of a text model's folder beside its weights."""


def write(
    bundle: ModelBundle, code_format: CodeFormat, output: Path, progress: registry.Progress
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


def _wrong_output(output: Path, *, is_file: bool, force: bool) -> str | None:
    """Return why nothing can be written there, or None."""
    if is_file != (output.suffix == ".safetensors") or not output.parent.is_dir():
        kind = "no .safetensors file" if is_file else "not the name of a folder"
        return f"--output {output} is {kind} in a folder that exists"
    fits = output.is_file() if is_file else output.is_dir()
    if output.exists() and not (force and fits):
        return f"{output} exists: use --force to replace it, or another --output"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = quantize_parser().parse_args(argv)
    output, kind = Path(arguments.output), arguments.weight_dtype
    out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)

    def fail(message: str, code: int) -> int:
        err.print(f"legato: error: {message}", markup=False, highlight=False)
        return code

    is_file = not registry.may_have_chat_template(arguments.model, arguments.weights)
    if wrong := _wrong_output(output, is_file=is_file, force=arguments.force):
        return fail(wrong, _WRONG)
    if arguments.group_size and kind != "int4":
        return fail(f"--group-size is for int4: {kind} has a scale for each row", _WRONG)
    code_format = format_of(KINDS[kind], arguments.group_size or GROUP)
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
            task = shown.add_task(f"quantising as {kind}", total=1.0)
            size = write(bundle, code_format, file, lambda done: shown.update(task, completed=done))
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
