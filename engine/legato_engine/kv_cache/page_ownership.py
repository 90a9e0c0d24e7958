"""What a sequence holds of the pages, and the rule that every page has one owner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from legato_engine.kv_cache.page_pool import PagePool
from legato_engine.kv_cache.radix_tree import Node, RadixTree
from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class PageOwnership:
    """What a sequence holds beside its row.

    Its table is pages of the tree, `private` ones, and at the end `draft` ones. `node` is the
    deepest of the tree that has the sequence's own content, None for one that shares nothing; its
    pages need not be the sequence's, who may have computed the same content at the same time.
    `source` is the node that it starts from a copy of, held until the copy is enqueued; `copied` is
    that node from then on, though the tree may have let go of it.
    """

    node: Node | None = None
    private: set[int] = dataclasses.field(default_factory=set)
    source: Node | None = None
    copied: Node | None = None
    draft: list[int] = dataclasses.field(default_factory=list)
    forgotten: bool = False  # what it has behind its node must not be found


def check_ownership(
    pool: PagePool, tree: RadixTree, held: Mapping[Sequence, PageOwnership], page_size: int
) -> None:
    """Assert that every page has one owner and every table is made of what is held."""
    nodes = set(tree.nodes())
    owners = [*pool.free_pages(), *(page for node in nodes for page in node.pages)]
    idle = sum(len(node.pages) for node in nodes if node.ref_count == 0)
    assert idle == tree.idle_pages, "idle pages are miscounted"
    forgotten: set[Node] = set()
    for sequence, holding in held.items():
        owners += [*holding.private, *holding.draft]
        nodes_held = [node for node in (holding.node, holding.source) if node is not None]
        forgotten.update(each for node in nodes_held for each in node.path if each not in nodes)
        table, num_draft = sequence.pages.ids, len(holding.draft)
        assert len(set(table)) == len(table), "a page is listed twice"
        assert table[len(table) - num_draft :] == tuple(holding.draft), "drafts are not last"
        assert holding.private <= set(table), "holds a page that it does not list"
        assert sequence.pages.capacity == (len(table) - num_draft) * page_size
    owners += [page for node in forgotten for page in node.pages]
    assert sorted(owners) == list(range(1, pool.num_usable + 1)), "a page has not one owner"
