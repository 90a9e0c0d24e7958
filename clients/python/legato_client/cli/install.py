"""The command that installs what is missing."""

from __future__ import annotations

from pathlib import Path

import legato_client

_PARTS = {
    "cli": ('"{root}[cli]"',),
    "web": ('"{root}[web]"',),
    "dds": ('"{root}[dds]"',),
    "ros": ('"{root}[ros]"',),
    "video": ('"{root}[video]"',),
    "engine": ("{root}", "{root}/engine/tiny", "{root}/service"),
}
"""What is installed from a clone for each extra of a wheel."""


def hint(extra: str) -> str:
    """For a clone, which no registry knows, its own folders."""
    root = _clone()
    if root is None:
        return f'pip install "legato[{extra}]"'
    parts = (part.format(root=_typed(root)) for part in _PARTS[extra])
    return " ".join(("pip install", *(f"-e {part}" for part in parts)))


def _clone() -> Path | None:
    root = Path(legato_client.__file__).resolve().parents[3]
    return root if (root / "service" / "pyproject.toml").is_file() else None


def _typed(root: Path) -> str:
    """As short as the working folder allows."""
    return "." if root == Path.cwd() else str(root)
