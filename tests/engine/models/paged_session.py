"""Drives a `Model` through pages as the runtime does, in one fixed batch."""

from __future__ import annotations

import torch
from legato_engine.models.paged_attention import DecodeBatch, KVCache, PrefillSpan
from legato_engine.runtime.kv_pool import kv_dtype
from legato_engine.types import PromptToken

PAGE_SIZE = 16
PROMPT = [PromptToken(1), PromptToken(134), PromptToken(90), PromptToken(3)]
FED = [40, 5, 120, 6, 77]


class PagedSession:
    """A batch of `num_rows` rows; page ids are scattered, and unwritten cache is NaN.

    A row that was never prefilled is padding: page table zeros, position 0.
    """

    def __init__(self, model, num_rows=4, seed=0):
        self.model = model
        self.num_rows = num_rows
        pages_per_row = -(-model.max_context // PAGE_SIZE)
        num_pages = (num_rows + 2) * pages_per_row + 1
        shape = (model.num_layers, num_pages, model.num_kv_heads, PAGE_SIZE, model.head_dim)
        nan = torch.tensor(float("nan")).to(kv_dtype(model))
        self.kv = KVCache(nan.expand(shape).clone(), nan.expand(shape).clone(), model.kv_scale_L2)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free_pages = order.tolist()
        self.pages_per_row = pages_per_row
        self.page_table_RM = torch.zeros(num_rows, pages_per_row, dtype=torch.int64)
        self.positions_R = torch.zeros(num_rows, dtype=torch.int64)
        self.tokens_R = torch.zeros(num_rows, dtype=torch.int64)
        self.payload_R2 = torch.zeros(num_rows, 2)
        self.prefixes = {}

    def prefix(self, image):
        """Return pages of BOS and the image, and their positions, computed once per image."""
        key = image.key if image is not None else None
        if key not in self.prefixes:
            x_PD = self.model.prefix_embeddings(image)
            length = len(x_PD)
            pages = torch.tensor(self._take(-(-length // PAGE_SIZE)), dtype=torch.int64)
            if length:
                self.model.cache_span(x_PD, PrefillSpan(0, pages, bidirectional=True), self.kv)
            self.prefixes[key] = pages, length
        return self.prefixes[key]

    def prefill(self, row, image, prompt):
        """[1, D] hidden of the prompt's last token; the row continues from there."""
        shared, length = self.prefix(image)
        num_full = length // PAGE_SIZE
        pages = torch.tensor(shared[:num_full].tolist() + self._take(self.pages_per_row - num_full))
        if length % PAGE_SIZE:
            for cache in (self.kv.k_LNHSE, self.kv.v_LNHSE):
                cache[:, int(pages[num_full])].copy_(cache[:, int(shared[num_full])])
        self.page_table_RM[row] = pages
        self.positions_R[row] = length + len(prompt)
        ids_T = torch.tensor([token.token_id for token in prompt])
        payload_T2 = torch.tensor([token.payload for token in prompt])
        x_TD = self.model.embed(ids_T, payload_T2)
        return self.model.prefill(x_TD, PrefillSpan(length, pages, bidirectional=False), self.kv)[
            -1:
        ]

    def feed(self, row, token_id, payload):
        """Set the token of the row's next step."""
        self.tokens_R[row] = token_id
        self.payload_R2[row] = torch.tensor(payload)

    def step(self):
        """[R, D] hidden of all rows after one decode step."""
        x_RD = self.model.embed(self.tokens_R, self.payload_R2)
        batch = DecodeBatch(self.positions_R.clone(), self.page_table_RM)
        hidden_RD = self.model.decode(x_RD, batch, self.kv)
        self.positions_R[self.page_table_RM[:, 0] != 0] += 1
        return hidden_RD

    def _take(self, count):
        return [self.free_pages.pop() for _ in range(count)]


class AdaptedModel:
    """A model whose calls use the rows' adapter slots."""

    def __init__(self, model, bank, slots):
        self.model, self.bank, self.slots = model, bank, torch.tensor(slots)
        self.prefilled = 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def rows(self, slots):
        """The launch's rows, at the highest rank."""
        return self.bank.rows(slots, self.bank.ranks[-1])

    def prefill(self, x_TD, span, kv):
        """Use the adapter of the row in prefill."""
        span.adapters = self.rows(self.slots[self.prefilled : self.prefilled + 1])
        return self.model.prefill(x_TD, span, kv)

    def cache_span(self, x_TD, span, kv):
        """Use the adapter of the row in prefill."""
        span.adapters = self.rows(self.slots[self.prefilled : self.prefilled + 1])
        self.model.cache_span(x_TD, span, kv)

    def decode(self, x_BD, batch, kv):
        """Use all rows' adapters."""
        batch.adapters = self.rows(self.slots)
        return self.model.decode(x_BD, batch, kv)


class AdaptedSession(PagedSession):
    """A session whose rows have adapter slots."""

    def __init__(self, model, bank, slots, **options):
        super().__init__(AdaptedModel(model, bank, slots), num_rows=len(slots), **options)

    def prefill(self, row, image, prompt):
        """Compute the prefix under the row's own adapter, without sharing it."""
        self.prefixes.clear()
        self.model.prefilled = row
        return super().prefill(row, image, prompt)


def walk(session, rows, image):
    """The logits of rows over a prefill and decode steps, [steps, V] by row."""
    model = session.model
    seen = {row: [session.prefill(row, image, PROMPT)] for row in rows}
    for step, token in enumerate(FED):
        for row in rows:
            session.feed(row, token, (0.1 * step, 0.4))
        hidden_RD = session.step()
        for row in rows:
            seen[row].append(hidden_RD[row : row + 1])
    return {row: torch.cat([model.logits(hidden) for hidden in seen[row]]) for row in rows}
