"""A device that checks how the scheduler uses its slots, rows, pages and adapters."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from legato_engine.scheduler.batch import Launch, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.interfaces import LaunchTimes
from legato_engine.sequence import RowTokens, SampledToken
from legato_engine.sequence import Sequence as EngineSequence

from tests.fakes import sample_token


class _Input(NamedTuple):
    """The positions `[first, first + length)` of a row, of which `num_accepted` are accepted."""

    first: int
    length: int
    num_accepted: int


@dataclasses.dataclass(slots=True)
class _SlotUse:
    """What a launch uses from `forward` to `collect`."""

    launch: Launch
    used: dict[tuple[str, int], object]  # ("page" or "row", id): its user
    resources: list[tuple[int, tuple[int, ...]]]  # by row: its device row and its pages
    inputs: list[_Input]  # by row
    outputs: list[RowTokens] | None = None


class FakeRunner:
    """A device that tracks the content of KV slots and the resources of launches.

    `not_finite` has (sequence id, sampled position) pairs whose logits are not finite. The numbers
    of drafted and of accepted tokens are drawn from `seed`.
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
        self._kv: dict[int, list[int]] = {}  # page: the content of its slots
        self._expected: dict[int, list[int]] = {}  # row: the expected content by position
        self._last_token: dict[int, tuple[int, int, int]] = {}  # row: sequence id, position, token
        self._adapters: dict[int, str] = {0: ""}  # slot: the adapter written to it
        self._features: tuple[EngineSequence, int] | None = None  # of its first crops
        self.encoded: list[tuple[EngineSequence, int]] = []  # pieces of visual prompts
        self._pieces: dict[EngineSequence, set[int]] = {}  # those that no prefill has consumed
        self.calls: list[tuple[str, int]] = []  # (call, launch id)
        self.plans: list[Plan] = []  # by launch id
        self.constraints: dict[int, list[int]] = {}  # by launch id

    def forward(self, launch: Launch) -> None:
        """Take the slot and run the forward pass at once."""
        self.calls.append(("forward", launch.launch_id))
        self.plans.append(launch.plan)
        assert launch.slot not in self._slots, "a slot is reused before its commit"
        assert all(use.outputs is not None for use in self._slots.values()), (
            "two unsampled forwards"
        )
        use = _SlotUse(launch, {}, [], [])
        plan = launch.plan
        assert (plan.refinement is not None) == (plan.kind is LaunchKind.REFINE)
        assert (plan.refinement is None) == bool(plan.rows), "a refinement names no sequence"
        num_decodes = len(plan.decodes)
        rows = plan.prefills
        computed = [
            bool(row.work.compute_pages and row.sequence.image_prefix_length) for row in rows
        ]
        assert computed == sorted(computed, reverse=True), "computed images are not first"
        together = rows[: sum(computed)] if sum(computed) > 1 else ()
        assert all(row.sequence.num_crops for row in together), "several images without an encoder"
        for index, row in enumerate(plan.rows):
            decodes = index < num_decodes
            given = self._draw(row) if decodes else _Input(row.position, *(row.num_tokens,) * 2)
            self._use(use, row, given, decodes=decodes)
            use.inputs.append(given)
            if decodes:
                self._decode(row, given)
            elif plan.kind is LaunchKind.ENCODE:
                assert len(plan.rows) == 1, "an encode has one image"
                self._encode(row)
            else:
                self._prefill(row, is_partial=row not in plan.counted_rows)
        self._slots[launch.slot] = use

    def mask(self, launch: Launch, constraints: Sequence[int]) -> Sequence[int]:
        """Refuse: none of these requests has a grammar."""
        raise AssertionError(f"launch {launch.launch_id} has no grammar")

    def sample(self, launch: Launch, constraints: Sequence[int]) -> None:
        """Sample every row; zombies have constraint 0."""
        self.calls.append(("sample", launch.launch_id))
        use = self._slots[launch.slot]
        assert use.launch is launch, "sampled in another launch's slot"
        assert use.outputs is None, "sampled twice"
        self.constraints[launch.launch_id] = list(constraints)
        use.outputs = []
        rows = launch.plan.sampled_rows
        num_decodes = len(launch.plan.decodes)
        inputs = use.inputs if rows else ()
        for row, given, constraint in zip(rows, inputs, constraints, strict=True):
            is_zombie = row.sequence.finalized
            assert (constraint == 0) == is_zombie, "only a zombie's constraint is 0"
            sampled = given
            if len(use.outputs) >= num_decodes:  # only a prompt's last position is sampled from
                sampled = _Input(given.first + given.length - 1, 1, 1)
            use.outputs.append(self._sample(row.sequence, sampled, constraint))

    def _sample(self, sequence: EngineSequence, given: _Input, constraint: int) -> RowTokens:
        """Sample a token after every accepted position."""
        tokens: list[SampledToken] = []
        for position in range(given.first + 1, given.first + 1 + given.num_accepted):
            token = sample_token(sequence.task.sampling.seed or 0, position, constraint)
            self._last_token[sequence.row] = (sequence.seq_id, position, token)
            if (sequence.seq_id, position) in self._not_finite:
                token = -1
            tokens.append(SampledToken(token, (0.0, 0.0)))
        return RowTokens(tuple(tokens), max(0, given.length - 1))

    def collect(self, launch: Launch) -> list[RowTokens]:
        """Return the tokens and free the slot."""
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
            assert launch.plan.refinement.result is None, "refined twice"
            launch.plan.refinement.result = ("better", launch.plan.refinement.inputs)
        for row, (batch_row, pages) in zip(launch.plan.rows, use.resources, strict=True):
            sequence = row.sequence
            assert sequence.row == batch_row, "released in flight"
            assert sequence.pages.ids[: len(pages)] == pages, "lost a page in flight"
        return use.outputs

    def times(self, launch: Launch) -> LaunchTimes:
        """Return zeros."""
        return LaunchTimes(0, 0, 0, 0, 0)

    def _use(self, use: _SlotUse, row: ScheduledSequence, given: _Input, *, decodes: bool) -> None:
        sequence = row.sequence
        assert sequence.row >= 0, "runs without a row"
        assert 0 not in sequence.pages.ids, "writes to the scratch page"
        assert len(set(sequence.pages.ids)) == len(sequence.pages.ids), "a page is listed twice"
        claims: dict[tuple[str, int], object] = {("row", sequence.row): sequence.seq_id}
        if sequence.adapter.slot:
            claims["adapter slot", sequence.adapter.slot] = sequence.adapter.key
        written = range(given.first, given.first + given.length)
        pages = {sequence.pages.ids[position // self._page_size] for position in written}
        pages.update(row.work.compute_pages)
        claims.update({("page", page): sequence.seq_id for page in pages})
        for other in (use, *self._slots.values()):
            for what, owner in claims.items():
                assert other.used.get(what, owner) == owner, f"{what} has two users in flight"
        assert ("row", sequence.row) not in use.used, "a sequence is twice in one batch"
        use.used.update(claims)
        num_pages = len(sequence.pages.ids)
        if decodes:  # later ones may be freed with rejected draft tokens
            num_pages = -(-written.stop // self._page_size)
        use.resources.append((sequence.row, sequence.pages.ids[:num_pages]))

    def _encode(self, row: ScheduledSequence) -> None:
        sequence, work = row.sequence, row.work
        assert sequence.progress.last_position < 0, "encoded after its prefill"
        if sequence.inputs.visual is not None:
            self._encode_pieces(sequence, range(work.first_piece, work.stop_piece))
            return
        assert work.compute_pages, "encodes an image whose prefix is cached"
        assert work.first_piece < work.stop_piece <= sequence.num_crops, "no such crops"
        self._continue_features(row)
        self._features = (sequence, work.stop_piece)

    def _encode_pieces(self, sequence: EngineSequence, pieces: range) -> None:
        """Encode pieces, each after those before it of its image."""
        visual, held = sequence.inputs.visual, self._pieces.setdefault(sequence, set())
        assert visual is not None, "its images are already released"
        assert pieces, "encodes nothing"
        assert held.isdisjoint(pieces), "encoded twice"
        held.update(pieces)
        for piece in pieces:
            begun = range(piece - piece % visual.prompt.pieces_per_image, piece)
            assert held.issuperset(begun), "encoded in another order"
        self.encoded += [(sequence, piece) for piece in pieces]

    def _consume_pieces(self, sequence: EngineSequence, start: int, end: int) -> None:
        """Encode what a chunk lacks; its last position gives up an image."""
        visual, held = sequence.inputs.visual, self._pieces.setdefault(sequence, set())
        assert visual is not None, "its images are already released"
        needed = visual.prompt.pieces_of(start, end)
        assert held.issubset(needed), "encoded too early"
        if missing := sorted(set(needed) - held):
            self._encode_pieces(sequence, range(missing[0], needed.stop))
        for span in visual.prompt.spans:
            if span.stop <= end:
                held.difference_update(visual.prompt.pieces_of(span.start, span.stop))

    def _continue_features(self, row: ScheduledSequence) -> None:
        """Check that the feature buffer is free or has the first crops of this row's image."""
        sequence, first = row.sequence, row.work.first_piece
        owner, encoded = self._features or (sequence, 0)
        if owner.finalized:
            owner, encoded = sequence, 0
        assert owner is sequence, "overwrites the features of another image"
        assert encoded == first, f"crops from {first} on are encoded after {encoded}"
        has_image = bool(sequence.num_crops or sequence.image_prefix_length)
        assert sequence.inputs.image is not None or not has_image, "its image is already released"

    def _prefill(self, row: ScheduledSequence, *, is_partial: bool) -> None:
        sequence, end = row.sequence, row.position + row.num_tokens
        if row.work.write_adapter:
            assert sequence.inputs.adapter is not None, "its adapter is already released"
            self._adapters[sequence.adapter.slot] = sequence.adapter.key
        if sequence.inputs.visual is not None:
            self._consume_pieces(sequence, row.position, end)
        else:
            self._continue_features(row)
            self._features = None
        assert row.work.stop_piece == 0, "a prefill encodes all remaining pieces"
        assert row.position >= sequence.prefix_length, "the input starts inside the prefix"
        assert row.num_tokens > 0, "no input to sample from"
        assert is_partial or end == sequence.length, "a known token is missing"
        expected = _contents(sequence)
        self._expected[sequence.row] = expected
        for position in range(sequence.prefix_length if row.work.compute_pages else 0):
            page = row.work.compute_pages[position // self._page_size]
            self._slots_of(page)[position % self._page_size] = expected[position]
        if row.work.copy_tail is not None:
            source, destination = row.work.copy_tail
            self._kv[destination] = list(self._slots_of(source))
        for position in range(row.position, end):
            self._write(sequence, position)
        self._check_kv(sequence, end)

    def _draw(self, row: ScheduledSequence) -> _Input:
        """Draw how many tokens the row drafts and how many of them are accepted."""
        sequence = row.sequence
        seq_id, first, _ = self._last_token[sequence.row]
        assert seq_id == sequence.seq_id, "decodes another sequence's token"
        assert 0 <= first - row.position <= row.slack, "decodes a token that is not its last"
        assert sequence.may_draft or (row.num_drafts, row.slack) == (0, 0), "must not draft"
        assert row.end <= len(sequence.pages.ids) * self._page_size, "no pages for its drafts"
        end = min(first + 1 + self._random.randint(0, row.num_drafts), sequence.max_length)
        assert end <= row.end, f"writes up to {end} of {row.end}"
        length = max(0, end - first)
        num_accepted = self._random.randint(1, length) if length else 0
        for index in range(1, num_accepted):
            if (sequence.seq_id, first + index) in self._not_finite:
                num_accepted = index  # a missing token equals no draft token
                break
        return _Input(first, length, num_accepted)

    def _decode(self, row: ScheduledSequence, given: _Input) -> None:
        """Write the newest token, right draft tokens and then wrong ones."""
        sequence = row.sequence
        expected = self._expected[sequence.row]
        _, _, token = self._last_token[sequence.row]
        for position in range(given.first, given.first + given.num_accepted):
            if position > given.first:
                constraint = sequence.task.constraint()
                token = sample_token(sequence.task.sampling.seed or 0, position, constraint)
            expected.append(hash((expected[-1], token)))
            self._write(sequence, position)
        for position in range(given.first + given.num_accepted, given.first + given.length):
            page = sequence.pages.ids[position // self._page_size]
            self._slots_of(page)[position % self._page_size] = hash(("rejected", position))
        self._check_kv(sequence, given.first + given.num_accepted)

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
        assert read[:length] == self._expected[sequence.row][:length], "reads KV of other content"


def _contents(sequence: EngineSequence) -> list[int]:
    """Return the content by position: a hash of all before it, and of the id if not shared."""
    shares = sequence.prefix_key is not None
    owner = (sequence.adapter.key, sequence.prefix_key) if shares else sequence.seq_id
    contents = [zlib.crc32(f"{owner} {n}".encode()) for n in range(sequence.prefix_length)]
    for token_id, _ in sequence.tokens:
        contents.append(hash((contents[-1] if contents else owner, token_id)))
    return contents
