"""The prefix cache and its radix tree."""

import random

import pytest
from legato_engine.kv_cache.manager import KVCacheManager, PrefillWork
from legato_engine.kv_cache.pools import IdPool
from legato_engine.kv_cache.radix_tree import Namespace, RadixTree, TreeNode

from tests.engine.kv_cache.test_manager import PAGE, admit, decode, launch, release, sequence
from tests.fakes import FakeTask, make_sequence


def test_a_miss_on_a_page_boundary_shares_all_prefix_pages() -> None:
    """The sequence starts with the tree's pages; all of them are computed, none is copied."""
    manager = KVCacheManager(17, PAGE, 2)
    first = sequence(0, 8)
    work = admit(manager, first)
    assert first.pages.ids[:2] == work.compute_pages
    assert work.copy_tail is None
    assert len(first.pages.ids) == 3  # 11 positions
    assert (first.pages.cached_tokens, manager.pages_used) == (0, 3)


def test_a_hit_shares_pages_and_computes_nothing() -> None:
    """A second sequence with the key uses the same pages while the first still decodes."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 8), sequence(1, 8)
    admit(manager, first)
    assert admit(manager, second) == PrefillWork()
    assert second.pages.ids[:2] == first.pages.ids[:2]
    assert second.pages.ids[2] != first.pages.ids[2]
    assert (second.pages.cached_tokens, manager.pages_used) == (8, 4)


def test_a_partial_last_page_is_copied_by_miss_and_hit() -> None:
    """The tree keeps its partial page; every sequence continues in a private copy of it."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 9), sequence(1, 9)
    work = admit(manager, first)
    assert len(work.compute_pages) == 3
    assert first.pages.ids[:2] == work.compute_pages[:2]
    assert work.copy_tail == (work.compute_pages[2], first.pages.ids[2])
    assert first.pages.ids[2] not in work.compute_pages
    hit = admit(manager, second)
    assert hit == PrefillWork((), (work.compute_pages[2], second.pages.ids[2]))
    assert manager.pages_used == 3 + 2  # 12 positions: 3 pages, 2 of them shared


def test_a_prefix_shorter_than_a_page_shares_only_through_its_copy() -> None:
    """Without a full page, all pages of the sequence are private and the tree has one page."""
    manager = KVCacheManager(17, PAGE, 2)
    first = sequence(0, 3)
    work = admit(manager, first)
    assert work.copy_tail == (work.compute_pages[0], first.pages.ids[0])
    assert not set(work.compute_pages) & set(first.pages.ids)


def test_without_a_key_nothing_is_shared() -> None:
    """Text-only sequences compute their own BOS in their own first page."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 1, None), sequence(1, 1, None)
    assert admit(manager, first) == PrefillWork(first.pages.ids[:1])
    assert admit(manager, second) == PrefillWork(second.pages.ids[:1])
    assert not set(first.pages.ids) & set(second.pages.ids)
    manager.release(first)
    manager.release(second)
    assert (manager.pages_used, manager.prefix_pages, manager.rows.num_used) == (0, 0, 0)


def test_release_leaves_known_content_in_the_cache() -> None:
    """After the last release the prefix, the prompt and the answer stay, evictable."""
    manager = KVCacheManager(17, PAGE, 2)
    first = sequence(0, 9)
    admit(manager, first)
    decode(manager, first, 7, 8)
    release(manager, first)
    assert (manager.pages_used, manager.prefix_pages, manager.rows.num_used) == (0, 3 + 2, 0)
    assert (first.row, first.pages.ids) == (-1, ())
    second = sequence(1, 9)
    assert admit(manager, second).compute_pages == ()
    assert (second.pages.cached_tokens, second.pages.cached_length) == (10, 10)
    assert manager.pages_used == 3 + 1


def test_equal_prompts_share_pages_while_their_owner_decodes() -> None:
    """Full pages of prompt and answer are shared as soon as they are known and enqueued."""
    manager = KVCacheManager(17, PAGE, 3)
    first = sequence(0, 1, "", prompt=9, max_tokens=12)
    admit(manager, first)
    second = sequence(1, 1, "", prompt=9, max_tokens=12)
    assert admit(manager, second) == PrefillWork()
    assert second.pages.ids[:2] == first.pages.ids[:2]
    assert (second.pages.cached_tokens, first.pages.cached_tokens) == (8, 0)
    decode(manager, first, 50, 51, 52, 53, 54, 55)
    turn = sequence(2, 1, "", prompt=9)
    turn.tokens += [(50, (0.0, 0.0)), (51, (0.0, 0.0)), (99, (0.0, 0.0))]
    admit(manager, turn)
    assert turn.pages.ids[:3] == first.pages.ids[:3]
    assert turn.pages.cached_tokens == 12


def test_a_common_prefix_inside_a_page_is_copied() -> None:
    """The page where two prompts diverge is copied before the second one writes to it."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 1, "", prompt=9), sequence(1, 1, "", prompt=9)
    second.tokens[6:] = [(77, (0.0, 0.0))] * 3
    admit(manager, first)
    work = admit(manager, second)
    assert second.pages.ids[0] == first.pages.ids[0]
    assert work == PrefillWork((), (first.pages.ids[1], second.pages.ids[1]))
    assert second.pages.cached_tokens == 7


