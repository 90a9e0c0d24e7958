"""Image encoding of launches.

Shape legend: C images, P positions of one image prefix, D text width, M pages of one prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import structlog
import torch

from legato_engine.models.base import ImageEncoder
from legato_engine.models.paged_attention import KVCache, PrefillSpan
from legato_engine.runtime.decode_slot import Resources
from legato_engine.runtime.graphs import Work
from legato_engine.scheduler.batch import ScheduledSequence

_log = structlog.get_logger()


class EncoderRunner:
    """Fills the pages of images that an `ImageEncoder` takes.

    Image and prompt have the same index in a slot. Several images pass the decoder together if that
    gives each the bits that it has alone, which `warm_up` measures. Otherwise, or if one has an
    adapter, they pass one after another.
    """

    def __init__(self, encoder: ImageEncoder, resources: Resources) -> None:
        self.max_images = resources.slots[0].max_images
        self._encoder = encoder
        self._resources = resources
        self._compute = resources.compute
        self._kv = resources.kv
        self._slots = resources.slots
        self._graphs = resources.graphs
        self._stacks = False

    def warm_up(self) -> None:
        self._graphs.run(self._cut_work)
        for count, gathered in product(range(1, self._encoder.max_crops + 1), (False, True)):
            self._graphs.run(self._crops_work, count, gathered)
        buffers = list(product(range(len(self._slots)), range(self.max_images)))
        for slot, index in buffers:
            self._graphs.run(self._finish_work, slot, index)
            for rank in self._resources.ranks:
                self._graphs.run(self._prefix_work, slot, index, rank)
        if self.max_images > 1:
            stacks = {(slot, *stack) for slot, last in buffers for stack in _stacks(last + 1)}
            self._stacks = all(self._keeps_bits(*stack) for stack in sorted(stacks))
            _log.info("image_stacking_measured", share_pass=self._stacks)

    def encode(self, slot: int, index: int, row: ScheduledSequence, stop: int) -> None:
        encoder, image, first = self._encoder, row.sequence.inputs.image, row.work.first_piece
        if first == 0:
            buffer = self._buffer(slot, index)
            encoder.stage(buffer, image)
            self._compute.submit(lambda: encoder.upload(buffer))
            self._graphs.run(self._cut_work)
            self._graphs.run(self._crops_work, stop, False)
        elif first < stop:
            self._compute.submit(lambda: encoder.gather(first, stop))
            self._graphs.run(self._crops_work, stop - first, True)
            self._compute.submit(lambda: encoder.scatter(first, stop))

    def embed(self, slot: int, rows: Sequence[ScheduledSequence]) -> None:
        for index, row in enumerate(rows):
            self.encode(slot, index, row, row.sequence.num_crops)
            self._graphs.run(self._finish_work, slot, index)

    def cache(self, slot: int, rows: Sequence[ScheduledSequence]) -> None:
        """Write keys and values, after prompts are uploaded and adapters written."""
        ranks = [self._resources.rank(row.sequence.adapter.rank) for row in rows]
        single = [(index, 1) for index in range(len(rows))]
        for first, count in _stacks(len(rows)) if self._stacks and not any(ranks) else single:
            if count > 1:
                self._graphs.run(self._stacked_work, slot, first, count)
            else:
                self._graphs.run(self._prefix_work, slot, first, ranks[first])

    def _buffer(self, slot: int, index: int) -> int:
        return slot * self.max_images + index

    def _keeps_bits(self, slot: int, index: int, count: int) -> bool:
        """Return whether stacking noise images gives each the keys and values it has alone.

        False if there are too few pages to compare. One measurement for each stack suffices,
        because a kernel's order of summation depends on shapes alone.
        """
        if count == 1:
            return True
        first = self._buffer(slot, index)
        embeddings_CPD = self._encoder.embeddings_CPD[first : first + count, 1:]
        pages_KM = self._slots[slot].prompt.device["prefix_pages"][index : index + count]
        num_pages = -(-self._encoder.embeddings_CPD.shape[1] // self._kv.page_size)
        if 2 * count * num_pages >= self._kv.k_LNHSE.shape[1]:
            return False
        pages_2CM = torch.arange(1, 1 + 2 * count * num_pages).view(2, count, num_pages)
        pages_2CM = pages_2CM.to(pages_KM.device)
        alone_CM, together_CM = pages_2CM

        def prepare() -> None:
            noise = torch.Generator(pages_KM.device).manual_seed(count)
            embeddings_CPD.normal_(generator=noise)
            pages_KM[:, :num_pages] = alone_CM

        def move() -> None:
            pages_KM[:, :num_pages] = together_CM

        self._compute.submit(prepare)
        for each in range(index, index + count):
            self._graphs.run(self._prefix_work, slot, each, 0)
        self._compute.submit(move)
        self._graphs.run(self._stacked_work, slot, index, count)
        same = list[bool]()
        self._compute.submit(lambda: same.append(_same_pages(self._kv, alone_CM, together_CM)))
        self._compute.record().wait()
        return same[0]

    def _cut_work(self) -> Work:
        return self._encoder.cut

    def _crops_work(self, count: int, gathered: bool) -> Work:
        return lambda: self._encoder.encode(count, gathered=gathered)

    def _finish_work(self, slot: int, index: int) -> Work:
        buffer = self._buffer(slot, index)

        def work() -> None:
            self._encoder.finish(buffer)

        return work

    def _prefix_work(self, slot: int, index: int, rank: int) -> Work:
        staged, model = self._slots[slot].prompt.device, self._resources.model
        pages_M, slot_1 = staged["prefix_pages"][index], staged["adapter_slot"][index : index + 1]
        x_PD = self._encoder.embeddings_CPD[self._buffer(slot, index)]

        def work() -> None:
            adapters = self._resources.adapters(slot_1, rank)
            span = PrefillSpan(0, pages_M, bidirectional=True, adapters=adapters)
            model.cache_span(x_PD, span, self._kv)

        return work

    def _stacked_work(self, slot: int, index: int, count: int) -> Work:
        pages_CM = self._slots[slot].prompt.device["prefix_pages"][index : index + count]
        return lambda: self._encoder.cache(self._buffer(slot, index), pages_CM, self._kv)


def _stacks(count: int) -> list[tuple[int, int]]:
    """Split into stacks of powers of two: (first, size).

    Three images in one pass take longer than two and one, because their rows suit the matrix
    library's tiles worse.
    """
    stacks, first = list[tuple[int, int]](), 0
    while first < count:
        stacks.append((first, 1 << ((count - first).bit_length() - 1)))
        first += stacks[-1][1]
    return stacks


def _same_pages(kv: KVCache, one_CM: torch.Tensor, other_CM: torch.Tensor) -> bool:
    """Compare by layer to bound the memory used."""
    return all(
        torch.equal(pages_NHSE[one_CM], pages_NHSE[other_CM])
        for cache_LNHSE in (kv.k_LNHSE, kv.v_LNHSE)
        for pages_NHSE in cache_LNHSE.view(torch.uint8)
    )
