"""One of the two ping-pong working sets: pinned buffers at both ends, device buffers between.

All buffers are allocated once, at fixed addresses. A slot belongs to one launch from staging until
the commit that reads `outputs.host`; nobody else may touch it in between.

`staged` says of each token of a step where it stands: its `row` and `position`, its `source` (the
row whose last token it is, or -1: the `token` and `payload` beside it), and `fresh`, the first
position of its sequence that the step writes: one behind its `position` marks padding; and of the
token sampled from it the `sample_row`, which is the scratch row where none is, and the
`sample_position`. `prompt` has a place for each prompt of a launch; their tokens lie one behind
another, and `copied` are the page that each continues a copy of, and the copy: page 0 twice where
there is none. `grown` names entries of the page table, row * M + index, that its launch fills
first. With speculation `lane` counts the tokens of its row in front of it: a decode stages rows and
lanes, and the device fills in the rest.

Shape legend: R tokens of a full batch, K prompts, M pages of a full context, D text width,
V vocabulary.
"""

from __future__ import annotations

import torch

from legato_engine.device.base import Device
from legato_engine.runtime.staging import StagingBuffer

MAX_PASSES = 10
"""Steps that one launch may cut its tokens into; each has staging of its own. A longer prompt takes
less time in one piece, by the library.
"""

SHARED_PASSES = 4
"""Of these as many as a shared launch may have: whoever rides waits for all of them."""


STEP_FIELDS = ("row", "source", "position", "fresh", "sample_row", "sample_position")


class DecodeSlot:
    """Buffers for one launch of at most `max_rows` tokens, or of at most `max_prompts` prompts that
    are `max_prompt` tokens together. With `max_images` computed in a launch, each but the first
    is a prompt more.

    `outputs` has a token and a payload for each. What `speculates` has more: of a prefill the row's
    `history`, its ids by position, and the `limit`, the last position that it may feed; and at the
    first token of a decode's row the `count` of those that stand and of those `proposed`.
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
        fields = dict.fromkeys((*STEP_FIELDS, "draft_index") if speculates else STEP_FIELDS, rows)
        most = max_prompts + max_images - 1
        one, pages = ((most,), torch.int64), ((most, max_pages), torch.int64)
        number = ((most,), torch.float32)
        drafting = {"history": ((most, max_prompt + 1), torch.int64), "limit": one}
        counts = dict.fromkeys(("count", "proposed"), rows)
        self.speculates = speculates
        self.max_prompts, self.max_images = max_prompts, max_images
        self.num_drafts = 0  # the most that a row of the staged decode proposes
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
                "copied": ((most, 2), torch.int64),
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
        self.logprob_R = self.outputs.device["logprob"]  # of a step in which somebody asked
