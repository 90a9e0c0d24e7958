"""Charts of docs/performance.md, drawn from records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.publish.decode_paths import NAMES, counts
from benchmarks.publish.records import STREAMS, Records
from benchmarks.publish.tables import LONE_STAGES, peers

_LEFT, _BAR, _GAP = 270, 18, 6
_WIDTH, _PLOT = 780, 440

Part = tuple[float, str, str]  # milliseconds, colour, word inside the bar
Group = tuple[str, list[tuple[str, list[Part], str]]]  # title; name, parts and figure of each bar


def draw(records: Records) -> dict[str, str]:
    """Return the SVG of each chart by its name."""
    return {
        "chart-decode": decode(records),
        "chart-launches": launches(records),
        "chart-lone": lone(records),
        "chart-two-slots": two_slots(records),
    }


def decode(records: Records) -> str:
    """One decode step against the byte floor and peers."""
    figures = records.figures("h200/kernels")
    groups: list[Group] = []
    for index, streams in enumerate(STREAMS):
        cell = figures[f"moondream2 {streams}x1"]
        bars = [
            _bar("byte floor", cell["floor"], GREY),
            _bar("Legato", cell["step"], BLUE),
        ]
        for name, steps, _ in peers(records):
            if steps[index] != "-":
                earlier = "not of this run" in name
                color = ORANGE if earlier else VIOLET
                bars.append(_bar(_short(name), float(steps[index]), color))
        groups.append((f"{streams} stream{'s' if streams > 1 else ''}", bars))
    return _bars("Decode step of Moondream 2's shape on one H200, ms (less is better)", groups)


def lone(records: Records) -> str:
    """Stages of a lone request for a new image."""
    colors = (GREEN, ORANGE, RED, BLUE, VIOLET, GREEN)
    bars = []
    for name, words in (("h200/lone", "chart"), ("h200/lone_photos", "photograph")):
        medians = records.figures(name)["median_ms"]
        parts = []
        for (stage, _), color in zip(LONE_STAGES.items(), colors, strict=True):
            wide = medians[stage] > 0.9
            parts.append((medians[stage], color, f"{medians[stage]:.1f}" if wide else ""))
        bars.append((words, parts, f"{medians['whole']:.1f} whole call"))
    legend = list(zip(LONE_STAGES.values(), colors, strict=True))
    title = "Query of a new 850x600 image, alone through gRPC: median ms by stage"
    return _bars(title, [("", bars)], legend)


def launches(records: Records) -> str:
    """Draw launches and waits of one answer by decode path."""
    bars: list[tuple[str, list[Part], str]] = []
    for name, each in counts(records).items():
        parts = [(each["launches"], BLUE, ""), (each["waits"], ORANGE, "")]
        bars.append((NAMES[name], parts, f"{each['launches']} + {each['waits']}"))
    legend = [("decode launches", BLUE), ("waits of the host for one", ORANGE)]
    return _bars("One answer of 256 tokens", [("", bars)], legend)


def two_slots(records: Records) -> str:
    """Draw a step of the blocking loop beside one of two launches in flight."""
    groups: list[Group] = []
    for streams in STREAMS:
        row = records.row("h200/decode", task="query", streams=streams)
        bars = []
        for name, words in (("blocking", "blocking loop"), ("pipelined", "two launches in flight")):
            step = row[name]
            parts = [
                (step["forward"], BLUE, "forward"),
                (step["sampling"], VIOLET, ""),
                (step["idle"], RED, "idle" if step["idle"] > 0.15 else ""),
            ]
            bars.append((words, parts, f"{step['period']:.3f} a step"))
        gain = f"{100 * (row['observed'] - 1):.1f} % more tokens/s"
        groups.append((f"{streams} stream{'s' if streams > 1 else ''}: {gain}", bars))
    legend = [("forward", BLUE), ("sampling", VIOLET), ("device idle", RED)]
    return _bars("One decode step on one H200, ms", groups, legend)


def _short(name: str) -> str:
    """Shorten a peer's name to what fits beside a bar."""
    if "not of this run" in name:
        return " ".join(name.split(",", maxsplit=1)[0].split()[:2]) + " (not of this run)"
    name = name.replace("Moondream's reference implementation", "Moondream's reference")
    return name.replace("static cache, ", "")


