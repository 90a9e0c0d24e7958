"""Clean environments lend what is declared, and the bill of materials is of what is installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from release import sbom
from release.environments import Environment, dependencies
from release.errors import ReleaseError


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
    listed = clean.run(clean.python, "-c", sbom.LISTING).split()
    assert listed == [f"packaging=={importlib.metadata.version('packaging')}"]


BILL = {
    "metadata": {"component": {"name": "legato-server", "version": "1.2.3"}},
    "components": [
        {"name": "legato", "version": "1.2.3"},
        {"name": "PyYAML", "version": "6.0"},
    ],
}
INSTALLED = ["legato-server==1.2.3", "legato==1.2.3", "pyyaml==6.0"]


def test_a_bill_of_what_is_installed_passes():
    """The server is the bill's subject, all else its components."""
    assert sbom.check(BILL, INSTALLED, "1.2.3") == 2


@pytest.mark.parametrize(
    ("installed", "version", "fault"),
    [
        ([*INSTALLED, "torch==2.11"], "1.2.3", "wrong about torch==2.11"),
        (INSTALLED[:2], "1.2.3", "wrong about pyyaml==6.0"),
        ([*INSTALLED[:2], "pyyaml==6.1"], "1.2.3", "wrong about pyyaml==6.0, pyyaml==6.1"),
        (INSTALLED, "1.2.4", "is of legato-server 1.2.3"),
    ],
)
def test_a_bill_of_something_else_is_refused(installed, version, fault):
    """A missing, a surplus and another component, and another release."""
    with pytest.raises(ReleaseError, match=fault):
        sbom.check(BILL, installed, version)


def test_a_bill_names_no_file_of_the_machine():
    """Where the release was built is not told."""
    component = {"name": "legato", "version": "1.2.3", "purl": "file:///home/me/legato.whl"}
    bill = BILL | {"components": [component, {"name": "PyYAML", "version": "6.0"}]}
    with pytest.raises(ReleaseError, match="files of this machine"):
        sbom.check(bill, INSTALLED, "1.2.3")