def test_what_is_cached_after_a_question_is_found() -> None:
    """A sequence that was asked for before another's prompt was launched shares its pages."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 8, prompt=6), sequence(1, 8, prompt=6)
    manager.admit(first)
    assert not manager.can_admit(second)  # its prefix is not computed yet
    launch(manager, first)
    admit(manager, second)
    assert second.pages.cached_length == 12
    assert second.pages.ids[:3] == first.pages.ids[:3]


def test_what_is_evicted_after_a_question_is_not_found() -> None:
    """A sequence that could be admitted computes what has left the cache since."""
    manager = KVCacheManager(10, PAGE, 2)
    first, second = sequence(0, 8, prompt=6), sequence(1, 8, prompt=6)
    other = sequence(2, 1, None, max_tokens=40)
    admit(manager, first)
    release(manager, first)
    admit(manager, other)
    assert manager.can_admit(second)
    decode(manager, other, *range(25))
    release(manager, other)
    admit(manager, second)
    assert second.pages.cached_length == 8


def test_the_last_token_of_a_prompt_is_always_an_input() -> None:
    """One or two positions of a fully cached prompt are computed: one is not worth a copy."""
    manager = KVCacheManager(33, PAGE, 2)
    for prompt, cached in ((7, 7), (8, 8), (9, 8), (10, 10)):
        first, second = (sequence(n, 1, f"{prompt}", prompt=prompt) for n in (0, 1))
        admit(manager, first)
        decode(manager, first, 5, 6, 7)
        release(manager, first)
        admit(manager, second)
        assert second.pages.cached_tokens == cached
        release(manager, second)


@pytest.mark.parametrize("different", ["adapter", "image", "payload"])
def test_only_positions_with_equal_kv_are_shared(different: str) -> None:
    """Different adapters, images or token payloads are not shared."""
    manager = KVCacheManager(33, PAGE, 2, num_adapter_slots=1)
    first, second = sequence(0, 8, prompt=9), sequence(1, 8, prompt=9)
    if different == "adapter":
        second.adapter.key = "tuned"
    elif different == "image":
        second.prefix_key = "other"
    else:
        second.tokens[0] = (second.tokens[0][0], (0.5, 0.0))
    admit(manager, first)
    admit(manager, second)
    assert second.pages.cached_tokens == (8 if different == "payload" else 0)
    assert not set(second.pages.ids[2:]) & set(first.pages.ids)


def test_a_page_computed_twice_is_kept_once() -> None:
    """A sequence keeps a duplicate of a cached page only while others reference that page."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 1, "", prompt=3), sequence(1, 1, "", prompt=3)
    admit(manager, first)
    admit(manager, second)  # its last position is in the page that `first` gave to the tree
    assert second.pages.ids != first.pages.ids
    assert manager.pages_used == 2 + 2  # each has a page for the token to come
    release(manager, first)
    decode(manager, second, 8, 9, 10)
    release(manager, second)
    assert manager.prefix_pages == 2


def test_a_sequence_alone_can_use_the_whole_pool() -> None:
    """Duplicates of cached pages are freed before the sequence runs out of pages."""
    manager = KVCacheManager(5, PAGE, 2)
    first, second = sequence(0, 1, "", prompt=3), sequence(1, 1, "", prompt=3, max_tokens=13)
    assert manager.can_ever_fit(second)
    admit(manager, first)
    admit(manager, second)
    release(manager, first)
    decode(manager, second, *range(60, 72))
    assert len(second.pages.ids) == 4


