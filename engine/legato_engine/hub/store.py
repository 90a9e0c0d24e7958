"""Pulled models on this machine: a folder for each, with a manifest that is written last."""

from __future__ import annotations

import os
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
    """What was pulled and when (RFC 3339)."""

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


def folder_of(models: str, name: str) -> Path:
    """Where a model is kept; `models` empty: in the default folder."""
    return (Path(models) if models else default_folder()) / name


def read_manifest(folder: Path) -> Manifest | None:
    """None without a complete model."""
    try:
        return msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Once it is there, all files are."""
    draft = folder / f"{_MANIFEST}.part"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    draft.replace(folder / _MANIFEST)


def find(models: str, name: str) -> Path:
    """The folder of a pulled model. Nothing is downloaded, and no hash is computed.

    Raises:
        InvalidField: it was not pulled, or a file is gone or has another size.
    """
    folder = folder_of(models, name)
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
