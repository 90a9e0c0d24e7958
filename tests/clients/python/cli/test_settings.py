"""A flag wins over the environment, which wins over the file; then comes the default."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from legato_client.cli import commands, main, settings


@pytest.fixture
def config(tmp_path):
    """Writes a file of settings."""

    def write(text: str) -> str:
        path = tmp_path / "legato.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def printed(capsys):
    """Runs a command with `--print-config`: what its lines say, and each line's comment."""

    def run(*words: str) -> tuple[dict[str, Any], dict[str, str]]:
        assert main([*words, "--print-config"]) == 0
        out = capsys.readouterr().out
        sources = {
            line.partition(" = ")[0]: line.rpartition("  # ")[2]
            for line in out.splitlines()
            if " = " in line
        }
        return tomllib.loads(out), sources

    return run


def test_precedence(config, printed, monkeypatch):
    """Each layer alone, then all of them; the source of each option is said."""
    path = config("[load]\nrate = 1\nseconds = 7.5\nprocesses = 3\n[client]\nserver = 'a:1'\n")
    monkeypatch.setenv("LEGATO_RATE", "2")
    monkeypatch.setenv("LEGATO_SERVER", "b:2")
    said, sources = printed("load", "--config", path, "--rate", "3")
    assert said["load"]["rate"] == 3
    assert said["load"]["server"] == "b:2"
    assert (said["load"]["seconds"], said["load"]["processes"]) == (7.5, 3)
    assert sources["rate"] == "flag"
    assert sources["server"] == "LEGATO_SERVER"
    assert sources["seconds"] == path
    assert sources["timeout"] == "default"
    said, sources = printed("load", "--config", path)
    assert (said["load"]["rate"], sources["rate"]) == (2, "LEGATO_RATE")
    monkeypatch.delenv("LEGATO_RATE")
    said, sources = printed("load", f"--config={path}")
    assert (said["load"]["rate"], sources["rate"]) == (1, path)
    monkeypatch.setenv("LEGATO_CONFIG", path)
    assert printed("load")[0] == said


@pytest.mark.parametrize("command", ["serve", "load", "bench", "trace"])
def test_what_is_printed_is_a_file_that_says_the_same(command, printed, config, monkeypatch):
    """Also where options exclude each other, of switches, and of lists."""
    monkeypatch.setenv("LEGATO_NO_VLLM_METRICS", "true")
    monkeypatch.setenv("LEGATO_STREAMS", "3" if command == "trace" else "1,3")
    first, sources = printed(command)
    again, again_sources = printed(command, "--config", config(_toml(first)))
    assert again == first
    if command == "serve":
        assert first["serve"]["no-vllm-metrics"] is True
        assert sources["no-vllm-metrics"] == "LEGATO_NO_VLLM_METRICS"
        assert again_sources["listen"].endswith("legato.toml")


def test_lists_are_replaced_not_joined(printed, config, monkeypatch):
    """An option that may be repeated has the values of one layer only."""
    path = config("[query]\nstop = ['a', 'b']\n")
    words = ["query", "why?", "--config", path]
    assert printed(*words)[0]["query"]["stop"] == ["a", "b"]
    monkeypatch.setenv("LEGATO_STOP", "c")
    assert printed(*words)[0]["query"]["stop"] == ["c"]
    monkeypatch.setenv("LEGATO_STOP", "['d', '-e']")
    assert printed(*words)[0]["query"]["stop"] == ["d", "-e"]
    assert printed(*words, "--stop", "f")[0]["query"]["stop"] == ["f"]


def test_switches(printed, config, monkeypatch):
    """A switch can be set off, by a lower layer or by its flag."""
    path = config("[query]\nstream = true\nreasoning = true\n")
    monkeypatch.setenv("LEGATO_REASONING", "off")
    said, _ = printed("query", "why?", "--config", path)
    assert (said["query"]["stream"], said["query"]["reasoning"]) == (True, False)
    said, _ = printed("query", "why?", "--config", path, "--no-stream", "--reasoning")
    assert (said["query"]["stream"], said["query"]["reasoning"]) == (False, True)


def test_a_flag_silences_what_it_excludes(printed, monkeypatch):
    """`--device cpu` wins over LEGATO_DEVICES, which excludes it."""
    monkeypatch.setenv("LEGATO_DEVICES", "all")
    assert printed("serve")[0]["serve"]["devices"] == "all"
    said, _ = printed("serve", "--device", "cpu")
    assert (said["serve"]["device"], said["serve"]["devices"]) == ("cpu", "")


def test_settings_reach_the_call(server, config):
    """They are what the command does, not only what it prints."""
    path = config(f"[client]\nserver = '{server.target}'\ntimeout = 30\n[query]\nmax-tokens = 7\n")
    assert main(["query", "why?", "--config", path]) == 0
    assert server.last("Generate").task.sampling.max_tokens == 7


def test_a_file_may_begin_with_a_mark(config, printed):
    """Some editors put one before UTF-8."""
    said, _ = printed("load", "--config", config("\ufeff[load]\nrate = 3\n"))
    assert said["load"]["rate"] == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[load]\nrats = 1", "[load] has no option 'rats'"),
        ("[laod]\nrate = 1", "no command is called 'laod'"),
        ("[load]\nrate = 'fast'", "rate: not 'fast'"),
        ("[load]\nrate = -1", "rate: must be above 0"),
        ("[load]\nkind = 'x'", "kind is one of"),
        ("[load]\ndeltas = 'perhaps'", "deltas is true or false"),
        ("[load]\nrate = [1]", "rate takes one value"),
        ("[client]\nrate = 1", "[client] has no option 'rate'"),
        ("load = 1", "load must be a table"),
        ("[load", "is not TOML"),
        (None, "cannot read"),
    ],
)
def test_errors_name_their_source(config, capsys, text, problem):
    """A wrong file is a usage error that names it, in JSON too."""
    path = "/no/such/file" if text is None else config(text)
    assert main(["load", "--config", path]) == 2
    said = capsys.readouterr().err
    assert path in said
    assert problem in said
    assert main(["load", "--config", path, "--json"]) == 2
    assert problem in json.loads(capsys.readouterr().err)["error"]["message"]


def test_a_wrong_variable_is_named(monkeypatch, capsys):
    """An empty one is none."""
    monkeypatch.setenv("LEGATO_RATE", "fast")
    assert main(["load", "--print-config"]) == 2
    assert "LEGATO_RATE: rate: not 'fast'" in capsys.readouterr().err
    monkeypatch.setenv("LEGATO_RATE", "")
    assert main(["load", "--print-config"]) == 0


def test_print_config_as_json(capsys):
    """One document: each option with its value and its source."""
    assert main(["load", "--print-config", "--json", "--rate", "5"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rate"] == {"value": 5.0, "source": "flag"}


def test_every_option_has_a_variable_of_its_own():
    """No two options of a command share one; every command can be configured."""
    tree = commands.make_parser(complete=True)
    for name, parser in commands._below(tree).items():
        options = [each for leaf in commands._leaves(parser) for each in settings.options_of(leaf)]
        variables = {settings.variable(each) for each in options}
        assert len(variables) == len(set(options)), name
        for leaf in commands._leaves(parser):
            assert "--config" in leaf.format_help()
    assert settings.variable("max-running") == "LEGATO_MAX_RUNNING"


def _toml(said: dict[str, Any]) -> str:
    lines = [f"[{name}]" for name in said]
    for table in said.values():
        lines += [f"{key} = {settings._toml(value)}" for key, value in table.items()]
    return "\n".join(lines)
