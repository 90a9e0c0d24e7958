"""Mistakes in `legato watch`, `legato bag` and `legato ros2`, before anything is asked."""

from __future__ import annotations

import sys

import legato_client.ros
import pytest
from legato_client.cli import main
from legato_client.cli.settings import ExitCode

WATCH = ("watch", "clip.mp4", "--task", "detect:cup")
BAG = ("bag", "in.mcap", "--image", "/image", "--output", "out.mcap")
NODE = ("ros2", "--image", "/image")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("watch", "clip.mp4"), "--task"),
        ((*WATCH[:3], "sing:song"), "a task is one of"),
        ((*WATCH, "--jpeg", "96"), "must be 1 to 95"),
        ((*WATCH, "--speed", "0"), "argument --speed: must be above 0, and is 0"),
        ((*WATCH, "--speed", "fast"), "argument --speed: must be a number, not 'fast'"),
        ((*WATCH, "--max-side", "1.5"), "--max-side: must be a whole number, not '1.5'"),
        ((*WATCH, "--output", "found.csv"), "ends in .jsonl or .mp4"),
        ((*WATCH, "--task", "detect:cup"), "two tasks are the same"),
        ((*BAG, "--task", "caption"), "detect, point or segment"),
        ((*NODE, "--task", "query:Who?"), "detect, point or segment"),
        (("ros2", "--image", "image", "--task", "detect:cup"), "a topic is /NAME"),
        ((*NODE, "--task", "detect:cup", "--domain", "-1"), "must not be negative"),
    ],
)
def test_mistakes_are_named(words, message, capsys, tmp_path, monkeypatch):
    """With the exit code of a wrong use."""
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_a_domain_that_is_no_number_is_named(capsys, monkeypatch):
    """It comes from ROS's own variable."""
    monkeypatch.setenv("ROS_DOMAIN_ID", "robot")
    assert main([*NODE, "--task", "detect:cup"]) == ExitCode.USAGE
    assert "ROS_DOMAIN_ID is a number, not 'robot'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    [
        (WATCH, "av", "video"),
        ((*BAG, "--task", "detect:cup"), "mcap", "ros"),
        ((*NODE, "--task", "detect:cup"), "cyclonedds", "dds"),
    ],
)
def test_what_is_missing_is_named(words, missing, extra, capsys, monkeypatch, server, tmp_path):
    """With the command that installs it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEGATO_SERVER", server.target)
    hide(missing, monkeypatch)
    assert main(list(words)) == ExitCode.OTHER
    said = capsys.readouterr().err
    assert f"[{extra}]" in said


def hide(package, monkeypatch):
    """A package cannot be imported, nor is what imports it loaded already."""
    for name in [package, *sys.modules]:
        if name == package or name.startswith(f"{package}."):
            monkeypatch.setitem(sys.modules, name, None)
    for name in [each for each in sys.modules if each.startswith("legato_client.ros.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(legato_client.ros, name.rpartition(".")[2], raising=False)
