"""What a sequence has in common with the tree: found, held, published, and given up."""

from __future__ import annotations

from legato_engine.kv_cache.page_ownership import PageOwnership
from legato_engine.kv_cache.page_pool import PagePool
from legato_engine.kv_cache.radix_tree import Match, Namespace, Node, RadixTree
from legato_engine.sequence import Sequence


class PrefixCache:
    """The tree as sequences see it. Nothing here takes a page that `open` does not name."""

    def __init__(self, tree: RadixTree, pool: PagePool, page_size: int) -> None:
        self._tree = tree
        self._pool = pool
        self._page_size = page_size

    # ------------------------------------------------------------ finding

    def match(self, sequence: Sequence) -> Match | None:
        """What the tree has of it, all but the last position, which must be fed to sample."""
        if sequence.prefix_key is None:
            return None
        root = self._tree.root(_namespace(sequence))
        if root is None:
            return None
        assert root.length == sequence.image_prefix_length, f"{root.namespace} has two lengths"
        return self._tree.match(root, sequence, sequence.length - 1)

    def knows_image_prefix(self, sequence: Sequence) -> bool:
        """Whether the tree has its unit, whatever else `match` would find."""
        return sequence.prefix_key is not None and self._tree.root(_namespace(sequence)) is not None

    def uncopied(self, match: Match) -> Match:
        """The same without the page to copy, which needs room beside the copy."""
        tail = match.node.length % self._page_size > 0
        return Match(match.node, match.node.length, match.node if tail else None)

    def open(self, sequence: Sequence) -> Match:
        """A root where there is none yet; the sequence will compute its unit."""
        length = sequence.image_prefix_length
        num_pages = -(-length // self._page_size)
        root = self._tree.open_root(_namespace(sequence), length, num_pages)
        return Match(root, length, root if length % self._page_size else None)

    def hold(self, holding: PageOwnership, match: Match) -> None:
        """Hold what was found, and what is to be copied."""
        holding.node, holding.source = match.node, match.source
        for node in (match.node, match.source):
            if node is not None:
                self._tree.acquire(node)

    def full_pages(self, node: Node) -> tuple[int, ...]:
        """The pages of a path, without one that a unit fills in part."""
        *below, root = node.path
        full = root.pages[: root.length // self._page_size]
        return full + tuple(page for each in reversed(below) for page in each.pages)

    # ------------------------------------------------------------ publishing

    def planned(self, holding: PageOwnership) -> None:
        """The prefill that computes its unit is planned: whoever is planned now may find it."""
        if holding.node is not None:
            for node in holding.node.path:
                node.ready = True

    def launched(self, sequence: Sequence, holding: PageOwnership) -> None:
        """The launch that fills its pages is enqueued, its copy and its picture's included."""
        if holding.source is not None:
            self._tree.release(holding.source, sequence.request.priority)
            holding.copied, holding.source = holding.source, None
        self.planned(holding)
        self.publish(sequence, holding)

    def publish(self, sequence: Sequence, holding: PageOwnership, *, partial: bool = False) -> None:
        """Put pages whose content is known and enqueued into the tree.

        Where the tree has the same content already, and others hold that, both keep their page.
        """
        node, size = holding.node, self._page_size
        if node is None or not node.attached or holding.forgotten:
            return
        # What is launched stands up to `last_position` at least, and its drafts are not its own.
        known = min(sequence.length, sequence.progress.last_position, sequence.pages.capacity)
        while node.length < known:
            stop = (node.length // size + 1) * size
            if stop > known and not partial:
                break
            stop = min(stop, known)
            page = sequence.pages.ids[node.length // size]
            child = self._tree.extend(node, sequence.keys(node.length, stop), page)
            self._tree.acquire(child, above=node)
            holding.node = node = child
            if child.pages == (page,):
                holding.private.discard(page)
            elif child.ref_count == 1:
                self._swap(holding, child, page)

    def merge(self, sequence: Sequence, holding: PageOwnership) -> bool:
        """Free the pages that it computed although the tree had them; whether there was one.

        So whoever is alone needs no more pages than its positions fill, see `fits_ever`.
        """
        path = [] if holding.node is None else list(holding.node.path)[:-1]
        doubles = [
            (node, page)
            for node in path
            if node.ref_count == 1
            and (page := sequence.pages.ids[(node.length - 1) // self._page_size]) not in node.pages
        ]
        for node, page in doubles:
            self._swap(holding, node, page)
        return bool(doubles)

    # ------------------------------------------------------------ giving up

    def forget(self, holding: PageOwnership, length: int) -> None:
        """Let nobody find what is held behind `length` positions, now or later.

        With all of it goes the page that its own begins as a copy of: what is wrong may be there.
        """
        holding.forgotten, node = True, holding.node
        if length == 0 and holding.copied is not None:
            self._tree.forget(holding.copied)
        behind = [] if node is None else [each for each in node.path if each.length > length]
        if behind:
            self._tree.forget(behind[-1])

    def release(self, sequence: Sequence, holding: PageOwnership) -> None:
        """Publish all that is known, then hold nothing any more."""
        self.publish(sequence, holding, partial=True)
        for node in (holding.source, holding.node):
            if node is not None:
                self._tree.release(node, sequence.request.priority)

    def _swap(self, holding: PageOwnership, node: Node, page: int) -> None:
        """Give the tree the holder's own page in place of one with the same content."""
        holding.private.remove(page)
        self._pool.free(node.pages)
        node.pages = (page,)


def _namespace(sequence: Sequence) -> Namespace:
    assert sequence.prefix_key is not None, "what shares nothing has no namespace"
    return Namespace(sequence.adapter.key, sequence.prefix_key)
