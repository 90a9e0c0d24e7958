"""Decode plans: the sequences of the batch, their positions and draft tokens."""

from collections.abc import Sequence as Many

import msgspec
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.runtime.backend import have_common_pages
from legato_engine.scheduler.batch import LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.decode import DecodePlanner
from legato_engine.scheduler.interfaces import RowTokens
from legato_engine.sequence import Sequence
from legato_engine.speculative.policy import BlockSizes

from tests.engine.scheduler.planning import (
    PAGE,
    members_of,
    plain,
    planned,
    running,
    sized,
)
from tests.fakes import FakeTask, make_sequence


def speculating(
    blocks: BlockSizes, *sequences: Sequence, manager: KVCacheManager | None = None
) -> DecodePlanner:
    """Return a planner that drafts."""
    manager = manager or KVCacheManager(17, PAGE, 8)
    return DecodePlanner(manager, members_of(*sequences), blocks)


def test_decode_starts_with_the_last_launched_token() -> None:
    """The first decode is at the prompt's end, each later one a position further."""
    first, later = running(0, launched=1), running(1, launched=3, refs=1)
    assert plain(first, later).plan() == Plan(
        LaunchKind.DECODE,
        (ScheduledSequence(first, position=4), ScheduledSequence(later, position=6)),
    )


def test_sequences_about_one_image_are_neighbours() -> None:
    """In whatever order they came, and without those that have gone; others stay in order."""
    sequences = [running(number, launched=1) for number in range(7)]
    for sequence, page in zip(sequences, (3, 5, 3, 8, 5, 3, 9), strict=True):
        sequence.pages.ids = (page, *range(20, 24))
    planner = plain(*sequences)
    plan = planner.plan()
    assert planned(plan) == [0, 2, 5, 1, 4, 3, 6]
    assert plan is not None
    assert not have_common_pages(plan.rows)  # 3 of 7
    sequences[3].preempted = sequences[2].preempted = True
    plan = planner.plan()
    assert planned(plan) == [0, 5, 1, 4, 6]
    assert plan is not None
    assert not have_common_pages(plan.rows)
    sequences[6].preempted = True
    plan = planner.plan()
    assert plan is not None
    assert have_common_pages(plan.rows)  # 2 of 4


def test_decode_skips_sequences_that_cannot_continue() -> None:
    """Preempted, with all tokens launched, in two launches or not prefilled."""
    leaving = running(0, launched=1)
    leaving.preempted = True
    encoding = running(4, launched=2)
    encoding.progress.last_position = -1
    full = running(1, launched=8)
    ahead = running(2, launched=3, refs=2)
    last = running(3, launched=7)
    assert planned(plain(leaving, full, ahead, encoding, last).plan()) == [3]
    assert plain(leaving, full, ahead, encoding).plan() is None


def test_a_stream_without_a_page_is_a_stream() -> None:
    """Images are split for a streaming sequence even if no page is free for its next token."""
    waiting = running(0, launched=2)
    waiting.pages.capacity = waiting.progress.last_position
    assert plain(waiting).is_streaming
    waiting.preempted = True
    assert not plain(waiting).is_streaming
    whole = running(1, launched=2)
    whole.request = msgspec.structs.replace(whole.request, deltas=False)
    assert not plain(whole, running(2, launched=8)).is_streaming


class Blocks(BlockSizes):
    """Block sizes of one bound that records what it is asked."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.calls: list[tuple[list[int], bool]] = []

    def allot(self, sequences: Many[Sequence], *, under_pressure: bool) -> list[int]:
        """Return the same bound for all."""
        self.calls.append(([sequence.seq_id for sequence in sequences], under_pressure))
        return [self._size] * len(sequences)

    def learn(self, sequence: Sequence, output: RowTokens) -> None:
        """Ignore it."""


def test_a_decode_drafts_no_more_than_its_task_may_sample() -> None:
    """Near its end a sequence drafts less; with constraints or payloads it does not draft."""
    long, near = running(0, launched=1, max_tokens=20), running(1, launched=3, max_tokens=6)
    last, boxes = running(2, launched=7), running(3, launched=2)
    outline = running(4, launched=2)
    boxes.task.constrained = outline.task.has_payload = True
    blocks = Blocks(4)
    plan = speculating(blocks, long, boxes, near, outline, last).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [4, 0, 2, 0, 0]
    assert blocks.calls == [([0, 1, 2], False)]


def test_a_scheduled_sequence_knows_the_last_position_it_may_write() -> None:
    """After launches with draft tokens it may start later, but never exceeds its maximal length."""
    sequence = running(0, launched=2, max_tokens=30, refs=1)
    sequence.progress.inflight_drafts = 3
    plan = speculating(Blocks(4), sequence).plan()
    assert plan is not None
    (row,) = plan.rows
    assert (row.position, row.slack, row.num_drafts) == (5, 3, 4)
    assert row.end == 5 + 3 + 5
    sequence.progress.num_launched = 28
    sequence.progress.last_position = sequence.prompt_length + 27
    plan = speculating(Blocks(4), sequence).plan()
    assert plan is not None
    assert plan.rows[0].num_drafts == 1
    assert plan.rows[0].end == sequence.max_length


def grown(seq_id: int, manager: KVCacheManager) -> Sequence:
    """Return a sequence of prefix 1 and prompt 3, admitted, with its first token launched."""
    sequence = make_sequence(seq_id, FakeTask(num_prompt=3, max_tokens=30))
    manager.admit(sequence)
    sequence.progress.num_launched, sequence.progress.last_position = 1, sequence.prompt_length
    manager.mark_launched(sequence)
    return sequence


def test_draft_tokens_take_no_page_that_a_sequence_needs_to_grow() -> None:
    """A sequence may draft as many as it has pages for: all, a half, a quarter, or none."""
    manager = KVCacheManager(7, PAGE, 2)  # two of two pages each; two are free
    first, second = grown(0, manager), grown(1, manager)
    plan = speculating(Blocks(8), first, second, manager=manager).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [4, 2]
    assert manager.stats().free == 1


def test_a_sequence_that_may_exceed_its_pages_waits_for_its_launch() -> None:
    """While draft tokens are in flight, a sequence needs pages for all of them."""
    manager = KVCacheManager(5, PAGE, 2)  # two of two pages each
    first, second = grown(0, manager), grown(1, manager)
    first.progress.inflight_drafts, first.inflight_refs = 3, 1
    planner = speculating(Blocks(1), first, second, manager=manager)
    assert planned(planner.plan()) == [0, 1]
    first.progress.inflight_drafts = 4
    assert planned(planner.plan()) == [1]
    first.progress.inflight_drafts = 0
    assert planned(planner.plan()) == [0, 1]


def test_a_launch_is_under_pressure_above_a_share_of_the_pages() -> None:
    """Bounds and the device are told alike."""
    for pages, pressed in ((13, False), (14, True)):
        manager = KVCacheManager(17, PAGE, 8)
        manager.admit(sized(0, pages * PAGE))
        blocks = Blocks(1)
        plan = speculating(blocks, running(1, launched=1), manager=manager).plan()
        assert plan is not None
        assert plan.under_pressure is pressed
        assert blocks.calls == [([1], pressed)]
