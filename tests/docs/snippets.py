"""The snippets of README.md and docs/, run as a reader runs them: in order, in one folder a page.

All of it has two cores. `make walk` does so in a fresh clone with a venv of its own, where each
page has a server that has answered nothing yet; test_pages.py does in this tree, where pages share
what they start by the same command.

A comment before a block changes that: `<!-- run: clone -->` leaves it to `make walk`,
`<!-- run: quiet -->` expects no output, `<!-- run: no, REASON -->` does not run it. A block of
`text` after a snippet has lines of its output, whose numbers may differ.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
SECTIONS = ("Installation", "First steps", "Guides")
"""Headings of the site under which every page's snippets are run."""

LANGUAGES = ("sh", "python", "go", "js")
PATIENCE = 500  # seconds for a block, which may download what Go and npm need
PORTS = {"127.0.0.1:50051": "serve", "127.0.0.1:8080": "http", "127.0.0.1:8090": "playground"}
"""Where a page's servers listen, by the address that the page names."""

_BLOCK = re.compile(
    r"^(?:<!-- run: (?P<how>[^\n]*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$"
    r"(?:\n+```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_SERVER = re.compile(r"^legato (serve|http|playground)\b([^&#\n]*)(?:#[^\n]*)?$", re.MULTILINE)
_PROGRAMS = ("go", "grpcurl", "jq", "node", "npm")
_SAVE = '{ export -p; printf "cd %q\\n" "$PWD"; } > "$STATE"'


def pages_of(sections: Sequence[str]) -> list[str]:
    """Return the pages that the site has under these headings, in its order."""
    nav = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text())["project"]["nav"]
    named = {title: pages for entry in nav for title, pages in entry.items()}
    return [f"docs/{file}" for each in sections for page in named[each] for file in page.values()]


PAGES = ("README.md", *pages_of(SECTIONS))


@dataclass(frozen=True)
class Snippet:
    """A block of code on a page, and how it is to be run."""

    page: str
    line: int
    language: str
    text: str
    how: str = ""
    output: str = ""

    @property
    def reason(self) -> str:
        """Return why it is never run, or an empty text."""
        return self.how.removeprefix("no, ") if self.how.startswith("no, ") else ""

    @property
    def missing(self) -> str:
        """Return the program that it needs and this machine lacks, or an empty text."""
        words = set(re.findall(r"[\w-]+", self.text)) if self.language == "sh" else set()
        needed = words | {{"js": "node"}.get(self.language, "")}
        return next((each for each in _PROGRAMS if each in needed and not shutil.which(each)), "")

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


def snippets(page: str) -> list[Snippet]:
    """Return the snippets of a page in order."""
    text = (ROOT / page).read_text()
    return [
        Snippet(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["how"] or "",
            found["output"] or "",
        )
        for found in _BLOCK.finditer(text)
        if found["language"] in LANGUAGES
    ]


class Reader:
    """Somebody who goes through pages in `folder`; what they start serves until the end.

    In a `clone` everything is run and listens as written; elsewhere what needs a clone is left out,
    and ports are free ones.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], *, clone: bool) -> None:
        self._folder = folder
        self._clone = clone
        self._state = Path(tempfile.mkstemp(prefix="legato-snippets-")[1])
        self._ports = {each: each if clone else free_address() for each in PORTS}
        self._environment = {
            **environment,
            "STATE": str(self._state),
            "LEGATO_SERVER": self._ports["127.0.0.1:50051"],
            "GOFLAGS": "-mod=mod",
        }
        self._groups: list[int] = []
        self._started: dict[str, str] = {}  # options by the address that listens

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        self._state.unlink()

    def _end(self) -> None:
        """End what pages started, which is in the sessions of their blocks."""
        for group in self._groups:
            try:
                os.killpg(group, signal.SIGTERM)
            except ProcessLookupError:
                continue
        for address in self._ports.values():
            until(lambda address=address: not listens(address), f"{address} to be free")
        self._groups.clear()
        self._started.clear()

    def skips(self, snippet: Snippet) -> str:
        """Return why a snippet is not run here, or an empty text."""
        if snippet.how == "clone" and not self._clone:
            return "needs a clone: make walk"
        return snippet.reason or (f"needs {snippet.missing}" if snippet.missing else "")

    def read(self, page: str) -> list[tuple[Snippet, str, str]]:
        """Run a page; return its snippets with their outputs, or why they were not run."""
        self._state.write_text("")
        found = snippets(page)
        reasons = [self.skips(each) for each in found]
        if not any(
            _SERVER.search(each.text) and "serve" in each.text
            for each, reason in zip(found, reasons, strict=True)
            if not reason
        ) and not all(reasons):
            self.run(Snippet(page, 0, "sh", "legato serve\n"))
        results = []
        for each, reason in zip(found, reasons, strict=True):
            why = reason or self._lacks(each)
            results.append((each, "" if why else self.run(each), why))
        return results

    def _lacks(self, snippet: Snippet) -> str:
        """Return which package of others a program imports and the environment lacks."""
        if snippet.language != "python":
            return ""
        modules = re.findall(r"^(?:import|from) (\w+)", snippet.text, re.MULTILINE)
        ours = {"legato_client", *sys.stdlib_module_names}
        wanted = "".join(f"import {each}\n" for each in modules if each not in ours)
        if not wanted:
            return ""
        code, _, errors = self._bash(f"python - <<'SNIPPET'\n{wanted}SNIPPET\n")
        return "" if code == 0 else errors.strip().splitlines()[-1]

    def run(self, snippet: Snippet) -> str:
        """Run a snippet and return what it shows. Raises AssertionError if it is not as written."""
        text = snippet.text
        for written, own in self._ports.items():
            text = text.replace(written, own)
        match snippet.language:
            case "sh":
                return self._shell(snippet, text)
            case "python":
                return self._checked(snippet, self._bash(f"python - <<'SNIPPET'\n{text}SNIPPET\n"))
            case "js":
                return self._checked(snippet, self._bash(f"node - <<'SNIPPET'\n{text}SNIPPET\n"))
        return self._checked(snippet, self._bash(f"cat > main.go <<'SNIPPET'\n{text}SNIPPET\n"))

    def _shell(self, snippet: Snippet, text: str) -> str:
        """Run commands; what serves is left running, and they return once it does."""
        started: list[tuple[str, Path]] = []

        def in_background(found: re.Match[str]) -> str:
            command, options = found[1], found[2].strip()
            address = next(self._ports[each] for each, name in PORTS.items() if name == command)
            log = self._folder / f"{command}.log"
            started.append((address, log))
            if self._started.get(address) == options:
                return ":"
            if address in self._started:
                self._end()
            self._started[address] = options
            started_as = f"legato {command} --listen {address} {options} > {log} 2>&1 &"
            return f"{started_as}\necho $! > {log}.pid"

        done = self._bash(_SERVER.sub(in_background, text))
        shown = self._checked(snippet, done) if not started else done[1]
        for address, log in started:
            until(
                lambda address=address, log=log: self._serves(address, log),
                f"{snippet}: {address} to serve",
            )
            shown += log.read_text()
        return shown

    def _serves(self, address: str, log: Path) -> bool:
        process = Path("/proc", Path(f"{log}.pid").read_text().strip())
        assert process.exists(), f"it ended:\n{log.read_text()}"
        if address != self._ports["127.0.0.1:50051"]:
            return listens(address)
        is_ready = listens(address) and '"event":"ready"' in log.read_text()
        return is_ready and self._bash("legato info")[0] == 0

    def _bash(self, text: str) -> tuple[int, str, str]:
        """Return exit code, output and errors of a script that starts where the last one ended."""
        script = f'set -e\n[ -s "$STATE" ] && source "$STATE"\ntrap \'{_SAVE}\' EXIT\n{text}'
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            self._groups.append(process.pid)
            code = process.wait(PATIENCE)
            for each in (out, err):
                each.seek(0)
            return code, out.read(), err.read()

    def _checked(self, snippet: Snippet, done: tuple[int, str, str]) -> str:
        code, shown, errors = done
        assert code == 0, f"{snippet} exits with {code}:\n{shown}{errors}"
        if snippet.language != "go" and snippet.how != "quiet":
            assert shown.strip(), f"{snippet} shows nothing:\n{errors}"
        lines = {plain(line) for line in shown.splitlines()}
        for line in snippet.output.splitlines():
            assert plain(line) in lines, f"{snippet} does not show {line!r}, but:\n{shown}"
        return shown


def plain(line: str) -> str:
    """Return a line without its numbers, which depend on the machine."""
    return re.sub(r"-?\d+(\.\d+)?", "0", line.strip())


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def until(condition: object, what: str) -> None:
    """Return once `condition()` holds."""
    assert callable(condition)
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.2)


def on_two_cores() -> None:
    """Leave two cores to this process and all that it starts."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


# ---------------------------------------------------------------- a fresh clone


def main() -> int:
    """Clone this repository's commit, and go through the pages there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="of the repository; default: all")
    parser.add_argument("--keep", action="store_true", help="leave the clone and its venv")
    args = parser.parse_args()
    on_two_cores()
    folder = Path(tempfile.mkdtemp(prefix="legato-walk-"))
    clone = folder / "legato"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    path = [each for each in os.environ["PATH"].split(os.pathsep) if "/.venv/" not in f"{each}/"]
    environment = {**os.environ, "PATH": os.pathsep.join(path)}
    for name in ("VIRTUAL_ENV", "PYTHONPATH"):
        environment.pop(name, None)
    commit = subprocess.check_output(["git", "-C", str(clone), "rev-parse", "HEAD"], text=True)
    print(f"{commit.strip()} in {clone}, {len(os.sched_getaffinity(0))} cores", flush=True)
    try:
        return sum(_walk(page, clone, environment) for page in args.pages or PAGES)
    finally:
        if not args.keep:
            shutil.rmtree(folder)


def _walk(page: str, clone: Path, environment: dict[str, str]) -> int:
    """Go through a page and print what it shows; return the number of failures, 0 or 1."""
    begun = time.monotonic()
    print(f"\n=== {page}", flush=True)
    venv = clone / ".venv" / "bin"
    if page != PAGES[0]:  # whose first block makes it
        environment["PATH"] = os.pathsep.join((str(venv), environment["PATH"]))
    try:
        with Reader(clone, environment, clone=True) as reader:
            for snippet, shown, reason in reader.read(page):
                print(f"--- {snippet}: {f'not run: {reason}' if reason else 'ok'}")
                print("".join(f"    {line}\n" for line in shown.splitlines()[:12]), end="")
    except AssertionError as error:
        print(f"FAILED {error}")
        return 1
    finally:
        print(f"    ({time.monotonic() - begun:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
