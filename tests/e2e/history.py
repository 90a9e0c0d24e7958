"""Mixed requests, and what clients saw of them while faults were injected."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from legato.v1 import inference_pb2, session_pb2, task_pb2
from legato_client import (
    AsyncClient,
    CaptionTask,
    Client,
    DetectTask,
    LegatoError,
    PointTask,
    QueryTask,
    Result,
    Sampling,
    SegmentTask,
    Task,
)
from PIL import Image

from tests.e2e.scenes import many_circles, two_shapes
from tests.grammar import Grammar
from tests.service.harness import Refusal, read_refusal
from tests.service.session.client import SessionClient

# ---------------------------------------------------------------- jobs
# A mixed bag of requests, for tests that compare answers.

WILD = Sampling(temperature=2.0, top_p=1.0, max_tokens=30, seed=11)
Job = tuple[Image.Image | None, Task]
Answer = tuple[object, ...]


def jobs() -> list[Job]:
    """Every skill on two images, greedy and sampled; 17 of them."""
    images = [two_shapes().image, many_circles(5).image]
    tasks: list[Task] = [
        DetectTask("red circle"),
        PointTask("red circle"),
        SegmentTask("blue square"),
        CaptionTask("short"),
        QueryTask("How many circles are there?"),
        QueryTask("What is in the image?", sampling=WILD),
        CaptionTask("long", sampling=WILD),
    ]
    bag: list[Job] = [(image, task) for image in images for task in tasks]
    return bag + [(None, QueryTask(text, sampling=WILD)) for text in ("one", "two", "three")]


def ask(client: Client, job: Job) -> Answer:
    """The answer to a job."""
    return said(*client.run_tasks(job[0], [job[1]]))


async def ask_async(client: AsyncClient, job: Job) -> Answer:
    """The answer to a job."""
    return said(*await client.run_tasks(job[0], [job[1]]))


async def ask_all(address: str, bag: Iterable[Job]) -> list[Answer]:
    """The answers to jobs that are all sent at once."""
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(ask_async(client, job) for job in bag))


def said(result: Result | LegatoError) -> Answer:
    """What a result says, without what it cost."""
    assert not isinstance(result, LegatoError), result
    names = ("answer", "reasoning", "caption", "objects", "points", "segments")
    return tuple(getattr(result, name, None) for name in names)


# ---------------------------------------------------------------- history
# What clients saw of their calls while faults were injected, checked against a run without.
#
# Of every call that was accepted: one terminal status, a stream by the grammar of Generate
# (indices
# without a gap, deltas that add up to the result), and the answer and tokens of the calm run. A
# call
# that is refused because there is no engine is asked again, and counts as one.

NO_ENGINE = ("the engine is being restarted", "the engine is starting", "the model is loading")
_PAUSE = 0.05  # seconds before a refused call is asked again


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a client, its refusals left out."""

    name: str
    began: float = dataclasses.field(default_factory=time.monotonic)
    ended: float = 0.0
    num_terminals: int = 0
    num_refusals: int = 0
    resumptions: int = 0
    answer: Answer | None = None
    failure: Refusal | None = None
    broken_rule: str = ""
    arrivals: list[float] = dataclasses.field(default_factory=list)  # of a stream's events


