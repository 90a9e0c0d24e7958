"""Writes the table of metrics into observability.md: python docs/metrics_table.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from legato_service.metrics import catalogue
from legato_service.metrics.catalogue import Metric

PAGE = Path(__file__).with_name("observability.md")
_BEGIN, _END = "<!-- table: metrics -->\n", "<!-- end of table -->\n"
_GROUPS: tuple[tuple[str, Sequence[Metric]], ...] = (
    ("RPCs", catalogue.CALLS),
    ("Requests", catalogue.REQUESTS),
    ("Service processes and sessions", catalogue.PROCESSES),
    ("Engine", catalogue.ENGINE),
    ("OpenTelemetry's names", catalogue.GEN_AI),
    ("vLLM's names", catalogue.VLLM),
)
_SUFFIXES = {"counter": "_total", "info": "_info"}


def tables() -> str:
    """Return a table for each group of metrics."""
    return "\n".join(_table(title, metrics) for title, metrics in _GROUPS)


def page() -> str:
    """Return the page with these tables."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{tables()}\n{_END}{after}"


def _table(title: str, metrics: Sequence[Metric]) -> str:
    heads = ("| metric | kind | labels | meaning |", "| --- | --- | --- | --- |")
    lines = [f"### {title}", "", *heads]
    for metric in metrics:
        name = f"`{metric.name}{_SUFFIXES.get(metric.kind, '')}`"
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| {name} | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
