"""The tables of the documents, made from records.

Each function returns Markdown: a table, and below it the records that its figures come from. A
table whose figures come from several commits names the record of each row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.publish import decode_paths, sizing
from benchmarks.publish.records import STREAMS, Records, Row, sources
from benchmarks.record import table
from benchmarks.robot import run as robot_run

# ---------------------------------------------------------------- peers

# Figures of peers, each with its version and its source.


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


# ---------------------------------------------------------------- service

# Tables of what the service costs around an engine without a model.


def service(records: Records) -> str:
    """Throughput of the service around an engine without a model, as shares of a bare server."""
    name = records.newest("serve_2cores_*", "cases", "processes")
    figures, rows = records.figures(name), []
    scaled = {(each["case"], each["processes"]): each["share"] for each in figures["processes"]}
    for case, turns in figures["cases"].items():
        rates = [turn["per_second"] for turn in turns["bare"]]
        shares = [_paired_share(turns["bare"], turns[server]) for server in ("inside", "legato")]
        shares += [scaled[case, processes] for processes in (1, 2)]
        rows.append([case, f"{statistics.median(rates):,.0f}", *(f"{each:.0%}" for each in shares)])
    heads = (
        "two cores, clients included",
        "bare grpc.aio server, calls or messages/s",
        "engine inside the service process",
        "engine process beside it",
        "eight callers, one service process",
        "eight callers, two service processes",
    )
    return table(heads, rows) + sources(records, name)


def idle_sessions(records: Records) -> str:
    """Format what idle sessions cost a Query."""
    name = records.newest("serve_2cores_*", "idle_sessions")
    rows = [
        [
            f"{each['sessions']:,}",
            *(f"{each[field]:.2f}" for field in ("p50", "p99", "max")),
            f"{each['bytes_each'] / 1024:.0f}" if each["sessions"] else "-",
        ]
        for each in records.figures(name)["idle_sessions"]
    ]
    heads = ("idle sessions", "Query P50 ms", "P99 ms", "max ms", "KiB a session")
    return table(heads, rows) + sources(records, name)


def _paired_share(bare: Sequence[Row], own: Sequence[Row]) -> float:
    """Return the median of the ratios of turns that were taken in pairs."""
    pairs = zip(bare, own, strict=True)
    ratios = [float(mine["per_second"] / theirs["per_second"]) for theirs, mine in pairs]
    return statistics.median(ratios)


# ---------------------------------------------------------------- tables

LONE_STAGES = {
    "there": "client to engine",
    "picture": "JPEG decoding",
    "launch": "planning and launch",
    "prefill": "device, to the first token",
    "decode": "device, two more tokens",
    "back": "engine to client",
}


def decode(records: Records) -> str:
    """One decode step by number of streams, beside peers."""
    rows = [
        ["byte floor at 4.68 TB/s", *_kernels(records, "floor"), records.link("h200/kernels")],
        [_forward(records), *_kernels(records, "step", "**"), records.link("h200/kernels")],
        *([peer, *steps, source] for peer, steps, source in peers(records)),
        [
            "Legato, device idle between steps",
            *(f"{row['pipelined']['idle']:.3f}" for row in _query_steps(records)),
            records.link("h200/decode"),
        ],
    ]
    heads = ("decode step, ms", *(_streams(n) for n in STREAMS), "record")
    return table(heads, rows) + sources(records, "h200/kernels", "h200/peers", "h200/decode")


def gain(records: Records) -> str:
    """Gain of two launches in flight over the blocking loop."""
    rows = []
    for name, field in (("predicted by the cost model", "predicted"), ("observed", "observed")):
        rows.append([name, *(f"{100 * (row[field] - 1):.1f} %" for row in _query_steps(records))])
    for name in ("blocking", "pipelined"):
        periods = (f"{row[name]['period']:.3f} ms" for row in _query_steps(records))
        rows.append([f"step, {name}", *periods])
    heads = ("two launches in flight", *(_streams(n) for n in STREAMS))
    return table(heads, rows) + sources(records, "h200/decode")


def requests(records: Records) -> str:
    """Whole requests through gRPC, alone and from 64 callers."""
    names = {
        "h200/e2e": "chart, JPEG of {} kB",
        "h200/e2e_photos": "photograph, JPEG of {} kB",
        "h200/e2e_fp8": "chart, fp8 tower",
    }
    rows = []
    for name, words in names.items():
        size = round(records.figures(name)["jpeg_bytes"] / 1000)
        alone = _cell(records, name, "new", 1, "p50")
        known = _cell(records, name, "cached", 1, "p50")
        new, mix = (_cell(records, name, kind, 64, "per_second") for kind in ("new", "mix"))
        cells = [alone and f"{alone:.1f} ms", known and f"{known:.1f} ms"]
        cells += [f"{each:.0f}" if each else "" for each in (new, mix)]
        rows.append([words.format(size), *(cell or "-" for cell in cells), records.link(name)])
    heads = (
        "Query, 850x600, 3 tokens",
        "new image alone, P50",
        "known image alone, P50",
        "64 callers, new images: answers/s",
        "64 callers, 5 questions per 3 images: answers/s",
        "record",
    )
    return table(heads, rows) + sources(records, *names)


def lone(records: Records) -> str:
    """Stages of one request for a new image."""
    names = ("h200/lone", "h200/lone_photos")
    medians = [records.figures(name)["median_ms"] for name in names]
    rows = [
        [words, *(f"{each[stage]:.2f}" for each in medians)]
        for stage, words in (LONE_STAGES | {"whole": "whole call"}).items()
    ]
    heads = ("stage, median ms", "chart", "photograph")
    return table(heads, rows) + sources(records, *names)


def hop(records: Records) -> str:
    """Format what gRPC and the process boundary add to a request for a known image."""
    rows = []
    for name in ("h200/hop", "h200/hop_again"):
        for row in records.rows(name):
            for client, field in (("blocking", "hop_blocking_ms"), ("asyncio", "hop_ms")):
                image = "by id" if row["picture"] == "id" else "as bytes"
                bare = row["bare"][client]
                cells = (f"{row[field]:.2f}", f"{bare:.2f}", f"{row[field] - bare:.2f}")
                rows.append([f"image {image}, {client} client", *cells, records.link(name)])
    heads = ("known photograph, P50 ms", "added", "of it a bare grpc.aio server", "rest", "record")
    return table(heads, rows) + sources(records, "h200/hop", "h200/hop_again")


def speculation(records: Records) -> str:
    """Gains of speculation with an oracle, decode phase beside whole requests."""
    rows = []
    for share in ("0.4", "0.6", "0.8"):
        cells = []
        for streams in (1, 8):
            off, budget = (
                records.row("h200/speculation", workload=share, streams=streams, setting=setting)
                for setting in ("off", "budget")
            )
            fields = ("decode_tokens_per_second", "tokens_per_second")
            cells += [f"{budget[field] / off[field]:.2f}" for field in fields]
        rows.append([f"{float(share):.0%}", *cells])
    heads = (
        "draft tokens of the oracle that are right",
        "1 stream, decode phase",
        "1 stream, whole request",
        "8 streams, decode phase",
        "8 streams, whole request",
    )
    note = (
        "Tokens a second relative to the same run without speculation, with `--speculation budget` "
        "and draft tokens from an oracle that is right at the given rate. An oracle is no "
        "product: it shows what drafts of that quality would bring."
    )
    loads = ("0.4", "0.6", "0.8", "mixed")
    settings = ("fixed:1", "fixed:3", "fixed:7", "seed", "budget")
    by_setting = [[load, *(_gain(records, load, each) for each in settings)] for load in loads]
    policies = table(("8 streams, decode phase", *settings), by_setting)
    mixed = "`mixed`: each request's draft tokens are right at a rate of 0.95, 0.1, 0.6 or 0.8."
    parts = (table(heads, rows), note, policies, mixed)
    return "\n\n".join(parts) + sources(records, "h200/speculation")


def _gain(records: Records, load: str, setting: str) -> str:
    """Tokens a second of eight streams, in the decode phase, relative to none drafted."""
    with_drafts, plain = (
        records.row("h200/speculation", workload=load, streams=8, setting=each)
        for each in (setting, "off")
    )
    field = "decode_tokens_per_second"
    return f"{with_drafts[field] / plain[field]:.2f}"


def moondream3(records: Records) -> str:
    """Moondream 3's decode step."""
    figures, rows = records.figures("h200/kernels_moondream3"), []
    names = {
        "moondream3": "bfloat16",
        "moondream3-e4m3-kv8": "experts, keys and values in e4m3",
    }
    shapes = ("1x1", "8x1", "32x1", "4x1@32767")
    for name, words in names.items():
        cells = (figures[f"{name} {shape}"] for shape in shapes)
        rows.append([words, *(_of_floor(cell) for cell in cells)])
    heads = (
        "Moondream 3, ms (share of the byte floor)",
        *(_streams(n) for n in STREAMS),
        "4 streams at position 32,767",
    )
    return table(heads, rows) + sources(records, "h200/kernels_moondream3")


