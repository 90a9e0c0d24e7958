"""What each package imports is declared by its own distribution."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
from functools import cache

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.distributions import CLIENT, ROOT, SERVER

# Imported by callers who have it: an array is an image; videos, bags, DDS and GGUF files are read
# by packages of extras.
CLIENTS_EXTRAS = {"av", "cyclonedds", "mcap", "mcap_ros2", "numpy"}
OPTIONAL = {"legato_client": CLIENTS_EXTRAS, "legato_service": set(), "legato_engine": {"gguf"}}
PACKAGES = [
    ("clients/python/legato_client", CLIENT),
    ("service/legato_service", SERVER),
    ("engine/legato_engine", SERVER),
]


def declared(distribution, *extras):
    """Return the direct requirements, and those of these extras."""
    read = tomllib.loads((ROOT / distribution.folder / "pyproject.toml").read_text())["project"]
    texts = [*read["dependencies"]]
    for extra in extras:
        texts += read["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def imported(folder):
    """Return the top-level modules that a folder imports, without the standard library's."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    names = {name.partition(".")[0] for name in found}
    return {name for name in names if name and name not in sys.stdlib_module_names}


@cache
def providers():
    found = importlib.metadata.packages_distributions()
    return {module: {canonicalize_name(name) for name in names} for module, names in found.items()}


def undeclared(modules, requirements):
    foreign = {module for module in modules if not module.startswith("legato")}
    return {module for module in foreign if not providers().get(module, set()) & requirements}


@pytest.mark.parametrize(("folder", "distribution"), PACKAGES, ids=[p for p, _ in PACKAGES])
def test_imports_are_declared(folder, distribution):
    """Also those that only a rare path imports."""
    if distribution is SERVER:
        requirements = declared(SERVER) | declared(CLIENT)  # required with the same version
    else:
        requirements = declared(CLIENT, "cli", "web", "mcp")
    modules = imported(ROOT / folder)
    assert len(modules) > 3
    assert undeclared(modules, requirements) == OPTIONAL[folder.rpartition("/")[2]]


def test_an_undeclared_import_is_found():
    """The control: a module of another distribution, and one of none."""
    assert undeclared({"grpc", "pytest", "nowhere"}, {"grpcio"}) == {"pytest", "nowhere"}
