"""A device whose tokens depend on the KV that it reads, and what a request reads alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from legato_engine.scheduler.batch import Launch, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.interfaces import LaunchTimes, LoopPoll, Pause
from legato_engine.scheduler.loops import max_new_pages
from legato_engine.scheduler.output import NOT_FINITE
from legato_engine.sequence import NO_PAYLOAD, RowTokens, SampledToken, TokenKey
from legato_engine.sequence import Sequence as EngineSequence

from tests.engine.scheduler.world import num_images
from tests.fakes import LISTS, TABLE, VOCABULARY, FakeTask, successor

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
