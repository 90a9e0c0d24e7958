"""Random schedules of a few requests in a tiny pool, on a device that reads its KV pages.

A page that is lost, shared wrongly or overwritten changes the tokens of its readers. So every
request is compared with a run alone, without pages and scheduler. `python -m
tests.engine.scheduler.schedules --schedules 1000000` runs many.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from legato_engine.errors import InternalError, NumericError, PromptTooLong
from legato_engine.ipc.messages import KVCacheStats
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import BatchLimits, Launch, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.interfaces import LaunchTimes, LoopPoll, Pause
from legato_engine.scheduler.loops import max_new_pages
from legato_engine.scheduler.output import NOT_FINITE
from legato_engine.scheduler.scheduler import Pipeline, Scheduler
from legato_engine.sequence import NO_PAYLOAD, RowTokens, SampledToken, TokenKey
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import FinishReason, PromptToken, RequestKey

from tests.engine.scheduler.world import RandomBlocks, num_images, shared
from tests.fakes import (
    LISTS,
    TABLE,
    VOCABULARY,
    FakeClock,
    FakeSink,
    FakeTask,
    make_sequence,
    successor,
)

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


# ---------------------------------------------------------------- reading runner
# A device whose tokens depend on the KV that it reads, and what a request reads alone.


PAGE = 4
WORTHWHILE = 4
PREFIXES = {None: 1, "": 1, "inside": 3, "border": 8, "behind": 9}  # positions, by kind
STUCK_RATE, STUCK_BEFORE_RATE = 0.05, 0.5  # of steps, the latter with a launch behind the loop
BROKEN = -1  # KV that is not finite, nor is anything computed from it


def length_of(key: str | None) -> int:
    """Return the positions of BOS and image; the part before a slash names the kind."""
    return PREFIXES[key if key is None else key.partition("/")[0]]


def sampled(seed: int, constraint: int, contents: Sequence[int], payload: bool) -> SampledToken:
    """Return the token that the device samples after these positions; depends on all of them."""
    if BROKEN in contents:
        return SampledToken(NOT_FINITE, NO_PAYLOAD)
    token = hash((seed, constraint, *contents)) % VOCABULARY
    return SampledToken(token, (token / VOCABULARY, 0.25) if payload else NO_PAYLOAD)


def prefix_contents(sequence: EngineSequence) -> list[int]:
    """Return the KV of BOS and image, which depends on the adapter and the image alone."""
    key = sequence.prefix_key or ""
    return [hash((*sequence.adapter.key.encode(), *key.encode(), n)) for n in range(length_of(key))]


def content(before: int, token: TokenKey | SampledToken) -> int:
    """Return the KV of a token, which depends on it, its payload and all positions before it."""
    token_id, payload = token[:2]
    return BROKEN if before == BROKEN else hash((before, token_id, payload[0]))


class Input(NamedTuple):
    """An input token of a launch, and the KV up to it."""

    token: TokenKey
    contents: list[int]


class ReadingRunner:
    """A device that runs at once and reads every position of every sequence.

    It knows page tables and positions only from launches, as the real one does. Draft tokens are
    right or wrong by `draw`. When `breaks` returns true, computed values are not finite. A loop
    gives up before any of its steps by `stuck`, where that is set, and none does afterwards. What
    is launched behind a loop runs when that has ended. With `drafts` loops have draft tokens, and
    what a decode samples behind one that gave up does not count.
    """

    def __init__(
        self, breaks: Callable[[], bool], draw: random.Random, *, drafts: bool = False
    ) -> None:
        self.drafts = drafts
        self.num_drafting = 0  # rows of steps of loops with drafts
        self._breaks = breaks
        self._draw = draw
        self._kv: dict[int, list[int]] = {}  # page: its slots
        self._tables: dict[int, dict[int, int]] = {}  # row: its pages, by index
        self._read: dict[int, list[list[Input]]] = {}  # slot: the inputs of each row
        self._outputs: dict[int, list[RowTokens]] = {}  # slot: the sampled tokens
        self._last: dict[int, SampledToken] = {}  # row: its newest token
        self._newest: dict[int, int] = {}  # row: its position
        self.num_accepted = self.num_rejected = self.num_together = 0
        self._steps = self._stop_at = self.num_looped = self.num_listed = 0
        self._loop_slot: int | None = None  # of the one in flight
        self._behind: Launch | None = None  # the launch after it
        self._early: list[int] | None = None  # its constraints
        self.num_parts = self.num_long_parts = self.num_lone_parts = 0
        self.shared_tokens = 0  # what fits one launch
        self.num_advanced = 0  # rows of loops whose constraints advance by a token in flight
        self.num_behind = self.num_ended = 0  # rows behind loops, and those that ended in them
        self._ended = -1
        self._constraints: list[int] = []
        self.stuck: random.Random | None = None
        self.num_stuck = self.num_void = 0  # loops that gave up, and rows behind that do not count
        self._gave_up = False  # the loop in flight
        self._void: Launch | None = None

    def forward(self, launch: Launch) -> None:
        """Run all rows at once."""
        assert launch.slot not in self._read, "a slot is reused before its commit"
        plan = launch.plan
        self.num_together += num_images(plan) > 1
        if plan.is_loop:
            begun, self._loop_slot = 0, launch.slot
            for row in plan.rows:
                known = row.slack == row.num_drafts == 0
                assert self.drafts or known, "a loop starts where the host knows"
                table, ids = self._tables[row.sequence.row], row.sequence.pages.ids
                new = row.new_pages(PAGE, plan.num_steps)
                table.update((index, ids[index]) for index in new)
                begun += len(new)
            widest = max(row.num_drafts for row in plan.rows)
            most = max_new_pages(len(plan.rows), PAGE, widest)
            assert begun <= most, "more than a launch can stage"
            self._gave_up = False
            self._read[launch.slot], self._steps, self._stop_at = [], 0, plan.num_steps
            return
        for row in plan.prefills:
            if row.work.compute_pages:
                assert row.sequence.inputs.image is not None, "its image is already released"
        self._read[launch.slot] = []
        if self._loop_slot is None:
            self._forward(launch)
        else:
            self._behind, self._early = launch, None

    def _forward(self, launch: Launch) -> None:
        plan = launch.plan
        if plan.has_partial_prefill:
            sequence, position = plan.rows[-1].sequence, plan.rows[-1].position
            self.num_parts += 1
            self.num_long_parts += sequence.length - position > self.shared_tokens
            self.num_lone_parts += not plan.decodes
        prompts = [[self._prefill(row)] for row in plan.prefills]
        self._read[launch.slot] = [self._decode(row) for row in plan.decodes] + prompts

    def mask(self, launch: Launch, constraints: Sequence[int]) -> Sequence[int]:
        """Refuse: none of these requests has a grammar."""
        raise AssertionError(f"launch {launch.launch_id} has no grammar")

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Accept draft tokens and sample one more for each row."""
        if launch.plan.is_loop:
            self._constraints = self._followed(launch, constraints)
            self._outputs[launch.slot] = []
            return
        if launch is self._void:
            return
        if launch is self._behind:
            assert not launch.plan.constrained, "a constraint depends on the loop before it"
            self._early = list(constraints)
            return
        read = self._read[launch.slot]
        self._outputs[launch.slot] = [
            self._settle(row.sequence, inputs, constraint)
            for row, constraint, inputs in zip(
                launch.plan.sampled_rows, constraints, read, strict=True
            )
        ]

    def _followed(self, launch: Launch, constraints: Sequence[int]) -> list[int]:
        """Constraints after tokens of the launch before, which is in flight."""
        after = launch.plan.after or [-1] * len(constraints)
        self.num_advanced += sum(index >= 0 for index in after)
        return [
            successor(TABLE, constraint, self._outputs[1 - launch.slot][index].tokens[-1].token_id)
            if index >= 0
            else constraint
            for constraint, index in zip(constraints, after, strict=True)
        ]

    def collect(self, launch: Launch) -> list[RowTokens] | None:
        """Return the tokens."""
        del self._read[launch.slot]
        if launch is self._void:
            self.num_void += len(launch.plan.rows)
            return None
        if launch.plan.is_loop:
            behind, self._behind, self._loop_slot = self._behind, None, None
            if behind is not None:
                self._check_rows(launch.plan, behind.plan)
                if self._gave_up and self.drafts and behind.plan.kind is LaunchKind.DECODE:
                    self._void = behind
                self._forward(behind)
                if self._early is not None:
                    self.sample(behind, self._early)
        return self._outputs.pop(launch.slot)

    def _check_rows(self, loop: Plan, plan: Plan) -> None:
        looped = [loop.rows[index].sequence for index in plan.behind]
        decoded = [row.sequence for row in plan.decodes]
        if self.drafts:
            assert not plan.behind, "the device knows where they are"
        else:
            assert decoded == looped, "other rows than the loop's"
        self.num_behind += len(decoded)

    def break_even_steps(self, launch: Launch) -> int:
        """The same for all."""
        return WORTHWHILE

    def poll_loop(self, launch: Launch, pause: Pause) -> list[RowTokens] | LoopPoll:
        """Run a step of a loop for rows that may have ended meanwhile."""
        if self._steps == self._stop_at:
            return LoopPoll.FINISHED
        if pause(0.0):
            return LoopPoll.PENDING
        rate = STUCK_RATE if self._behind is None else STUCK_BEFORE_RATE
        if self.stuck is not None and self.stuck.random() < rate:
            self._stop_at, self.stuck = self._steps, None
            self._gave_up = True
            self.num_stuck += 1
            return LoopPoll.FINISHED
        self.num_looped += 1
        self._steps += 1
        outputs = []
        for row, constraint in zip(launch.plan.rows, self._constraints, strict=True):
            if self.drafts:
                at = row._replace(slack=row.end_after(launch.plan.num_steps) - row.position)
            else:
                at = row._replace(position=row.position + self._steps - 1)
            inputs = self._decode(at, known=True)
            outputs.append(self._settle(row.sequence, inputs, constraint))
        for index, output in enumerate(outputs):
            for token in output.tokens:
                following = successor(TABLE, self._constraints[index], token.token_id)
                self._constraints[index] = following
        self.num_listed += any(constraint >= LISTS for constraint in self._constraints)
        if any(token.token_id < 0 for output in outputs for token in output.tokens):
            self._stop_at = self._steps
        if self.drafts and self._ends(launch.plan, outputs):
            self._stop_at = self._steps
        return outputs

    def _ends(self, plan: Plan, outputs: Sequence[RowTokens]) -> bool:
        """Whether a row had its last token, or has no positions for a block, or none was fed."""
        fed = [row for row, output in zip(plan.rows, outputs, strict=True) if output.tokens]
        self.num_drafting += len(fed)
        for row in fed:
            newest = self._newest[row.sequence.row]
            num_left = row.sequence.max_length - 1 - newest
            end = newest + 1 + min(row.num_drafts, num_left)
            if num_left < 0 or end > row.reach(plan.num_steps):
                return True
        return not fed

    def stop_loop(self, launch: Launch) -> None:
        """End it after up to two steps, which may be under way already."""
        if launch.launch_id != self._ended:
            self._ended = launch.launch_id
            self._stop_at = min(self._stop_at, max(1, self._steps + self._draw.randint(0, 2)))

    def times(self, launch: Launch) -> LaunchTimes:
        """No time passes on this device."""
        return LaunchTimes(0, 0, 0, 0, 0)

    def _decode(self, row: ScheduledSequence, *, known: bool = False) -> list[Input]:
        """Run the newest token and its draft tokens, up to the sequence's end."""
        sequence, inputs = row.sequence, list[Input]()
        table, position = self._tables[sequence.row], self._newest[sequence.row]
        if position == row.position + row.slack + 1 and not row.num_drafts:
            assert sequence.finalized, "it has no page to go on"
            self.num_ended += 1
            return inputs
        # What does not count is taken back when the launch after it may have been planned already.
        first = row.position - (self.drafts and self.num_stuck > 0)
        assert first <= position <= row.position + row.slack, f"starts at {position}"
        if not known:  # a loop's pages are, from its beginning
            table.update((index, sequence.pages.ids[index]) for index in row.new_pages(PAGE))
        token: TokenKey = self._last[sequence.row][:2]
        most = min(row.num_drafts, sequence.max_length - 1 - position)
        num_drafts = self._draw.randint(0, most) if most > 0 else most
        for offset in range(1 + num_drafts):
            inputs.append(Input(token, self._run(row, position + offset, [token])))
            token = self._draft(sequence, inputs[-1].contents)
        return inputs

    def _draft(self, sequence: EngineSequence, contents: list[int]) -> TokenKey:
        task = sequence.task
        if self._draw.random() < 0.3:
            return self._draw.randrange(VOCABULARY), NO_PAYLOAD
        right = sampled(task.sampling.seed or 0, task.constraint(), contents, task.has_payload)
        return max(right.token_id, 0), NO_PAYLOAD

    def _settle(self, sequence: EngineSequence, inputs: list[Input], constraint: int) -> RowTokens:
        task = sequence.task
        tokens: list[SampledToken] = []
        for each in inputs:
            if tokens and each.token[0] != tokens[-1].token_id:
                break
            seed = task.sampling.seed or 0
            tokens.append(sampled(seed, constraint, each.contents, task.has_payload))
        if tokens:
            self._last[sequence.row] = tokens[-1]
            self._newest[sequence.row] = len(inputs[len(tokens) - 1].contents)
            self.num_accepted += len(tokens) - 1
            self.num_rejected += len(inputs) - len(tokens)
        return RowTokens(tuple(tokens), max(0, len(inputs) - 1))

    def _prefill(self, row: ScheduledSequence) -> Input:
        sequence, work = row.sequence, row.work
        self._tables[sequence.row] = dict(enumerate(sequence.pages.ids))
        if work.compute_pages:
            broken = self._breaks()
            for position, written in enumerate(prefix_contents(sequence)):
                page = self._slots(work.compute_pages[position // PAGE])
                page[position % PAGE] = BROKEN if broken else written
        if work.copy_tail is not None:
            source, destination = work.copy_tail
            self._kv[destination] = list(self._slots(source))
        assert row.num_tokens > 0, "no input to sample from"
        first = row.position - sequence.prefix_length
        tokens = sequence.tokens[first : first + row.num_tokens]
        return Input(tokens[-1], self._run(row, row.position, tokens))

    def _run(self, row: ScheduledSequence, position: int, tokens: Iterable[TokenKey]) -> list[int]:
        """Write the KV of these tokens; return that of all positions up to the last one."""
        pages = self._tables[row.sequence.row]
        before = self._slots(pages[(position - 1) // PAGE])[(position - 1) % PAGE]
        for token in tokens:
            before = BROKEN if self._breaks() else content(before, token)
            self._slots(pages[position // PAGE])[position % PAGE] = before
            position += 1
        count = -(-position // PAGE)
        read = [slot for index in range(count) for slot in self._slots(pages[index])]
        return read[:position]

    def _slots(self, page: int) -> list[int]:
        assert page != 0, "uses the scratch page"
        return self._kv.setdefault(page, [0] * PAGE)


def alone(sequence: EngineSequence) -> list[int]:
    """Return the tokens that the request reads when it runs alone."""
    task = sequence.task
    assert isinstance(task, FakeTask)
    single = FakeTask(
        seed=task.sampling.seed or 0,
        max_tokens=task.max_tokens,
        constrained=task.constrained,
        uses_transition_table=task.uses_transition_table,
    )
    contents = prefix_contents(sequence)
    for token in sequence.prompt:
        contents.append(content(contents[-1], (token.token_id, token.payload)))
    while single.finish_reason is None and len(single.tokens) < single.max_tokens:
        seed = single.sampling.seed or 0
        next_token = sampled(seed, single.constraint(), contents, single.has_payload)
        single.consume(next_token)
        contents.append(content(contents[-1], next_token))
    return single.tokens


# ---------------------------------------------------------------- soak

REPORTED = 50  # lines of progress
MAX_PART_SIZE = 10_000  # schedules


def main(argv: Sequence[str] | None = None) -> int:
    """Run the schedules and print progress; the first failure ends the run."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--schedules", default=1_000_000, type=int)
    parser.add_argument("--first", default=0, type=int, help="seed of the first")
    parser.add_argument("--processes", default=os.cpu_count() or 1, type=int)
    arguments = parser.parse_args(argv)
    total, size = arguments.schedules, part_size(arguments.schedules, arguments.processes)
    stop = arguments.first + total
    parts = [range(at, min(at + size, stop)) for at in range(arguments.first, stop, size)]
    start, totals, done = time.monotonic(), Totals(), 0
    for number, (part, more) in enumerate(run_parts(parts, arguments.processes), start=1):
        totals.join(more)
        done += len(part)
        if number * REPORTED % len(parts) < REPORTED:
            seconds = time.monotonic() - start
            sys.stdout.write(f"{done} of {total} in {seconds:.0f} s: {totals}\n")
            sys.stdout.flush()
    return 0


def part_size(total: int, processes: int) -> int:
    """Return the schedules per part, few enough that all processes end together."""
    return max(1, min(MAX_PART_SIZE, total // (20 * processes)))


def run_parts(parts: Sequence[range], processes: int) -> Iterator[tuple[range, Totals]]:
    """Yield each part's totals in order; raise the first failure, which names its seed."""
    if processes == 1:
        yield from zip(parts, map(run_all, parts), strict=True)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from zip(parts, pool.imap(run_all, parts), strict=True)


if __name__ == "__main__":
    sys.exit(main())
