"""One simulated engine beside the records of whole requests."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.fleet.clock import Clock
from benchmarks.fleet.costs import FITTED, EngineCosts, measured
from benchmarks.fleet.engine import Picture, Request, SimulatedEngine
from benchmarks.records import Records

RECORDS = {"h200/e2e": (1, 64), "h200/e2e_photos": (1, 64), "h200/e2e_all": (4, 16)}
PREDICTED = (("new", 3, 128), ("mix", 3, 128), ("cached", 3, 128))  # that no record has
_KNOWN_TOKENS = 4  # of a question, computed, as all questions of the records begin alike
_SECONDS, _WARM_UP = 20.0, 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One cell, measured and simulated; `record` is empty where nothing was measured."""

    record: str
    workload: str
    tokens: int
    callers: int
    fitted: bool
    measured_per_second: float
    simulated_per_second: float
    measured_p50_ms: float
    simulated_p50_ms: float


class Callers:
    """Callers that each send the next request with the answer to the last."""

    def __init__(self, costs: EngineCosts, workload: str, tokens: int, callers: int) -> None:
        self._clock = Clock()
        self._engine = SimulatedEngine(0, self._clock, costs, self)
        self._workload = workload
        self._tokens = tokens
        self._random = random.Random(callers)
        self._pictures = 0
        self._again: list[tuple[int, Picture]] = []  # asked once, and the call to ask again at
        self._calls = 0
        self._num_callers = callers
        self.seconds: list[float] = []

    def run(self) -> tuple[float, float]:
        """Return answers a second and P50 in seconds."""
        for _ in range(self._num_callers):
            self._send()
        self._clock.run(_SECONDS)
        return len(self.seconds) / (_SECONDS - _WARM_UP), statistics.median(self.seconds)

    def _send(self) -> None:
        now = self._clock.now
        self._calls += 1
        self._engine.submit(Request(now, now + 120.0, self._picture(), self._tokens))

    def _picture(self) -> Picture:
        if self._workload == "cached":
            return Picture(0)
        if self._again and self._again[0][0] <= self._calls:
            return self._again.pop(0)[1]
        self._pictures += 1
        picture = Picture(self._pictures)
        if self._workload == "mix" and self._pictures % 3:
            later = self._random.uniform(self._num_callers + 1, 2 * self._num_callers + 2)
            self._again.append((self._calls + round(later), picture))
            self._again.sort(key=lambda each: each[0])
        return picture

    def answered(self, request: Request) -> None:
        if self._clock.now > _WARM_UP:
            self.seconds.append(self._clock.now - request.arrival)
        self._send()

    def refused(self, request: Request) -> None:
        raise AssertionError(f"{self._num_callers} callers filled the queue")

    expired = lost = refused

    def computed(self, picture: Picture) -> None:
        picture.num_computed += 1


def compare(
    records: Records,
    measured_cells: Mapping[str, Sequence[int]] = RECORDS,
    predicted: Sequence[tuple[str, int, int]] = PREDICTED,
) -> Iterator[Comparison]:
    """Simulate the measured cells of records by number of callers, and those without a record."""
    for name, callers in measured_cells.items():
        jpeg_bytes = records.figures(name)["jpeg_bytes"]
        for row in records.rows(name):
            if row["callers"] in callers:
                cell = (row["workload"], row["tokens"], row["callers"])
                per_second, p50 = _simulate(records, jpeg_bytes, *cell)
                yield Comparison(
                    record=name,
                    workload=row["workload"],
                    tokens=row["tokens"],
                    callers=row["callers"],
                    fitted=_is_fitted(name, row["workload"], row["callers"]),
                    measured_per_second=row["per_second"],
                    simulated_per_second=per_second,
                    measured_p50_ms=row["p50"],
                    simulated_p50_ms=p50 * 1e3,
                )
    for cell in predicted:
        per_second, p50 = _simulate(records, records.figures("h200/e2e")["jpeg_bytes"], *cell)
        yield Comparison("", *cell, False, 0.0, per_second, 0.0, p50 * 1e3)


def _simulate(
    records: Records, jpeg_bytes: float, workload: str, tokens: int, callers: int
) -> tuple[float, float]:
    costs = dataclasses.replace(measured(records, jpeg_bytes), known_question_tokens=_KNOWN_TOKENS)
    return Callers(costs, workload, tokens, callers).run()


def _is_fitted(record: str, workload: str, callers: int) -> bool:
    crowd_of_photos = (record, workload, callers) == ("h200/e2e_photos", "cached", 64)
    return crowd_of_photos or (record == "h200/e2e" and (workload, callers) in FITTED)
