"""Text for people, or one JSON document for machines."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from legato_client import _errors
from legato_client.cli.settings import CommandError, ExitCode, exit_code_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_COUNT_PERIOD = 10.0  # seconds between two lines with a count
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

    @property
    def can_draw(self) -> bool:
        """Return whether rich is installed, and `out` a terminal."""
        return self.is_interactive and importlib.util.find_spec("rich") is not None

    def on_standard_error(self) -> Terminal:
        """Write to standard error: standard output belongs to another reader."""
        return Terminal(self.json_output, self._err, self._err)

    def console(self) -> Console:
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
        if self.can_draw:
            self.console().print(rich_table(headers, rows))
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
        if self.can_draw:
            with self.console().status(printable(text)) as status:
                yield status.update
            return
        self.line(text)
        yield lambda _text: None

    @contextlib.contextmanager
    def live(self, *, transient: bool = False) -> Iterator[Live | None]:
        """Yield rich's display of what changes, None where there is none."""
        if not self.can_draw:
            yield None
            return
        from rich.live import Live

        with Live(console=self.console(), auto_refresh=False, transient=transient) as live:
            yield live

    @contextlib.contextmanager
    def counting(self, what: str, total: int | None, done: int) -> Iterator[Callable[[], None]]:
        """Yield a function that counts one more, for any thread; `total` is None if unknown.

        Without a terminal of its own, and rich, the count is a line now and then.
        """
        if self.can_draw:
            from rich import progress

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
            )
            with progress.Progress(*columns, console=self.console()) as shown:
                task = shown.add_task(what, total=total, completed=done)
                yield lambda: shown.advance(task)
            return
        lock, printed_at = threading.Lock(), time.monotonic()
        of_total = what if total is None else f"of {total} {what}"

        def count() -> None:
            nonlocal done, printed_at
            with lock:
                done += 1
                if time.monotonic() - printed_at >= _COUNT_PERIOD:
                    printed_at = time.monotonic()
                    self.line(f"{done} {of_total}")

        yield count


def rich_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, header_style="bold", border_style="dim")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # a label is no markup
    return table


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


# ---------------------------------------------------------------- remedies

_CONNECTION_HINTS = (  # part of gRPC's message, and what it means
    (
        "WRONG_VERSION_NUMBER",
        "the server does not speak TLS: leave out --tls, --ca, --cert and --key",
    ),
    (
        "http1.x server",
        "that port speaks HTTP/1, as `legato http` and `legato playground` do: name the gRPC port",
    ),
    (
        "certificate has expired",
        "the server's certificate has expired",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is of an authority that is not known here: name its PEM file "
        "with --ca",
    ),
    (
        "Hostname Verification",
        "the server's certificate is for another name or address than that of --server",
    ),
    (
        "Socket closed",
        "the server closed the connection: if it speaks TLS, add --tls or --ca, and if it asks for "
        "a client's certificate, --cert and --key",
    ),
)
_ANY_CONNECTION = "is the server running? start one with `legato serve`"
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC takes the first that is set
_TOKEN = (
    "name a file with a token that is valid now with --token-file, or set LEGATO_TOKEN; the "
    "server's operator makes tokens"
)


def hint_of(error: _errors.LegatoError) -> str:
    """Return the hint lines to print below the error, each with its line break, or ""."""
    lines = [
        f"{each.field}: {each.description}"
        for each in error.field_violations
        if each.description not in error.message
    ]
    if error.retry_after is not None:
        lines.append(f"try again in {error.retry_after:g} s")
    if isinstance(error, _errors.Unavailable) and not error.reason:
        found = (hint for part, hint in _CONNECTION_HINTS if part in error.message)
        lines.append(next(found, _ANY_CONNECTION))
        if proxy := next((name for name in _PROXIES if os.environ.get(name)), ""):
            lines.append(f"servers on other hosts are reached through {proxy}; see no_proxy")
    elif isinstance(error, _errors.DeadlineExceeded):
        lines.append("--timeout allows more time")
    elif isinstance(error, _errors.Unauthenticated):
        lines.append(_TOKEN)
    elif isinstance(error, _errors.PermissionDenied) and "scope" in error.metadata:
        lines.append(f"the token needs the scope {error.metadata['scope']}")
    return "".join(f"\n  {line}" for line in lines)
