"""Host time of one pipelined scheduler step, on a device that does nothing."""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from collections.abc import Callable, Sequence

from legato_engine.config import SPECULATION_OFF
from legato_engine.core.output import OutputSink
from legato_engine.core.requests import RequestTable, ScheduledRequest
from legato_engine.ipc.messages import EngineMessage, encode
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.models.confidence import Calibration
from legato_engine.models.moondream.tasks import DetectSkill
from legato_engine.models.text import TaskSetup
from legato_engine.scheduler.batch import Launch, LaunchKind, StepRecord
from legato_engine.scheduler.interfaces import Clock, LaunchTimes
from legato_engine.scheduler.scheduler import Pipeline, Scheduler
from legato_engine.sequence import Descriptor, RowTokens, SampledToken, Task
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.speculation import block_sizes
from legato_engine.types import (
    Certainty,
    DetectSpec,
    Event,
    FinishReason,
    PromptToken,
    QueryOutput,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    TextEvent,
)

from benchmarks import record
from benchmarks.publish.summary import DRAFTED

STREAMS = (1, 8, 32)
DRAFTING = ("seed", "budget")
WARM_UP = 200  # ticks before the first that counts
PAGE_SIZE = 64
PROMPT = (PromptToken(1), PromptToken(2))
CERTAINTY: Certainty = (0.9, 0.8)


class NullRunner:
    """A device that is done at once.

    Every row has `num_tokens` prepared tokens, with certainties if they are `values`, and has
    drafted four if it drafts.
    """

    def __init__(self, max_rows: int, num_tokens: int, *, values: bool, drafts: bool) -> None:
        token = SampledToken(7, (0.5, 0.25), certainty=CERTAINTY if values else None)
        learnt = Descriptor(8.0, 10.0, 0.8, 4, 0, 0)
        output = RowTokens((token,) * num_tokens, *((4, learnt) if drafts else ()))
        tokens = [output] * max_rows
        self._first = [[RowTokens((token,))] * count for count in range(max_rows + 1)]
        self._tokens = [tokens[:count] for count in range(max_rows + 1)]
        self._times = LaunchTimes(0, 0, 0, 0, 0)

    def forward(self, launch: Launch) -> None:
        """Nothing."""

    def mask(self, launch: Launch, constraints: Sequence[int]) -> Sequence[int]:
        """Refuse: none of these requests has a grammar."""
        raise AssertionError(f"launch {launch.launch_id} has no grammar")

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Nothing."""

    def collect(self, launch: Launch) -> list[RowTokens]:
        """One prepared token per row."""
        count = len(launch.plan.rows)
        return (self._tokens if launch.plan.kind is LaunchKind.DECODE else self._first)[count]

    def times(self, launch: Launch) -> LaunchTimes:
        """No time passes on this device."""
        return self._times


class LastRecords:
    """An observer that keeps the last `capacity` launches alive, as a trace does."""

    def __init__(self, capacity: int) -> None:
        self._records: collections.deque[StepRecord] = collections.deque(maxlen=capacity)

    def committed(self, record: StepRecord) -> None:
        """Remember a launch."""
        self._records.append(record)


class BareTask:
    """The smallest task; `spoken` says whether every token emits an event."""

    uses_transition_table = False
    grammar = None
    has_payload = False
    reasoning_tokens = 0

    def __init__(self, max_tokens: int, *, constrained: bool, spoken: bool) -> None:
        self.prompt: tuple[PromptToken, ...] = PROMPT
        self.sampling = SamplingParams(temperature=0.0, seed=0)
        self.max_tokens = max_tokens
        self.constrained = constrained
        self.finish_reason: FinishReason | None = None
        self._events = (TextEvent(text="word"),) if spoken else ()

    def constraint(self) -> int:
        """Any but the free one."""
        return 1

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Return the same events for every token."""
        return self._events

    def result(self, finish_reason: FinishReason) -> QueryOutput:
        """Nothing."""
        return QueryOutput(answer="")


