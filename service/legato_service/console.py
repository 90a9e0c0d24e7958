"""Progress of the start."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from legato_engine.ipc.messages import Loading, ServedModel
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_ANY_HOST = ("0.0.0.0", "[::]", "::", "")


class TerminalAnnouncer:
    """A progress bar, then a summary with an example command."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def loading(self, progress: Loading) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("loading", total=1.0)
        self._bar.update(self._task, completed=progress.fraction, description=progress.stage)

    def ready(self, address: str, models: Sequence[ServedModel]) -> None:
        self.close()
        model = models[0]
        table = Table.grid(padding=(0, 2))
        table.add_row("listening", Text(address, style="bold"))
        size = f"{model.num_parameters / 1e6:,.1f} M parameters"
        table.add_row("model", f"{model.name} · {size} · {model.dtype}")
        if model.kv_token_bytes:
            cached = f"{model.kv_token_bytes / 1024:,.0f} KiB a token"
            table.add_row("kv cache", f"{cached} · {model.kv_dtype}")
        table.add_row("device", ", ".join(each.device for each in models))
        table.add_row("tasks", " ".join(model.tasks))
        self._console.print(Panel(table, title="legato", expand=False))
        self._console.print("try:", style="dim")
        self._console.print(Text(example(address, model.tasks)), soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        self._bar.stop()


class LogAnnouncer:
    """Announcer that logs one event per stage of the start."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("legato.service")
        self._stage = ""

    def loading(self, progress: Loading) -> None:
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._log.info("loading", stage=progress.stage, fraction=progress.fraction)

    def ready(self, address: str, models: Sequence[ServedModel]) -> None:
        model = models[0]
        devices = ", ".join(each.device for each in models)
        cache = {"kv_dtype": model.kv_dtype, "kv_token_bytes": model.kv_token_bytes}
        self._log.info("ready", address=address, model=model.name, device=devices, **cache)

    def close(self) -> None:
        pass


Announcer = TerminalAnnouncer | LogAnnouncer
"""Display of the progress of the start: `loading` is called repeatedly, also without a change;
`ready` gets a model for each engine and device."""


def example(address: str, tasks: Sequence[str]) -> str:
    """Return a command of this package that the model can answer."""
    host, _, port = address.rpartition(":")
    host = "127.0.0.1" if host in _ANY_HOST else host
    asked = "detect photo.jpg cup" if "detect" in tasks else 'query "Why is the sky blue?"'
    return f"legato {asked} --server {host}:{port}"
