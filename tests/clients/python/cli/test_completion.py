"""`legato completion`."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess

import pytest
from legato_client.cli import main

COMMANDS = ("detect", "chat", "load", "serve", "completion")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell, capsys, tmp_path):
    """Each script knows the commands and their options, and its shell can read it."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "max-objects", "max-running", "print-config"):
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
