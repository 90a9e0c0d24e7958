"""The pages that a sequence owns, and the rule that every page has exactly one owner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from legato_engine.kv_cache.page_pool import PagePool
from legato_engine.kv_cache.radix_tree import Node, RadixTree
from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class PageOwnership:
    """The owners of a sequence's pages, by position:

    - `[0, node.length)`: the tree, or the sequence if it computed the same content at the same time
    - `[node.length, capacity)`: the sequence (`private`)
    - `[capacity, end)`: the sequence (`draft`)

    The sequence has references on `node` and on `source`.
    """

    node: Node | None = None  # deepest with the sequence's content; None if it shares nothing
    private: set[int] = dataclasses.field(default_factory=set)
    draft: list[int] = dataclasses.field(default_factory=list)
    source: Node | None = None  # of the copy in the first private page, until that is enqueued
    copied: Node | None = None  # then the same node, without a reference
    invalid: bool = False  # positions after `node` must not be published


def check_ownership(
    pool: PagePool, tree: RadixTree, owned: Mapping[Sequence, PageOwnership], page_size: int
) -> None:
    """Assert that every page has one owner and that page tables agree with the owners."""
    nodes = set(tree.nodes())
    owners = [*pool.free_pages, *(page for node in nodes for page in node.pages)]
    idle = sum(len(node.pages) for node in nodes if node.ref_count == 0)
    assert idle == tree.idle_pages, f"{tree.idle_pages} idle pages counted, {idle} found"
    detached: set[Node] = set()
    for sequence, ownership in owned.items():
        owners += [*ownership.private, *ownership.draft]
        acquired = [node for node in (ownership.node, ownership.source) if node is not None]
        detached.update(each for node in acquired for each in node.path if each not in nodes)
        _check_table(sequence, ownership, page_size)
    owners += [page for node in detached for page in node.pages]
    assert sorted(owners) == list(range(1, pool.num_usable + 1)), "a page has not one owner"


def _check_table(sequence: Sequence, ownership: PageOwnership, page_size: int) -> None:
    ids, num_kept = sequence.pages.ids, len(sequence.pages.ids) - len(ownership.draft)
    assert len(set(ids)) == len(ids), f"a page is listed twice: {ids}"
    assert list(ids[num_kept:]) == ownership.draft, f"{ids} does not end in {ownership.draft}"
    assert ownership.private <= set(ids), f"owns {ownership.private}, lists {ids}"
    assert sequence.pages.capacity == num_kept * page_size
