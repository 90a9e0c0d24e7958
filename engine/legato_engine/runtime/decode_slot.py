"""The buffers of one in-flight launch: pinned at both ends, device memory between.

They are allocated once, at fixed addresses. A launch owns its slot from staging until the commit
that reads `outputs.host`; no other code may access the slot in between.

Shape legend: R tokens of a full batch, V vocabulary.
"""

from __future__ import annotations

import torch

from legato_engine.device.base import Device
from legato_engine.runtime.staging import StagingBuffer

MAX_PASSES = 10
"""Steps that a launch's tokens may be cut into, each with its own staging. A longer prompt is
faster in one piece, by the matrix library.
"""

SHARED_PASSES = 4
"""Steps of a shared launch, because its decodes wait for all of them."""


STEP_FIELDS = (
    "row",  # of the page table and the row state
    "source",  # the row whose newest token is fed; -1: the staged `token` and `payload`
    "position",
    "fresh",  # the row's first position that this step writes; above `position`: padding
    "sample_row",  # of the token sampled from it; the scratch row: none is
    "sample_position",
)
"""Fields of each token of a step. With speculation there is also its `draft_index`, 0 for a row's
newest token: then the host stages rows and draft indices, and the device the other fields.
"""


class DecodeSlot:
    """Buffers for one launch of up to `max_rows` tokens, or of up to `max_prompts` prompts.

    All prompts together have up to `max_prompt` tokens. Of `max_images` images computed in a
    launch, all but the first are additional prompts.

    - `staged`: `STEP_FIELDS` of each token.
    - `grown`: entries of the page table (row * pages of a row + index) and their new pages.
    - `prompt`: adjacent tokens of all prompts and, by prompt index, its row's constants; `copied`
      is a shared page and the copy of it (0 and 0: none).
    - `outputs`: token, payload and log-probability of each token.

    With speculation a prompt also has its `history` (ids by position) and its `limit` (the last
    position that may be fed), and an output its row's counts of returned (`count`) and of fed draft
    tokens (`proposed`), valid at the row's first token.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_pages: int,
        max_prompt: int,
        max_prompts: int = 1,
        max_images: int = 1,
        width: int,
        vocab_size: int,
        dtype: torch.dtype,
        speculates: bool = False,
    ) -> None:
        on = device.torch_device
        rows = ((max_rows,), torch.int64)
        pairs = ((max_rows, 2), torch.float32)
        names = (*STEP_FIELDS, "draft_index") if speculates else STEP_FIELDS
        fields = dict.fromkeys(names, rows)
        num_prompts = max_prompts + max_images - 1
        one, pages = ((num_prompts,), torch.int64), ((num_prompts, max_pages), torch.int64)
        number = ((num_prompts,), torch.float32)
        drafting = {"history": ((num_prompts, max_prompt + 1), torch.int64), "limit": one}
        counts = dict.fromkeys(("count", "proposed"), rows)
        self.speculates = speculates
        self.max_prompts, self.max_images = max_prompts, max_images
        self.num_drafts = 0  # the most draft tokens that a row of the staged decode feeds
        self.staged = StagingBuffer(
            device, {**fields, "token": rows, "payload": pairs}, copies=MAX_PASSES
        )
        self.grown = StagingBuffer(device, {"entry": rows, "page": rows})
        self.constraint = StagingBuffer(device, {"constraint": rows})
        self.prompt = StagingBuffer(
            device,
            {
                "row": one,
                "token": ((max_prompt,), torch.int64),
                "payload": ((max_prompt, 2), torch.float32),
                "prefix_pages": pages,
                "pages": pages,
                "copied": ((num_prompts, 2), torch.int64),
                **dict.fromkeys(("adapter_slot", "seed", "top_k"), one),
                **dict.fromkeys(("temperature", "top_p"), number),
                **(drafting if speculates else {}),
            },
        )
        self.outputs = StagingBuffer(
            device,
            {
                "token": rows,
                "payload": pairs,
                "logprob": ((max_rows,), torch.float32),
                **(counts if speculates else {}),
            },
        )
        self.hidden_RD = torch.zeros(max_rows, width, dtype=dtype, device=on)
        self.logits_RV = torch.zeros(max_rows, vocab_size, device=on)
        self.tokens_R = self.outputs.device["token"]
        self.payload_R2 = self.outputs.device["payload"]
        self.logprob_R = self.outputs.device["logprob"]  # stale unless a row wants it
