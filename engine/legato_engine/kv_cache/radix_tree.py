"""What is kept of prompts and answers: pages of KV, found again by the tokens that they hold."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from legato_engine.kv_cache.eviction import EvictionCandidate, Rank, eviction_rank
from legato_engine.kv_cache.page_pool import PagePool
from legato_engine.sequence import Keys, Sequence

MIN_COPIED = 2
"""Positions that a copy of a page has to save, beyond a unit's; one is not worth a copy."""

MAX_LOOKED_AT = 16
"""Pages that are looked at, newest first, for the one that agrees longest with a prompt's rest."""


class Namespace(NamedTuple):
    """What must agree before tokens are compared: `image` is a picture's key, "" without one."""

    adapter: str
    image: str


class Node:
    """KV of the positions behind its parent's, up to `length`, in pages that the tree owns.

    A root holds a unit: the positions that see each other in both directions (BOS and a picture) in
    all of their pages, or none at all where there is no picture. Every other node is one page, and
    only a leaf's may be filled in part. Nothing writes to a page of the tree but the launches that
    were enqueued before it came here.

    `ref_count` counts the sequences whose table goes through here; so it is never less than a
    child's. `ready` is False while the prefill that computes a unit is not planned. `attached` is
    False once it must not be found any more; it goes with its last holder then.
    """

    __slots__ = (
        "attached",
        "children",
        "keys",
        "last_used",
        "length",
        "namespace",
        "node_id",
        "pages",
        "parent",
        "priority",
        "ready",
        "ref_count",
    )

    def __init__(
        self,
        node_id: int,
        namespace: Namespace,
        parent: Node | None,
        keys: Keys,
        pages: tuple[int, ...],
        length: int,
    ) -> None:
        self.node_id = node_id
        self.namespace = namespace
        self.parent = parent
        self.keys = keys
        self.pages = pages
        self.length = length
        self.children: dict[Keys, Node] = {}
        self.ref_count = 0
        self.priority = 0
        self.last_used = 0
        self.ready = True
        self.attached = True

    @property
    def path(self) -> Iterator[Node]:
        """This node and all above it."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class Match(NamedTuple):
    """What the tree has of a sequence: all of `node`'s path, and `source`'s page to copy.

    `length` positions are there in all, the copied ones included.
    """

    node: Node
    length: int
    source: Node | None = None


class _IdleLeaf(NamedTuple):
    rank: Rank
    serial: int  # no two are equal, so nodes are never compared
    node: Node


class RadixTree:
    """Nodes by namespace and content; those that nobody holds stay until their pages are needed.

    An edge is a page's worth of tokens, so sharing ends on page borders, and what two prompts have
    in common beyond is copied.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[Namespace, Node] = {}
        self._ids = itertools.count()
        self._time = 0
        self._idle_leaves: list[_IdleLeaf] = []  # a heap; what is no idle leaf any more stays in it
        self._num_nodes = 0
        self.idle_pages = 0  # of nodes that nobody holds
        self.shared_pages = 0  # of nodes that several hold

    # ------------------------------------------------------------ finding

    def root(self, namespace: Namespace) -> Node | None:
        """A namespace's root, ready or not."""
        return self._roots.get(namespace)

    def match(self, root: Node, sequence: Sequence, stop: int) -> Match:
        """The longest that is kept of the sequence's positions before `stop`."""
        node = root
        while (end := self._page_end(node.length)) <= stop:
            child = node.children.get(sequence.keys(node.length, end))
            if child is None:
                break
            node = child
        return self._with_copy(node, sequence, min(stop, end))

    def _with_copy(self, node: Node, sequence: Sequence, stop: int) -> Match:
        """What one more page has in common with the positions from the node's end to `stop`."""
        ends_in_page = node.length % self._page_size > 0  # only a unit does, or a leaf
        source, most = (node, 0) if ends_in_page else (None, MIN_COPIED - 1)
        if node.length < stop and node.children:
            keys = sequence.keys(node.length, stop)
            for child in itertools.islice(reversed(node.children.values()), MAX_LOOKED_AT):
                count = _num_common(child.keys, keys)
                if count > most:
                    source, most = child, count
        return Match(node, node.length + (most if source is not None else 0), source)

    def _page_end(self, position: int) -> int:
        return (position // self._page_size + 1) * self._page_size

    # ------------------------------------------------------------ growing

    def open_root(self, namespace: Namespace, length: int, num_pages: int) -> Node:
        """A root for a unit that the caller will compute, or for none (0 positions, 0 pages)."""
        assert namespace not in self._roots, f"{namespace} has a root"
        pages = self._pool.allocate(num_pages)
        root = Node(next(self._ids), namespace, None, (), pages, length)
        root.ready = not pages
        self._roots[namespace] = root
        self._count(root)
        return root

    def extend(self, node: Node, keys: Keys, page: int) -> Node:
        """The child with these tokens: one that is there, else a new one, which owns `page`."""
        assert node.attached, "what is forgotten is not extended"
        assert node.parent is None or node.length % self._page_size == 0, "extends a partial page"
        child = node.children.get(keys)
        if child is None:
            length = node.length + len(keys)
            child = Node(next(self._ids), node.namespace, node, keys, (page,), length)
            node.children[keys] = child
            self._count(child)
        return child

    def _count(self, node: Node) -> None:
        self._num_nodes += 1
        self.idle_pages += len(node.pages)

    # ------------------------------------------------------------ holding

    def acquire(self, node: Node, above: Node | None = None) -> None:
        """One more holder of a node and all above it, up to one that the caller holds already."""
        for each in node.path:
            if each is above:
                return
            if each.ref_count == 0:
                self.idle_pages -= len(each.pages)
            elif each.ref_count == 1:
                self.shared_pages += len(each.pages)
            each.ref_count += 1

    def release(self, node: Node, priority: int) -> None:
        """One holder less of a node and all above it.

        What nobody holds any more stays, with the priority of its last holder, unless it is
        forgotten or was never computed.
        """
        self._time += 1
        for each in node.path:
            assert each.ref_count > 0, f"node {each.node_id} is dropped but nobody holds it"
            each.ref_count -= 1
            each.priority, each.last_used = priority, self._time
            if each.ref_count == 1:
                self.shared_pages -= len(each.pages)
            elif each.ref_count == 0:
                self.idle_pages += len(each.pages)
                if not (each.attached and each.ready):
                    self._remove(each)
                else:
                    self._offer(each)

    def forget(self, node: Node) -> None:
        """Let nobody find a node and what is below it; their pages go with the last holder."""
        if not node.attached:
            return
        self._unlink(node)
        below = [node]
        for each in below:
            each.attached = False
            below.extend(each.children.values())
        for each in reversed(below):
            if each.ref_count == 0:
                self._remove(each)

    # ------------------------------------------------------------ eviction

    def make_room(self, count: int) -> None:
        """Evict idle leaves by `eviction_rank` until `count` pages are free."""
        while not self._pool.can_allocate(count):
            assert self._idle_leaves, f"{count} pages asked, nothing left to evict"
            leaf = heapq.heappop(self._idle_leaves)
            if _is_current(leaf):
                node = leaf.node
                self._unlink(node)
                node.attached = False
                self._remove(node)

    def _offer(self, node: Node) -> None:
        """Let a node be evicted if it is an idle leaf; a root without pages just goes."""
        if not _is_idle_leaf(node):
            return
        if not node.pages:
            self._unlink(node)
            node.attached = False
            self._remove(node)
            return
        heapq.heappush(self._idle_leaves, _IdleLeaf(_rank(node), next(self._ids), node))
        if len(self._idle_leaves) > 2 * self._num_nodes + 64:
            self._idle_leaves = sorted(filter(_is_current, self._idle_leaves))

    def _unlink(self, node: Node) -> None:
        """Take a node out of where it is found."""
        parent = node.parent
        if parent is None:
            del self._roots[node.namespace]
            return
        del parent.children[node.keys]
        self._offer(parent)

    def _remove(self, node: Node) -> None:
        """Free the pages of a node that nobody holds and nobody finds."""
        if node.attached:
            self._unlink(node)
            node.attached = False
        self._num_nodes -= 1
        self.idle_pages -= len(node.pages)
        self._pool.free(node.pages)

    # ------------------------------------------------------------ state

    def nodes(self) -> Iterator[Node]:
        """All that can be found, parents first."""
        below = list(self._roots.values())
        for node in below:
            yield node
            below.extend(node.children.values())


def _num_common(one: Keys, other: Keys) -> int:
    count = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def _is_idle_leaf(node: Node) -> bool:
    return node.attached and node.ref_count == 0 and not node.children


def _is_current(leaf: _IdleLeaf) -> bool:
    return _is_idle_leaf(leaf.node) and leaf.rank == _rank(leaf.node)


def _rank(node: Node) -> Rank:
    """What is kept proposes nothing: its acceptance rate says nothing and is 0."""
    return eviction_rank(EvictionCandidate(node.node_id, node.priority, 0.0, node.last_used))
