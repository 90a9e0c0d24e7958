"""Prefix cache: pages that sequences share through the radix tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from legato_engine.kv_cache.pools import IdPool
from legato_engine.kv_cache.radix_tree import UNKNOWN_RATE, Match, Namespace, RadixTree, TreeNode
from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class PageOwnership:
    """Owners of a sequence's pages, by position.

    - `[0, node.length)`: the tree, or the sequence if it computed the same content at the same time
    - `[node.length, capacity)`: the sequence (`private`)
    - `[capacity, end)`: the sequence (`draft`)

    The sequence references `node` and `source`.
    """

    node: TreeNode | None = None  # deepest one with its content; None if it shares nothing
    private: set[int] = dataclasses.field(default_factory=set)
    draft: list[int] = dataclasses.field(default_factory=list)
    source: TreeNode | None = None  # copied to the first private page, until that is enqueued
    copied: TreeNode | None = None  # `source` after the copy, without a reference
    invalid: bool = False  # positions after `node` must not be published


def check_ownership(
    pool: IdPool, tree: RadixTree, owned: Mapping[Sequence, PageOwnership], page_size: int
) -> None:
    nodes = set(tree.nodes())
    owners = [*pool.free_ids, *(page for node in nodes for page in node.pages)]
    idle = sum(len(node.pages) for node in nodes if node.ref_count == 0)
    assert idle == tree.idle_pages, f"{tree.idle_pages} idle pages counted, {idle} found"
    detached: set[TreeNode] = set()
    for sequence, ownership in owned.items():
        owners += [*ownership.private, *ownership.draft]
        acquired = [node for node in (ownership.node, ownership.source) if node is not None]
        detached.update(each for node in acquired for each in node.path if each not in nodes)
        _check_table(sequence, ownership, page_size)
    owners += [page for node in detached for page in node.pages]
    assert sorted(owners) == list(range(1, pool.size + 1)), "a page has no owner or several"


def _check_table(sequence: Sequence, ownership: PageOwnership, page_size: int) -> None:
    ids, num_kept = sequence.pages.ids, len(sequence.pages.ids) - len(ownership.draft)
    assert len(set(ids)) == len(ids), f"a page is listed twice: {ids}"
    assert list(ids[num_kept:]) == ownership.draft, f"{ids} does not end in {ownership.draft}"
    assert ownership.private <= set(ids), f"owns {ownership.private}, lists {ids}"
    assert sequence.pages.capacity == num_kept * page_size


# ---------------------------------------------------------------- prefix cache


class PrefixCache:
    """Lookup, acquisition and publication of cached pages; only `add_root` allocates pages."""

    def __init__(self, tree: RadixTree, pool: IdPool, page_size: int) -> None:
        self._tree = tree
        self._pool = pool
        self._page_size = page_size
        self._asked: tuple[Sequence, int, int] | None = None
        self._found: Match | None = None

    # ------------------------------------------------------------ lookup

    def match(self, sequence: Sequence) -> Match | None:
        """Find the cached part of a sequence, without the last position, which is sampled from.

        Memoised until the sequence or the tree changes, because admission asks twice.
        """
        asked = sequence, sequence.length, self._tree.num_changes
        if asked != self._asked:
            self._asked, self._found = asked, self._look_up(sequence)
        return self._found

    def _look_up(self, sequence: Sequence) -> Match | None:
        if sequence.prefix_key is None:
            return None
        root = self._tree.root(_namespace(sequence))
        if root is None:
            return None
        length = sequence.image_prefix_length
        assert root.length == length, f"{root.namespace} has two lengths: {root.length}, {length}"
        return self._tree.match(root, sequence, sequence.length - 1)

    def has_image_prefix(self, sequence: Sequence) -> bool:
        """Return whether the image prefix is cached or computed by an admitted sequence."""
        return sequence.prefix_key is not None and self._tree.root(_namespace(sequence)) is not None

    def without_copy(self, match: Match) -> Match:
        """Drop the optional copy of a match; its source occupies an additional page."""
        tail = match.node.length % self._page_size > 0
        return Match(match.node, match.node.length, match.node if tail else None)

    def full_pages(self, node: TreeNode | None) -> tuple[int, ...]:
        """Return a path's pages, without an image prefix's partial last page."""
        if node is None:
            return ()
        *below, root = node.path
        full = root.pages[: root.length // self._page_size]
        return full + tuple(page for each in reversed(below) for page in each.pages)

    # ------------------------------------------------------------ admission

    def add_root(self, sequence: Sequence) -> Match:
        length = sequence.image_prefix_length
        num_pages = -(-length // self._page_size)
        root = self._tree.add_root(_namespace(sequence), length, num_pages)
        return Match(root, length, root if length % self._page_size else None)

    def acquire(self, ownership: PageOwnership, match: Match) -> None:
        ownership.node, ownership.source = match.node, match.source
        for node in (match.node, match.source):
            if node is not None:
                self._tree.acquire(node)

    # ------------------------------------------------------------ publishing

    def mark_planned(self, ownership: PageOwnership) -> None:
        if ownership.node is not None:
            for node in ownership.node.path:
                node.ready = True

    def mark_launched(self, sequence: Sequence, ownership: PageOwnership) -> None:
        if ownership.source is not None:
            source = ownership.source  # this sequence's draft acceptance is unknown yet
            self._tree.release(source, sequence.request.priority, source.acceptance)
            ownership.copied, ownership.source = ownership.source, None
        self.mark_planned(ownership)
        self.publish(sequence, ownership)

    def publish(
        self, sequence: Sequence, ownership: PageOwnership, *, partial: bool = False
    ) -> None:
        """Move full pages whose content is known and enqueued to the tree.

        If others reference a page with the same content, both pages stay. `partial` includes a last
        page that is not full.
        """
        node, size = ownership.node, self._page_size
        if node is None or not node.attached or ownership.invalid:
            return
        # Launches have written [0, last_position). Draft pages start at `capacity`.
        known = min(sequence.length, sequence.progress.last_position, sequence.pages.capacity)
        while node.length < known:
            stop = (node.length // size + 1) * size
            if stop > known and not partial:
                break
            stop = min(stop, known)
            page = sequence.pages.ids[node.length // size]
            child = self._tree.extend(node, sequence.keys(node.length, stop), page)
            self._tree.acquire(child, above=node)
            ownership.node = node = child
            if child.pages == (page,):
                ownership.private.discard(page)
            elif child.ref_count == 1:
                self._replace_page(ownership, child, page)

    def deduplicate(self, sequence: Sequence, ownership: PageOwnership) -> bool:
        """Free tree pages that only this sequence references and has computed itself.

        Without them, `KVCacheManager.can_ever_fit` counts all pages of a sequence that runs alone.
        """
        path = [] if ownership.node is None else list(ownership.node.path)[:-1]
        duplicates = [
            (node, page)
            for node in path
            if node.ref_count == 1
            and (page := sequence.pages.ids[(node.length - 1) // self._page_size]) not in node.pages
        ]
        for node, page in duplicates:
            self._replace_page(ownership, node, page)
        return bool(duplicates)

    # ------------------------------------------------------------ release

    def invalidate(self, ownership: PageOwnership, length: int) -> None:
        """Remove positions `[length, end)` from lookup, now and later.

        With `length` 0 also the copied page, where the invalid values may come from.
        """
        ownership.invalid, node = True, ownership.node
        if length == 0 and ownership.copied is not None:
            self._tree.detach(ownership.copied)
        invalid = [] if node is None else [each for each in node.path if each.length > length]
        if invalid:
            self._tree.detach(invalid[-1])

    def release(self, sequence: Sequence, ownership: PageOwnership) -> None:
        self.publish(sequence, ownership, partial=True)
        for node in (ownership.source, ownership.node):
            if node is not None:
                self._tree.release(node, sequence.request.priority, _acceptance(sequence))

    def _replace_page(self, ownership: PageOwnership, node: TreeNode, page: int) -> None:
        """Swap the tree's page for the sequence's, with the same content."""
        ownership.private.remove(page)
        self._pool.free(node.pages)
        node.pages = (page,)


def _acceptance(sequence: Sequence) -> float:
    learnt = sequence.draft_stats.learnt
    return UNKNOWN_RATE if learnt is None else learnt.ema_acceptance_rate


def _namespace(sequence: Sequence) -> Namespace:
    assert sequence.prefix_key is not None, f"sequence {sequence.seq_id} shares nothing"
    return Namespace(sequence.adapter.key, sequence.prefix_key, sequence.request.tenant)