def _bar(name: str, value: float, color: str) -> tuple[str, list[Part], str]:
    return name, [(value, color, "")], f"{value:.2f}"


def _bars(title: str, groups: Sequence[Group], legend: Sequence[tuple[str, str]] = ()) -> str:
    """Draw groups of horizontal, stacked bars over one scale."""
    count = sum(len(bars) for _, bars in groups)
    height = 46 + count * (_BAR + _GAP) + 30 * len(groups) + 26 * math.ceil(len(legend) / 3)
    longest = max(sum(part[0] for part in parts) for _, bars in groups for _, parts, _ in bars)
    scale = _PLOT / longest / 1.2
    canvas = Canvas(_WIDTH, height, title)
    canvas.text((16, 26), title, size=14, bold=True)
    y = 40.0
    for heading, bars in groups:
        y += 24
        canvas.text((16, y - 8), heading, size=12, bold=True)
        for name, parts, figure in bars:
            canvas.text((_LEFT - 8, y + 13), name, size=11.5, anchor="end")
            x = float(_LEFT)
            for value, color, words in parts:
                canvas.bar((x, y), (value * scale, _BAR), color, words)
                x += value * scale
            canvas.text((x + 6, y + 13), figure, size=11.5, color=FAINT)
            y += _BAR + _GAP
        y += 6
    for index, (name, color) in enumerate(legend):
        x, row = 16 + 240 * (index % 3), y + 22 * (index // 3)
        canvas.bar((x, row + 8), (12, 12), color)
        canvas.text((x + 17, row + 18), name, size=11.5)
    return canvas.finished()


# ---------------------------------------------------------------- svg
# A small SVG canvas: boxes, arrows, bars and words, and nothing to install.


INK = "#243447"
FAINT = "#6b7a8c"
PAPER = "#ffffff"
BLUE, GREEN, ORANGE, RED, VIOLET, GREY = (
    "#2f6fa8",
    "#3a8f5c",
    "#d98324",
    "#c0453f",
    "#7a5ba6",
    "#9aa7b4",
)
TINTS = {
    BLUE: "#e6f0f8",
    GREEN: "#e6f4ea",
    ORANGE: "#fbefdf",
    RED: "#fae7e6",
    VIOLET: "#efe9f6",
    GREY: "#f1f4f6",
}

Point = tuple[float, float]


class Canvas:
    """Collects shapes; coordinates are pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif" '
            f'font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def text(
        self,
        at: Point,
        words: str,
        *,
        size: float = 13,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        """Write a line of text with its baseline at `at`."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(words)}</text>'
        )

    def box(
        self, at: Point, size: Point, lines: Sequence[str] = (), color: str = BLUE, rx: int = 6
    ) -> None:
        """Draw a box with centred lines, the first one bold."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{rx}" '
            f'fill="{TINTS[color]}" stroke="{color}" stroke-width="1.4"/>'
        )
        top = y + height / 2 - 8.5 * (len(lines) - 1) + 4.5
        for index, line in enumerate(lines):
            place = (x + width / 2, top + 17 * index)
            if index:
                self.text(place, line, size=11.5, anchor="middle", color=FAINT)
            else:
                self.text(place, line, anchor="middle", bold=True)

    def frame(self, at: Point, size: Point, title: str, color: str = GREY) -> None:
        """Draw a dashed frame with its title at the top left, inside."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="10" '
            f'fill="none" stroke="{color}" stroke-dasharray="5 4"/>'
        )
        self.text((x + 12, y + 20), title, color=FAINT, bold=True)

    def bar(self, at: Point, size: Point, color: str, words: str = "") -> None:
        """Draw a filled bar with a short word in it."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
            f'fill="{color}"/>'
        )
        if words:
            middle = (x + width / 2, y + height / 2 + 4)
            self.text(middle, words, size=11, anchor="middle", color=PAPER)

    def line(self, points: Sequence[Point], color: str = INK, *, dashed: bool = False) -> None:
        """Draw a plain line through the points."""
        self._path(points, color, ' stroke-dasharray="3 4"' if dashed else "")

    def arrow(self, points: Sequence[Point], words: str = "", *, dashed: bool = False) -> None:
        """Draw an arrow through the points, with words above the middle of its first part."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._path(points, INK, f' marker-end="url(#head)"{dash}')
        if words:
            (x0, y0), (x1, y1) = points[:2]
            self.text(((x0 + x1) / 2, (y0 + y1) / 2 - 6), words, size=11.5, anchor="middle")

    def finished(self) -> str:
        """Return the SVG document."""
        return "\n".join([*self._parts, "</svg>", ""])

    def _path(self, points: Sequence[Point], color: str, extra: str) -> None:
        (x, y), *rest = points
        shape = f"M{x:.1f} {y:.1f}" + "".join(f"L{x:.1f} {y:.1f}" for x, y in rest)
        self._parts.append(
            f'<path d="{shape}" fill="none" stroke="{color}" stroke-width="1.4"{extra}/>'
        )


# ---------------------------------------------------------------- diagrams
# Diagrams of the documents: processes, a session, the pipeline, the errors of a call.


def draw_diagrams() -> dict[str, str]:
    """Return the SVG of each diagram by its name."""
    return {
        "processes": processes(),
        "session": session(),
        "pipeline": pipeline(),
        "errors": errors(),
    }


def processes() -> str:
    """Clients, service processes and the engine process, and what passes between them."""
    canvas = Canvas(860, 330, "Processes of Legato")
    for index, (name, note) in enumerate(
        (("Python client", "or legato CLI"), ("Go client", ""), ("robot", "session of frames"))
    ):
        canvas.box((16, 40 + 84 * index), (130, 60), [name, *([note] if note else [])], GREEN)
        canvas.arrow([(146, 70 + 84 * index), (236, 150)])
    canvas.text((170, 76), "gRPC", size=11.5)
    canvas.frame((240, 20), (210, 290), "service process, 1 to N")
    canvas.box((256, 54), (178, 54), ["RPC middleware", "ids, deadlines, errors"], BLUE)
    canvas.box((256, 122), (178, 54), ["servicer, sessions", "protobuf to core types"], BLUE)
    canvas.box((256, 190), (178, 54), ["engine client", "Submit, Abort; restart"], BLUE)
    canvas.text((345, 286), "never imports torch", size=11.5, anchor="middle", color=FAINT)
    canvas.frame((600, 20), (244, 290), "engine process, 1 per device")
    canvas.box((616, 54), (212, 44), ["preprocessor threads", "decode, hash images"], ORANGE)
    canvas.box((616, 108), (212, 44), ["scheduler", "plans, two launches"], ORANGE)
    canvas.box((616, 162), (212, 44), ["runtime, models, kernels", "device streams"], ORANGE)
    canvas.box((616, 216), (212, 44), ["KV cache", "pages, prefix tree"], ORANGE)
    canvas.text((722, 286), "knows no gRPC", size=11.5, anchor="middle", color=FAINT)
    canvas.arrow([(450, 206), (600, 140)], "")
    canvas.text((525, 148), "local socket", size=11.5, anchor="middle")
    canvas.arrow([(600, 180), (450, 232)])
    canvas.text((525, 250), "outputs, heartbeats", size=11.5, anchor="middle")
    canvas.box((476, 46), (98, 44), ["/dev/shm", "image bytes"], GREY)
    canvas.arrow([(450, 78), (476, 72)])
    canvas.arrow([(574, 70), (616, 74)])
    return canvas.finished()


def session() -> str:
    """Frames, credits and drops of a session over time."""
    canvas = Canvas(860, 400, "A session: frames, credits, drops")
    camera, server, engine = 120, 430, 720
    for x, name in ((camera, "robot"), (server, "session"), (engine, "engine")):
        canvas.box((x - 60, 14), (120, 30), [name], GREY)
        canvas.line([(x, 44), (x, 384)], FAINT, dashed=True)
    steps = (
        (70, camera, server, "open: tasks, policy, max_frame_age"),
        (96, server, camera, "opened: frame_credits 2"),
        (126, camera, server, "frame 1"),
        (140, server, engine, "its tasks, one image"),
        (160, server, camera, "accepted 1: frame_credits 2"),
        (190, camera, server, "frame 2 (waits: frame 1 runs)"),
        (216, camera, server, "frame 3 (newer)"),
        (240, server, camera, "dropped 2: SUPERSEDED by 3"),
        (268, engine, server, "results of frame 1"),
        (284, server, camera, "results of frame 1"),
        (302, server, engine, "frame 3"),
        (328, engine, server, "results of frame 3"),
        (350, server, camera, "results of 3, or dropped: TOO_OLD"),
    )
    for y, start, end, words in steps:
        inset = 4 if end > start else -4
        canvas.arrow([(start, y), (end - inset, y)], words)
    canvas.text((16, 392), "Every frame ends in its results or in one FrameDropped.", color=FAINT)
    return canvas.finished()


def pipeline() -> str:
    """Two launches in flight beside the blocking loop."""
    canvas = Canvas(860, 340, "Two launches in flight and the blocking loop")
    left, step, prepare = 130, 150, 50
    canvas.text((16, 26), "blocking loop (--pipeline-depth 1)", bold=True)
    canvas.text((16, 62), "host")
    canvas.text((16, 96), "device")
    x = float(left)
    for index in range(3):
        canvas.bar((x, 48), (prepare, 22), ORANGE, f"plan {index + 1}")
        canvas.bar((x + prepare, 82), (step, 22), BLUE, f"step {index + 1}")
        canvas.bar((x + prepare + step, 48), (30, 22), GREEN, "read")
        x += prepare + step + 30
        canvas.bar((x - 30, 82), (30 + prepare * (index < 2), 22), RED, "idle")
    canvas.text((16, 156), "two launches in flight", bold=True)
    for row, words in enumerate(("host", "slot 1", "slot 2")):
        canvas.text((16, 194 + 34 * row), words)
    canvas.bar((left, 180), (prepare, 22), ORANGE, "plan 1")
    x = left + prepare
    for index in range(4):
        slot = index % 2
        later = 34 * (index > 0)
        canvas.bar((x + later + 4, 180), (prepare, 22), ORANGE, f"plan {index + 2}")
        canvas.bar((x, 214 + 34 * slot), (step, 22), BLUE, f"step {index + 1}")
        if index:
            canvas.bar((x + 4, 180), (30, 22), GREEN, f"c {index}")
        x += step
    canvas.text(
        (16, 306), "While step 1 runs, the host plans step 2 and enqueues its forward pass."
    )
    canvas.text(
        (16, 326),
        "The commit of step 1 (c 1) comes before step 2 is sampled, and frees slot 1 for step 3.",
    )
    return canvas.finished()


def errors() -> str:
    """Draw a client's reactions to failed calls."""
    canvas = Canvas(860, 420, "What to do with a failed call")
    rows = (
        ("UNAVAILABLE", "starting, lost, draining", "retry here or elsewhere (clients do)", GREEN),
        ("RESOURCE_EXHAUSTED", "queue full, quota", "wait retry_after seconds, then retry", GREEN),
        ("DEADLINE_EXCEEDED", "too slow for the deadline", "allow more time, or send less", ORANGE),
        ("ABORTED", "slow reader, torn frame", "read faster, or send it again", ORANGE),
        ("NOT_FOUND", "image, model, adapter", "upload the image again, fix the name", ORANGE),
        ("INVALID_ARGUMENT", "field, image, prompt", "change the request; never retry", RED),
        ("FAILED_PRECONDITION", "task or shared memory", "use another model, or send bytes", RED),
        ("INTERNAL", "a defect", "report it with the request id", VIOLET),
    )
    canvas.box((16, 180), (130, 56), ["call failed", "gRPC status"], GREY)
    for index, (status, when, action, color) in enumerate(rows):
        y = 16 + 50 * index
        canvas.line([(146, 208), (176, 208), (176, y + 20), (196, y + 20)])
        canvas.box((196, y), (290, 40), [status, when], color)
        canvas.arrow([(486, y + 20), (524, y + 20)])
        canvas.box((526, y), (318, 40), [action], color)
    return canvas.finished()
