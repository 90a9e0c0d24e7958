"""A decode whose batch the device chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from legato_engine.runtime.draft_state import Layout
from legato_engine.runtime.graph_runner import Work
from legato_engine.runtime.resources import Resources


class DraftingDecode:
    """Decodes of each slot with speculation: block sizes, a proposal, and the forward of the batch
    that both make necessary.
    """

    def __init__(self, resources: Resources, layouts: Sequence[Layout]) -> None:
        drafts = resources.state.drafts
        assert drafts is not None, "only draft tokens are placed by the device"
        self._resources = resources
        self._drafts = drafts
        self._layouts = tuple(layouts)
        drafts.lay_out(self._layouts, resources.buckets[-1])

    def work(self, slot: int, make_forward: Callable[..., Work], adapted: int) -> Work:
        """`make_forward(slot, tokens, groups, adapted)` makes the forward of a batch."""
        drafts, buffers = self._drafts, self._resources.slots[slot]
        graphs, table_RM = self._resources.graphs, self._resources.state.page_table_RM

        def make_proposal(slot: int, block: int) -> Work:
            return lambda: drafts.propose(buffers, table_RM, block)

        propose = graphs.switch(
            drafts.proposal, make_proposal, [(slot, block) for block in drafts.blocks]
        )
        forward = graphs.switch(
            drafts.choice, make_forward, [(slot, *layout, adapted) for layout in self._layouts]
        )

        def work() -> None:
            drafts.allot(buffers, table_RM)
            propose()
            drafts.place(buffers)
            forward()

        return work

    def sampling(self, slot: int, make_sample: Callable[..., Work], *shape: bool) -> Work:
        """Sampling of a step in a loop, where only the device knows its batch, and the settling of
        all rows. `make_sample(slot, tokens, *shape)` makes the sampling of a batch.
        """
        drafts, buffers = self._drafts, self._resources.slots[slot]
        token_R = self._resources.state.token_R
        sample = self._resources.graphs.switch(
            drafts.choice, make_sample, [(slot, each.tokens, *shape) for each in self._layouts]
        )

        def work() -> None:
            sample()
            drafts.settle(buffers, drafts.num_rows, token_R)

        return work
