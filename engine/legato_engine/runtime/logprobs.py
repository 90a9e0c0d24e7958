"""Log-probabilities of sampled tokens and of their alternatives.

Shape legend: B rows, V vocabulary, A alternatives.
"""

from __future__ import annotations

import torch

from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.resources import Resources


class LogprobStep:
    """Log-probabilities of one batch size over one slot's buffers; can be captured.

    Runs after sampling, only in launches with a row that wants them.
    """

    def __init__(self, resources: Resources, slot: DecodeSlot, batch: int) -> None:
        self._values = resources.model.capabilities.values
        self._constraints_CV = resources.constraints_CV
        self._slot = slot
        self._batch = batch

    def __call__(self, payload: bool, alternatives: bool) -> None:
        slot, batch = self._slot, self._batch
        constraint_B = slot.constraints(batch)
        token_B = slot.tokens_R[:batch].clamp(min=0)  # -1 where the logits were not finite
        logits_BV = slot.logits_RV[:batch] + self._constraints_CV[constraint_B]
        logprob_B = token_logprobs(logits_BV, token_B)
        if alternatives:
            wanted = slot.alternatives.device
            logprob_BA, token_BA = likeliest(logits_BV, wanted["token"].shape[1])
            wanted["token"][:batch].copy_(token_BA)
            wanted["logprob"][:batch].copy_(logprob_BA)
        if payload and self._values is not None:
            hidden_BD, payload_B2 = slot.hidden_RD[:batch], slot.payload_R2[:batch]
            logprob_B += self._values.payload_logprobs(hidden_BD, token_B, payload_B2)
        slot.logprob_R[:batch].copy_(logprob_B)


def likeliest(logits_BV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, A] log-softmax of the highest constrained logits, in falling order, and their tokens."""
    logits_BA, token_BA = logits_BV.topk(count, dim=-1)
    return logits_BA - logits_BV.logsumexp(-1, keepdim=True), token_BA


def token_logprobs(logits_BV: torch.Tensor, token_B: torch.Tensor) -> torch.Tensor:
    """[B] float32 log-softmax of constrained logits at one token per row; rows do not interact."""
    chosen_B = logits_BV.gather(-1, token_B[:, None])[:, 0]
    return chosen_B - logits_BV.logsumexp(-1)