def adapters(records: Records) -> str:
    """Format what an adapter adds to a decode step at one stream."""
    rows = []
    for model, words in (("moondream2", "Moondream 2"), ("moondream3", "Moondream 3")):
        steps = {
            row["rank"]: row["step_ms"]
            for row in records.rows("h200/adapters")
            if (row["model"], row["streams"]) == (model, 1)
        }
        rows.append([words, *(f"+{steps[rank] - steps[0]:.2f}" for rank in (8, 64, 512))])
    heads = ("one adapter, one stream, ms", "rank 8", "rank 64", "rank 512")
    return table(heads, rows) + sources(records, "h200/adapters")


def tiny(records: Records) -> str:
    """Detect by legato-tiny on two CPU cores."""
    name = "rpc_tiny_cpu_2026-11-21"
    figures = records.figures(name)
    rows = [
        [words, *(f"{figures[part][field]:,.0f}" for field in ("p50", "p95"))]
        for part, words in (
            ("alone", "new 640x480 image, alone"),
            ("cached", "known image, alone"),
            ("many", "new images, 64 callers"),
        )
    ]
    heads = ("Detect, 7 tokens", "P50 ms", "P95 ms")
    return table(heads, rows) + sources(records, name)


def lift(records: Records) -> str:
    """Format the errors of centres in 3D."""
    shown = {
        "box": "box",
        "box: median of all": "median over the same box, to compare",
        "outline": "outline",
        "point": "point",
    }
    found = {each["method"]: each for each in records.figures("lift")["mujoco"]}
    parts = [each for each in found["box"]["parts"] if each["occlusion"] in (0, 0.4)]
    keys = [(each["distance_m"], each["occlusion"]) for each in parts]
    rows = []
    for method, name in shown.items():
        own = {(e["distance_m"], e["occlusion"]): e for e in found[method]["parts"]}
        cells = (f"{100 * own[k]['median_m']:.1f} / {100 * own[k]['p95_m']:.1f}" for k in keys)
        within = found[method]["within"]
        rows.append([name, *cells, "-" if within is None else f"{within:.0%}"])
    places = (f"{d:g} m" + (f", {o:.0%} hidden" if o else "") for d, o in keys)
    heads = ("error, cm (median / P95)", *places, "within two deviations")
    return table(heads, rows) + sources(records, "lift")


