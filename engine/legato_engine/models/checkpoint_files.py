"""Weight files."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from legato_engine.errors import InvalidField
from legato_engine.models.gguf import checkpoint as gguf
from legato_engine.models.gguf.reader import is_gguf
from legato_engine.models.untrusted import refusing

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLED = (".pt", ".pth")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Header(NamedTuple):
    """A stored tensor without its data."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def headers(path: Path) -> tuple[Header, ...]:
    """List the tensors of a .safetensors, .pt or .gguf file, or of a folder with one or shards.

    Of a .pt file only a dict of tensors is unpickled. Tensors of a .gguf file have the names and
    the order that they have in a Hugging Face checkpoint, and are dequantised.

    Raises:
        InvalidField: a file is missing, truncated or of another kind.
    """
    found: list[Header] = []
    for file in _files(path):
        with refusing(file.name, "weights"):
            found += _headers(file)
    return tuple(found)


def require_layers(num_layers: int, path: Path) -> None:
    """Compare the layers of a configuration with the tensors of its weights.

    Each has several. Objects for layers take time and memory before any tensor is read.

    Raises:
        InvalidField: there are more layers than tensors, or as `headers`.
    """
    stored = len(headers(path))
    if num_layers > stored:
        problem = f"{path.name} has {stored} tensors, too few for {num_layers} layers"
        raise InvalidField(problem, field="weights")


Fill = Callable[[str, torch.Tensor], None]
"""Writes the tensor of that name into one of its shape, and casts it where that one is."""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Fill]:
    """Read tensors by name, without a copy besides that in their destination where that can be."""
    if file.suffix in _PICKLED:
        yield functools.partial(_copy, _unpickled(file).__getitem__)
    elif is_gguf(file):
        yield functools.partial(gguf.fill, file)
    else:
        with _open(file) as handle:
            yield functools.partial(_copy, handle.get_tensor)


def _copy(mapped: Callable[[str], torch.Tensor], name: str, target: torch.Tensor) -> None:
    with refusing(name, "weights"):
        tensor = mapped(name)
    target.copy_(tensor.to(target.device))


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if (path / _SINGLE_FILE).is_file():
        return (path / _SINGLE_FILE,)
    if (path / _INDEX_FILE).is_file():
        return _shards(path / _INDEX_FILE)
    raise InvalidField(f"no safetensors weights at {path}", field="weights")


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = tuple(index.parent / Path(name).name for name in names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidField(f"{index.name} is no index of shards", field="weights") from None
    if missing := [file.name for file in files if not file.is_file()]:
        problem = f"{index.name} names {len(missing)} of {len(files)} files that are not there"
        raise InvalidField(f"{problem}: {', '.join(missing[:3])}", field="weights")
    return files


def _headers(file: Path) -> Iterator[Header]:
    if file.suffix in _PICKLED:
        for name, tensor in _unpickled(file).items():
            yield Header(name, file, tuple(tensor.shape), tensor.dtype)
        return
    if is_gguf(file):
        for name, shape in gguf.shapes(file).items():
            yield Header(name, file, shape, torch.float32)
        return
    with _open(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
            part = handle.get_slice(name)
            if (stored := part.get_dtype()) not in _DTYPES:
                raise InvalidField(f"{file.name}: {name} is stored as {stored}", field="weights")
            yield Header(name, file, tuple(part.get_shape()), _DTYPES[stored])


def _open(file: Path) -> safe_open:
    with refusing(file.name, "weights"):
        return safe_open(file, framework="pt")


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    with refusing(file.name, "weights"):
        content: object = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        raise InvalidField(f"{file.name} is no dict of tensors by name", field="weights")
    return content
