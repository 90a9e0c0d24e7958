"""`legato serve`, `legato demo`, `legato http` and other commands that start processes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from legato_client.cli import commands, forward, http, main
from legato_client.cli.demo import script_for
from legato_client.cli.terminal import Terminal
from PIL import Image

from tests.clients.python.face import until
from tests.clients.python.fake_server import STREAMS, failure
from tests.clients.python.web.serving import CHAT, HELLO, connect
from tests.e2e.server import ENVIRONMENT

# ---------------------------------------------------------------- forward
# The commands that belong to the server's packages.

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
    lacking = forward.ForwardedProgram("legato_engine.none", "legato_engine.none:make_parser", "")
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


# ---------------------------------------------------------------- demo
# The demo, against a real process that gives scripted answers.


@pytest.fixture
def scene(tmp_path):
    """An image with a script beside it."""
    Image.new("RGB", (200, 100), "white").save(tmp_path / "scene.png")
    script = {
        "caption_length": "normal",
        "detect": ["cat", "dog"],
        "point": "nose",
        "segment": "cat",
        "query": "how many?",
    }
    (tmp_path / "scene.json").write_text(json.dumps(script))
    return tmp_path / "scene.png"


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Puts the stand-in service where `python -m legato_service` finds it."""
    stand_in_service(tmp_path, "from tests.clients.python.cli import fake_service")
    path = ":".join([str(tmp_path), *(entry for entry in sys.path if entry)])
    monkeypatch.setenv("PYTHONPATH", path)
    return lambda behaviour: monkeypatch.setenv("FAKE_SERVICE", behaviour)


def test_demo(scene, service, tmp_path, capsys):
    """The demo shows every answer, saves the image, and its server ends well."""
    service("ok")
    target = tmp_path / "demo.png"
    assert main(["demo", "--image", str(scene), "--output", str(target)]) == 0
    out = capsys.readouterr().out
    for shown in ("a cat", "box     cat", "detect dog", "point   nose", "outline 1", "two cats"):
        assert shown in out
    with Image.open(target) as drawn:
        assert drawn.getcolors(1) is None, "only one colour"


def test_server_that_does_not_start(scene, service, capsys):
    """A server that ends while starting fails the demo and shows the end of its log.

    Options after `--` reach the server.
    """
    service("crash")
    assert main(["demo", "--image", str(scene), "--", "--device", "abacus"]) == 4
    err = capsys.readouterr().err
    assert "exit code 3" in err
    assert "no weights here for abacus" in err


def test_server_that_does_not_stop_well(scene, service, tmp_path, capsys):
    """A server whose exit code is not 0 fails the demo."""
    service("bad-exit")
    assert main(["demo", "--image", str(scene), "--output", str(tmp_path / "d.png")]) == 1
    assert "exit code 5" in capsys.readouterr().err


