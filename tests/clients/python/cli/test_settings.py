"""Settings by flag, environment and file, completion, and what people type wrong."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import grpc
import legato_client.ros
import pytest
from google.rpc import error_details_pb2
from legato_client import Client, DeadlineExceeded, Unavailable
from legato_client._grpc.channel import full_target
from legato_client.cli import arguments, commands, forward, main, settings
from legato_client.cli.settings import ExitCode
from legato_client.cli.terminal import hint_of
from legato_service import arguments as server
from PIL import Image

from tests.clients.python.fake_server import failure


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
        ("[load]\nrate = 'fast'", "rate: must be a number, not 'fast'"),
        ("[load]\nseed = 'any'", "seed: not 'any'"),
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
    assert "LEGATO_RATE: rate: must be a number, not 'fast'" in capsys.readouterr().err
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
    for name, parser in commands.below(tree).items():
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
    *(arguments.not_negative, arguments.above_zero_share, arguments.quality, arguments.days),
    *(arguments.rate, server.fraction, server.share, server.whole, server.not_negative),
    *(server.above_zero, server.positive),
}
"""Parsers of numbers."""
UNITS = {
    *("N", "SECONDS", "DAYS", "MS", "BYTES", "PIXELS", "TOKENS", "FPS", "HZ", "RATE", "FACTOR"),
    *("C", "S", "T", "P", "0..1", "QUALITY", "GB"),
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
    """And an option has one long name."""
    for action in COMMANDS[name]._actions:
        long = [each for each in action.option_strings if each.startswith("--")]
        assert not ONE_NAME & {*long}, name
        assert len(long) < 2 or isinstance(action, argparse.BooleanOptionalAction), name


def test_every_command_is_listed_in_one_group():
    """With a sentence and an example for each group, which is a command line that parses."""
    tree = commands.make_parser()
    listed = [name for group in commands.GROUPS for name in group.commands]
    assert len(listed) == len(set(listed))
    assert set(commands.below(tree)) <= set(listed)
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
    words = _words_of(example)
    name = " ".join(words[1:3]) if words[1] == "token" else words[1]
    if name in COMMANDS:
        COMMANDS[name].parse_args(words[len(name.split()) + 1 :])


def _words_of(example: str) -> list[str]:
    return shlex.split(example.removeprefix('eval "$(').removesuffix(')"').partition(" >>")[0])


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - forward.MODULES))
def test_options_may_stand_anywhere(name):
    """Before, between and after the words of every command, and what follows "--" is a word."""
    parser = COMMANDS[name]
    words = _words_of(parser.example)[len(name.split()) + 1 :]
    if name in ("query", "run", "demo"):  # several words, one of them after "--"
        words += ["more", "--", "--device"]
    expected = parser.parse_args(["--config", "a", *words])
    options = parser._option_string_actions
    for place in range(1, words.index("--") if "--" in words else len(words) + 1):
        before = options.get(words[place - 1])
        if before is None or before.nargs == 0:
            asked = parser.parse_args([*words[:place], "--config", "a", *words[place:]])
            assert vars(asked) == vars(expected), place
    if name == "query":
        assert (expected.image, expected.question) == (["street.jpg", words[1], "more"], "--device")


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


def test_a_variable_that_sets_nothing_is_reported(capsys, monkeypatch):
    """With the one that was meant, on standard error, and the command runs all the same."""
    monkeypatch.setenv("LEGATO_MAX_RUNING", "3")
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


# ---------------------------------------------------------------- completion

COMMAND_NAMES = ("detect", "chat", "load", "serve", "completion")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell, capsys, tmp_path):
    """Each script knows the commands and their options, and its shell can read it."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMAND_NAMES, "max-objects", "max-running", "print-config"):
        assert word in script
    if (program := shutil.which(shell)) is None:
        return
    path = tmp_path / "script"
    path.write_text(script)
    checked = subprocess.run([program, "-n", str(path)], capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")


def complete(script: str, *words: str) -> set[str]:
    """What bash offers for the last word."""
    typed = " ".join(words)
    program = f"""{script}
COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_legato; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(capsys):
    """Commands, options of the client and of the server, and their choices."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "legato", "det") == {"detect"}
    assert "--max-objects" in complete(script, "legato", "detect", "--max")
    assert "--max-running" in complete(script, "legato", "serve", "--max-r")
    assert complete(script, "legato", "serve", "--kv-dtype", "mo") == {"model"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(capsys):
    """As bash."""
    assert main(["completion", "fish"]) == 0
    script = capsys.readouterr().out

    def offered(typed: str) -> set[str]:
        program = f"{script}\ncomplete --do-complete '{typed}'"
        command = ["fish", "--no-config", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {line.split("\t")[0] for line in done.stdout.splitlines()}

    assert "detect" in offered("legato det")
    assert "--max-objects" in offered("legato detect --max")
    assert "--max-running" in offered("legato serve --max-r")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(capsys, tmp_path):
    """As bash, from a file `_legato` in a folder of `$fpath`, at the Tab key of a terminal."""
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "_legato").write_text(capsys.readouterr().out)
    ours, shells = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}  # nothing but what is typed and completed
    with subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=shells,
        stdout=shells,
        stderr=shells,
        env=environment,
        start_new_session=True,
    ) as shell:
        os.close(shells)
        try:
            begin = f"PS1=; fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D"
            type_in(ours, f"{begin}; echo rea''dy\n", until="ready")
            type_in(ours, "legato detec\t", until="legato detect ")
            type_in(ours, "\x15legato serve --max-ru\t", until="--max-running")
        finally:
            shell.kill()
            os.close(ours)


