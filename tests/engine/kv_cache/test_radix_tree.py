"""The radix tree: lookup by content, references, eviction order."""

import random

import pytest
from legato_engine.kv_cache.pools import PagePool
from legato_engine.kv_cache.radix_tree import (
    EvictionCandidate,
    Namespace,
    Node,
    RadixTree,
    eviction_order,
)

from tests.fakes import FakeTask, make_sequence

PAGE = 4
PLAIN = Namespace("", "")


def cache(tree: RadixTree, pool: PagePool, *token_ids: int, priority: int = 0) -> Node:
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
    pool = PagePool(5)
    tree = RadixTree(pool, PAGE)
    cache(tree, pool, *range(16))
    assert (tree.idle_pages, pool.num_free) == (4, 0)
    tree.evict_until_free(2)
    assert [node.length for node in tree.nodes()] == [0, 4, 8]
    tree.evict_until_free(4)
    assert (tree.root(PLAIN), tree.idle_pages) == (None, 0)


def test_referenced_nodes_are_never_evicted() -> None:
    """Eviction skips a referenced path, and asserts when nothing else is left."""
    pool = PagePool(5)
    tree = RadixTree(pool, PAGE)
    used = cache(tree, pool, *range(8))
    cache(tree, pool, *range(50, 58))
    tree.acquire(used)
    assert tree.idle_pages == 2
    with pytest.raises(AssertionError, match="nothing left to evict"):
        tree.evict_until_free(3)
    assert [node.length for node in tree.nodes()] == [0, 4, 8]


def test_eviction_follows_the_order_of_the_specification() -> None:
    """Leaves are evicted in `eviction_order`, in whatever order they were added and used."""
    draw = random.Random(1)
    for _ in range(50):
        pool = PagePool(9)
        tree = RadixTree(pool, PAGE)
        cached = [cache(tree, pool, *[n] * PAGE, priority=draw.randrange(3)) for n in range(8)]
        for _ in range(draw.randrange(12)):
            again = draw.choice(cached)
            tree.acquire(again)
            tree.release(again, draw.randrange(3), draw.choice((0.2, 0.5, 0.8)))
        order = eviction_order(
            EvictionCandidate(node.node_id, node.priority, node.acceptance, node.last_used)
            for node in cached
        )
        left = [candidate.candidate_id for candidate in order]
        for count in range(1, 9):
            tree.evict_until_free(count)
            found = {node.node_id for node in tree.nodes() if node.pages}
            assert found == set(left[count:])


def test_stale_heap_entries_do_not_pile_up() -> None:
    """A page that is used again and again has few entries in the heap."""
    pool = PagePool(3)
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
    pool = PagePool(9)
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
    pool = PagePool(8)
    tree = RadixTree(pool, PAGE)
    root = tree.add_root(Namespace("", "image"), 9, 3)
    tree.acquire(root)
    assert not root.ready
    tree.release(root, 0)
    assert tree.root(Namespace("", "image")) is None
    assert (tree.idle_pages, pool.num_free) == (0, 7)


def test_releasing_too_often_asserts() -> None:
    """A release without a reference asserts."""
    pool = PagePool(8)
    tree = RadixTree(pool, PAGE)
    node = cache(tree, pool, *range(4))
    with pytest.raises(AssertionError, match="without a reference"):
        tree.release(node, 0)


def test_the_page_with_the_longest_common_prefix_is_copied() -> None:
    """The source of a copy is the child that shares the most positions with the prompt."""
    pool = PagePool(8)
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
