"""Sampling on the device: constraint, temperature, top-k, top-p, log-probabilities.

A row's token does not depend on the batch.

Shape legend: B rows, V vocabulary, C constraints, A alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.decode_loop import ANY
from legato_engine.runtime.decode_slot import DecodeSlot, Resources
from legato_engine.runtime.graphs import Work
from legato_engine.sequence import Constraint

GREEDY_TEMPERATURE = 1e-6  # at or below, the highest logit wins


def constraint_table(
    constraints: Sequence[Constraint], vocab_size: int, num_masks: int = 0
) -> torch.Tensor:
    """[C, V] float32: 0 where a token is allowed, -inf where not; then rows for masks."""
    table_CV = torch.zeros(len(constraints) + num_masks, vocab_size)
    for row_V, constraint in zip(table_CV, constraints, strict=False):
        if constraint.allowed is not None:
            row_V.fill_(-torch.inf)
            row_V[list(constraint.allowed)] = 0.0
        row_V[list(constraint.suppressed)] = -torch.inf
    return table_CV


def successor_table(constraints: Sequence[Constraint], num_masks: int = 0) -> torch.Tensor:
    """[C, 2] int64: after which token (`ANY`: all) which constraint follows."""
    rows = [
        (ANY, index) if of.then is None else (ANY if of.on is None else of.on, of.then)
        for index, of in enumerate((*constraints, *[Constraint()] * num_masks))
    ]
    return torch.tensor(rows, dtype=torch.int64)


def mask_work(resources: Resources, slot: DecodeSlot, count: int) -> Work:
    """Add the masks of a slot's first rows to their constraints.

    Shape legend: M rows with a grammar, W words of 32 tokens.
    """
    first, table_CV = resources.first_mask, resources.constraints_CV
    out_MV = table_CV[first : first + count]
    base_M, words_MW = (slot.masks.device[name][:count] for name in ("base", "words"))
    shift_32 = torch.arange(32, dtype=torch.int32, device=base_M.device)

    def work() -> None:
        bits_MV = ((words_MW[:, :, None] >> shift_32) & 1).flatten(1)
        forbidden_MV = bits_MV[:, : out_MV.shape[1]] == 0
        out_MV.copy_(table_CV[base_M].masked_fill_(forbidden_MV, -torch.inf))

    return work


def greedy(logits_BV: torch.Tensor) -> torch.Tensor:
    """[B] int64; the lowest id wins a tie."""
    return logits_BV.argmax(-1)


def sample(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor,
    top_k_B: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
) -> torch.Tensor:
    """[B] int64. Rows with temperature <= 1e-6 are greedy; `top_k` 0 is off.

    By falling probability, tokens after a mass of more than `top_p` are dropped, never the first.
    The choice is the Gumbel-max of the rest.
    """
    scaled_BV = logits_BV / temperature_B.clamp(min=GREEDY_TEMPERATURE)[:, None]
    log_probs_BV = scaled_BV.log_softmax(-1)
    sorted_BV, order_BV = log_probs_BV.sort(dim=-1, descending=True, stable=True)
    probs_BV = sorted_BV.exp()
    before_BV = probs_BV.cumsum(-1) - probs_BV
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    limit_B = torch.where(top_k_B > 0, top_k_B, logits_BV.shape[-1])
    dropped_BV = (before_BV > top_p_B[:, None]) | (rank_V[None, :] >= limit_B[:, None])
    dropped_BV[:, 0] = False
    noise_BV = gumbel_noise(seed_B, position_B, order_BV)
    scores_BV = (sorted_BV + noise_BV).masked_fill(dropped_BV, -torch.inf)
    chosen_B = order_BV.gather(-1, scores_BV.argmax(-1, keepdim=True))[:, 0]
    return torch.where(temperature_B <= GREEDY_TEMPERATURE, greedy(logits_BV), chosen_B)


def gumbel_noise(
    seed_B: torch.Tensor, position_B: torch.Tensor, token_BV: torch.Tensor
) -> torch.Tensor:
    """[B, V] float32 standard Gumbel noise, a hash of (seed, position, token)."""
    key_B = _mix(_mix(seed_B) + position_B)
    bits_BV = _mix(key_B[:, None] + token_BV)
    uniform_BV = ((bits_BV >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return (-(-uniform_BV.log()).log()).float()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64: products wrap, shifts are made logical by masks."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


# ---------------------------------------------------------------- logprobs


def write_logprobs(
    resources: Resources, slot: DecodeSlot, batch: int, payload: bool, alternatives: bool
) -> None:
    """Write log-probabilities of sampled tokens, and `alternatives` to them; can be captured."""
    model, constraint_B = resources.model, slot.constraints(batch)
    token_B = slot.tokens_R[:batch].clamp(min=0)  # -1 where the logits were not finite
    logits_BV = slot.logits_RV[:batch] + resources.constraints_CV[constraint_B]
    logprob_B = token_logprobs(logits_BV, token_B)
    if alternatives:
        wanted = slot.alternatives.device
        logprob_BA, token_BA = likeliest(logits_BV, wanted["token"].shape[1])
        wanted["token"][:batch].copy_(token_BA)
        wanted["logprob"][:batch].copy_(logprob_BA)
    if payload and model.has_value_heads:
        hidden_BD, payload_B2 = slot.hidden_RD[:batch], slot.payload_R2[:batch]
        logprob_B += model.payload_logprobs(hidden_BD, token_B, payload_B2)
    slot.logprob_R[:batch].copy_(logprob_B)


def likeliest(logits_BV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, A] log-softmax of the highest constrained logits, in falling order, and their tokens."""
    logits_BA, token_BA = logits_BV.topk(count, dim=-1)
    return logits_BA - logits_BV.logsumexp(-1, keepdim=True), token_BA


def token_logprobs(logits_BV: torch.Tensor, token_B: torch.Tensor) -> torch.Tensor:
    """[B] float32 log-softmax of constrained logits at one token per row; rows do not interact."""
    chosen_B = logits_BV.gather(-1, token_B[:, None])[:, 0]
    return chosen_B - logits_BV.logsumexp(-1)