class TaskFailed(Exception):
    """One of several tasks failed."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        info = error_details_pb2.ErrorInfo()
        for detail in status.details:
            detail.Unpack(info)  # False for other kinds
        codes = {code.value[0]: code for code in grpc.StatusCode}
        self.refusal = Refusal(codes[status.code], status.message, {"ErrorInfo": info}, {}, 0)


Ask = Callable[["Stubs", Call], Awaitable[Answer]]
"""Makes a call and returns what it answers."""


@dataclasses.dataclass(frozen=True)
class Stubs:
    """What calls are made with."""

    inference: Any
    sessions: Any


@dataclasses.dataclass(frozen=True)
class Report:
    """The figures of a history."""

    calls: int
    right: int
    wrong: list[str]
    failed: list[str]
    resumed: int
    refusals: int
    pauses: list[float]  # longest silences of resumed streams, in seconds

    @property
    def share(self) -> float:
        """Of the calls, those that ended with the right answer."""
        return self.right / self.calls if self.calls else 0.0

    def __str__(self) -> str:
        pauses = sorted(self.pauses)
        text = f"{self.calls} calls, {self.right} right ({self.share:.2%}), {len(self.wrong)} wrong"
        text += f", {len(self.failed)} failed, {self.resumed} resumed, {self.refusals} refusals"
        if len(pauses) > 1:
            p50, p99 = statistics.median(pauses), pauses[int(0.99 * (len(pauses) - 1))]
            text += f"; {len(pauses)} pauses, P50 {p50:.2f} s, P99 {p99:.2f} s"
        return text


class History:
    """Calls in the order of their beginning, and when the engine was killed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.kills: list[float] = []

    async def ask(self, stubs: Stubs, name: str, ask: Ask) -> Call:
        """Make a call until it is accepted; record how it ends."""
        call = Call(name)
        self.calls.append(call)
        while not call.num_terminals:
            try:
                call.answer = await ask(stubs, call)
                call.num_terminals += 1
            except grpc.RpcError as error:
                refusal = read_refusal(error)
                if not call.arrivals and refusal.message.startswith(NO_ENGINE):
                    call.num_refusals += 1
                    await asyncio.sleep(_PAUSE)
                else:
                    call.failure = refusal
                    call.num_terminals += 1
            except TaskFailed as error:
                call.failure = error.refusal
                call.num_terminals += 1
            except AssertionError as error:
                call.broken_rule = str(error) or "a rule of the grammar"
                call.num_terminals += 1
        call.ended = time.monotonic()
        return call

    def check(self, expected: Mapping[str, Answer]) -> Report:
        """Compare every call with the calm run."""
        wrong, failed, right, pauses = [], [], 0, []
        for call in self.calls:
            pauses += self._pauses(call)
            if call.broken_rule or call.num_terminals != 1:
                wrong.append(f"{call.name}: {call.broken_rule or call.num_terminals}")
            elif call.failure is not None:
                failed.append(f"{call.name}: {call.failure.reason} {call.failure.message}")
            elif call.answer != expected[call.name]:
                wrong.append(
                    f"{call.name}: {call.answer!r:.2000} not {expected[call.name]!r:.2000}"
                )
            else:
                right += 1
        return Report(
            calls=len(self.calls),
            right=right,
            wrong=wrong,
            failed=failed,
            resumed=sum(call.resumptions > 0 for call in self.calls),
            refusals=sum(call.num_refusals for call in self.calls),
            pauses=pauses,
        )

    def _pauses(self, call: Call) -> list[float]:
        """The longest silence after each kill; events may be under way when the engine dies."""
        if not call.resumptions:
            return []
        found = []
        for kill, following in itertools.pairwise([*self.kills, math.inf]):
            begun = [each for each in call.arrivals if each <= kill][-1:]
            later = [each for each in call.arrivals if kill < each <= following]
            gaps = [right - left for left, right in itertools.pairwise(begun + later)]
            if begun and gaps:
                found.append(max(gaps))
        return found


# ---------------------------------------------------------------- calls


def generate(request: inference_pb2.GenerateRequest) -> Ask:
    """A stream; its tokens are part of the answer if the request asks for them."""

    async def ask(stubs: Stubs, call: Call) -> Answer:
        grammar = Grammar()
        stream = stubs.inference.Generate(request)
        async for event in stream:
            call.arrivals.append(time.monotonic())
            grammar.feed(event)
        grammar.end(ok=True)
        finished = grammar.events[-1].finished
        call.resumptions = finished.info.resumptions
        return (bytes_of(finished.result), *_cost(finished.info))

    return ask


def unary(method: str, request: Any) -> Ask:
    """A unary call."""

    async def ask(stubs: Stubs, call: Call) -> Answer:
        response = await getattr(stubs.inference, method)(request)
        call.resumptions = response.info.resumptions
        cost = _cost(response.info)
        response.ClearField("info")
        for result in getattr(response, "results", ()):
            if result.HasField("error"):
                raise TaskFailed(result.error)
        return (bytes_of(response), *cost)

    return ask


def frame(tasks: list[task_pb2.Task], image: Any) -> Ask:
    """A session of one frame; a task's error is not an answer."""

    async def ask(stubs: Stubs, call: Call) -> Answer:
        client = SessionClient(stubs.sessions.Session())
        await client.send(open=session_pb2.SessionOpen(standing_tasks=tasks, stream_deltas=True))
        await client.wait_for(lambda: client.messages)
        await client.frame(1, image=image)
        await client.done()
        await client.end()
        results = sorted(client.results[1], key=lambda each: str(each.task_id))
        if any(_was_refused(each) for each in results):
            call.num_refusals += 1
            await asyncio.sleep(_PAUSE)
            return await ask(stubs, call)
        for each in results:
            if each.HasField("error"):
                raise TaskFailed(each.error)
        return tuple(bytes_of(each) for each in results)

    return ask


def _was_refused(result: task_pb2.TaskResult) -> bool:
    return result.HasField("error") and result.error.message.startswith(NO_ENGINE)


def bytes_of(message: Any) -> bytes:
    """A result without its costs."""
    copy = type(message)()
    copy.CopyFrom(message)
    for each in (copy, *getattr(copy, "results", ())):
        if "usage" in each.DESCRIPTOR.fields_by_name:
            each.ClearField("usage")
        if "timings" in each.DESCRIPTOR.fields_by_name:
            each.ClearField("timings")
    data: bytes = copy.SerializeToString(deterministic=True)
    return data


def _cost(info: inference_pb2.ResponseInfo) -> Answer:
    tokens = tuple(token.SerializeToString(deterministic=True) for token in info.tokens)
    usage = info.usage
    return (usage.input_tokens, usage.output_tokens, usage.reasoning_tokens, *tokens)
