"""What is kept: found by content, held while it is read, evicted in order."""

import random

import pytest
from legato_engine.kv_cache.eviction import EvictionCandidate, eviction_order
from legato_engine.kv_cache.page_pool import PagePool
from legato_engine.kv_cache.radix_tree import Namespace, Node, RadixTree

from tests.fakes import FakeTask, make_sequence

PAGE = 4
PLAIN = Namespace("", "")


def keep(tree: RadixTree, pool: PagePool, *token_ids: int, priority: int = 0) -> Node:
    """A chain of full pages of these tokens, held by nobody; its last node."""
    node = tree.root(PLAIN) or tree.open_root(PLAIN, 0, 0)
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


def test_leaves_go_before_what_they_stand_on() -> None:
    """A long answer is evicted from its end, so what is left can still be found."""
    pool = PagePool(5)
    tree = RadixTree(pool, PAGE)
    keep(tree, pool, *range(16))
    assert (tree.idle_pages, pool.num_free) == (4, 0)
    tree.make_room(2)
    assert [node.length for node in tree.nodes()] == [0, 4, 8]
    tree.make_room(4)
    assert (tree.root(PLAIN), tree.idle_pages) == (None, 0)


def test_what_is_held_is_never_evicted() -> None:
    """Eviction passes over a held path, and asserts when nothing else is left."""
    pool = PagePool(5)
    tree = RadixTree(pool, PAGE)
    held = keep(tree, pool, *range(8))
    keep(tree, pool, *range(50, 58))
    tree.acquire(held)
    assert tree.idle_pages == 2
    with pytest.raises(AssertionError, match="nothing left to evict"):
        tree.make_room(3)
    assert [node.length for node in tree.nodes()] == [0, 4, 8]


def test_eviction_follows_the_order_of_the_specification() -> None:
    """Whatever was kept and used in whatever order, leaves go as `eviction_order` has them."""
    draw = random.Random(1)
    for _ in range(50):
        pool = PagePool(9)
        tree = RadixTree(pool, PAGE)
        kept = [keep(tree, pool, *[n] * PAGE, priority=draw.randrange(3)) for n in range(8)]
        for _ in range(draw.randrange(12)):
            again = draw.choice(kept)
            tree.acquire(again)
            tree.release(again, draw.randrange(3))
        order = eviction_order(
            EvictionCandidate(node.node_id, node.priority, 0.0, node.last_used) for node in kept
        )
        left = [candidate.candidate_id for candidate in order]
        for count in range(1, 9):
            tree.make_room(count)
            found = {node.node_id for node in tree.nodes() if node.pages}
            assert found == set(left[count:])


def test_stale_offers_do_not_pile_up() -> None:
    """A page that is read again and again is offered for eviction once."""
    pool = PagePool(3)
    tree = RadixTree(pool, PAGE)
    node = keep(tree, pool, *range(4))
    for _ in range(1000):
        tree.acquire(node)
        tree.release(node, 0)
    assert len(tree._idle_leaves) < 100
    tree.make_room(2)
    assert tree.idle_pages == 0


def test_what_is_forgotten_takes_all_below_along() -> None:
    """Idle pages are free at once, held ones with their last holder, and none is found."""
    pool = PagePool(9)
    tree = RadixTree(pool, PAGE)
    first = keep(tree, pool, *range(4))
    keep(tree, pool, *range(4), *range(30, 34))
    held = keep(tree, pool, *range(4), *range(40, 44))
    tree.acquire(held)
    tree.forget(first)
    assert [node.length for node in tree.nodes()] == [0]
    assert (tree.idle_pages, pool.num_free) == (0, 6)
    tree.release(held, 0)
    assert (pool.num_free, tree.root(PLAIN)) == (8, None)


def test_a_unit_that_was_never_computed_goes_with_its_holder() -> None:
    """Nobody finds a picture that nobody will compute; its pages are free again."""
    pool = PagePool(8)
    tree = RadixTree(pool, PAGE)
    root = tree.open_root(Namespace("", "picture"), 9, 3)
    tree.acquire(root)
    assert not root.ready
    tree.release(root, 0)
    assert tree.root(Namespace("", "picture")) is None
    assert (tree.idle_pages, pool.num_free) == (0, 7)


def test_dropping_too_often_asserts() -> None:
    """Holders and drops match."""
    pool = PagePool(8)
    tree = RadixTree(pool, PAGE)
    node = keep(tree, pool, *range(4))
    with pytest.raises(AssertionError, match="nobody holds it"):
        tree.release(node, 0)


def test_the_page_that_agrees_longest_is_the_one_to_copy() -> None:
    """Of several pages behind a path the one with most in common with the rest is the source."""
    pool = PagePool(8)
    tree = RadixTree(pool, PAGE)
    keep(tree, pool, 1, 2, 3, 4, 5, 6, 9, 9)
    best = keep(tree, pool, 1, 2, 3, 4, 5, 6, 7, 9)
    keep(tree, pool, 1, 2, 3, 4, 5, 9, 9, 9)
    asked = make_sequence(0, FakeTask(), prefix_key="")
    asked.prefix_length = 0
    asked.tokens = [(n, (0.0, 0.0)) for n in (1, 2, 3, 4, 5, 6, 7, 8, 1)]
    root = tree.root(PLAIN)
    assert root is not None
    match = tree.match(root, asked, 8)
    assert (match.node.length, match.length, match.source) == (4, 7, best)
