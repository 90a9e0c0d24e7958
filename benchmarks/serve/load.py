"""Callers in processes of their own, so that sending does not slow down the server."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from google.protobuf.message import Message
from legato.v1 import inference_pb2 as pb
from legato.v1 import task_pb2
from legato_client import AsyncClient, DetectResult, QueryResult, Sampling
from legato_client.load.plan import LoadPlan

from benchmarks.image.charts import stamped
from benchmarks.serve.rpc import jpeg

# ---------------------------------------------------------------- workloads

# The requests of callers as lists of jobs: images by number, a question, a number of tokens.

QUESTION = "What about {}?"
"""With its template about 19 tokens, as a question about a chart has: random weights come with a
tokenizer of one token a byte."""
_MIX_PICTURES, _MIX_QUESTIONS = 3, 5  # five questions for every three images


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One call; jobs with the same `image` send the same bytes. Only `timed` ones count."""

    image: int
    question: str
    tokens: int
    timed: bool
    detects: bool = False  # instead of a question: objects, of three tokens each


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A cell to measure: `calls` timed ones by `callers` at once, images from number `first`."""

    callers: int
    calls: int
    tokens: int
    first: int

    @property
    def lead(self) -> int:
        """Untimed calls before, until every caller has been busy for a while."""
        return max(4, 2 * self.callers)

    @property
    def tail(self) -> int:
        """Untimed calls after, so that the last timed ones run among as many as the first."""
        return self.callers if self.callers > 1 else 0

    @property
    def total(self) -> int:
        """Calls in all."""
        return self.lead + self.calls + self.tail


def new(ask: Ask) -> list[Job]:
    """Return calls with a new image each."""
    return _jobs(ask, [ask.first + index for index in range(ask.total)])


def cached(ask: Ask) -> list[Job]:
    """Return calls with the same image each."""
    return _jobs(ask, [ask.first] * ask.total)


def mix(ask: Ask) -> list[Job]:
    """Return five questions for every three images, shuffled.

    Two of three images get two questions. The second one comes `callers` to twice as many calls
    after the first, so that the first is answered and its image still cached.
    """
    rng = random.Random(ask.first)
    span = 2 * ask.callers + 2
    spacing = _MIX_QUESTIONS / _MIX_PICTURES
    places: list[tuple[float, int]] = []
    for index in range(int((ask.total + 2 * span) / spacing) + _MIX_PICTURES):
        place = (index + rng.random()) * spacing
        places.append((place, ask.first + index))
        if index % _MIX_PICTURES:
            places.append((place + rng.uniform(ask.callers + 1, span), ask.first + index))
    images = [image for _, image in sorted(places)]
    return _jobs(ask, images[span : span + ask.total])


WORKLOADS: dict[str, Callable[[Ask], list[Job]]] = {"new": new, "mix": mix, "cached": cached}


def _jobs(ask: Ask, images: list[int]) -> list[Job]:
    timed = range(ask.lead, ask.lead + ask.calls)
    return [
        Job(image, QUESTION.format(place % 100), ask.tokens, place in timed)
        for place, image in enumerate(images)
    ]


# ---------------------------------------------------------------- load

CALL_TIMEOUT = 120.0  # seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call as its caller saw it; times are seconds of a clock that all processes share.

    `hit`: the image was known. `cached`: its keys and values were known, too. `error` is empty
    unless the call failed.
    """

    start: float
    end: float
    timed: bool
    tokens: int = 0
    hit: bool = False
    cached: bool = False
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """The figures of one workload at one number of callers; times are in milliseconds.

    `answered` counts all calls that succeeded, `calls` the timed ones, `failed` all others.
    `per_second` counts answers while all callers are busy, over `window` seconds. Latencies are of
    the timed calls that succeeded. `load_cpu` is the share of a core that the
    busiest load process used.
    """

    calls: int
    failed: int
    p50: float
    p95: float
    p99: float
    per_second: float
    window: float
    mean_tokens: float
    hit_share: float
    cached_share: float
    load_cpu: float
    errors: tuple[str, ...]
    answered: int = 0


def summarise(calls: Sequence[Call], load_cpu: float) -> Cell:
    """Compute the figures of a cell; undefined ones are 0, never NaN."""
    good = [call for call in calls if call.timed and not call.error]
    errors = tuple(sorted({call.error for call in calls if call.error}))[:5]
    failed = sum(bool(call.error) for call in calls)
    if len(good) < 2:
        return Cell(
            len(good), failed, 0, 0, 0, 0, 0, 0, 0, 0, load_cpu, errors, len(calls) - failed
        )
    cuts = statistics.quantiles([(call.end - call.start) * 1e3 for call in good], n=100)
    opening, closing = min(call.start for call in good), max(call.start for call in good)
    answered = sum(opening < call.end <= closing for call in calls if not call.error)
    window = closing - opening
    return Cell(
        calls=len(good),
        failed=failed,
        p50=cuts[49],
        p95=cuts[94],
        p99=cuts[98],
        per_second=answered / window if window > 0 else 0.0,
        window=window,
        mean_tokens=statistics.fmean(call.tokens for call in good),
        hit_share=statistics.fmean(call.hit for call in good),
        cached_share=statistics.fmean(call.cached for call in good),
        load_cpu=load_cpu,
        errors=errors,
        answered=len(calls) - failed,
    )


