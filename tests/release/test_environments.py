"""Clean environments lend what is declared, and the bill of materials is of what is installed."""

from __future__ import annotations

import json

import pytest

from release import install
from release.environments import Environment, dependencies
from release.process import ReleaseError


def test_dependencies_follow_extras_and_markers(wheel):
    """Of wheels through their metadata, of others through what is installed."""
    wheels = [
        wheel("base", "1", ["packaging", "server==1; extra == 'engine'", "rich; extra == 'cli'"]),
        wheel("server", "1", ["base==1", "iniconfig", "torch; sys_platform == 'plan9'"]),
    ]
    assert dependencies(wheels, "base") == ["packaging"]
    assert dependencies(wheels, "base[engine]") == ["iniconfig", "packaging"]
    assert dependencies(wheels, "base[cli]") == [*RICH, "rich"]


RICH = ["markdown-it-py", "mdurl", "packaging", "pygments"]


def test_a_dependency_that_is_not_installed_is_named(wheel):
    """It cannot be lent."""
    with pytest.raises(ReleaseError, match="no-such-distribution is not installed"):
        dependencies([wheel("base", "1", ["No.Such-Distribution"])], "base")


def test_only_what_is_lent_can_be_imported(tmp_path):
    """An undeclared dependency fails, although it lies beside this interpreter."""
    clean = Environment(tmp_path / "venv")
    clean.lend(["packaging"])
    clean.run(clean.python, "-c", "import packaging")
    with pytest.raises(ReleaseError, match="No module named 'pytest'"):
        clean.run(clean.python, "-c", "import pytest")


def test_a_bill_of_materials_has_what_is_installed(tmp_path):
    """The server is its subject, what was lent its components, and no file is named."""
    clean = Environment(tmp_path / "venv")
    clean.lend(["packaging"])
    install.describe(clean, tmp_path / "bill.json", "0")
    bill = json.loads((tmp_path / "bill.json").read_text())
    assert bill["metadata"]["component"]["name"] == "legato-server"
    assert [each["name"] for each in bill["components"]] == ["packaging"]
