"""`legato completion`."""

from __future__ import annotations

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
