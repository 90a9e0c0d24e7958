"""Random lives of a few requests in a tiny pool, on a device whose tokens depend on what it reads.

A page that is lost, shared wrongly or overwritten changes a token of whoever reads it, so every
request is compared with a run of it alone, that knows neither pages nor scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
from legato_engine.core import FinishReason, PromptToken, RequestKey
from legato_engine.errors import InternalError, PromptTooLong
from legato_engine.ipc.messages import KVCacheStats
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.launch import Launch, ScheduledSequence
from legato_engine.scheduler.output_processor import NOT_FINITE
from legato_engine.scheduler.pipeline import Pipeline
from legato_engine.scheduler.runner import LaunchTimes, RowTokens
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import NO_PAYLOAD, TokenKey
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.tasks import SampledToken

from tests.engine.scheduler.world import RandomBlocks, num_images, shared
from tests.fakes import VOCABULARY, FakeClock, FakeSink, FakeTask, make_sequence

PAGE = 4
PREFIXES = {None: 1, "": 1, "inside": 3, "border": 8, "behind": 9}  # positions, by kind
BROKEN = -1  # KV that is not finite; whatever is computed from it is not finite either
MOST_TICKS = 3000  # many times what any of these schedules takes; more means that it is stuck


def length_of(key: str | None) -> int:
    """Positions of BOS and a picture: what stands before a slash says how many."""
    return PREFIXES[key if key is None else key.partition("/")[0]]


def sampled(seed: int, constraint: int, contents: Sequence[int], payload: bool) -> SampledToken:
    """What the device samples behind these positions: any wrong input shows."""
    if BROKEN in contents:
        return SampledToken(NOT_FINITE, (0.0, 0.0))
    token = hash((seed, constraint, *contents)) % VOCABULARY
    return SampledToken(token, (token / VOCABULARY if payload else len(contents), 0.25))


def prefix_contents(sequence: EngineSequence) -> list[int]:
    """KV of BOS and the picture: everything that decides it, and nothing else."""
    key = sequence.prefix_key or ""
    return [hash((*sequence.adapter.key.encode(), *key.encode(), n)) for n in range(length_of(key))]


def content(before: int, token: TokenKey | SampledToken) -> int:
    """KV of a token: of itself, its payload if it has one, and all before it."""
    token_id, payload = token[:2]
    return BROKEN if before == BROKEN else hash((before, token_id, payload[0] % 1.0))


class Lane(NamedTuple):
    """A token that a launch fed, and what was read up to it."""

    fed: TokenKey
    contents: list[int]


class ReadingRunner:
    """A device that runs at once and reads every position of every table.

    It knows of a page what launches told it, where its rows stand, and what of their proposals is
    what it samples: right ones and wrong ones, as `draw` has it. Where `breaks` says so, what it
    computes is not finite.
    """

    def __init__(self, breaks: Callable[[], bool], draw: random.Random) -> None:
        self._breaks = breaks
        self._draw = draw
        self._kv: dict[int, list[int]] = {}  # page: its slots
        self._tables: dict[int, dict[int, int]] = {}  # row: its pages, by place
        self._read: dict[int, list[list[Lane]]] = {}  # slot: what each row of its launch has fed
        self._outputs: dict[int, list[RowTokens]] = {}  # slot: what was sampled
        self._last: dict[int, SampledToken] = {}  # row: its newest token
        self._newest: dict[int, int] = {}  # row: the position of that
        self.num_accepted = self.num_rejected = self.num_together = 0

    def forward(self, launch: Launch) -> None:
        """Write and read."""
        assert launch.slot not in self._read, "a slot is reused before its commit"
        plan = launch.plan
        self.num_together += num_images(plan) > 1
        prompts = [[self._prefill(row)] for row in plan.prefills]
        self._read[launch.slot] = [self._decode(row) for row in plan.decodes] + prompts

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """What stands of every row, and a token behind it."""
        read = self._read[launch.slot]
        self._outputs[launch.slot] = [
            self._settle(row.sequence, lanes, constraint)
            for row, constraint, lanes in zip(
                launch.plan.sampled_rows, constraints, read, strict=True
            )
        ]

    def collect(self, launch: Launch) -> list[RowTokens]:
        """Hand out the tokens."""
        del self._read[launch.slot]
        return self._outputs.pop(launch.slot)

    def times(self, launch: Launch) -> LaunchTimes:
        """No time passes on this device."""
        return LaunchTimes(0, 0, 0, 0, 0)

    def _decode(self, row: ScheduledSequence) -> list[Lane]:
        """Feed the newest token and what is proposed behind it, up to the sequence's end."""
        sequence, lanes = row.sequence, list[Lane]()
        table, position = self._tables[sequence.row], self._newest[sequence.row]
        assert 0 <= position - row.position <= row.slack, "stands where it was not foreseen"
        table.update((place, sequence.pages.ids[place]) for place in row.new_pages(PAGE))
        fed: TokenKey = self._last[sequence.row][:2]
        most = min(row.num_drafts, sequence.max_length - 1 - position)
        num_drafts = self._draw.randint(0, most) if most > 0 else most
        for lane in range(1 + num_drafts):
            lanes.append(Lane(fed, self._feed(row, position + lane, [fed])))
            fed = self._proposal(sequence, lanes[-1].contents)
        return lanes

    def _proposal(self, sequence: EngineSequence, contents: list[int]) -> TokenKey:
        task = sequence.task
        if self._draw.random() < 0.3:
            return self._draw.randrange(VOCABULARY), NO_PAYLOAD
        right = sampled(task.sampling.seed or 0, task.constraint(), contents, task.has_payload)
        return max(right.token_id, 0), NO_PAYLOAD

    def _settle(self, sequence: EngineSequence, lanes: list[Lane], constraint: int) -> RowTokens:
        task = sequence.task
        tokens: list[SampledToken] = []
        for lane in lanes:
            if tokens and lane.fed[0] != tokens[-1].token_id:
                break
            seed = task.sampling.seed or 0
            tokens.append(sampled(seed, constraint, lane.contents, task.has_payload))
        if tokens:
            self._last[sequence.row] = tokens[-1]
            self._newest[sequence.row] = len(lanes[len(tokens) - 1].contents)
            self.num_accepted += len(tokens) - 1
            self.num_rejected += len(lanes) - len(tokens)
        return RowTokens(tuple(tokens), max(0, len(lanes) - 1))

    def _prefill(self, row: ScheduledSequence) -> Lane:
        sequence, work = row.sequence, row.work
        self._tables[sequence.row] = dict(enumerate(sequence.pages.ids))
        if work.compute_pages:
            assert sequence.inputs.image is not None, "its picture is gone"
            broken = self._breaks()
            for position, written in enumerate(prefix_contents(sequence)):
                page = self._slots(work.compute_pages[position // PAGE])
                page[position % PAGE] = BROKEN if broken else written
        if work.copy_tail is not None:
            source, destination = work.copy_tail
            self._kv[destination] = list(self._slots(source))
        assert row.num_tokens > 0, "feeds nothing to sample from"
        first = row.position - sequence.prefix_length
        tokens = sequence.tokens[first : first + row.num_tokens]
        return Lane(tokens[-1], self._feed(row, row.position, tokens))

    def _feed(self, row: ScheduledSequence, position: int, tokens: Iterable[TokenKey]) -> list[int]:
        """What is read of all positions up to the last one fed."""
        pages = self._tables[row.sequence.row]
        before = self._slots(pages[(position - 1) // PAGE])[(position - 1) % PAGE]
        for token in tokens:
            before = BROKEN if self._breaks() else content(before, token)
            self._slots(pages[position // PAGE])[position % PAGE] = before
            position += 1
        count = -(-position // PAGE)
        read = [slot for place in range(count) for slot in self._slots(pages[place])]
        return read[:position]

    def _slots(self, page: int) -> list[int]:
        assert page != 0, "the scratch page is nobody's"
        return self._kv.setdefault(page, [0] * PAGE)


def alone(sequence: EngineSequence) -> list[int]:
    """What the request reads when nothing else exists."""
    task = sequence.task
    assert isinstance(task, FakeTask)
    single = FakeTask(
        seed=task.sampling.seed or 0, max_tokens=task.max_tokens, constrained=task.constrained
    )
    contents = prefix_contents(sequence)
    for asked in sequence.prompt:
        contents.append(content(contents[-1], (asked.token_id, asked.payload)))
    while single.finish_reason is None and len(single.tokens) < single.max_tokens:
        seed = single.sampling.seed or 0
        token = sampled(seed, single.constraint(), contents, single.has_payload)
        single.consume(token)
        contents.append(content(contents[-1], token))
    return single.tokens


@dataclasses.dataclass(slots=True)
class Totals:
    """What happened in some schedules, to see that they are about something."""

    requests: int = 0
    whole: int = 0
    tokens: int = 0
    cached: int = 0
    preemptions: int = 0
    together: int = 0  # launches that computed several pictures
    drafts: int = 0
    accepted: int = 0
    rejected: int = 0

    def add(self, world: Schedule, report: KVCacheStats) -> None:
        """One schedule more."""
        ended = world.sink.ended
        self.requests += len(world.sequences)
        self.whole += sum(
            isinstance(end, FinishReason) and end is not FinishReason.CANCELLED
            for end in ended.values()
        )
        self.tokens += sum(s.num_committed for s in world.sequences)
        self.cached += sum(s.pages.cached_tokens for s in world.sequences)
        self.preemptions += report.preemptions
        self.together += world.runner.num_together
        self.drafts += world.num_drafts
        self.accepted += world.runner.num_accepted
        self.rejected += world.runner.num_rejected

    def join(self, other: Totals) -> None:
        """What happened in others, too."""
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


class Schedule:
    """One random schedule; `run` carries it out and checks it.

    Every fourth seed is a crowd: bursts of many pictures, nobody streams, and a launch may compute
    several of them.
    """

    def __init__(self, seed: int) -> None:
        self.crowd = seed % 4 == 0
        draw = self.draw = random.Random(seed)
        self.break_rate = draw.choice((0.0, 0.0, 0.0, 0.01))
        self.sink = FakeSink()
        self.clock = FakeClock()
        self.manager = KVCacheManager(
            draw.randint(7, 14) * (1 + self.crowd), PAGE, draw.randint(1, 6), num_adapter_slots=1
        )
        self.runner = ReadingRunner(lambda: draw.random() < self.break_rate, draw)
        largest = 0 if self.crowd else draw.choice((0, 0, 1, 3, 9))
        self.speculates = largest > 0
        self.scheduler = Scheduler(
            self.runner,
            self.manager,
            Pipeline(draw.choice((1, 2, 2))),
            self.clock,
            self.sink,
            limits=shared(draw.choice((2, 3)), 3, 40)
            if self.crowd
            else shared(draw.choice((1, 1, 2, 3)), 1),
            max_overtakes=draw.randint(0, 3),
            crops_per_launch=draw.randint(0, 3),
            block_sizes=RandomBlocks(largest, seed) if self.speculates else None,
        )
        self.sequences: list[EngineSequence] = []
        self.aborted: set[RequestKey] = set()
        self.num_drafts = 0
        # Few words, so that prompts often begin alike.
        self._systems = [self._words(draw.randint(1, 10)) for _ in range(2)]

    def run(self) -> None:
        """Requests come and go between ticks; then all that live run out.

        What is kept in the end is whole: whoever asks the same again gets its answer. Only where a
        request was given up before its bad logits were read, one more has to find them.
        """
        draw = self.draw
        for _ in range(draw.randint(1, 10)):
            self._submit()
            for _ in range(draw.choice((0, 0, 0, 0, 9) if self.crowd else (0, 0, 1, 2, 5))):
                self._disturb()
                self._step()
        self._drain()
        self._check_end()
        if self.break_rate:
            self.break_rate = 0.0
            again = list(self.sequences)
            for _ in range(2):
                for sequence in again:
                    self._submit_again(sequence)
                    self._drain()
            self._check_end()
            for sequence in self.sequences[-len(again) :]:
                end = self.sink.ended[sequence.request.request_id]
                assert isinstance(end, FinishReason), "bad logits again"

    def _drain(self) -> None:
        for _ in range(MOST_TICKS):
            if self.scheduler.idle:
                return
            self._step()
        raise AssertionError("it never ends")

    def _words(self, count: int) -> list[PromptToken]:
        return [PromptToken(self.draw.randrange(3)) for _ in range(count)]

    def _submit(self) -> None:
        draw = self.draw
        prompt = [*draw.choice(self._systems), *self._words(draw.randint(0, 3))]
        key = draw.choice(list(PREFIXES))
        if length_of(key) > 1 and self.crowd:
            key = f"{key}/{draw.randrange(5)}"
        adapter = draw.choice(("", "", "tuned", "other"))
        if self.sequences and draw.random() < 0.3:  # the next turn of a conversation
            before = draw.choice(self.sequences)
            key, adapter = before.prefix_key, before.adapter.key
            said = before.keys(before.prefix_length, before.length)
            prompt = [PromptToken(*token) for token in said] + self._words(2)
        task = FakeTask(
            seed=draw.randrange(3),
            max_tokens=draw.choice((draw.randint(1, 9), draw.randint(12, 30))),
            constrained=draw.random() < 0.4,
        )
        task.prompt = tuple(prompt)
        sequence = make_sequence(
            len(self.sequences),
            task,
            prefix_key=key,
            prefix_length=length_of(key),
            num_crops=draw.randint(0, 7) if length_of(key) > 1 else 0,
            arrival=self.clock.now(),
            priority=draw.choice((0, 0, 1, 5)),
        )
        sequence.adapter.key = adapter
        sequence.request = msgspec.structs.replace(sequence.request, deltas=not self.crowd)
        with contextlib.suppress(PromptTooLong):
            self.scheduler.submit(sequence)
            self.sequences.append(sequence)

    def _submit_again(self, sequence: EngineSequence) -> None:
        before = sequence.task
        task = FakeTask(
            seed=before.sampling.seed or 0,
            max_tokens=before.max_tokens,
            constrained=before.constrained,
        )
        task.prompt = before.prompt
        again = make_sequence(
            len(self.sequences),
            task,
            prefix_key=sequence.prefix_key,
            prefix_length=sequence.prefix_length,
            arrival=self.clock.now(),
        )
        again.adapter.key = sequence.adapter.key
        self.scheduler.submit(again)
        self.sequences.append(again)

    def _disturb(self) -> None:
        """Now and then one is aborted or stopped, or time passes.

        Where nobody proposes, draft pages are given and taken back here.
        """
        draw = self.draw
        what = draw.random()
        if what > 0.2 or not self.sequences:
            return
        sequence = draw.choice(self.sequences)
        if what < 0.03:
            if sequence.request.request_id not in self.sink.ended:
                self.aborted.add(sequence.request.request_id)
            self.scheduler.abort(sequence.request.request_id)
        elif what < 0.06:
            self.scheduler.stop(sequence.request.request_id)
        elif what < 0.1:
            self.clock.advance(1.0)
        elif sequence.row >= 0 and not (sequence.finalized or self.speculates):
            length = min(sequence.pages.capacity + draw.randint(1, 9), sequence.max_length)
            if self.manager.reserve_draft(sequence, length):
                self.num_drafts += 1
                if draw.random() < 0.7:
                    self.manager.commit_to(sequence, draw.randint(0, length))

    def _step(self) -> None:
        progressed = self.scheduler.step()
        assert progressed or self.scheduler.idle, "something lives and nothing runs"
        self.manager.check()

    def _check_end(self) -> None:
        load = self.scheduler.load()
        assert load.pages_used == load.rows_used == load.running == load.waiting == 0
        ended = self.sink.ended
        assert ended.keys() | self.aborted == {s.request.request_id for s in self.sequences}
        assert not ended.keys() & self.aborted
        for sequence in self.sequences:
            assert isinstance(sequence.task, FakeTask)
            tokens, end = sequence.task.tokens, ended.get(sequence.request.request_id)
            expected = alone(sequence)
            whole = isinstance(end, FinishReason) and end is not FinishReason.CANCELLED
            assert tokens == (expected if whole else expected[: len(tokens)]), "another answer"
            if isinstance(end, InternalError):
                assert end.metadata == {"reason": "NUMERIC"}


def run_all(seeds: Iterable[int]) -> Totals:
    """Schedules by their seeds; a failure names its seed."""
    totals = Totals()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            schedule.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        totals.add(schedule, schedule.manager.stats())
    return totals
