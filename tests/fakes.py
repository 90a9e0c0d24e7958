"""Stand-ins for what surrounds the scheduler: a task, a device, a clock and a listener.

The fakes check as they run: the device that its buffers, rows and pages are used lawfully, the task
that it is never fed after its end, the listener that a request's news comes in order.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from legato_engine.core import (
    Event,
    FinishReason,
    PromptToken,
    QueryResult,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
    TextDelta,
)
from legato_engine.errors import LegatoError
from legato_engine.scheduler.launch import Launch, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.runner import LaunchTimes, RowTokens
from legato_engine.sequence import HostInputs, SequenceAdapter, Timing
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.tasks import SampledToken, Task

VOCABULARY = 97
STOP_EVERY = 13  # token ids divisible by it end a task
SILENT_EVERY = 5  # token ids divisible by it give no event


def sample_token(seed: int, position: int, constraint: int) -> int:
    """The token that the fake device samples: any wrong input shows in the stream."""
    return zlib.crc32(f"{seed} {position} {constraint}".encode()) % VOCABULARY


class FakeClock:
    """A clock turned by hand."""

    def __init__(self, now: float = 100.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds."""
        return self._now

    def perf_ns(self) -> int:
        """Nanoseconds, the same time."""
        return round(self._now * 1e9)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class FakeTask:
    """Reads tokens until a stop token; when constrained, its constraint depends on all of them."""

    def __init__(
        self,
        *,
        seed: int = 0,
        num_prompt: int = 1,
        max_tokens: int = 8,
        constrained: bool = False,
        fails_at: int | None = None,
    ) -> None:
        self.prompt = tuple(PromptToken(token_id) for token_id in range(num_prompt))
        self.sampling = SamplingParams(seed=seed)
        self.max_tokens = max_tokens
        self.constrained = constrained
        self.has_payload = constrained
        self.fails_at = fails_at
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.is_over: Callable[[], bool] = lambda: False

    def constraint(self) -> int:
        """A free task's never changes; neither kind is ever 0."""
        assert self.sampling.seed is not None
        return 1 + (sum(self.tokens) % 7 if self.constrained else self.sampling.seed % 3)

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Remember the token; some tokens give no event."""
        assert self.finish_reason is None, "fed after its last token"
        assert not self.is_over(), "a zombie committed a token"
        if len(self.tokens) == self.fails_at:
            raise ValueError("this task cannot read its token")
        self.tokens.append(token.token_id)
        if token.token_id % STOP_EVERY == 0:
            self.finish_reason = FinishReason.STOP
        return () if token.token_id % SILENT_EVERY == 0 else (TextDelta(text=str(token.token_id)),)

    def result(self, finish_reason: FinishReason) -> QueryResult:
        """All tokens as text."""
        return QueryResult(answer=" ".join(map(str, self.tokens)))

    @property
    def reasoning_tokens(self) -> int:
        """None."""
        return 0

    def expected_tokens(self, prompt_length: int) -> list[int]:
        """What this task reads when it runs alone, without a scheduler."""
        alone = FakeTask(max_tokens=self.max_tokens, constrained=self.constrained)
        alone.sampling = self.sampling
        while alone.finish_reason is None and len(alone.tokens) < self.max_tokens:
            position = prompt_length + len(alone.tokens)
            token = sample_token(self.sampling.seed or 0, position, alone.constraint())
            alone.consume(SampledToken(token, (0.0, 0.0)))
        return alone.tokens


def make_sequence(
    seq_id: int,
    task: Task | None = None,
    *,
    prefix_key: str | None = None,
    prefix_length: int = 1,
    num_crops: int = 0,
    deadline: float | None = None,
    arrival: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    adapter: str = "",
) -> EngineSequence:
    """A waiting sequence of request `r<seq_id>`; its adapter changes its prefix too."""
    task = task if task is not None else FakeTask(seed=seq_id)
    request = Request(
        request_id=RequestKey(f"r{seq_id}", tenant),
        task=QueryTask(question="?"),
        deadline=deadline,
        priority=priority,
    )
    if prefix_key is not None and adapter:
        prefix_key = f"{prefix_key} {adapter}"
    sequence = EngineSequence(
        seq_id,
        request,
        task,
        prefix_key,
        prefix_length,
        task.prompt,
        num_crops,
        HostInputs(object(), object() if adapter else None),
        SequenceAdapter(adapter, 8 if adapter else 0),
        Timing(arrival),
    )
    if isinstance(task, FakeTask):
        task.is_over = lambda: sequence.finalized
    return sequence


class _Fed(NamedTuple):
    """What a row fed: `num_lanes` positions from `first` on, of which `num_right` stand."""

    first: int
    num_lanes: int
    num_right: int


@dataclasses.dataclass(slots=True)
class _SlotUse:
    """What a launch holds from `forward` to `collect`."""

    launch: Launch
    held: dict[tuple[str, int], object]  # ("page" or "row", id): who reads or writes it
    resources: list[tuple[int, tuple[int, ...]]]  # per row: its batch row and its pages
    fed: list[_Fed]  # per row
    outputs: list[RowTokens] | None = None


class FakeRunner:
    """A device that remembers what was written to which KV slot and which launch holds what.

    `not_finite` names (sequence id, sampled position) pairs whose logits are not finite. How much
    of what a row may draft is proposed, and how much of that accepted, is drawn from `seed`.
    """

    def __init__(
        self,
        page_size: int,
        not_finite: frozenset[tuple[int, int]] = frozenset(),
        seed: int = 0,
    ) -> None:
        self._page_size = page_size
        self._not_finite = not_finite
        self._random = random.Random(seed)
        self._slots: dict[int, _SlotUse] = {}
        self._kv: dict[int, list[int]] = {}  # page: what was written to each of its slots
        self._expected: dict[int, list[int]] = {}  # row: what its sequence must read, by position
        self._last_token: dict[int, tuple[int, int, int]] = {}  # row: sequence id, position, token
        self._adapters: dict[int, str] = {0: ""}  # by slot: whose weights were written there
        self._features: tuple[EngineSequence, int] | None = None  # whose first crops are encoded
        self.calls: list[tuple[str, int]] = []  # (call, launch id)
        self.plans: list[Plan] = []  # by launch id
        self.constraints: dict[int, list[int]] = {}  # by launch id

    def forward(self, launch: Launch) -> None:
        """Take the slot; run the forward pass at once, as the compute stream would in its turn."""
        self.calls.append(("forward", launch.launch_id))
        self.plans.append(launch.plan)
        assert launch.slot not in self._slots, "a slot is reused before its commit"
        assert all(use.outputs is not None for use in self._slots.values()), (
            "two unsampled forwards"
        )
        use = _SlotUse(launch, {}, [], [])
        plan = launch.plan
        assert (plan.refinement is not None) == (plan.kind is LaunchKind.REFINE)
        assert (plan.refinement is None) == bool(plan.rows), "a refinement is no sequence's"
        num_decodes = len(plan.decodes)
        rows = plan.prefills
        computed = [
            bool(row.work.compute_pages and row.sequence.image_prefix_length) for row in rows
        ]
        assert computed == sorted(computed, reverse=True), "pictures that are computed come first"
        together = rows[: sum(computed)] if sum(computed) > 1 else ()
        assert all(row.sequence.num_crops for row in together), "only an encoder takes several"
        for place, row in enumerate(plan.rows):
            decodes = place < num_decodes
            fed = self._decide(row) if decodes else _Fed(row.position, *(row.num_tokens,) * 2)
            self._hold(use, row, fed, decodes=decodes)
            use.fed.append(fed)
            if decodes:
                self._decode(row, fed)
            elif plan.kind is LaunchKind.ENCODE:
                assert len(plan.rows) == 1, "an encode is about one picture"
                self._encode(row)
            else:
                self._prefill(row)
        self._slots[launch.slot] = use

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Sample every row; a zombie's constraint is 0."""
        self.calls.append(("sample", launch.launch_id))
        use = self._slots[launch.slot]
        assert use.launch is launch, "sampled in another launch's slot"
        assert use.outputs is None, "sampled twice"
        self.constraints[launch.launch_id] = list(constraints)
        use.outputs = []
        rows = launch.plan.sampled_rows
        num_decodes = len(launch.plan.decodes)
        for row, fed, constraint in zip(rows, use.fed if rows else (), constraints, strict=True):
            is_zombie = row.sequence.finalized
            assert (constraint == 0) == is_zombie, "only a zombie's constraint is 0"
            newest = fed
            if len(use.outputs) >= num_decodes:  # only a prompt's last position is sampled from
                newest = _Fed(fed.first + fed.num_lanes - 1, 1, 1)
            use.outputs.append(self._sample(row.sequence, newest, constraint))

    def _sample(self, sequence: EngineSequence, fed: _Fed, constraint: int) -> RowTokens:
        """A token behind every lane that stands."""
        tokens: list[SampledToken] = []
        for position in range(fed.first + 1, fed.first + 1 + fed.num_right):
            token = sample_token(sequence.task.sampling.seed or 0, position, constraint)
            self._last_token[sequence.row] = (sequence.seq_id, position, token)
            if (sequence.seq_id, position) in self._not_finite:
                token = -1
            tokens.append(SampledToken(token, (0.0, 0.0)))
        return RowTokens(tuple(tokens), max(0, fed.num_lanes - 1))

    def collect(self, launch: Launch) -> list[RowTokens]:
        """Hand out the tokens and give the slot back."""
        self.calls.append(("collect", launch.launch_id))
        use = self._slots.pop(launch.slot)
        assert use.launch is launch, "collected from another launch's slot"
        assert use.outputs is not None, "collected before it was sampled"
        older = [
            u.launch.launch_id
            for u in self._slots.values()
            if u.launch.launch_id < launch.launch_id
        ]
        assert not older, f"launches {older} are older and not committed"
        if launch.plan.refinement is not None:
            assert launch.plan.refinement.answer is None, "refined twice"
            launch.plan.refinement.answer = ("better", launch.plan.refinement.given)
        for row, (batch_row, pages) in zip(launch.plan.rows, use.resources, strict=True):
            sequence = row.sequence
            assert sequence.row == batch_row, "released in flight"
            assert sequence.pages.ids[: len(pages)] == pages, "lost a page in flight"
        return use.outputs

    def times(self, launch: Launch) -> LaunchTimes:
        """No time passes on this device."""
        return LaunchTimes(0, 0, 0, 0, 0)

    def _hold(self, use: _SlotUse, row: ScheduledSequence, fed: _Fed, *, decodes: bool) -> None:
        sequence = row.sequence
        assert sequence.row >= 0, "runs without a row"
        assert 0 not in sequence.pages.ids, "writes to the scratch page"
        assert len(set(sequence.pages.ids)) == len(sequence.pages.ids), "a page is listed twice"
        claims: dict[tuple[str, int], object] = {("row", sequence.row): sequence.seq_id}
        if sequence.adapter.slot:
            claims["adapter slot", sequence.adapter.slot] = sequence.adapter.key
        written = range(fed.first, fed.first + fed.num_lanes)
        pages = {sequence.pages.ids[position // self._page_size] for position in written}
        pages.update(row.work.compute_pages)
        claims.update({("page", page): sequence.seq_id for page in pages})
        for other in (use, *self._slots.values()):
            for what, owner in claims.items():
                assert other.held.get(what, owner) == owner, f"{what} has two owners in flight"
        assert ("row", sequence.row) not in use.held, "a sequence is twice in one batch"
        use.held.update(claims)
        num_pages = len(sequence.pages.ids)
        if decodes:  # none behind is lost with a rejected draft
            num_pages = -(-written.stop // self._page_size)
        use.resources.append((sequence.row, sequence.pages.ids[:num_pages]))

    def _encode(self, row: ScheduledSequence) -> None:
        sequence, work = row.sequence, row.work
        assert sequence.progress.last_position < 0, "encoded behind its prefill"
        assert work.compute_pages, "encodes a picture whose prefix is there"
        assert work.first_crop < work.stop_crop <= sequence.num_crops, "no such crops"
        self._continue_features(row)
        self._features = (sequence, work.stop_crop)

    def _continue_features(self, row: ScheduledSequence) -> None:
        """The feature buffer is free, or holds the first crops of this very row's picture."""
        sequence, first = row.sequence, row.work.first_crop
        owner, encoded = self._features or (sequence, 0)
        if owner.finalized:
            owner, encoded = sequence, 0
        assert owner is sequence, "another picture's features wait for their prefill"
        assert encoded == first, "crops are encoded in order, each once"
        assert sequence.inputs.image is not None, "its picture is gone"

    def _prefill(self, row: ScheduledSequence) -> None:
        sequence = row.sequence
        if row.work.write_adapter:
            assert sequence.inputs.adapter is not None, "its adapter is gone"
            self._adapters[sequence.adapter.slot] = sequence.adapter.key
        self._continue_features(row)
        self._features = None
        assert row.work.stop_crop == 0, "a prefill encodes all that are left"
        assert row.position >= sequence.prefix_length, "what is fed starts behind the prefix"
        assert row.num_tokens > 0, "feeds nothing to sample from"
        assert row.position + row.num_tokens == sequence.length, "all that is known is there"
        expected = _contents(sequence)
        self._expected[sequence.row] = expected
        for position in range(sequence.prefix_length if row.work.compute_pages else 0):
            page = row.work.compute_pages[position // self._page_size]
            self._slots_of(page)[position % self._page_size] = expected[position]
        if row.work.copy_tail is not None:
            source, destination = row.work.copy_tail
            self._kv[destination] = list(self._slots_of(source))
        for position in range(row.position, row.position + row.num_tokens):
            self._write(sequence, position)
        self._check_kv(sequence, row.position + row.num_tokens)

    def _decide(self, row: ScheduledSequence) -> _Fed:
        """Where the row stands, how much it proposes, and how much of that luck accepts."""
        sequence = row.sequence
        seq_id, first, _ = self._last_token[sequence.row]
        assert seq_id == sequence.seq_id, "decodes another sequence's token"
        assert 0 <= first - row.position <= row.slack, "decodes a token that is not its last"
        assert sequence.may_draft or (row.num_drafts, row.slack) == (0, 0), "must not draft"
        assert row.end <= len(sequence.pages.ids) * self._page_size, "no pages for its lanes"
        end = min(first + 1 + self._random.randint(0, row.num_drafts), sequence.max_length)
        assert end <= row.end, "writes behind what was foreseen"
        num_lanes = max(0, end - first)
        num_right = self._random.randint(1, num_lanes) if num_lanes else 0
        for lane in range(1, num_right):
            if (sequence.seq_id, first + lane) in self._not_finite:
                num_right = lane  # what is no token is never what was proposed
                break
        return _Fed(first, num_lanes, num_right)

    def _decode(self, row: ScheduledSequence, fed: _Fed) -> None:
        """Feed the newest token, right proposals and then wrong ones."""
        sequence = row.sequence
        expected = self._expected[sequence.row]
        _, _, token = self._last_token[sequence.row]
        for position in range(fed.first, fed.first + fed.num_right):
            if position > fed.first:
                constraint = sequence.task.constraint()
                token = sample_token(sequence.task.sampling.seed or 0, position, constraint)
            expected.append(hash((expected[-1], token)))
            self._write(sequence, position)
        for position in range(fed.first + fed.num_right, fed.first + fed.num_lanes):
            page = sequence.pages.ids[position // self._page_size]
            self._slots_of(page)[position % self._page_size] = hash(("rejected", position))
        self._check_kv(sequence, fed.first + fed.num_right)

    def _slots_of(self, page: int) -> list[int]:
        return self._kv.setdefault(page, [0] * self._page_size)

    def _write(self, sequence: EngineSequence, position: int) -> None:
        page = sequence.pages.ids[position // self._page_size]
        written = self._expected[sequence.row][position]
        self._slots_of(page)[position % self._page_size] = written

    def _check_kv(self, sequence: EngineSequence, length: int) -> None:
        adapter = self._adapters.get(sequence.adapter.slot)
        assert adapter == sequence.adapter.key, f"reads the adapter {adapter}"
        read = [slot for page in sequence.pages.ids for slot in self._slots_of(page)]
        assert read[:length] == self._expected[sequence.row][:length], "reads what is not its own"


def _contents(sequence: EngineSequence) -> list[int]:
    """By position: a hash of all up to there, and of the sequence's id if it shares nothing."""
    shares = sequence.prefix_key is not None
    owner = (sequence.adapter.key, sequence.prefix_key) if shares else sequence.seq_id
    contents = [zlib.crc32(f"{owner} {n}".encode()) for n in range(sequence.prefix_length)]
    for token_id, _ in sequence.tokens:
        contents.append(hash((contents[-1], token_id)))
    return contents


class FakeSink:
    """Collects a request's news and checks their order; may call back on a delta."""

    def __init__(self) -> None:
        self.started_ids: list[RequestKey] = []
        self.texts: dict[str, list[str]] = {}
        self.ended: dict[RequestKey, FinishReason | LegatoError] = {}
        self.on_delta: Callable[[EngineSequence], None] = lambda sequence: None

    def started(self, sequence: EngineSequence) -> None:
        """First news."""
        assert not sequence.finalized, "started after its end"
        self.started_ids.append(sequence.request.request_id)
        assert sequence.request.request_id not in self.texts, "started twice"
        self.texts[sequence.request.request_id] = []

    def delta(self, sequence: EngineSequence, events: Sequence[Event]) -> None:
        """Some text."""
        request_id = sequence.request.request_id
        assert request_id not in self.ended, "news after the end"
        assert events, "an empty delta"
        for event in events:
            assert isinstance(event, TextDelta)
            self.texts[request_id].append(event.text)
        self.on_delta(sequence)

    def done(self, sequence: EngineSequence, finish_reason: FinishReason) -> None:
        """Last news."""
        assert sequence.request.request_id in self.texts, "done before it started"
        self._end(sequence, finish_reason)

    def failed(self, sequence: EngineSequence, error: LegatoError) -> None:
        """Last news."""
        self._end(sequence, error)

    def _end(self, sequence: EngineSequence, how: FinishReason | LegatoError) -> None:
        assert sequence.finalized, "ended but not finalized"
        assert sequence.request.request_id not in self.ended, "ended twice"
        self.ended[sequence.request.request_id] = how
