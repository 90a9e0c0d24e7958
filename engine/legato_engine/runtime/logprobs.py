"""How likely what was sampled was, for rows whose callers ask.

Shape legend: B rows, V vocabulary, C constraints.
"""

from __future__ import annotations

import torch

from legato_engine.models.model import Model
from legato_engine.runtime.decode_slot import DecodeSlot


class LogprobStep:
    """One batch size over one slot's buffers, behind its sampling.

    Reads the logits and payloads that sampling leaves, whichever program it was, and writes only
    the slot's log-probabilities: a step in which nobody asks runs none of it. Can be captured.
    """

    def __init__(
        self, model: Model, slot: DecodeSlot, constraints_CV: torch.Tensor, batch: int
    ) -> None:
        self._model = model
        self._slot = slot
        self._constraints_CV = constraints_CV
        self._batch = batch

    def __call__(self, payload: bool) -> None:
        """Fill the sampled rows; of their values, too, where the step computed `payload`s."""
        slot, batch = self._slot, self._batch
        constraint_B = slot.constraint.device["constraint"][:batch]
        token_B = slot.tokens_R[:batch].clamp(min=0)  # -1 where the logits were not finite
        logits_BV = slot.logits_RV[:batch] + self._constraints_CV[constraint_B]
        logprob_B = token_logprobs(logits_BV, token_B)
        if payload:
            hidden_BD, payload_B2 = slot.hidden_RD[:batch], slot.payload_R2[:batch]
            logprob_B += self._model.payload_logprobs(hidden_BD, token_B, payload_B2)
        slot.logprob_R[:batch].copy_(logprob_B)


def token_logprobs(logits_BV: torch.Tensor, token_B: torch.Tensor) -> torch.Tensor:
    """[B] float32 log-softmax of constrained logits at one token of each row; no other row counts.

    A constrained logit is -inf where its token was not allowed. The only allowed token has 0.
    """
    chosen_B = logits_BV.gather(-1, token_B[:, None])[:, 0]
    return chosen_B - logits_BV.logsumexp(-1)
