"""The ROS 2 packages' files, and the page's tables, against the node's code."""

from __future__ import annotations

import ast
import configparser
import math
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from legato_ros.camera import OUTPUTS
from legato_ros.node import ACTIONS, SERVICES
from legato_ros.parameters import CAMERA, NODE
from rclpy.qos import DurabilityPolicy

from tests.ros2.interfaces import OWN, ROS2

PAGE = (ROS2.parent / "docs" / "ros2.md").read_text()
NODE_FOLDER, MESSAGES = ROS2 / "legato_ros", ROS2 / "legato_msgs"
FROM_PYPI = {"legato_client", "PIL", "setuptools"}
ROSDEP = {"numpy": "python3-numpy"}


# ---------------------------------------------------------------- the page


def shown(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(value)
    return "NaN" if isinstance(value, float) and math.isnan(value) else str(value)


def limits(spec):
    if spec.choices:
        return ", ".join(spec.choices)
    return "" if spec.limits is None else "{:g} to {:g}".format(*spec.limits)


def parameters(specs):
    return [
        f"| `{spec.name}` | {shown(spec.default)} | {limits(spec)} | {spec.when.value} | "
        f"{spec.description} |"
        for spec in specs
    ]


def type_of(kind):
    return kind.TYPE.replace("/msg/", "/")


def topics():
    return [
        f"| `{output.topic}` | `{type_of(output.kind)}` | reliable, last {output.qos.depth}"
        f"{', latched' if output.qos.durability is DurabilityPolicy.TRANSIENT_LOCAL else ''} | "
        f"{output.description}{f' (`{output.needs}`)' if output.needs else ''} |"
        for output in OUTPUTS
    ]


def calls():
    return [
        f"| `~/{name}` | {word} `legato_msgs/{kind.__name__}` | {text} |"
        for word, table in (("service", SERVICES), ("action", ACTIONS))
        for name, (kind, text) in table.items()
    ]


@pytest.mark.parametrize(
    "rows", [parameters(NODE), parameters(CAMERA), topics(), calls()],
    ids=["node", "camera", "topics", "calls"],
)  # fmt: skip
def test_the_page_has_the_tables_of_the_code(rows):
    """Each row in its order, and no other in between."""
    table = "\n".join(rows)
    assert f"\n{table}\n\n" in PAGE, f"docs/ros2.md lacks this table:\n{table}"


# ---------------------------------------------------------------- the packages' files


def imported(folder):
    """Return the top-level modules that a package's files import."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - {folder.name}


def named(folder, *tags):
    root = ElementTree.parse(folder / "package.xml").getroot()
    return {each.text for tag in tags for each in root.findall(tag)}


def test_the_manifest_names_what_is_imported():
    """So rosdep installs it; the rest is from PyPI, as the page says."""
    needed = {ROSDEP.get(name, name) for name in imported(NODE_FOLDER) - FROM_PYPI}
    assert needed == named(NODE_FOLDER, "exec_depend")


def test_interfaces_are_generated():
    """Every file is built, and what its fields are of is a dependency."""
    cmake = (MESSAGES / "CMakeLists.txt").read_text()
    files = {f"{kind}/{name}.{kind}" for kind, names in OWN.items() for name in names}
    assert set(re.findall(r'"(\w+/\w+\.\w+)"', cmake)) == files
    texts = " ".join((MESSAGES / each).read_text() for each in files)
    used = set(re.findall(r"^(\w+)/\w+(?:\[\])? ", texts, re.MULTILINE))
    assert used | {"action_msgs"} == named(MESSAGES, "depend")
    assert set(re.findall(r"find_package\((\w+_\w+) REQUIRED\)", cmake)) >= used


def test_setup_is_as_colcon_wants_it(monkeypatch):
    """Marker, manifest, launch files, parameters and the executable are installed."""
    arguments: dict[str, Any] = {}
    monkeypatch.chdir(NODE_FOLDER)
    monkeypatch.setattr("setuptools.setup", arguments.update)
    exec(compile((NODE_FOLDER / "setup.py").read_text(), "setup.py", "exec"), {})
    name = NODE_FOLDER.name
    assert arguments["name"] == name
    assert {arguments["version"]} == named(NODE_FOLDER, "version") == named(MESSAGES, "version")
    installed = {target: [Path(each).name for each in files]
                 for target, files in arguments["data_files"]}  # fmt: skip
    assert installed["share/ament_index/resource_index/packages"] == [name]
    assert set(installed[f"share/{name}/launch"]) == {"legato.launch.py", "bag.launch.py"}
    assert installed[f"share/{name}/config"] == ["legato.yaml"]
    assert arguments["entry_points"]["console_scripts"] == ["legato_node = legato_ros.node:main"]
    config = configparser.ConfigParser()
    config.read(NODE_FOLDER / "setup.cfg")
    assert config["install"]["install_scripts"] == f"$base/lib/{name}"