class LoadProcesses:
    """Processes that hold the images and send requests on command; a context manager.

    The image of a job is `pool[number % len(pool)]`, stamped with its number.
    """

    def __init__(self, target: str, pool: Sequence[bytes], processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._far_ends: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(there, target, tuple(pool)), daemon=True)
            self._pipes.append(here)
            self._far_ends.append(there)
            self._processes.append(process)

    def __enter__(self) -> LoadProcesses:
        for process, far_end in zip(self._processes, self._far_ends, strict=True):
            process.start()
            far_end.close()  # the last copy here, so that the death of the process is seen
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def run(self, jobs: Sequence[Job], callers: int, seconds: float) -> Cell:
        """Share jobs and callers among the processes; none sends after `seconds`.

        Raises:
            EOFError: A process died.
        """
        pipes = self._pipes[: min(len(self._pipes), callers)]
        deadline = time.perf_counter() + seconds
        for place, pipe in enumerate(pipes):
            share = len(range(place, callers, len(pipes)))
            pipe.send((jobs[place :: len(pipes)], share, deadline))
        calls: list[Call] = []
        shares: list[float] = []
        for pipe in pipes:
            done, cpu = pipe.recv()
            calls += done
            shares.append(cpu)
        return summarise(calls, max(shares))


def _serve(pipe: Connection, target: str, pool: Sequence[bytes]) -> None:
    """Run one list of jobs after another in a load process, until it is terminated."""
    while True:
        jobs, callers, deadline = pipe.recv()
        start, cpu = time.perf_counter(), time.process_time()
        calls = asyncio.run(_ask_all(target, pool, jobs, callers, deadline))
        share = (time.process_time() - cpu) / (time.perf_counter() - start)
        pipe.send((calls, share))


async def _ask_all(
    target: str, pool: Sequence[bytes], jobs: Sequence[Job], callers: int, deadline: float
) -> list[Call]:
    calls: list[Call] = []
    waiting = iter(jobs)
    async with AsyncClient(target, timeout=CALL_TIMEOUT) as client:

        async def caller(shared: Iterator[Job]) -> None:
            for job in shared:
                if time.perf_counter() > deadline:
                    return
                jpeg = stamped(pool[job.image % len(pool)], job.image)
                calls.append(await _ask(client, job, jpeg))

        await asyncio.gather(*(caller(waiting) for _ in range(callers)))
    return calls


async def _ask(client: AsyncClient, job: Job, jpeg: bytes) -> Call:
    sampling = Sampling(temperature=0.0, max_tokens=job.tokens, seed=0)
    start = time.perf_counter()
    try:
        answer: DetectResult | QueryResult
        if job.detects:
            answer = await client.detect(jpeg, job.question, max_objects=max(1, job.tokens // 3))
        else:
            answer = await client.query(jpeg, job.question, sampling=sampling)
    except Exception as error:  # noqa: BLE001 - a benchmark counts what failed and goes on
        return Call(start, time.perf_counter(), job.timed, error=f"{type(error).__name__}: {error}")
    end = time.perf_counter()
    usage, image = answer.info.usage, answer.info.image
    return Call(
        start,
        end,
        job.timed,
        tokens=usage.output_tokens if usage else 0,
        hit=bool(image and image.cache_hit),
        cached=bool(usage and usage.cached_tokens),
    )


# ---------------------------------------------------------------- cases
# The requests that `serve` sends to its servers.


SIZE = (640, 480)
_SERVICE = "/legato.v1.InferenceService/"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One kind of request; `name` is the RPC, `answers` how many of `counted` one request gets."""

    title: str
    name: str
    request: Message
    in_flight: int
    counted: str = "calls"
    answers: int = 1

    @property
    def streams(self) -> bool:
        """Whether messages are counted."""
        return self.name == "Generate"

    def plan(self, target: str, seconds: float, senders: int) -> LoadPlan:
        """Return a closed loop: as much load as the server answers."""
        return LoadPlan(
            target=target,
            kind="stream" if self.streams else "unary",
            path=_SERVICE + self.name,
            request=self.request.SerializeToString(),
            in_flight=self.in_flight,
            seconds=seconds,
            warm_up=0.0,
            senders=senders,
        )


def cases(length: int) -> list[Case]:
    """Return all cases; streams have `length` answers."""
    photo = pb.DetectRequest(object="red circle", max_objects=3)
    photo.image.encoded.data = jpeg(0, SIZE)
    points = task_pb2.PointTask(object="red circle", max_objects=length)
    points_request = pb.GenerateRequest(task=task_pb2.Task(point=points))
    points_request.image.encoded.data = jpeg(0, (32, 32))
    words = task_pb2.Task(query=task_pb2.QueryTask(question="What is in the picture?"))
    words.sampling.max_tokens = length
    return [
        Case("Query", "Query", pb.QueryRequest(question="What is in the picture?"), 64),
        Case(f"Detect, {len(photo.image.encoded.data) // 1024} KiB JPEG", "Detect", photo, 16),
        Case(f"Generate, {length} points", "Generate", points_request, 16, "points", length),
        Case(
            f"Generate, {length} words",
            "Generate",
            pb.GenerateRequest(task=words),
            16,
            "words",
            length,
        ),
    ]


# ---------------------------------------------------------------- process stats
# CPU time and memory of a process, as the kernel counts them.


_TICK = os.sysconf("SC_CLK_TCK")
_ENGINE = b"-m\0legato_engine."  # of the command; the module differs between versions


def seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in steps of a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def engine(service: int) -> int:
    """Return the engine process that a service process has started."""
    (found,) = (
        child
        for child in children(service)
        if _ENGINE in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return found


def children(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
