"""Radix tree of KV pages by their tokens, with eviction order."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from legato_engine.kv_cache.pools import IdPool
from legato_engine.sequence import Keys, Sequence

UNKNOWN_RATE = 0.8
"""Acceptance rate of requests that verified no draft tokens, as in the block policies."""

_Rank = tuple[int, float, int, int]

MIN_COPIED = 2
"""Minimum positions worth a copy, beyond an image prefix."""

MAX_SCANNED_CHILDREN = 16
"""Maximum children, newest first, that are compared to find the best page to copy."""


class Namespace(NamedTuple):
    """A separate key space of the tree; `image` is "" without one, `tenant` on an open server.

    Tenants share no pages: neither counts nor times reveal what another tenant sent.
    """

    adapter: str
    image: str
    tenant: str = ""


@dataclasses.dataclass(slots=True, eq=False)
class TreeNode:
    """KV of the positions `[parent.length, length)`, in pages that the tree owns.

    A root has the pages of an image prefix, or none without an image. Every other node has one
    page, partial only in a leaf. Only launches enqueued before a page was added write it.

    `ref_count` is never less than a child's. `ready` is False until the prefill that computes an
    image prefix is planned. `attached` is False once the node is removed from lookup; the last
    reference then frees its pages.
    """

    node_id: int
    namespace: Namespace
    parent: TreeNode | None
    keys: Keys
    pages: tuple[int, ...]
    length: int
    children: dict[Keys, TreeNode] = dataclasses.field(default_factory=dict)
    ref_count: int = 0
    priority: int = 0
    acceptance: float = UNKNOWN_RATE
    last_used: int = 0
    ready: bool = True
    attached: bool = True

    @property
    def path(self) -> Iterator[TreeNode]:
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent


class Match(NamedTuple):
    """Cached part of a sequence: `node`'s path, and part of `source`'s page, to be copied."""

    node: TreeNode
    length: int
    source: TreeNode | None = None


class _IdleLeaf(NamedTuple):
    rank: _Rank
    serial: int  # unique, so that nodes are never compared
    node: TreeNode


class RadixTree:
    """Nodes by namespace and content; unreferenced ones stay until their pages are needed.

    An edge is one page of tokens; a common prefix that ends inside a page is copied.
    """

    def __init__(self, pool: IdPool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[Namespace, TreeNode] = {}
        self._ids = itertools.count()
        self._time = 0
        self._idle_leaves: list[_IdleLeaf] = []  # a heap, stale entries included
        self._num_nodes = 0
        self.num_changes = 0  # changes of what a lookup may find
        self.idle_pages = 0  # of nodes without a reference
        self.shared_pages = 0  # of nodes with several references

    # ------------------------------------------------------------ lookup

    def root(self, namespace: Namespace) -> TreeNode | None:
        return self._roots.get(namespace)

    def match(self, root: TreeNode, sequence: Sequence, stop: int) -> Match:
        node = root
        while (end := self._page_end(node.length)) <= stop:
            child = node.children.get(sequence.keys(node.length, end))
            if child is None:
                break
            node = child
        return self._with_copy(node, sequence, min(stop, end))

    def _with_copy(self, node: TreeNode, sequence: Sequence, stop: int) -> Match:
        """Extend a match by the page that shares the most positions."""
        ends_in_page = node.length % self._page_size > 0  # an image prefix or a leaf
        source, most = (node, 0) if ends_in_page else (None, MIN_COPIED - 1)
        if node.length < stop and node.children:
            keys = sequence.keys(node.length, stop)
            for child in itertools.islice(reversed(node.children.values()), MAX_SCANNED_CHILDREN):
                # A child can beat `most` only if it shares the next position, too; hardly any does.
                if child.keys[most : most + 1] != keys[most : most + 1]:
                    continue
                count = _num_common(child.keys, keys)
                if count > most:
                    source, most = child, count
        return Match(node, node.length + (most if source is not None else 0), source)

    def _page_end(self, position: int) -> int:
        return (position // self._page_size + 1) * self._page_size

    # ------------------------------------------------------------ growth

    def add_root(self, namespace: Namespace, length: int, num_pages: int) -> TreeNode:
        """Add a root that the caller will compute; without an image it has 0 positions."""
        assert namespace not in self._roots, f"{namespace} already has a root"
        pages = self._pool.allocate(num_pages)
        root = TreeNode(next(self._ids), namespace, None, (), pages, length)
        root.ready = not pages
        self._roots[namespace] = root
        self._count_new(root)
        return root

    def extend(self, node: TreeNode, keys: Keys, page: int) -> TreeNode:
        """Return the child with these tokens; a new one takes ownership of `page`."""
        assert node.attached, f"node {node.node_id} is detached"
        partial = node.parent is not None and node.length % self._page_size
        assert not partial, f"node {node.node_id} ends inside a page, at {node.length}"
        child = node.children.get(keys)
        if child is None:
            length = node.length + len(keys)
            child = TreeNode(next(self._ids), node.namespace, node, keys, (page,), length)
            node.children[keys] = child
            self._count_new(child)
        return child

    def _count_new(self, node: TreeNode) -> None:
        self.num_changes += 1
        self._num_nodes += 1
        self.idle_pages += len(node.pages)

    # ------------------------------------------------------------ references

    def acquire(self, node: TreeNode, above: TreeNode | None = None) -> None:
        """Add a reference to a node and its ancestors, below the referenced `above`."""
        for each in node.path:
            if each is above:
                return
            if each.ref_count == 0:
                self.idle_pages -= len(each.pages)
            elif each.ref_count == 1:
                self.shared_pages += len(each.pages)
            each.ref_count += 1

    def release(self, node: TreeNode, priority: int, acceptance: float = UNKNOWN_RATE) -> None:
        """Unreference a node and its ancestors.

        An unreferenced node stays, with its last user's priority and rate of accepted draft tokens,
        unless detached or never computed.
        """
        self._time += 1
        for each in node.path:
            assert each.ref_count > 0, f"node {each.node_id} is released without a reference"
            each.ref_count -= 1
            each.priority, each.last_used = priority, self._time
            each.acceptance = acceptance
            if each.ref_count == 1:
                self.shared_pages -= len(each.pages)
            elif each.ref_count == 0:
                self.idle_pages += len(each.pages)
                if not (each.attached and each.ready):
                    self._remove(each)
                else:
                    self._offer(each)

    def detach(self, node: TreeNode) -> None:
        """Remove a node and its descendants from lookup; the last reference frees each."""
        if not node.attached:
            return
        self._unlink(node)
        subtree = [node]
        for each in subtree:
            each.attached = False
            subtree.extend(each.children.values())
        for each in reversed(subtree):
            if each.ref_count == 0:
                self._remove(each)

    # ------------------------------------------------------------ eviction

    def evict_until_free(self, count: int) -> None:
        while not self._pool.can_allocate(count):
            assert self._idle_leaves, f"{count} pages requested, nothing left to evict"
            leaf = heapq.heappop(self._idle_leaves)
            if _is_current(leaf):
                self._remove(leaf.node)

    def _offer(self, node: TreeNode) -> None:
        """Make an idle leaf evictable; remove an idle root without pages."""
        if not _is_idle_leaf(node):
            return
        if not node.pages:
            self._remove(node)
            return
        heapq.heappush(self._idle_leaves, _IdleLeaf(_rank(node), next(self._ids), node))
        if len(self._idle_leaves) > 2 * self._num_nodes + 64:
            self._idle_leaves = sorted(filter(_is_current, self._idle_leaves))

    def _unlink(self, node: TreeNode) -> None:
        self.num_changes += 1
        parent = node.parent
        if parent is None:
            del self._roots[node.namespace]
            return
        del parent.children[node.keys]
        self._offer(parent)

    def _remove(self, node: TreeNode) -> None:
        if node.attached:
            self._unlink(node)
            node.attached = False
        self._num_nodes -= 1
        self.idle_pages -= len(node.pages)
        self._pool.free(node.pages)

    # ------------------------------------------------------------ state

    def nodes(self) -> Iterator[TreeNode]:
        nodes = list(self._roots.values())
        for node in nodes:
            yield node
            nodes.extend(node.children.values())


def _num_common(one: Keys, other: Keys) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _is_idle_leaf(node: TreeNode) -> bool:
    return node.attached and node.ref_count == 0 and not node.children


def _is_current(leaf: _IdleLeaf) -> bool:
    return _is_idle_leaf(leaf.node) and leaf.rank == _rank(leaf.node)


def _rank(node: TreeNode) -> _Rank:
    """Return a rank; the lowest is evicted first."""
    return node.priority, node.acceptance, node.last_used, node.node_id
