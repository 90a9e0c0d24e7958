"""What the engines' slots, devices and hosts did in the last moment, a line for each."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from legato_client._values.admin import DecodeSteps, TimelineSpan, TimelineUpdate

_WIDTH = 32  # characters of a bar
_SLOT = (("forward", "█"), ("sample", "▓"), ("copy", "▒"), ("commit", "░"))
_DEVICE = (("forward", "█"), ("sample", "▓"), ("idle", "·"))
_HOST = (("plan", "█"), ("launch", "▓"), ("finalize", "▒"), ("commit", "░"))


class SlotView:
    """Adds up updates; `lines` tells them and begins anew, empty without any."""

    def __init__(self) -> None:
        self._engines: dict[int, _Engine] = {}
        self._has_new = False

    def add(self, update: TimelineUpdate) -> None:
        if update.spans:
            self._engines.setdefault(update.engine, _Engine()).add(update)
            self._has_new = True

    def lines(self) -> list[str]:
        found: list[str] = []
        if not self._has_new:
            return found
        self._has_new = False
        for number, engine in sorted(self._engines.items()):
            found += engine.lines(f"engine {number} " if len(self._engines) > 1 else "")
        return found


class _Engine:
    def __init__(self) -> None:
        self._started = 0.0
        self._depth = 0
        self._steps: DecodeSteps | None = None
        self._lost = 0
        self._note = ""
        self._begin = 0.0  # of what is added up, in the server's seconds
        self._end = 0.0
        self._times = collections.defaultdict[tuple[str, str], float](float)  # by lane and name
        self._latest: dict[str, TimelineSpan] = {}  # by lane

    def add(self, update: TimelineUpdate) -> None:
        if self._started not in (0.0, update.engine_started):
            self._note = ", started again"
        self._started, self._depth = update.engine_started, update.pipeline_depth
        self._steps = update.decode_steps or self._steps
        self._lost += update.lost_launches
        slots = {s.launch: s.lane for s in update.spans if s.lane.startswith("slot ")}
        for span in update.spans:
            self._begin = min(self._begin or span.start, span.start)
            self._end = max(self._end, span.start + span.duration)
            lane = span.lane.partition(" ")[0]
            self._times[lane, span.name] += span.duration
            if lane != "slot":
                self._times[slots.get(span.launch, ""), span.name] += span.duration
            self._latest[span.lane] = span

    def lines(self, prefix: str) -> Iterator[str]:
        seconds = max(self._end - self._begin, 1e-9)
        for slot in ("slot 0", "slot 1") if self._depth else ():
            held = self._latest.get(slot)
            what = f"{held.kind} {held.launch}, {held.rows} rows" if held else "free"
            yield self._line(prefix + slot, slot, _SLOT, seconds, what)
        if self._depth:
            yield self._line(prefix + "device", "device", _DEVICE, seconds, self._gains())
        lost = f"{self._lost} launches lost" if self._lost else ""
        yield self._line(prefix + "host", "cpu", _HOST, seconds, lost + self._note)
        self._times.clear()
        self._begin = self._end

    def _line(
        self, label: str, lane: str, parts: tuple[tuple[str, str], ...], seconds: float, text: str
    ) -> str:
        shares = [(mark, name, self._times[lane, name] / seconds) for name, mark in parts]
        bar = "".join(mark * round(share * _WIDTH) for mark, _, share in shares)[:_WIDTH]
        figures = " ".join(f"{mark} {name} {share:4.0%}" for mark, name, share in shares)
        return f"{label:16} |{bar:{_WIDTH}}| {figures}  {text}".rstrip()

    def _gains(self) -> str:
        steps = self._steps
        if steps is None:
            return ""
        step = f"step {steps.step_ms:.2f} ms, depth {self._depth}"
        if self._depth == 1:
            return step
        gains = f"{steps.predicted_gain:+.1%} predicted, {steps.observed_gain:+.1%} observed"
        return f"{step}, gain {gains}"
