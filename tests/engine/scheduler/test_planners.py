"""Plans are values: the sequences of the next batch and their positions."""

from collections.abc import Sequence as Many

import msgspec
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.kv_cache.prefill_work import PrefillWork
from legato_engine.scheduler.block_sizes import BlockSizes
from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.launch import ALONE, BatchLimits, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.planner import Planner
from legato_engine.scheduler.prefill_planner import PrefillPlanner
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import Sequence

from tests.fakes import FakeTask, make_sequence

PAGE = 4


def make_planner(
    manager: KVCacheManager, *, max_overtakes: int = 16, limits: BatchLimits = ALONE
) -> PrefillPlanner:
    """Return a planner with an empty queue."""
    queue = WaitingQueue(max_overtakes=max_overtakes, priority_seconds=1.0)
    return PrefillPlanner(manager, queue, limits)


def running(seq_id: int, *, launched: int, max_tokens: int = 8, refs: int = 0) -> Sequence:
    """Return a sequence of prefix 1 and prompt 3 with `launched` tokens launched."""
    sequence = make_sequence(seq_id, FakeTask(num_prompt=3, max_tokens=max_tokens))
    sequence.progress.num_launched = launched
    sequence.progress.last_position = sequence.prompt_length + launched - 1
    sequence.inflight_refs = refs
    sequence.pages.capacity = sequence.max_length
    sequence.pages.ids = tuple(range(1, -(-sequence.max_length // PAGE) + 1))
    return sequence


def members_of(*sequences: Sequence) -> RunningSequences:
    """Return these as the running sequences."""
    queue = WaitingQueue(max_overtakes=0, priority_seconds=1.0)
    members = RunningSequences(KVCacheManager(17, PAGE, 1), queue)
    for sequence in sequences:
        members.add(sequence)
    return members


def sized(seq_id: int, positions: int) -> Sequence:
    """Return a text-only sequence that needs all its positions at once."""
    return make_sequence(seq_id, FakeTask(num_prompt=positions - 1, max_tokens=1))


def planned(plan: Plan | None) -> list[int]:
    """Return the ids of the sequences in a plan."""
    return [] if plan is None else [row.sequence.seq_id for row in plan.rows]


def plain(*sequences: Sequence) -> DecodePlanner:
    """Return a planner without speculation."""
    return DecodePlanner(KVCacheManager(17, PAGE, 2), members_of(*sequences), None)


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
    assert plain(waiting).streaming
    waiting.preempted = True
    assert not plain(waiting).streaming
    whole = running(1, launched=2)
    whole.request = msgspec.structs.replace(whole.request, deltas=False)
    assert not plain(whole, running(2, launched=8)).streaming


class Blocks:
    """Always the same block size; records its arguments."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.calls: list[tuple[list[int], float]] = []

    def allot(self, sequences: Many[Sequence], *, kv_use: float) -> list[int]:
        """Return the same size for each."""
        self.calls.append(([sequence.seq_id for sequence in sequences], kv_use))
        return [self._size] * len(sequences)

    def learn(self, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
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
    assert blocks.calls == [([0, 1, 2], 0.0)]


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


def test_new_pages_are_those_that_no_earlier_launch_could_reach() -> None:
    """They begin between its farthest start and its end; there may be several."""
    sequence = running(0, launched=2, max_tokens=60)
    rows = [
        ScheduledSequence(sequence, 5, num_drafts=k, slack=s)
        for k, s in ((0, 0), (2, 0), (8, 2), (8, 4))
    ]
    assert [list(row.new_pages(PAGE)) for row in rows] == [[], [], [2, 3], [3, 4]]
    assert list(ScheduledSequence(sequence, 8).new_pages(PAGE)) == [2]


def grown(seq_id: int, manager: KVCacheManager) -> Sequence:
    """Return a sequence of prefix 1 and prompt 3, admitted, with its first token launched."""
    sequence = make_sequence(seq_id, FakeTask(num_prompt=3, max_tokens=30))
    manager.admit(sequence)
    sequence.progress.num_launched, sequence.progress.last_position = 1, sequence.prompt_length
    manager.launched(sequence)
    return sequence


def test_draft_tokens_take_no_page_that_a_sequence_needs_to_grow() -> None:
    """Without pages for all draft tokens a sequence has none and decodes one token."""
    manager = KVCacheManager(7, PAGE, 2)  # two of two pages each; two are free
    first, second = grown(0, manager), grown(1, manager)
    plan = speculating(Blocks(8), first, second, manager=manager).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [0, 0]
    plan = speculating(Blocks(7), first, second, manager=manager).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [7, 0]
    assert manager.stats().draft == 1


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


def test_kv_use_is_the_share_of_live_sequences() -> None:
    """A policy receives the fraction of the pages in use."""
    manager = KVCacheManager(17, PAGE, 8)
    manager.admit(sized(0, 8 * PAGE))
    blocks = Blocks(1)
    speculating(blocks, running(1, launched=1), manager=manager).plan()
    assert blocks.calls == [([1], 0.5)]


def test_a_prefill_starts_after_the_prefix() -> None:
    """The whole prompt is scheduled, from the end of the prefix."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    sequence = make_sequence(0, FakeTask(num_prompt=3), prefix_key="k", prefix_length=9)
    planner.add(sequence)
    plan = planner.plan()
    assert plan is not None
    pages = plan.rows[0].work.compute_pages
    work = PrefillWork(pages, (pages[2], sequence.pages.ids[2]))
    assert plan == Plan(LaunchKind.PREFILL, (ScheduledSequence(sequence, 9, 3, work),))
    assert len(planner) == 0
    assert planner.plan() is None


def test_prefills_are_first_come_first_served() -> None:
    """One sequence per launch by default, in the order of arrival."""
    planner = make_planner(KVCacheManager(17, PAGE, 3))
    for seq_id in range(3):
        planner.add(sized(seq_id, 4))
    assert [planned(planner.plan()) for _ in range(3)] == [[0], [1], [2]]


def test_a_prefill_batch_has_bounded_rows() -> None:
    """The limits of prompts, tokens and sampled sequences are kept."""
    for limits, batches in (
        (BatchLimits(3, tokens=99, sampled=9), [[0, 1, 2], [3, 4]]),
        (BatchLimits(9, tokens=11, sampled=9), [[0, 1], [2, 3], [4]]),
        (BatchLimits(9, tokens=99, sampled=4), [[0, 1, 2, 3], [4]]),
        (BatchLimits(9, tokens=3, sampled=9), [[0], [1], [2], [3], [4]]),
    ):
        planner = make_planner(KVCacheManager(17, PAGE, 5), limits=limits)
        for seq_id in range(5):
            planner.add(sized(seq_id, 4))
        assert [planned(planner.plan()) for _ in batches] == batches


def test_an_image_to_compute_begins_a_launch() -> None:
    """No earlier request waits for an image; requests about a cached or the same image join."""
    manager = KVCacheManager(33, PAGE, 9)
    planner = make_planner(manager, limits=BatchLimits(9, tokens=99, sampled=9))
    keys = ("a", "a", "b", None, "a")
    sequences = [
        make_sequence(n, prefix_key=key, prefix_length=4 if key else 1)
        for n, key in enumerate(keys)
    ]
    for sequence in sequences[:4]:
        planner.add(sequence)
    plan = planner.plan()
    assert planned(plan) == [0, 1], "the next request computes an image"
    assert plan is not None
    assert [bool(row.work.compute_pages) for row in plan.rows] == [True, False]
    planner.add(sequences[4])
    assert planned(planner.plan()) == [2, 3, 4]
    assert [sequence.pages.cached_tokens for sequence in sequences] == [0, 4, 0, 0, 4]


def test_images_share_a_launch_while_many_requests_wait() -> None:
    """Up to the limit, before all other prompts, which may be first and are not fewer for it.

    None is added if few requests wait, an answer is long, a decode streams, or the first image is
    not supported by the encoder.
    """

    def plan(
        *keys: str | None,
        images: int = 2,
        min_queue_length: int = 1,
        said: int = 0,
        streaming: bool = False,
    ) -> list[int]:
        manager = KVCacheManager(65, PAGE, 9)
        limits = BatchLimits(
            3, tokens=99, sampled=9, images=images, min_queue_length=min_queue_length
        )
        planner = make_planner(manager, limits=limits)
        for n, key in enumerate(keys):
            length, crops = (4, 0 if key == "host" else 3) if key else (1, 0)
            planner.add(make_sequence(n, prefix_key=key, prefix_length=length, num_crops=crops))
        decodes = decodes_of(running(90, launched=said, max_tokens=99)) if said else ()
        made = planner.plan(decodes=decodes, streaming=streaming)
        assert made is not None
        computed = [row.encodes for row in made.prefills]
        assert computed == sorted(computed, reverse=True), "images are not first"
        assert made.num_mixed_decodes == len(decodes)
        return planned(made)[made.num_mixed_decodes :]

    assert plan("a", "b", "c") == [0, 1]
    assert plan("a", "b", "c", images=3, min_queue_length=0) == [0, 1, 2]
    assert plan("a", "a", "b", "b", "c", None) == [0, 2, 1, 3]
    assert plan("a", "a", "b", "b", "a", "b") == [0, 2, 1, 3], "an image adds a prompt"
    assert plan("a", "b", min_queue_length=2) == [0]
    assert plan("a", "b", "c", min_queue_length=2) == [0, 1]
    assert plan("a", "b", "c", said=7) == [0, 1]
    assert plan("a", "b", "c", said=8) == [0]
    assert plan("a", "b", "c", streaming=True) == [0]
    assert plan(None, "b", "c") == [1, 2, 0]
    assert plan(None, "b", "c", min_queue_length=9) == [0]
    assert plan("host", "b", "c") == [0]
    assert plan("a", "host", "c") == [0]


def decodes_of(*sequences: Sequence) -> tuple[ScheduledSequence, ...]:
    """Return these as scheduled in a decode."""
    plan = plain(*sequences).plan()
    assert plan is not None
    return plan.rows


def test_decodes_join_a_prefill() -> None:
    """All of them or none, before the prompts, which join up to the limits."""
    decodes = decodes_of(running(7, launched=1), running(8, launched=2))
    for limits, seq_ids, num_mixed_decodes in (
        (BatchLimits(4, tokens=10, sampled=4), [7, 8, 0, 1], 2),
        (BatchLimits(4, tokens=9, sampled=4), [7, 8, 0], 2),
        (BatchLimits(4, tokens=99, sampled=3), [7, 8, 0], 2),
        (BatchLimits(4, tokens=5, sampled=4), [0], 0),
        (BatchLimits(4, tokens=99, sampled=2), [0, 1], 0),
        (ALONE, [0], 0),
    ):
        planner = make_planner(KVCacheManager(17, PAGE, 5), limits=limits)
        planner.add(sized(0, 4))
        planner.add(sized(1, 4))
        plan = planner.plan(decodes=decodes)
        assert plan is not None
        assert (planned(plan), plan.num_mixed_decodes) == (seq_ids, num_mixed_decodes)
        assert plan.decodes == decodes[:num_mixed_decodes]
        assert [row.sequence.seq_id for row in plan.prefills] == seq_ids[num_mixed_decodes:]


def test_adapters_share_launches() -> None:
    """Prompts and decodes of any adapters share; only a missing adapter slot makes one wait."""
    manager = KVCacheManager(33, PAGE, 9, num_adapter_slots=1)
    planner = make_planner(manager, limits=BatchLimits(4, tokens=99, sampled=9))
    for seq_id, adapter in enumerate(("x", "", "y", "x")):
        planner.add(make_sequence(seq_id, adapter=adapter))
    one = running(9, launched=1)
    one.adapter.key = "x"
    turns = Planner(planner, plain(one), prefills_per_decode=1, crops_per_launch=0)
    plan = turns.plan()
    assert plan is not None
    assert (planned(plan), plan.num_mixed_decodes) == ([9, 0, 1], 1)


def test_a_shared_launch_waits_for_the_constraints_of_its_decodes() -> None:
    """A prompt's constraint is known when it is planned."""
    free, boxes = running(0, launched=1), running(1, launched=1)
    boxes.task.constrained = True
    prompt = ScheduledSequence(boxes, 0, 3)
    for decodes, waits in ((decodes_of(free), False), (decodes_of(free, boxes), True)):
        plan = Plan(LaunchKind.PREFILL, (*decodes, prompt), len(decodes))
        assert plan.constrained is waits


def test_a_large_request_is_overtaken_only_so_often() -> None:
    """Small requests overtake a large one that does not fit, until it blocks them and is next."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=2)
    blocker = sized(0, 16)
    manager.admit(blocker)
    planner.add(sized(1, 32))
    small = [sized(seq_id, 4) for seq_id in range(2, 6)]
    for sequence in small:
        planner.add(sequence)
    assert [planned(planner.plan()) for _ in range(3)] == [[2], [3], []]
    manager.release(blocker)
    assert planner.plan() is None
    for sequence in small[:2]:
        manager.release(sequence)
    assert planned(planner.plan()) == [1]


def test_a_blocking_request_goes_before_all_later_ones() -> None:
    """When the large request fits, it is taken first."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=0)
    blocker = sized(0, 4)
    manager.admit(blocker)
    planner.add(sized(1, 32))
    planner.add(sized(2, 4))
    assert planner.plan() is None
    manager.release(blocker)
    assert planned(planner.plan()) == [1]


def test_a_search_skips_no_more_than_may_overtake() -> None:
    """A request further back waits even if it fits."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=1)
    manager.admit(sized(0, 16))
    for seq_id, positions in ((1, 32), (2, 32), (3, 4)):
        planner.add(sized(seq_id, positions))
    assert planner.plan() is None


def test_a_removed_sequence_is_not_planned() -> None:
    """A sequence that left the queue is not prefilled."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    first, second = sized(0, 4), sized(1, 4)
    planner.add(first)
    planner.add(second)
    planner.remove(first)
    assert planned(planner.plan()) == [1]


def test_an_encode_names_its_crops_and_has_no_input() -> None:
    """Each part of an image has the same pages and its own crops, the prefill has the rest."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    sequence = make_sequence(0, prefix_key="k", prefix_length=8, num_crops=5)
    planner.add(sequence)
    plans = [planner.plan(max_crops=2), planner.plan(max_crops=2), planner.plan()]
    assert plans[0] is not None
    pages = plans[0].rows[0].work.compute_pages
    parts = [PrefillWork(pages, None, first, stop) for first, stop in ((0, 2), (2, 4), (4, 0))]
    assert plans == [
        Plan(LaunchKind.ENCODE, (ScheduledSequence(sequence, 8, 0, parts[0]),)),
        Plan(LaunchKind.ENCODE, (ScheduledSequence(sequence, 8, 0, parts[1]),)),
        Plan(LaunchKind.PREFILL, (ScheduledSequence(sequence, 8, 1, parts[2]),)),
    ]
    assert not planner.has_work


def test_a_sequence_aborted_between_its_encodes_is_not_planned() -> None:
    """The next in the queue is planned, and the planner forgets the first."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    large, text = make_sequence(0, num_crops=5), sized(1, 4)
    planner.add(large)
    planner.add(text)
    assert planned(planner.plan(max_crops=2)) == [0]
    assert len(planner) == 1
    planner.remove(large)
    assert planned(planner.plan(max_crops=2)) == [1]
    assert not planner.has_work


def test_mixed_decodes_count_as_decodes() -> None:
    """No decode runs between two prefills that include all decodes."""
    prefill = make_planner(KVCacheManager(65, PAGE, 8), limits=BatchLimits(2, 20, 4))
    one = running(9, launched=1)
    planner = Planner(prefill, plain(one), prefills_per_decode=1, crops_per_launch=0)
    for seq_id, positions in enumerate((4, 4, 4, 30, 4)):
        prefill.add(sized(seq_id, positions))
    batches = [planned(planner.plan()) for _ in range(5)]
    assert batches == [[9, 0, 1], [9, 2], [3], [9], [9, 4]]


def test_prefills_and_decodes_take_turns() -> None:
    """`prefills_per_decode` prefills, then a decode; each continues alone while it has work."""
    prefill = make_planner(KVCacheManager(65, PAGE, 8))
    one = running(9, launched=1)
    members = members_of()
    decode = DecodePlanner(KVCacheManager(17, PAGE, 2), members, None)
    planner = Planner(prefill, decode, prefills_per_decode=2, crops_per_launch=0)
    for seq_id in range(5):
        prefill.add(sized(seq_id, 4))
    plans = []
    for decodes in (True, True, True, False, False, False, True, False):
        one.preempted = not decodes
        members.add(one)
        plans.append(planner.plan())
    kinds = [None if plan is None else plan.kind.value for plan in plans]
    assert kinds == [*["prefill"] * 2, "decode", *["prefill"] * 3, "decode", None]
