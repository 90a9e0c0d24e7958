"""The build hook of legato-server: the engine's package lies outside this folder in a clone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "legato_engine"


class EngineHook(BuildHookInterface[Any]):
    """Takes the package from the clone, or from this folder, where an sdist has it.

    A wheel gets it by the same way from both, as hatchling writes such files last: so wheels are
    the same bytes.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        inside, beside = root / PACKAGE, root.parent / "engine" / PACKAGE
        if version == "editable" or (inside.is_dir() and self.target_name == "sdist"):
            return
        package = inside if inside.is_dir() else beside
        if not package.is_dir():
            raise FileNotFoundError(f"legato-server lacks {PACKAGE}: neither {inside} nor {beside}")
        build_data["force_include"][str(package)] = PACKAGE