def robot(records: Records) -> str:
    """Format what a robot knows of moving things, by server and load, and what kills cost it."""
    servers = records.figures("robot")["servers"]
    runs = {
        f"{name}, {run}": f for name, each in servers.items() for run, f in each["runs"].items()
    }
    kills = [
        [f"{name}, kill {number}", *robot_run.outage_cells(outage)]
        for name, each in servers.items()
        for number, outage in enumerate(each["outages"], 1)
    ]
    tables = table(["", *runs], robot_run.rows(runs)), table(["", *robot_run.OUTAGE], kills)
    return "\n\n".join(tables) + sources(records, "robot")


def headline(records: Records) -> str:
    """Format the one table of README.md."""
    labels = {
        "h200/kernels": "Legato's decode step and the byte floor",
        "h200/decode": "its sampling",
        "h200/e2e": "Legato's request",
        "h200/peers": "peers",
    }
    rows = [
        [_forward(records), *_kernels(records, "step", "**"), "**" + _lone_call(records) + "**"],
        ["least time to read the bytes", *_kernels(records, "floor"), "-"],
    ]
    for peer, steps, _ in peers(records):
        total = reference_total(records) if peer.endswith("implementation, compiled") else "-"
        rows.append([peer, *steps, total])
    heads = (
        "NVIDIA H200, bfloat16, random weights",
        *(f"decode step, {_streams(n)}, ms" for n in STREAMS),
        "new 850x600 image to 3 tokens, ms",
    )
    runs = {
        name: run["figures"]["rows"][0]["p50"]
        for name, run in records.members("h200/e2e_pairs").items()
    }
    warm = runs.pop("warm")
    further = (
        f"\n\nIn {len(runs)} further runs on other H200s the request took "
        f"{min(runs.values()):.1f} to {max(runs.values()):.1f} ms, in their warm-up run {warm:.1f} "
        f"({records.link('h200/e2e_pairs', 'record')})."
    )
    return table(heads, rows) + sources(records, *labels, labels=labels) + further


def _forward(records: Records) -> str:
    """Name Legato's row: its kernels are timed without sampling, which peers include."""
    sampling = max(row["pipelined"]["sampling"] for row in _query_steps(records))
    return f"**Legato**, forward; sampling adds {sampling:.2f}"


def _kernels(records: Records, field: str, mark: str = "") -> Iterator[str]:
    figures = records.figures("h200/kernels")
    return (f"{mark}{figures[f'moondream2 {n}x1'][field]:.2f}{mark}" for n in STREAMS)


def _lone_call(records: Records) -> str:
    return f"{_cell(records, 'h200/e2e', 'new', 1, 'p50'):.1f}, through gRPC"


def _query_steps(records: Records) -> list[Row]:
    return [records.row("h200/decode", task="query", streams=n) for n in STREAMS]


def _cell(records: Records, name: str, workload: str, callers: int, field: str) -> float | None:
    wanted = {"workload": workload, "callers": callers, "tokens": 3}
    rows = [row for row in records.rows(name) if wanted.items() <= row.items()]
    return rows[0][field] if rows else None


def _of_floor(cell: Row) -> str:
    return f"{cell['step']:.2f} ({cell['floor'] / cell['step']:.0%})"


def _streams(number: int) -> str:
    return f"{number} stream{'s' if number > 1 else ''}"


TABLES: dict[str, Callable[[Records], str]] = {
    "adapters": adapters,
    "decode": decode,
    "gain": gain,
    "headline": headline,
    "hop": hop,
    "idle_sessions": idle_sessions,
    "lift": lift,
    "lone": lone,
    "moondream3": moondream3,
    "requests": requests,
    "robot": robot,
    "service": service,
    "speculation": speculation,
    "tiny": tiny,
    **decode_paths.TABLES,
    **sizing.TABLES,
}
