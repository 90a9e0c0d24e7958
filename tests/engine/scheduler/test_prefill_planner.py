"""Prefill plans: admission, shared launches and encodes."""

from legato_engine.kv_cache.manager import KVCacheManager, PrefillWork
from legato_engine.scheduler.batch import ALONE, BatchLimits, LaunchKind, Plan, ScheduledSequence

from tests.engine.scheduler.planning import PAGE, decodes_of, make_planner, planned, running, sized
from tests.fakes import FakeTask, make_sequence


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
    assert plan(None, "b", images=1, min_queue_length=0) == [0]
    assert plan("host", "b", "c") == [0]
    assert plan("a", "host", "c") == [0]


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
