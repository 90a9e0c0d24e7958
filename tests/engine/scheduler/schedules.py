"""Random schedules of a few requests in a tiny pool, on a device that reads its KV pages.

A page that is lost, shared wrongly or overwritten changes the tokens of its readers. So every
request is compared with a run alone, without pages and scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterable

import msgspec
from legato_engine.errors import InternalError, NumericError, PromptTooLong
from legato_engine.ipc.messages import KVCacheStats
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import BatchLimits
from legato_engine.scheduler.scheduler import Pipeline, Scheduler
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import FinishReason, PromptToken, RequestKey

from tests.engine.scheduler.reading_runner import PAGE, PREFIXES, ReadingRunner, alone, length_of
from tests.engine.scheduler.world import RandomBlocks, shared
from tests.fakes import FakeClock, FakeSink, FakeTask, make_sequence

MAX_STEPS = 3000  # many times what any of these schedules takes


@dataclasses.dataclass(slots=True)
class Totals:
    """What happened in some schedules, to check that they cover enough."""

    requests: int = 0
    whole: int = 0
    tokens: int = 0
    cached: int = 0
    preemptions: int = 0
    together: int = 0  # launches that computed several images
    switches: int = 0
    drafts: int = 0
    looped: int = 0  # steps of loops
    drafting: int = 0  # rows of those that drafted
    behind: int = 0  # rows of launches behind loops
    outrun: int = 0  # of them, those that had ended in the loop
    stuck: int = 0  # loops that gave up a step
    void: int = 0  # rows of decodes behind one that do not count
    followed: int = 0  # rows of loops whose constraints follow a token in flight
    listed: int = 0  # of those, steps with a constraint that follows another
    parts: int = 0  # of prompts, without the last ones
    long_parts: int = 0  # of prompts that are too long to share a launch
    lone_parts: int = 0  # beside no decode
    cuts: int = 0  # waits for a step of a loop that were cut short
    accepted: int = 0
    rejected: int = 0

    def add(self, world: Schedule, stats: KVCacheStats) -> None:
        """Add one schedule."""
        ended = world.sink.ended
        self.requests += len(world.sequences)
        self.whole += sum(
            isinstance(end, FinishReason) and end is not FinishReason.CANCELLED
            for end in ended.values()
        )
        self.tokens += sum(s.num_committed for s in world.sequences)
        self.cached += sum(s.pages.cached_tokens for s in world.sequences)
        self.preemptions += stats.preemptions
        self.together += world.runner.num_together
        self.switches += world.num_switches
        self.drafts += world.num_drafts
        self.looped += world.runner.num_looped
        self.drafting += world.runner.num_drafting
        self.behind += world.runner.num_behind
        self.outrun += world.runner.num_ended
        self.stuck += world.runner.num_stuck
        self.void += world.runner.num_void
        self.followed += world.runner.num_advanced
        self.listed += world.runner.num_listed
        self.parts += world.runner.num_parts
        self.long_parts += world.runner.num_long_parts
        self.lone_parts += world.runner.num_lone_parts
        self.cuts += world.num_cuts
        self.accepted += world.runner.num_accepted
        self.rejected += world.runner.num_rejected

    def join(self, other: Totals) -> None:
        """Add the totals of other schedules."""
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


class Schedule:
    """One random schedule, run and checked by `run`.

    Every fourth seed submits bursts of many images without streams, which may share launches. Every
    third one decodes by loops. With `switches` the pipeline's depth changes
    between steps, too.
    """

    def __init__(self, seed: int, *, switches: bool = False) -> None:
        self.bursts = seed % 4 == 0
        draw = self.draw = random.Random(seed)
        self.break_rate = draw.choice((0.0, 0.0, 0.0, 0.01))
        self.sink = FakeSink()
        self.clock = FakeClock()
        passes, has_long = (0, 6, 8)[seed // 7 % 3], seed // 21 % 2 == 1
        self.most_more = 16 if has_long else 8
        num_pages = draw.randint(7, 14) * (1 + self.bursts) + (5 if passes and has_long else 0)
        self.manager = KVCacheManager(num_pages, PAGE, draw.randint(1, 6), num_adapter_slots=1)
        largest = 0 if self.bursts else draw.choice((0, 0, 1, 3, 9))
        self.speculates = largest > 0
        self.runner = ReadingRunner(
            lambda: draw.random() < self.break_rate, draw, drafts=self.speculates
        )
        self.loops = seed % 3 == 1
        self.cut = random.Random(f"cut {seed}") if passes else None  # longer prompts
        depth = draw.choice((1, 2, 2))
        long_chunk_tokens = 10 if has_long and seed % 5 < 2 else 0
        limits = self._limits(passes, 2 * passes if has_long else 24, long_chunk_tokens)
        self.runner.shared_tokens = limits.tokens
        self.scheduler = Scheduler(
            self.runner,
            self.manager,
            Pipeline(depth),
            self.clock,
            self.sink,
            limits=limits,
            max_overtakes=draw.randint(0, 3),
            crops_per_launch=draw.randint(0, 3),
            block_sizes=RandomBlocks(largest, seed) if self.speculates else None,
            loops=self.runner if self.loops else None,
            pause=self._pause,
        )
        self._cuts = random.Random(f"cuts {seed}")  # draws of its own
        self.num_cuts = 0
        if seed % 2 == 1:  # draws of its own
            self.runner.stuck = random.Random(-seed)
        # Draws of its own: the others stay those of the seed.
        self.switch = random.Random(~seed) if switches else None
        self.num_switches = 0  # with a launch in flight
        self.sequences: list[EngineSequence] = []
        self.aborted: set[RequestKey] = set()
        self.num_drafts = 0
        # Few words, so that prompts often share a prefix.
        self._systems = [self._words(draw.randint(1, 10)) for _ in range(2)]

    def run(self) -> None:
        """Submit and disturb requests between steps, then run all of them to their end.

        Afterwards cached content is valid: the same requests get their answers again. If a request
        was aborted before its non-finite logits were read, its content is invalidated by the first
        repetition.
        """
        draw = self.draw
        for _ in range(draw.randint(1, 10)):
            self._submit()
            for _ in range(draw.choice((0, 0, 0, 0, 9) if self.bursts else (0, 0, 1, 2, 5))):
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
        for _ in range(MAX_STEPS):
            if self.scheduler.idle:
                return
            self._step()
        raise AssertionError(f"not idle after {MAX_STEPS} steps")

    def _words(self, count: int) -> list[PromptToken]:
        return [PromptToken(self.draw.randrange(3)) for _ in range(count)]

    def _submit(self) -> None:
        draw = self.draw
        prompt = [*draw.choice(self._systems), *self._words(draw.randint(0, 3))]
        key = draw.choice(list(PREFIXES))
        if length_of(key) > 1 and self.bursts:
            key = f"{key}/{draw.randrange(5)}"
        adapter = draw.choice(("", "", "tuned", "other"))
        if self.sequences and draw.random() < 0.3:  # the next turn of a conversation
            before = draw.choice(self.sequences)
            key, adapter = before.prefix_key, before.adapter.key
            said = before.keys(before.prefix_length, before.length)
            prompt = [PromptToken(*token) for token in said] + self._words(2)
        if self.cut:
            more = self.cut.randint(0, self.most_more)
            prompt += [PromptToken(self.cut.randrange(3)) for _ in range(more)]
        task = FakeTask(
            seed=draw.randrange(3),
            max_tokens=draw.choice((draw.randint(1, 9), draw.randint(12, 30))),
            constrained=draw.random() < 0.4,
        )
        task.uses_transition_table = self.loops and task.constrained and len(self.sequences) % 3 > 0
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
        sequence.request = msgspec.structs.replace(sequence.request, deltas=not self.bursts)
        with contextlib.suppress(PromptTooLong):
            self.scheduler.submit(sequence)
            self.sequences.append(sequence)

    def _submit_again(self, sequence: EngineSequence) -> None:
        before = sequence.task
        task = FakeTask(
            seed=before.sampling.seed or 0,
            max_tokens=before.max_tokens,
            constrained=before.constrained,
            uses_transition_table=before.uses_transition_table,
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
        """Sometimes abort or stop a request, advance the clock, or reserve and commit draft pages.

        Draft pages are reserved here only without speculation.
        """
        draw = self.draw
        chance = draw.random()
        if chance > 0.2 or not self.sequences:
            return
        sequence = draw.choice(self.sequences)
        if chance < 0.03:
            if sequence.request.request_id not in self.sink.ended:
                self.aborted.add(sequence.request.request_id)
            self.scheduler.abort(sequence.request.request_id)
        elif chance < 0.06:
            self.scheduler.stop(sequence.request.request_id)
        elif chance < 0.1:
            self.clock.advance(1.0)
        elif sequence.row >= 0 and not (sequence.finalized or self.speculates):
            length = min(sequence.pages.capacity + draw.randint(1, 9), sequence.max_length)
            if self.manager.reserve_draft(sequence, length):
                self.num_drafts += 1
                if draw.random() < 0.7:
                    self.manager.commit_to(sequence, draw.randint(0, length))

    def _limits(self, pass_tokens: int, tokens: int, long_chunk_tokens: int) -> BatchLimits:
        if self.bursts:
            return shared(self.draw.choice((2, 3)), 3, 40, pass_tokens)
        prompts = self.draw.choice((1, 1, 2, 3))
        if not pass_tokens:
            return shared(prompts, 1)
        return shared(max(2, prompts), 1, tokens, pass_tokens, long_chunk_tokens)

    def _pause(self, seconds: float) -> bool:
        del seconds
        is_cut = self._cuts.random() < 0.1
        self.num_cuts += is_cut
        return is_cut

    def _set_depth(self, switch: random.Random) -> None:
        load, depth = self.scheduler.load(), switch.choice((1, 2))
        self.scheduler.set_depth(depth)
        self.num_switches += load.inflight > 0 and load.pipeline_depth != depth

    def _step(self) -> None:
        if self.switch is not None and self.switch.random() < 0.3:
            self._set_depth(self.switch)
        progressed = self.scheduler.step()
        assert progressed or self.scheduler.idle, "live sequences, and none runs"
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
            if not whole:
                expected = expected[: len(tokens)]
            assert tokens == expected, "reads other tokens than alone"
            if isinstance(end, InternalError):
                assert isinstance(end, NumericError)


def run_all(seeds: Iterable[int], *, switches: bool = False) -> Totals:
    """Run schedules by their seeds; a failure names its seed."""
    totals = Totals()
    for seed in seeds:
        schedule = Schedule(seed, switches=switches)
        try:
            schedule.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        totals.add(schedule, schedule.manager.stats())
    return totals