def type_in(terminal: int, keys: str, *, until: str) -> None:
    """Press keys, and read what the terminal shows until it holds a text."""
    os.write(terminal, keys.encode())
    shown = ""
    while until not in shown:
        shown += os.read(terminal, 4096).decode("utf-8", "replace")


# ---------------------------------------------------------------- mistakes
# What people type wrong, and what they are told.


@pytest.mark.parametrize(
    ("typed", "target"),
    [
        ("robot", "robot:50051"),
        ("127.0.0.1", "127.0.0.1:50051"),
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("dns:50051", "dns:50051"),
        ("unix:/run/legato.sock", "unix:/run/legato.sock"),
        ("dns:///robot:7", "dns:///robot:7"),
        ("ipv4:10.0.0.1:7,10.0.0.2:7", "ipv4:10.0.0.1:7,10.0.0.2:7"),
    ],
)
def test_targets(typed, target):
    """A host without a port is asked at Legato's, not at gRPC's 443."""
    assert full_target(typed) == target


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("http://127.0.0.1:7", "no URL: '127.0.0.1:7' instead of 'http://127.0.0.1:7'"),
        ("https://robot/", "no URL: 'robot'"),
        ("robot:", "HOST:PORT, not 'robot:'"),
        ("robot:fast", "HOST:PORT, not 'robot:fast'"),
        ("robot:70000", "HOST:PORT"),
        (":7", "HOST:PORT"),
    ],
)
def test_targets_that_are_none(typed, problem, capsys, monkeypatch):
    """They are refused by name: by the client, by the flag and in the environment."""
    with pytest.raises(ValueError, match="a server is HOST:PORT"):
        Client(typed)
    assert main(["info", "--server", typed]) == 2
    assert problem in capsys.readouterr().err
    monkeypatch.setenv("LEGATO_SERVER", typed)
    assert main(["info"]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "LEGATO_SERVER" in said


@pytest.mark.parametrize(
    ("name", "form"), [("a.png", "PNG"), ("a.JPG", "JPEG"), ("a.jpeg", "JPEG"), ("a.webp", "WEBP")]
)
def test_the_name_of_a_image_tells_its_form(name, form, image, server, tmp_path):
    """The file holds what its name says."""
    target = tmp_path / name
    words = ["detect", image, "cat", "--output", str(target), "--server", server.target]
    assert main(words) == 0
    with Image.open(target) as drawn:
        assert drawn.format == form


@pytest.mark.parametrize("name", ["found.txt", "found", "found.gif"])
def test_a_name_of_no_image(name, image, server, tmp_path, capsys):
    """It is refused before the server is asked, and nothing is written."""
    target = tmp_path / name
    words = ["detect", image, "cat", "--output", str(target), "--server", server.target]
    assert main(words) == 2
    assert ".png, .jpg, .jpeg, .webp" in capsys.readouterr().err
    assert not target.exists()
    assert not server.requests


def test_a_word_too_many(image, capsys):
    """The help that is named is that of the command."""
    assert main(["detect", image, "a", "b"]) == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: b" in said
    assert "legato detect --help" in said
    assert main(["token", "new", "--who"]) == 2
    assert "legato token new --help" in capsys.readouterr().err


def test_an_unknown_model(capsys):
    """The models that users know are told, before anything is loaded."""
    assert main(["serve", "--model", "moondream-2"]) == 2
    said = capsys.readouterr().err
    assert "no model is called 'moondream-2', but 'moondream2' is" in said
    assert "legato-tiny, moondream2" in said
    assert "random-tiny" not in said
    assert len(said.splitlines()) == 1


def test_load_is_a_command_of_its_own(capsys):
    """`bench` measures this machine only."""
    assert main(["bench", "--serve"]) == 2
    with pytest.raises(SystemExit):
        main(["load", "--help"])
    assert "Put load on a running server" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_proxy_is_named_where_no_server_answers(name, monkeypatch):
    """A server that cannot be reached may be behind a proxy that cannot."""
    for each in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(each, raising=False)
    assert "no_proxy" not in hint_of(Unavailable("no"))
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert f"through {name}; see no_proxy" in hint_of(Unavailable("no"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["dtect"], "there is no command 'dtect'; did you mean detect?"),
        (["token", "nw"], "there is no command 'nw'; did you mean new?"),
        (["detect", "a.png", "cat", "--outptu", "b"], "--outptu b; did you mean --output?"),
        (["serve", "--max-runing", "3"], "--max-runing 3; did you mean --max-running?"),
        (["caption", "a.png", "--length", "shrt"], "not 'shrt'; did you mean short?"),
        (["pull", "moondrem2"], "not 'moondrem2'; did you mean moondream2?"),
        (["detect", "a.png", " "], "argument object: must not be empty"),
        (["query", ""], "argument question: must not be empty"),
        (["detect", "a.png", "cat", "--max-objects", "0"], "must be at least 1, and is 0"),
        (["detect", "a.png", "cat", "--temperature", "-1"], "must be 0 or more, and is -1"),
        (["detect", "a.png", "cat", "--top-p", "0"], "must be above 0 and at most 1, and is 0"),
        (["detect", "a.png", "cat", "--max-tokens", "0"], "must be at least 1, and is 0"),
        (["detect", "none.png", "cat"], "cannot read none.png: No such file or directory"),
        (["detect", "/dev/null", "cat"], "/dev/null is no JPEG, PNG or WebP image"),
        (["chat", "/dev/null"], "/dev/null is no JPEG, PNG or WebP image"),
        (["trace", "--follow"], "--follow needs --server"),
        (["playground", "--require-token"], "unrecognized arguments: --require-token"),
    ],
)
def test_a_mistake_is_reported_before_any_call(words, problem, capsys):
    """Once, in a line that names the argument; nothing is asked of a server."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.count(problem) == 1


def test_a_video_is_no_image(tmp_path, capsys):
    """The commands for videos are named."""
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"\0\0\0\x18ftypmp42")
    assert main(["detect", str(clip), "cat"]) == 2
    assert f"{clip} is no JPEG, PNG or WebP image: it seems to be a video; use `legato run`" in (
        capsys.readouterr().err
    )


def test_what_the_server_refuses_is_named_once(image, server, capsys):
    """By the file, not by a field of the contract."""
    refused = failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(
                    field="image.encoded.data", description="the image is truncated or corrupt"
                )
            ]
        ),
    )
    server.script["Generate"].append(refused)
    assert main(["detect", image, "cat", "--server", server.target]) == 2
    said = capsys.readouterr().err
    assert said.count("the image is truncated or corrupt") == 1
    assert f"{image}: the image is truncated or corrupt" in said


def test_a_playground_recommends_what_it_has(capsys):
    """Its help names no option that it lacks."""
    with pytest.raises(SystemExit):
        main(["playground", "--help"])
    assert "--require-token" not in capsys.readouterr().out
    assert main(["playground", "--listen", "0.0.0.0:0"]) == 2
    said = capsys.readouterr().err
    assert "--allow-remote" in said
    assert "--require-token" not in said


@pytest.mark.parametrize(
    "words", [["models", "--json"], ["--help"], ["serve", "--help"], ["completion", "bash"]]
)
def test_a_reader_may_leave(words):
    """`| head` ends a command without a traceback, whoever's program it is."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "legato_client.cli", *words]
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["run", "clip.mp4", "--task", "caption", "--output", "o.jsonl"], "av", "video"),
        (
            ["run", "a.png", "--task", "caption", "--output", "o.jsonl", "--annotate", "d"],
            "PIL",
            "cli",
        ),
        (["watch", "clip.mp4", "--task", "caption"], "av", "video"),
        (["bag", "a.mcap", "--image", "/a", "--task", "detect:a", "--output", "b"], "mcap", "ros"),
        (["ros2", "--image", "/a", "--task", "detect:a"], "cyclonedds", "dds"),
        (["detect", "IMAGE", "cat", "--output", "a.png"], "PIL", "cli"),
        (["playground"], "starlette", "web"),
        (["compat", "a.toml"], "grpc_tools", "compat"),
        (["completion", "bash"], "shtab", "cli"),
    ],
)
def test_a_missing_extra_is_reported_first(
    words, module, extra, image, capsys, monkeypatch, tmp_path
):
    """Before a file is written or a server is asked, with the command that installs it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == module else found(name, *of)
    )
    assert main([image if word == "IMAGE" else word for word in words]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"[{extra}]" in err
    assert err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"clip.mp4", "a.png"}


def test_a_folder_of_several_bags_is_refused(tmp_path, capsys):
    """A recorded folder has one file; of several one must be named."""
    words = ["--image", "/a", "--task", "detect:a", "--output", str(tmp_path / "out")]
    assert main(["bag", str(tmp_path), *words]) == 2
    assert f"{tmp_path} has 0 .mcap files: name one" in capsys.readouterr().err
    (tmp_path / "a_0.mcap").write_bytes(b"no bag")
    assert main(["bag", str(tmp_path), *words]) == 2
    assert "a_0.mcap is no MCAP file" in capsys.readouterr().err


def test_many_images_name_the_option_that_the_server_refuses(image, server, tmp_path, capsys):
    """As a single one does: `--max-tokens`, not a field of the contract."""
    field = "generate_batch.tasks.sampling.max_tokens"
    refused = failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=field, description="too many")
            ]
        ),
    )
    server.script["RunTasks"] += [refused] * 9
    words = [image, "--output", str(tmp_path / "out.jsonl"), "--max-tokens", "99999"]
    assert main(["run", *words, "--task", "detect:cat", "--server", server.target]) == 2
    assert "--max-tokens: too many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (Unavailable("Trying to connect an http1.x server"), "speaks HTTP/1"),
        (DeadlineExceeded("Deadline Exceeded"), "--timeout"),
    ],
)
def test_a_remedy_is_named(error, hint):
    """Another port for HTTP, and the option for more time."""
    assert hint in hint_of(error)


# ---------------------------------------------------------------- live commands
# Mistakes in `legato watch`, `legato bag` and `legato ros2`, before anything is asked.

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