def test_a_sharer_waits_until_the_prefix_is_launched() -> None:
    """A sharer is admitted only after the launch that computes the prefix, and finds it."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 8), sequence(1, 8)
    manager.admit(first)
    assert not manager.can_admit(second)
    launch(manager, first)
    assert manager.can_admit(second)
    assert manager.admit(second).compute_pages == ()


def test_a_sharer_computes_what_an_aborted_one_did_not() -> None:
    """A prefix whose sequence ended before its launch is computed by the next sequence."""
    manager = KVCacheManager(17, PAGE, 2)
    first, second = sequence(0, 8), sequence(1, 8)
    manager.admit(first)
    release(manager, first)
    assert manager.pages_used == manager.prefix_pages == 0
    assert len(admit(manager, second).compute_pages) == 2
    assert second.pages.cached_tokens == 0


def test_one_key_has_one_length() -> None:
    """A key names content, so two lengths for one key assert."""
    manager = KVCacheManager(17, PAGE, 2)
    admit(manager, sequence(0, 8))
    with pytest.raises(AssertionError, match="two lengths"):
        manager.admit(sequence(1, 9))


# ---------------------------------------------------------------- invalid content


def test_an_invalid_prefix_lasts_as_long_as_its_references() -> None:
    """Its users continue, no sequence joins them, and its pages are freed with the last one."""
    manager = KVCacheManager(17, PAGE, 3)
    first, second, third = sequence(0, 8), sequence(1, 8), sequence(2, 8)
    admit(manager, first)
    admit(manager, second)
    manager.invalidate(first)
    release(manager, first)
    assert manager.pages_used == 3
    assert len(admit(manager, third).compute_pages) == 2
    release(manager, second)
    assert (manager.pages_used, manager.prefix_pages) == (3, 0)


def test_the_source_of_an_invalid_copy_is_invalidated_too() -> None:
    """The invalid values may come from the copied page, so no other sequence finds it.

    If only positions after the prompt are invalid, the page stays.
    """
    manager = KVCacheManager(17, PAGE, 2)
    first, second, third, fourth, fifth = (sequence(n, 1, "", prompt=2) for n in range(5))
    admit(manager, first)
    release(manager, first)  # cached in a partial page
    work = admit(manager, second)
    assert work.copy_tail is not None
    assert second.pages.cached_tokens == 2
    manager.invalidate(second)
    manager.check()
    release(manager, second)
    assert manager.prefix_pages == 0
    admit(manager, third)
    assert third.pages.cached_tokens == 0
    release(manager, third)
    admit(manager, fourth)
    manager.invalidate(fourth, fourth.prompt_length)
    release(manager, fourth)
    admit(manager, fifth)
    assert fifth.pages.cached_tokens == 2


def test_an_invalid_answer_leaves_the_prompt() -> None:
    """Positions before the given length are found, none after it."""
    manager = KVCacheManager(17, PAGE, 2)
    first = sequence(0, 8, prompt=4, max_tokens=9)
    admit(manager, first)
    decode(manager, first, 5, 6, 7, 8, 9)
    manager.invalidate(first, first.prompt_length)
    decode(manager, first, 10)
    release(manager, first)
    second = sequence(1, 8, prompt=4)
    second.tokens += first.tokens[4:]
    admit(manager, second)
    assert second.pages.cached_tokens == 12


# ---------------------------------------------------------------- radix tree
# The radix tree: lookup by content, references, eviction order.

PLAIN = Namespace("", "")


def cache(tree: RadixTree, pool: IdPool, *token_ids: int, priority: int = 0) -> TreeNode:
    """Add an unreferenced chain of full pages of these tokens; return its last node."""
    node = tree.root(PLAIN) or tree.add_root(PLAIN, 0, 0)
    tree.acquire(node)
    for first in range(0, len(token_ids), PAGE):
        keys = tuple((token_id, (0.0, 0.0)) for token_id in token_ids[first : first + PAGE])
        known = node.children.get(keys)
        page = pool.allocate(1)[0] if known is None else known.pages[0]
        child = tree.extend(node, keys, page)
        tree.acquire(child, above=node)
        node = child
    tree.release(node, priority)
    return node


def test_leaves_are_evicted_before_their_parents() -> None:
    """A long answer is evicted from its end, so that the rest can still be found."""
    pool = IdPool(range(1, 5))
    tree = RadixTree(pool, PAGE)
    cache(tree, pool, *range(16))
    assert (tree.idle_pages, pool.num_free) == (4, 0)
    tree.evict_until_free(2)
    assert [node.length for node in tree.nodes()] == [0, 4, 8]
    tree.evict_until_free(4)
    assert (tree.root(PLAIN), tree.idle_pages) == (None, 0)


def test_referenced_nodes_are_never_evicted() -> None:
    """Eviction skips a referenced path, and asserts when nothing else is left."""
    pool = IdPool(range(1, 5))
    tree = RadixTree(pool, PAGE)
    used = cache(tree, pool, *range(8))
    cache(tree, pool, *range(50, 58))
    tree.acquire(used)
    assert tree.idle_pages == 2
    with pytest.raises(AssertionError, match="nothing left to evict"):
        tree.evict_until_free(3)
    assert [node.length for node in tree.nodes()] == [0, 4, 8]


def test_eviction_follows_the_order_of_the_specification() -> None:
    """Low priority goes first, then little acceptance, then what was used longest ago."""
    draw = random.Random(1)
    for _ in range(50):
        pool = IdPool(range(1, 9))
        tree = RadixTree(pool, PAGE)
        cached = [cache(tree, pool, *[n] * PAGE, priority=draw.randrange(3)) for n in range(8)]
        for _ in range(draw.randrange(12)):
            again = draw.choice(cached)
            tree.acquire(again)
            tree.release(again, draw.randrange(3), draw.choice((0.2, 0.5, 0.8)))
        order = sorted(
            cached,
            key=lambda node: (node.priority, node.acceptance, node.last_used, node.node_id),
        )
        left = [node.node_id for node in order]
        for count in range(1, 9):
            tree.evict_until_free(count)
            found = {node.node_id for node in tree.nodes() if node.pages}
            assert found == set(left[count:])


def test_stale_heap_entries_do_not_pile_up() -> None:
    """A page that is used again and again has few entries in the heap."""
    pool = IdPool(range(1, 3))
    tree = RadixTree(pool, PAGE)
    node = cache(tree, pool, *range(4))
    for _ in range(1000):
        tree.acquire(node)
        tree.release(node, 0)
    assert len(tree._idle_leaves) < 100
    tree.evict_until_free(2)
    assert tree.idle_pages == 0


def test_detaching_a_node_detaches_its_descendants() -> None:
    """Idle pages are freed at once, others with their last reference, and none is found."""
    pool = IdPool(range(1, 9))
    tree = RadixTree(pool, PAGE)
    first = cache(tree, pool, *range(4))
    cache(tree, pool, *range(4), *range(30, 34))
    used = cache(tree, pool, *range(4), *range(40, 44))
    tree.acquire(used)
    tree.detach(first)
    assert [node.length for node in tree.nodes()] == [0]
    assert (tree.idle_pages, pool.num_free) == (0, 6)
    tree.release(used, 0)
    assert (pool.num_free, tree.root(PLAIN)) == (8, None)


def test_an_image_prefix_that_was_never_computed_is_freed_on_release() -> None:
    """An image that will not be computed is not found, and its pages are free again."""
    pool = IdPool(range(1, 8))
    tree = RadixTree(pool, PAGE)
    root = tree.add_root(Namespace("", "image"), 9, 3)
    tree.acquire(root)
    assert not root.ready
    tree.release(root, 0)
    assert tree.root(Namespace("", "image")) is None
    assert (tree.idle_pages, pool.num_free) == (0, 7)


def test_releasing_too_often_asserts() -> None:
    """A release without a reference asserts."""
    pool = IdPool(range(1, 8))
    tree = RadixTree(pool, PAGE)
    node = cache(tree, pool, *range(4))
    with pytest.raises(AssertionError, match="without a reference"):
        tree.release(node, 0)


def test_the_page_with_the_longest_common_prefix_is_copied() -> None:
    """The source of a copy is the child that shares the most positions with the prompt."""
    pool = IdPool(range(1, 8))
    tree = RadixTree(pool, PAGE)
    cache(tree, pool, 1, 2, 3, 4, 5, 6, 9, 9)
    best = cache(tree, pool, 1, 2, 3, 4, 5, 6, 7, 9)
    cache(tree, pool, 1, 2, 3, 4, 5, 9, 9, 9)
    sequence = make_sequence(0, FakeTask(), prefix_key="")
    sequence.prefix_length = 0
    sequence.tokens = [(n, (0.0, 0.0)) for n in (1, 2, 3, 4, 5, 6, 7, 8, 1)]
    root = tree.root(PLAIN)
    assert root is not None
    match = tree.match(root, sequence, 8)
    assert (match.node.length, match.length, match.source) == (4, 7, best)
