"""Text for people, or one JSON document for machines."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from legato_client import _errors
from legato_client.cli.hints import hint_of
from legato_client.cli.settings import CommandError, ExitCode, exit_code_of

if TYPE_CHECKING:
    from rich.console import Console

_BOLD, _DIM, _RED, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"

_CONTROLS = re.compile(
    r"(?P<own>\x1b\[(?:0|1|2|31)m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences, then control strings
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_C1 = re.compile(r"[\x7f-\x9f]")


def printable(text: str) -> str:
    """Remove control sequences, except line ends, tabs and this module's own styles.

    Names, answers and errors are those of a server, a file or a model, which may be hostile.
    """
    return _CONTROLS.sub(lambda found: found["own"] or "", text)


def _json_line(value: dict[str, Any]) -> str:
    """Encode a JSON line that a terminal can print; nothing is lost."""
    text = json.dumps(value, ensure_ascii=False)
    return _C1.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


class Terminal:
    """Standard output and error of one run.

    With `json_output` only `document` writes to `out`, and errors are JSON on `err`. rich draws
    tables where it is installed and `out` is a terminal, else they are aligned columns.
    """

    def __init__(
        self, json_output: bool, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self.json_output = json_output
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    @property
    def is_interactive(self) -> bool:
        return not self.json_output and self._out.isatty()

    def on_standard_error(self) -> Terminal:
        """Write to standard error: standard output belongs to another reader."""
        return Terminal(self.json_output, self._err, self._err)

    def console(self) -> Console:
        """Return rich's console on `out`."""
        from rich.console import Console

        return Console(file=self._out)

    def write(self, text: str) -> None:
        """Write immediately, without a line end."""
        if not self.json_output:
            self._out.write(printable(text))
            self._out.flush()

    def line(self, text: str = "") -> None:
        self.write(text + "\n")

    def notice(self, text: str) -> None:
        """Write a line about the progress of a command to standard error."""
        self._err.write(
            _json_line({"notice": text}) if self.json_output else printable(text) + "\n"
        )
        self._err.flush()

    def heading(self, text: str) -> None:
        self.line(f"{_BOLD}{text}{_RESET}" if self.is_interactive else text)

    def dim(self, text: str) -> str:
        return f"{_DIM}{text}{_RESET}" if self.is_interactive else text

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self.json_output:
            return
        if self.is_interactive and importlib.util.find_spec("rich"):
            self._rich_table(headers, rows)
            return
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        for row in (headers, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.line("  ".join(cells).rstrip())

    def document(self, value: dict[str, Any]) -> None:
        if self.json_output:
            self._out.write(_json_line(value))

    def fail(self, error: _errors.LegatoError | CommandError) -> ExitCode:
        if isinstance(error, CommandError):
            code, report = error.exit_code, {"code": error.exit_code.name, "message": str(error)}
            hint = ""
        else:
            code, report = exit_code_of(error), _report(error)
            hint = hint_of(error)
        if self.json_output:
            self._err.write(_json_line({"error": {"exit_code": int(code), **report}}))
        else:
            label = f"{_RED}error:{_RESET}" if self._err.isatty() else "error:"
            self._err.write(printable(f"legato: {label} {error}{hint}\n"))
        return code

    @contextlib.contextmanager
    def progress(self, text: str) -> Iterator[Any]:
        """Yield a function that changes the text."""
        if self.is_interactive and importlib.util.find_spec("rich"):
            console = importlib.import_module("rich.console").Console(file=self._out)
            with console.status(printable(text)) as status:
                yield status.update
            return
        self.line(text)
        yield lambda _text: None

    @contextlib.contextmanager
    def live(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that shows some lines: in place of those before on a terminal."""
        if not (self.is_interactive and importlib.util.find_spec("rich")):
            yield self.line
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(file=self._out), auto_refresh=False) as live:
            yield lambda text: live.update(Text(printable(text), no_wrap=True), refresh=True)

    @contextlib.contextmanager
    def counting(self, what: str, total: int | None, done: int) -> Iterator[Callable[[], None]]:
        """Yield a function that counts one more, for any thread; `total` is None if unknown.

        Without a terminal of its own, and rich, the count is a line now and then.
        """
        if self.is_interactive and importlib.util.find_spec("rich"):
            progress = importlib.import_module("legato_client.cli.progress_bar")
            with progress.bar(self._out, what, total, done) as count:
                yield count
            return
        yield _LineCount(self, what, total, done)

    def _rich_table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*headers, header_style="bold", border_style="dim")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))  # a label is no markup
        Console(file=self._out).print(table)


class _LineCount:
    """Progress line with the count, updated at most once in `PERIOD` seconds."""

    PERIOD = 10.0

    def __init__(self, terminal: Terminal, what: str, total: int | None, done: int) -> None:
        self._terminal = terminal
        self._what = what if total is None else f"of {total} {what}"
        self._lock = threading.Lock()
        self._done = done
        self._printed_at = time.monotonic()

    def __call__(self) -> None:
        with self._lock:
            self._done += 1
            if time.monotonic() - self._printed_at >= self.PERIOD:
                self._printed_at = time.monotonic()
                self._terminal.line(f"{self._done} {self._what}")


def _report(error: _errors.LegatoError) -> dict[str, Any]:
    return {
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "request_id": error.request_id,
        "metadata": error.metadata,
        "field_violations": [dataclasses.asdict(v) for v in error.field_violations],
        "retry_after": error.retry_after,
    }