def detect(max_tokens: int) -> Task:
    """Return a real task: a box every third token, without end."""
    sampling = SamplingParams(temperature=0.0, seed=0)
    setup = TaskSetup(PROMPT, sampling, max_tokens, frozenset((0,)))
    return DetectSkill(setup, DetectSpec(object="thing", max_objects=max_tokens), Calibration())


TASKS: dict[str, Callable[[int], Task]] = {
    "free": lambda length: BareTask(length, constrained=False, spoken=False),
    "constrained": lambda length: BareTask(length, constrained=True, spoken=False),
    "free, reported": lambda length: BareTask(length, constrained=False, spoken=True),
    "detect, reported": detect,
}


def ticks(
    make_task: Callable[[int], Task],
    streams: int,
    count: int,
    *,
    speculation: str = SPECULATION_OFF,
    num_tokens: int = 1,
    observer: Callable[[StepRecord], None] | None = None,
) -> list[int]:
    """Return nanoseconds of `count` steps.

    Each launches and commits one decode of `streams`, which has `num_tokens` tokens a row.

    Without an `observer` the last launches are kept, as by a trace.
    """
    length = (WARM_UP + count + 2 * streams + 16) * num_tokens + 16
    requests = RequestTable(wake=lambda: None)
    sink = OutputSink("tick", requests, send=_encoded, finish=lambda request, done: _encoded(done))
    tasks = [make_task(length) for _ in range(streams)]
    values, drafts = tasks[0].has_payload, speculation != SPECULATION_OFF
    runner = NullRunner(streams, num_tokens, values=values, drafts=drafts)
    pages = streams * (-(-(length + len(PROMPT) + 1) // PAGE_SIZE))
    scheduler = Scheduler(
        runner,
        KVCacheManager(pages + 1, PAGE_SIZE, streams),
        Pipeline(2),
        Clock(),
        sink,
        block_sizes=block_sizes(speculation),
        observer=observer or LastRecords(256).committed,
    )
    for index, task in enumerate(tasks):
        request = Request(request_id=RequestKey(f"request-{index}"), task=QuerySpec(question="?"))
        requests.add(ScheduledRequest(request_id=request.request_id, tenant="", request=request))
        scheduler.submit(EngineSequence(index, request, task, None, 1, task.prompt))
    for _ in range(2 * streams + WARM_UP):
        scheduler.step()
    spent = []
    for _ in range(count):
        start = time.perf_counter_ns()
        scheduler.step()
        spent.append(time.perf_counter_ns() - start)
    assert scheduler.load().running == streams, "a stream ended among the measured ticks"
    return spent


def main(argv: Sequence[str]) -> int:
    """Measure every kind of task at every number of streams and record the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tick", description=__doc__)
    parser.add_argument("--name", default="tick", help="of the record")
    parser.add_argument("--ticks", default=5000, type=int, help="measured ticks per row")
    arguments = parser.parse_args(argv)
    rows = []
    kinds: list[tuple[str, str, str, int]] = [
        *((name, name, SPECULATION_OFF, 1) for name in TASKS),
        *(
            (f"free, {setting}, {count}{DRAFTED}", "free", setting, count)
            for setting in DRAFTING
            for count in (1, 2)
        ),
    ]
    for name, task, setting, count in kinds:
        for streams in STREAMS:
            spent = sorted(
                ticks(TASKS[task], streams, arguments.ticks, speculation=setting, num_tokens=count)
            )
            median = statistics.median(spent) / 1000
            p99 = spent[len(spent) * 99 // 100] / 1000
            rows.append({"tasks": name, "streams": streams, "median_us": median, "p99_us": p99})
    heads = ("tasks", "streams", "median us", "p99 us")
    cells = [
        [row["tasks"], row["streams"], f"{row['median_us']:.1f}", f"{row['p99_us']:.1f}"]
        for row in rows
    ]
    figures = {"ticks": arguments.ticks, "rows": rows}
    record.write(
        arguments.name, "One decode tick of the host", figures, [record.table(heads, cells)]
    )
    return 0


def _encoded(report: EngineMessage) -> None:
    encode(report)
