"""The distributions of a release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Distribution:
    """One name on the package index: a wheel and an sdist."""

    name: str
    folder: str  # of its pyproject.toml, from the repository's root
    sources: tuple[str, ...]  # what its wheel and sdist are made from, files and folders

    @property
    def stem(self) -> str:
        """The name as it begins file names."""
        return self.name.replace("-", "_")

    def wheel(self, version: str) -> str:
        return f"{self.stem}-{version}-py3-none-any.whl"

    def sdist(self, version: str) -> str:
        return f"{self.stem}-{version}.tar.gz"


CLIENT = Distribution(
    "legato",
    ".",
    (
        ".gitignore",
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "buf.yaml",
        "clients/python",
        "proto",
        "pyproject.toml",
    ),
)
SERVER = Distribution("legato-server", "service", (".gitignore", "engine/legato_engine", "service"))
TINY = Distribution("legato-tiny", "engine/tiny", (".gitignore", "engine/tiny"))
ALL = (CLIENT, SERVER, TINY)


def file_names(version: str) -> list[str]:
    """All that is uploaded, sorted."""
    return sorted(name for each in ALL for name in (each.wheel(version), each.sdist(version)))
