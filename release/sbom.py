"""The software bill of materials of an installed server, in CycloneDX's JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from release.distributions import ROOT, SERVER
from release.environments import Environment
from release.errors import ReleaseError
from release.process import run


def file_name(version: str) -> str:
    return f"{SERVER.stem}-{version}.cdx.json"


def write(installed: Environment, output: Path, version: str, epoch: str, validates: bool) -> int:
    """Describe what is installed in an environment.

    `validates` against CycloneDX's schema, which takes ten times as long as the description.

    Returns:
        The number of components besides the server.

    Raises:
        ReleaseError: It could not be written, or does not hold what is installed.
    """
    program = Path(sys.executable).with_name("cyclonedx-py")
    described: list[str | Path] = [
        "--pyproject",
        ROOT / SERVER.folder / "pyproject.toml",
        "--output-reproducible",
    ]
    described.append("--validate" if validates else "--no-validate")
    options = [*described, "--output-file", output, installed.python]
    run([program, "environment", *options], installed.folder, {"SOURCE_DATE_EPOCH": epoch})
    listed = installed.run(installed.python, "-c", LISTING)
    return check(json.loads(output.read_text()), listed.split(), version)


# Run in the environment: a line NAME==VERSION for each distribution.
LISTING = """
import importlib.metadata
for each in importlib.metadata.distributions():
    print(f"{each.name}=={each.version}")
"""


def check(bom: dict[str, Any], installed: Iterable[str], version: str) -> int:
    """Compare a bill with lines NAME==VERSION; return the number of components besides the server.

    Raises:
        ReleaseError: They differ, or the bill names a path of this machine.
    """
    server = bom["metadata"]["component"]
    if (server["name"], server["version"]) != (SERVER.name, version):
        raise ReleaseError(f"the bill is of {server['name']} {server['version']}")
    named = {_pair(each["name"], each["version"]) for each in bom["components"]}
    expected = {_pair(*line.split("==", 1)) for line in installed} - {_pair(SERVER.name, version)}
    if wrong := sorted(named ^ expected):
        raise ReleaseError(f"the bill of materials is wrong about {', '.join(wrong)}")
    if "file://" in json.dumps(bom):
        raise ReleaseError("the bill of materials names files of this machine")
    return len(named)


def _pair(name: str, version: str) -> str:
    return f"{canonicalize_name(name)}=={version}"
