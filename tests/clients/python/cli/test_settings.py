"""A flag wins over the environment, which wins over the file; then comes the default."""

from __future__ import annotations

import argparse
import json
import shlex
import tomllib
from typing import Any

import pytest
from legato_client.cli import arguments, commands, forward, load, main, settings, token
from legato_service import arguments as server


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
        options = [each for leaf in commands.leaves(parser) for each in settings.options_of(leaf)]
        variables = {settings.variable(each) for each in options}
        assert len(variables) == len(set(options)), name
        for leaf in commands.leaves(parser):
            assert "--config" in leaf.format_help()
    assert settings.variable("max-running") == "LEGATO_MAX_RUNNING"


def every_command() -> dict[str, Any]:
    """The parser of each command, as `legato COMMAND --help` makes it."""
    tree = commands.make_parser()
    found = {leaf.prog.removeprefix("legato "): leaf for leaf in commands.leaves(tree)}
    for name in forward.MODULES:
        parser = commands.installed(name)
        assert isinstance(parser, arguments.Parser), f"{name} is installed"
        found[name] = parser
    return found


COMMANDS = every_command()
NUMBERS = {
    *(int, float, arguments.count, arguments.positive, arguments.share, arguments.at_least_one),
    *(arguments.not_negative, arguments.above_zero_share, arguments.quality, token._days),
    *(load._positive, server.fraction, server.share, server.whole, server.not_negative),
    *(server.above_zero, server.positive),
}
"""Parsers of numbers."""
UNITS = {
    *("N", "SECONDS", "DAYS", "MS", "BYTES", "PIXELS", "TOKENS", "FPS", "RATE", "FACTOR"),
    *("C", "S", "T", "P", "0..1", "QUALITY"),
}
"""Metavars of numbers: a unit, or what a number without a unit is."""
ONE_NAME = {"--out", "--topic", "--duration", "--period-seconds", "--frames-per-second"}
"""Names that would be a second one of a concept."""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_described(name):
    """With a sentence that says what it is, no empty default, and the unit of a number."""
    parser = COMMANDS[name]
    assert parser.description, name
    assert parser.example.startswith(f"legato {name.split()[0]}") or name == "completion"
    shown = parser.format_help()
    assert "(default: )" not in shown
    assert f"$ {parser.example}" in shown
    assert "exit codes: 0 " in shown
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        what = f"{name} {action.option_strings or action.dest}"
        assert action.help, what
        assert not action.help.startswith("of "), what
        if action.type in NUMBERS and action.choices is None:
            assert action.metavar in UNITS, what
            if action.metavar == "N":
                assert any(word in action.help for word in ("number", "maximum", "Nth", "N "))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_concept_has_one_name(name):
    """Older spellings work and are not shown."""
    parser = COMMANDS[name]
    shown = parser.format_help()
    for action in parser._actions:
        assert not ONE_NAME & {*arguments.visible_names(action)}, name
        for older in settings.older_names(action):
            assert f"--{older} " not in shown
            assert parser._option_string_actions[f"--{older}"] is action


def test_every_command_is_listed_in_one_group():
    """With a sentence and an example for each group, which is a command line that parses."""
    tree = commands.make_parser()
    listed = [name for group in commands.GROUPS for name in group.commands]
    assert len(listed) == len(set(listed))
    assert set(commands._below(tree)) <= set(listed)
    shown = tree.format_help()
    for group in commands.GROUPS:
        assert f"{group.title}: {group.purpose}" in shown
        assert f"$ {group.example}" in shown


@pytest.mark.parametrize(
    "example",
    [
        *(parser.example for parser in COMMANDS.values()),
        *(group.example for group in commands.GROUPS),
    ],
)
def test_examples_parse(example):
    """Each is a command line that its command takes."""
    words = shlex.split(example.removeprefix('eval "$(').removesuffix(')"').partition(" >>")[0])
    name = " ".join(words[1:3]) if words[1] == "token" else words[1]
    if name in COMMANDS:
        COMMANDS[name].parse_args(words[len(name.split()) + 1 :])


def test_options_of_a_server_are_grouped():
    """None is among the ungrouped ones but the help."""
    parser = COMMANDS["serve"]
    (ungrouped,) = [each for each in parser._action_groups if each.title == "options"]
    assert [action.dest for action in ungrouped._group_actions] == ["help"]


def test_the_timeline_of_a_server_is_in_the_help(capsys):
    """`legato trace --help` lists the options for a running server."""
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    shown = capsys.readouterr().out
    for option in ("--server HOST:PORT", "--seconds SECONDS", "--follow", "--streams N"):
        assert option in shown


def test_older_names_of_options_work(capsys, config, monkeypatch):
    """As flags, as variables and in files."""
    words = ["watch", "clip.mp4", "--task", "caption", "--print-config", "--json"]
    assert main([*words, "--rate", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["speed"] == {"value": 2.0, "source": "flag"}
    path = config("[watch]\nrate = 3\n")
    assert main([*words, "--config", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["speed"] == {"value": 3.0, "source": str(path)}
    monkeypatch.setenv("LEGATO_RATE", "4")
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)["speed"]
    assert said == {"value": 4.0, "source": "LEGATO_RATE"}


def test_a_variable_that_sets_nothing_is_reported(capsys, monkeypatch):
    """With the one that was meant, on standard error, and the command runs all the same."""
    monkeypatch.setenv("LEGATO_MAX_RUNING", "3")
    monkeypatch.setenv("LEGATO_OUT", "an older name")
    assert main(["models", "--print-config"]) == 0
    assert capsys.readouterr().err == (
        "legato: warning: LEGATO_MAX_RUNING is no setting of any command; did you mean "
        "LEGATO_MAX_RUNNING?\n"
    )


def _toml(said: dict[str, Any]) -> str:
    lines = [f"[{name}]" for name in said]
    for table in said.values():
        lines += [f"{key} = {settings._toml(value)}" for key, value in table.items()]
    return "\n".join(lines)