def test_missing_image(service, tmp_path, capsys):
    """An image that is not there is a usage error, before any server starts."""
    service("ok")
    assert main(["demo", "--image", str(tmp_path / "none.png")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_script(scene):
    """The script beside an image says what is asked, in order; flags replace its parts."""
    script = script_for(scene)
    titles = [title for title, _ in script.tasks()]
    assert titles == [
        "caption", "detect cat", "detect dog", "point nose", "segment cat", "query how many?"
    ]  # fmt: skip
    changed = script.with_changes(detect=["owl"], point="", segment=None, query=None)
    assert [title for title, _ in changed.tasks()][1:3] == ["detect owl", "segment cat"]


def test_image_without_a_script(tmp_path):
    """Any other image gets a caption."""
    assert [title for title, _ in script_for(tmp_path / "x.jpg").tasks()] == ["caption"]


def test_broken_script(scene, capsys):
    """A script that is not one is a clear failure."""
    scene.with_suffix(".json").write_text("[]")
    assert main(["demo", "--image", str(scene)]) == 1
    assert "is not a demo script" in capsys.readouterr().err


# ---------------------------------------------------------------- http
# `legato http` as a process, and its options.


def test_a_signal_stops_it():
    """It tells its URL when it serves, and ends with exit code 0 and a silent standard error."""
    command = [sys.executable, "-m", "legato_client.cli", "http", "--json", "--listen"]
    with subprocess.Popen(
        [*command, "127.0.0.1:0", "--server", "127.0.0.1:1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            with urllib.request.urlopen(f"{said['url']}/healthz") as reply:
                assert json.load(reply) == {"status": "ok"}
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate()
            assert (process.returncode, errors) == (0, b"")
        finally:
            process.kill()


def test_a_signal_lets_a_stream_finish(server):
    """What runs when the signal comes is answered whole, and then the process ends."""
    *told, last = STREAMS["query"]
    going_on = threading.Event()
    server.script["Generate"].append([*told, going_on, last])
    command = [sys.executable, "-m", "legato_client.cli", "http", "--json", "--listen"]
    with subprocess.Popen(
        [*command, "127.0.0.1:0", "--server", server.target],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            request = urllib.request.Request(
                f"{url}{CHAT}",
                json.dumps({"messages": HELLO, "stream": True}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request) as reply:
                begun = reply.readline()
                process.send_signal(signal.SIGTERM)
                until(lambda: not _takes_connections(url))
                going_on.set()
                assert (begun + reply.read()).endswith(b"data: [DONE]\n\n")
            assert process.wait() == 0
        finally:
            going_on.set()
            process.kill()


def _takes_connections(url: str) -> bool:
    try:
        with contextlib.closing(connect(url)) as connection:
            connection.connect()
    except ConnectionError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--listen", "0.0.0.0:0"], "others can reach 0.0.0.0:0"),
        (["--listen", "8080"], "HOST:PORT"),
        (["--tls-cert", "a.pem"], "need each other"),
        (["--tls-cert", "no.pem", "--tls-key", "no.pem"], "cannot read no.pem"),
        (["--alias", "gpt"], "NAME=MODEL"),
        (["--token-file", "no.token"], "no.token"),
    ],
)
def test_wrong_options(options, problem, capsys):
    """A wrong option ends the command with a sentence that names it."""
    assert main(["http", *options]) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("legato: error:")
    assert problem in said


def test_the_extra_is_missing():
    """Without the extra's packages one sentence says what to install; nothing else needs them."""
    program = """
import sys
sys.modules.update(dict.fromkeys(["msgspec", "starlette", "uvicorn"]))  # None: cannot be imported
from legato_client.cli import main
sys.exit(main(["http"]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("legato: error: `legato http` needs msgspec, starlette, uvicorn")
    assert "[web]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_required_tokens_must_matter(server, capsys):
    """--require-token is refused where the server takes calls without one, or does not answer."""
    assert main(["http", "--require-token", "--server", server.target]) == 2
    assert "takes calls without a token" in capsys.readouterr().err
    for _ in range(10):
        server.script["GetServerInfo"].append(failure(grpc.StatusCode.UNAVAILABLE, "DRAINING"))
    assert main(["http", "--require-token", "--server", server.target]) == 4
    assert "cannot tell whether" in capsys.readouterr().err


def test_a_token_does_not_leave_this_host_unencrypted(monkeypatch, capsys):
    """With a server elsewhere and no TLS, this process' own token is an error, not sent."""
    monkeypatch.setenv("LEGATO_TOKEN", "legato_a_b")
    assert main(["http", "--server", "a.example:1", "--listen", "127.0.0.1:0"]) == 1
    assert "is not sent to a.example:1 without TLS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "caller", "lend", "sent"),
    [
        ("127.0.0.1:1", "legato_c_d", True, ["Bearer legato_c_d"]),
        ("127.0.0.1:1", "", True, ["Bearer legato_own_x"]),
        ("127.0.0.1:1", "", False, []),
        ("a.example:1", "legato_c_d", False, []),
    ],
    ids=["the caller's", "lent", "not lent", "not encrypted"],
)
def test_whose_token_is_sent(tmp_path, capsys, target, caller, lend, sent):
    """The caller's own token goes first, and no token leaves this host unencrypted."""
    file = tmp_path / "token"
    file.write_text("legato_own_x")
    words = ["http", "--server", target, "--token-file", str(file)]
    args = commands.make_parser().parse_args(words)
    client = http.connector(args, Terminal(json_output=False), lambda: caller, lend=lend)()
    metadata = client._connection.metadata()
    assert [value for key, value in metadata if key == "authorization"] == sent
    assert ("no token is passed on" in capsys.readouterr().out) == target.startswith("a.")


_OPTIONS = """
import argparse

def make_parser(kind=argparse.ArgumentParser):
    parser = kind(prog="legato serve", allow_abbrev=False)
    for name in ("--listen", "--device", "--port"):
        parser.add_argument(name)
    return parser
"""


def stand_in_service(folder: Path, program: str) -> None:
    """Write the package into `folder`; `python -m legato_service` runs `program`."""
    package = folder / "legato_service"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "arguments.py").write_text(_OPTIONS)
    (package / "__main__.py").write_text(program)
