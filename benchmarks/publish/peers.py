"""Figures of peers, each with its version and its source."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.publish.records import STREAMS, Records


def peers(records: Records) -> Iterator[tuple[str, list[str], str]]:
    """Yield name, steps by number of streams, and source of each peer."""
    for peer in records.figures("h200/peers")["peers"]:
        rows, name, source = peer["rows"], peer["name"], records.link("h200/peers")
        if not rows:
            rows, source = peer["not_of_this_run"], "none"
        if peer["peer"] == "moondream":
            rows, name = [row for row in rows if row["compiled"]], f"{name}, compiled"
        if not rows:
            continue
        for package, version in peer["versions"].items():
            if name.startswith(package):
                name = f"{package} {version.partition('+')[0]}{name.removeprefix(package)}"
        if source == "none":
            version, date = rows[0].get("version", ""), records.date("h200/peers")
            name = f"{name} {version}".strip() + f", another H200, by {date}, **not of this run**"
        steps = {row["streams"]: f"{row['step_ms']:.2f}" for row in rows}
        yield name, [steps.get(n, "-") for n in STREAMS], source


def reference_total(records: Records) -> str:
    """Return what the reference implementation takes for an image and three tokens."""
    found = {peer["peer"]: peer for peer in records.figures("h200/peers")["peers"]}
    totals = [row["total_ms"] for row in found["moondream"]["rows"] if row["compiled"]]
    return f"{totals[0]:.1f}, without a server" if totals else "-"
