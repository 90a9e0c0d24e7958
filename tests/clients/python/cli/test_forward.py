"""The commands that belong to the server's packages."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from legato_client.cli import forward, main

from tests.clients.python.cli.stand_in import stand_in_service

ROOT = Path(__file__).parents[4]


def test_missing_engine(monkeypatch, capsys):
    """Without the engine extra the message is the command that installs it.

    From a clone, whose packages no registry has, that is one that names its folders.
    """
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    for command in ("serve", "bench", "trace", "demo"):
        assert main([command]) == 1
        said = capsys.readouterr().err
        folders = re.findall(r"-e (\S+)", said)
        assert [(ROOT / each).resolve() for each in folders] == [
            ROOT,
            ROOT / "engine" / "tiny",
            ROOT / "service",
        ]
    monkeypatch.setattr(forward, "_clone", lambda: None)
    assert main(["serve"]) == 1
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


def test_command_of_another_version(monkeypatch, capsys):
    """A command whose module this version lacks says so."""
    monkeypatch.setattr(forward, "_ENGINE_NEEDS", ())
    lacking = forward.Program("legato_engine.none", "legato_engine.none:make_parser", "")
    monkeypatch.setitem(forward.MODULES, "bench", lacking)
    assert main(["bench"]) == 1
    assert "this version has no `legato bench`" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(forward.MODULES))
def test_options_are_known_without_torch(command):
    """The parser of each forwarded command loads in a moment, and its abbreviations are off."""
    module, _, function = forward.MODULES[command].parser.partition(":")
    program = (
        f"import sys, importlib; made = importlib.import_module({module!r}).{function}();"
        "assert not made.allow_abbrev; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_becomes_the_module(tmp_path):
    """The forwarded program replaces this one: same process, its own exit code.

    What the environment sets comes as a flag, and options of the settings stay behind.
    """
    stand_in_service(tmp_path, "import os, sys; print(os.getpid(), sys.argv[1:])\nsys.exit(7)")
    settings = tmp_path / "legato.toml"
    settings.write_text("[serve]\ndevice = 'abacus'\n")
    program = (
        "import sys; from legato_client.cli import forward; from legato_client.cli import main;"
        "forward._ENGINE_NEEDS = (); "
        f"sys.exit(main(['serve', '--port', '1', '--config', {str(settings)!r}]))"
    )
    path = ":".join([str(tmp_path), *(entry for entry in sys.path if entry)])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path, "LEGATO_LISTEN": "127.0.0.1:9"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        out, _ = process.communicate(timeout=200)
    pid, words = out.split(maxsplit=1)
    assert pid == str(process.pid)
    assert words.strip() == "['--listen=127.0.0.1:9', '--device=abacus', '--port', '1']"
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


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_told_what_a_server_needs(monkeypatch, capsys, system):
    """A server's commands say in one sentence that they need Linux; what only reads files runs."""
    monkeypatch.setattr(sys, "platform", system)
    for command in ("serve", "bench", "replay", "demo"):
        assert main([command]) == 1
        said = capsys.readouterr().err
        assert "needs Linux" in said
        assert system in said
        assert "Traceback" not in said
    assert forward.parser_of("models").prog


def test_the_client_is_imported_without_what_only_linux_has():
    """Client and command line load where `os` lacks Linux's functions and uvloop is absent."""
    code = (
        "import os, sys\n"
        "for name in ('eventfd', 'eventfd_write', 'memfd_create', 'sched_getaffinity',\n"
        "             'sched_setscheduler', 'sched_param'):\n"
        "    delattr(os, name)\n"
        "sys.modules['uvloop'] = None\n"
        "import legato_client, legato_client.cli\n"
        "assert legato_client.Client('127.0.0.1:1')\n"
        "assert not {'torch', 'legato_engine', 'legato_service'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_a_server_starts_without_the_other_commands():
    """Their libraries would be imported for nothing before each start."""
    program = (
        "import os, sys\n"
        "from legato_client.cli import main\n"
        "os.execv = lambda *_: None\n"
        "main(['serve', '--model', 'null'])\n"
        "print(*(name for name in ('commands', 'watch', 'ros2') "
        "if f'legato_client.cli.{name}' in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
