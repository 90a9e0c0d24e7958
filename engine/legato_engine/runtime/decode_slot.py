"""The buffers of one launch in flight: pinned at both ends, device memory between.

They have fixed addresses. A launch owns its slot from staging until the commit that reads
`outputs.host`.

Shape legend: R tokens of a full batch, V vocabulary.
"""

from __future__ import annotations

import torch

from legato_engine.device.base import Device
from legato_engine.runtime.request_descriptors import WORDS
from legato_engine.runtime.staging import Fields, StagingBuffer, StagingRoom, size_of

MAX_PASSES = 14
"""Host sides of the staged steps.

A prompt of more steps (448 tokens, 32 in a step) is left to the matrix library, which is faster
there (2,000 tokens as steps: 87 ms instead of 21). It rounds otherwise, and where its passes begin
depends on what is cached.
"""

SHARED_PASSES = 4
"""Steps of a shared launch; its decodes wait for all of them."""

MAX_ALTERNATIVES = 20
"""Alternatives to a token that a launch computes."""

STEP_FIELDS = (
    "row",  # of the page table and the row state
    "source",  # the row whose newest token is fed; -1: the staged `token` and `payload`
    "position",
    "fresh",  # the row's first position that this step writes; above `position`: padding
    "sample_row",  # of the token sampled from it, or the scratch row
    "sample_position",
)
"""Fields of each token of a step. With speculation the device stages them for a decode."""

DRAFT_FIELDS = ("draft_index", "scheduled")
"""More fields of a token with speculation: 0 for a row's newest token, and the row's index in the
launch.
"""

SCHEDULED_FIELDS = ("scheduled_row", "room", "reach", "start", "fed")
"""Fields of each row of a launch with speculation: the row of the state, or the scratch row; the
most draft tokens that it has pages for, or `NO_DRAFTS`; in a loop, the end of the positions that it
may write; its first token and their number, which the device stages for a decode.
"""


class DecodeSlot:
    """Buffers for one launch of up to `max_rows` tokens, or of up to `max_prompts` prompts.

    Prompts have up to `max_prompt` tokens together. All but the first of `max_images` computed
    images are additional prompts.

    Beside each other, so that neighbours are uploaded at once, are `prompt`, `grown`, `behind` and
    `staged`.

    - `staged`: `STEP_FIELDS` of each token.
    - `behind`: the index of each token's row in the loop before, or `NOT_BEHIND`.
    - `grown`: entries of the page table (row * pages of a row + index) and their new pages; with
      speculation, of a loop.
    - `constraint`: of each row and, for a loop, `Plan.after`.
    - `prompt`: adjacent tokens of all prompts and, by prompt index, its row's constants; `copied`
      is a shared page and the copy of it (0 and 0: none).
    - `outputs`: by token.
    - `alternatives`: of each token, the likeliest in falling order, if a row of the launch wants
      them.

    With speculation a prompt also has its `history` (ids by position), `limit` (the last position
    to feed) and `descriptor`. A launch stages `SCHEDULED_FIELDS`, the pages that begin in it, and
    `control`: its flags, and the proposal of an `EXACT` one. By row of the launch, its outputs have
    counts of returned (`count`) and of fed draft tokens (`proposed`), and the row's `descriptor`.
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
        max_drafting: int = 0,
        max_grown: int = 0,
    ) -> None:
        """With speculation, a launch has up to `max_drafting` rows. `max_grown` pages begin in one,
        with speculation in a loop (0: one a row).
        """
        on = device.torch_device
        rows = ((max_rows,), torch.int64)
        self.speculates = speculates = max_drafting > 0
        self.max_prompts, self.max_images = max_prompts, max_images
        self.constraint = StagingBuffer(device, {"constraint": rows, "after": rows})
        num_prompts = max_prompts + max_images - 1
        begun = ((max_grown or max_rows,), torch.int64)
        prompt = _prompt_fields(num_prompts, max_prompt, max_pages, speculates=speculates)
        grown: Fields = {"entry": begun, "page": begun}
        behind: Fields = {"index": rows}
        staged = _step_fields(max_rows, max_drafting)
        room = StagingRoom(device, sum(map(size_of, (prompt, grown, behind, staged))))
        self.prompt = StagingBuffer(device, prompt, room=room)
        self.grown = StagingBuffer(device, grown, room=room)
        self.behind = StagingBuffer(device, behind, room=room)
        self.staged = StagingBuffer(device, staged, room=room, copies=MAX_PASSES)
        self.outputs = StagingBuffer(device, _output_fields(max_rows, max_drafting))
        places = (max_rows, min(MAX_ALTERNATIVES, vocab_size))
        self.alternatives = StagingBuffer(
            device, {"token": (places, torch.int64), "logprob": (places, torch.float32)}
        )
        self.hidden_RD = torch.zeros(max_rows, width, dtype=dtype, device=on)
        self.logits_RV = torch.zeros(max_rows, vocab_size, device=on)
        self.tokens_R = self.outputs.device["token"]
        self.payload_R2 = self.outputs.device["payload"]  # stale unless a row has payloads
        self.certainty_R2 = self.outputs.device["certainty"]  # likewise
        self.logprob_R = self.outputs.device["logprob"]  # stale unless a row wants it
        self.entry_R = self.staged.device["scheduled"] if speculates else None

    def constraints(self, batch: int) -> torch.Tensor:
        """Each token's constraint; those of rows are staged with speculation."""
        constraint_S = self.constraint.device["constraint"]
        return constraint_S[:batch] if self.entry_R is None else constraint_S[self.entry_R[:batch]]


def _step_fields(max_rows: int, max_drafting: int) -> Fields:
    rows = ((max_rows,), torch.int64)
    fields: Fields = dict.fromkeys(STEP_FIELDS, rows)
    if max_drafting:
        fields |= dict.fromkeys((*DRAFT_FIELDS, "entry", "page"), rows)
        fields |= dict.fromkeys(SCHEDULED_FIELDS, ((max_drafting,), torch.int64))
        fields["control"] = ((2,), torch.int64)
    return fields | {"token": rows, "payload": ((max_rows, 2), torch.float32)}


def _prompt_fields(
    num_prompts: int, max_prompt: int, max_pages: int, *, speculates: bool
) -> Fields:
    one, pages = ((num_prompts,), torch.int64), ((num_prompts, max_pages), torch.int64)
    number = ((num_prompts,), torch.float32)
    fields: Fields = {
        "row": one,
        "token": ((max_prompt,), torch.int64),
        "payload": ((max_prompt, 2), torch.float32),
        "prefix_pages": pages,
        "pages": pages,
        "copied": ((num_prompts, 2), torch.int64),
        **dict.fromkeys(("adapter_slot", "seed", "top_k"), one),
        **dict.fromkeys(("temperature", "top_p"), number),
    }
    if speculates:
        fields["history"] = ((num_prompts, max_prompt + 1), torch.int64)
        fields["limit"] = one
        fields["descriptor"] = ((num_prompts, WORDS), torch.int64)
    return fields


def _output_fields(max_rows: int, max_drafting: int) -> Fields:
    pairs = ((max_rows, 2), torch.float32)
    fields: Fields = {
        "token": ((max_rows,), torch.int64),
        "payload": pairs,
        "certainty": pairs,
        "logprob": ((max_rows,), torch.float32),
    }
    if max_drafting:
        fields |= dict.fromkeys(("count", "proposed"), ((max_drafting,), torch.int64))
        fields["descriptor"] = ((max_drafting, WORDS), torch.int64)
    return fields
