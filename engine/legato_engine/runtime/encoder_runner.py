"""The pictures that a launch computes: encoded one after another, then through the decoder.

Shape legend: C pictures, P positions of one, D text width, M pages of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import structlog
import torch

from legato_engine.device.base import Device
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.model import ImageEncoder, Model
from legato_engine.models.paged_cache import KVCache, PrefillSpan
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.graph_runner import GraphRunner, Work
from legato_engine.scheduler.launch import Row

_log = structlog.get_logger()


class EncoderRunner:
    """Fills the pages of pictures that an encoder takes, for the slots of a program.

    A launch has at most `max_images`. Each has a place of the encoder's, and stands at the same
    place of its slot's prompts: the first ones.

    Several pictures pass the decoder together where that gives each the bits that it has alone,
    which `warm_up` measures. Where not, or where one has an adapter, one follows another.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        model: Model,
        device: Device,
        kv: KVCache,
        slots: Sequence[DecodeSlot],
        bank: AdapterBank | None,
        graphs: GraphRunner,
    ) -> None:
        self.max_images = slots[0].max_images
        self._encoder = encoder
        self._model = model
        self._compute = device.compute
        self._kv = kv
        self._slots = slots
        self._bank = bank
        self._graphs = graphs
        self._stacks = False

    def warm_up(self) -> None:
        """Every number of crops, every place and rank; then whether pictures pass together."""
        self._graphs.run(self._cut_work)
        for count, taken in product(range(1, self._encoder.max_crops + 1), (False, True)):
            self._graphs.run(self._crops_work, count, taken)
        ranks = (0, *self._bank.ranks) if self._bank is not None else (0,)
        places = list(product(range(len(self._slots)), range(self.max_images)))
        for slot, index in places:
            self._graphs.run(self._finish_work, slot, index)
            for rank in ranks:
                self._graphs.run(self._prefix_work, slot, index, rank)
        if self.max_images > 1:
            stacks = {(slot, *stack) for slot, last in places for stack in _stacks(last + 1)}
            self._stacks = all(self._keeps_bits(*stack) for stack in sorted(stacks))
            _log.info("pictures of a launch", share_pass=self._stacks)

    def encode(self, slot: int, index: int, row: Row, stop: int) -> None:
        """The crops of one picture up to `stop` that are not encoded yet."""
        encoder, image, first = self._encoder, row.sequence.pixels, row.prefix.first_crop
        if first == 0:
            place = self._place(slot, index)
            encoder.stage(place, image)
            self._compute.submit(lambda: encoder.upload(place))
            self._graphs.run(self._cut_work)
            self._graphs.run(self._crops_work, stop, False)
        elif first < stop:
            self._compute.submit(lambda: encoder.take(first, stop))
            self._graphs.run(self._crops_work, stop - first, True)
            self._compute.submit(lambda: encoder.give(first, stop))

    def embed(self, slot: int, rows: Sequence[Row]) -> None:
        """The embeddings of these rows' pictures."""
        for index, row in enumerate(rows):
            self.encode(slot, index, row, row.sequence.num_crops)
            self._graphs.run(self._finish_work, slot, index)

    def cache(self, slot: int, rows: Sequence[Row]) -> None:
        """Their keys and values, once the slot's prompts are uploaded and adapters written."""
        bank = self._bank
        ranks = [bank.bucket(row.sequence.adapter_rank) if bank is not None else 0 for row in rows]
        apart = [(index, 1) for index in range(len(rows))]
        for first, count in _stacks(len(rows)) if self._stacks and not any(ranks) else apart:
            if count > 1:
                self._graphs.run(self._stacked_work, slot, first, count)
            else:
                self._graphs.run(self._prefix_work, slot, first, ranks[first])

    def _place(self, slot: int, index: int) -> int:
        return slot * self.max_images + index

    def _keeps_bits(self, slot: int, index: int, count: int) -> bool:
        """Whether pictures of noise have the same keys and values together as alone; False where
        there are too few pages to see.

        A captured graph runs the same kernels whatever the numbers are, and in what order a kernel
        adds depends on shapes alone: so what holds of noise at each place holds of every picture.
        """
        if count == 1:
            return True
        first = self._place(slot, index)
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

    def _crops_work(self, count: int, taken: bool) -> Work:
        return lambda: self._encoder.encode(count, taken=taken)

    def _finish_work(self, slot: int, index: int) -> Work:
        place = self._place(slot, index)

        def work() -> None:
            self._encoder.finish(place)

        return work

    def _prefix_work(self, slot: int, index: int, rank: int) -> Work:
        bank, staged = self._bank, self._slots[slot].prompt.device
        pages_M, slot_1 = staged["prefix_pages"][index], staged["adapter_slot"][index : index + 1]
        x_PD = self._encoder.embeddings_CPD[self._place(slot, index)]

        def work() -> None:
            adapters = bank.rows(slot_1, rank) if bank is not None and rank else None
            span = PrefillSpan(0, pages_M, bidirectional=True, adapters=adapters)
            self._model.cache_span(x_PD, span, self._kv)

        return work

    def _stacked_work(self, slot: int, index: int, count: int) -> Work:
        pages_CM = self._slots[slot].prompt.device["prefix_pages"][index : index + count]
        return lambda: self._encoder.cache(self._place(slot, index), pages_CM, self._kv)


def _stacks(count: int) -> list[tuple[int, int]]:
    """The first and the number of each stack of so many pictures: powers of two.

    Three together take longer than two and one, as their rows suit the library's tiles worse.
    """
    stacks, first = list[tuple[int, int]](), 0
    while first < count:
        stacks.append((first, 1 << ((count - first).bit_length() - 1)))
        first += stacks[-1][1]
    return stacks


def _same_pages(kv: KVCache, one_CM: torch.Tensor, other_CM: torch.Tensor) -> bool:
    """Whether pages hold the same bits; as many are read at a time as one layer has."""
    return all(
        torch.equal(pages_NHSE[one_CM], pages_NHSE[other_CM])
        for cache_LNHSE in (kv.k_LNHSE, kv.v_LNHSE)
        for pages_NHSE in cache_LNHSE.view(torch.uint8)
    )
