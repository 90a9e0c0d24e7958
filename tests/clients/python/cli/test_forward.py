"""The commands that belong to the server's packages."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from importlib import metadata

import pytest
from legato_client.cli import forward, main


def test_missing_engine(monkeypatch, capsys):
    """Without the engine extra the message is the command that installs it."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    for command in ("serve", "bench", "trace", "demo"):
        assert main([command]) == 1
        assert 'pip install "legato[engine]"' in capsys.readouterr().err


def test_every_need_is_installed_by_the_extra():
    """What the message says is missing is something that its own command would install."""
    extra = [need for need in metadata.requires("legato") or [] if "'engine'" in need]
    assert len(extra) == 1
    assert extra[0].startswith("legato-server==")
    needs = [*extra, *(metadata.requires("legato-server") or [])]
    installed = {_normal(re.split(r"[^\w.-]", need)[0]) for need in needs}
    providers = metadata.packages_distributions()
    for module in forward._ENGINE_NEEDS:
        owners = {_normal(name) for name in providers.get(module, ["legato"])}
        assert owners & installed, f"{module} comes with {owners}"


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize("command", ["serve", "bench", "trace"])
def test_arguments_are_passed_on(command, monkeypatch):
    """Every argument reaches the module unchanged, options included."""
    monkeypatch.setattr(forward, "require_engine", lambda _command: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    program = forward.command_line(command, ["--help", "x", "--", "-y"])
    assert program[:2] == [sys.executable, "-m"]
    assert program[2] == forward.MODULES[command][0]
    assert program[3:] == ["--help", "x", "--", "-y"]


def test_command_of_another_version(monkeypatch, capsys):
    """A command whose module this version lacks says so."""
    monkeypatch.setattr(forward, "_ENGINE_NEEDS", ())
    monkeypatch.setitem(forward.MODULES, "bench", ("legato_engine.no_such_module", ""))
    assert main(["bench"]) == 1
    assert "this version has no `legato bench`" in capsys.readouterr().err


def test_the_command_becomes_the_module(tmp_path):
    """The forwarded program replaces this one: same process, its own exit code."""
    (tmp_path / "legato_service.py").write_text(
        "import os, sys; print(os.getpid(), sys.argv[1:])\nsys.exit(7)"
    )
    program = (
        "import sys; from legato_client.cli import forward, main;"
        "forward._ENGINE_NEEDS = (); sys.exit(main(['serve', '--port', '1']))"
    )
    path = ":".join([str(tmp_path), *(entry for entry in sys.path if entry)])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        out, _ = process.communicate(timeout=60)
    assert out.split()[0] == str(process.pid)
    assert out.split()[1:] == ["['--port',", "'1']"]
    assert process.returncode == 7


def test_trace_through_the_command_line(tmp_path):
    """`legato trace` runs the engine's tool, whose file appears where --output says."""
    path = tmp_path / "steps.json"
    options = ["--model", "random-tiny", "--device", "cpu", "--threads", "1", "--length", "4"]
    command = [sys.executable, "-m", "legato_client.cli", "trace", *options, "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout.replace("\n", "")
    assert json.loads(path.read_text())["traceEvents"]


def test_bench_through_the_command_line():
    """`legato bench --json` prints what the engine's tool does: JSON and nothing beside it."""
    options = ["--model", "random-tiny", "--device", "cpu", "--threads", "1", "--length", "6"]
    options += ["--streams", "1", "--repeats", "1", "--json"]
    command = [sys.executable, "-m", "legato_client.cli", "bench", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["streams"] for row in json.loads(done.stdout)["rows"]] == [1]
