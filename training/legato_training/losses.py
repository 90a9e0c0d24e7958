"""The losses: tokens, coordinate and size bins with soft targets, dense nouns on image tokens.

B batch, S suffix, D width, N padded region targets, C kinds, A names per kind, W word pieces per
name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from legato_training.lexicon import lexicon
from legato_training.model import LegatoTiny
from legato_training.vocabulary import Words

COORD_SPREAD = 2.0
SIZE_SPREAD = 8.0
BACKGROUND_WEIGHT = 0.1
MAX_ALIASES = 4
MAX_PIECES = 8


def soft_bins(centre: Tensor, spread: float, bins: int) -> Tensor:
    """Gaussian distribution over bins around a fractional bin, [..., bins]."""
    distance = torch.arange(bins, device=centre.device) - centre[..., None]
    return torch.softmax(-0.5 * (distance / spread) ** 2, dim=-1)


def size_to_bin(size: Tensor, bins: int) -> Tensor:
    """Fractional bin of a size: 2^(bin / (bins - 1) * 10 - 10) backwards."""
    return (torch.log2(size.clamp(min=2.0**-10)) + 10) / 10 * (bins - 1)


def gather_rows(hidden_BSD: Tensor, at_BN: Tensor) -> Tensor:
    """hidden[b, at[b, n]] with -1 read as 0, [B, N, D]."""
    index = at_BN.clamp(min=0)[..., None].expand(-1, -1, hidden_BSD.shape[-1])
    return hidden_BSD.gather(1, index)


def masked_soft_loss(logits: Tensor, target: Tensor, used: Tensor) -> Tensor:
    """Mean over used entries of cross entropy minus the target's own entropy: perfect is zero."""
    log_probability = F.log_softmax(logits.float(), dim=-1)
    loss = (target * (target.clamp(min=1e-9).log() - log_probability)).sum(-1)
    return (loss * used).sum() / used.sum().clamp(min=1)


def region_losses(
    model: LegatoTiny, hidden_BSD: Tensor, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Coordinate and size losses at the positions that predict them."""
    bins = model.config.bins
    at = batch["coord_at"].long()
    logits = model.region.coord_decoder(gather_rows(hidden_BSD, at))
    target = soft_bins((batch["coord_value"] * bins).clamp(max=bins - 1), COORD_SPREAD, bins)
    coord = masked_soft_loss(logits, target, (at >= 0).float())
    at = batch["size_at"].long()
    logits = model.region.size_decoder(gather_rows(hidden_BSD, at)).unflatten(-1, (2, bins))
    target = soft_bins(size_to_bin(batch["size_value"], bins), SIZE_SPREAD, bins)
    size = masked_soft_loss(logits, target, (at >= 0).float()[..., None].expand(-1, -1, 2))
    return coord, size


def token_loss(model: LegatoTiny, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross entropy of the next token where it is learned."""
    logits = model.token_logits(hidden_BSD)
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets_BS.long().flatten(), ignore_index=-1
    )


class DenseNouns(nn.Module):
    """Classifies each projected image token against the mean word embedding of what covers it.

    Only training uses it: it ties names to places long before the answers could.
    """

    ids_CAW: Tensor
    aliases_C: Tensor

    def __init__(self, words: Words, dim: int) -> None:
        super().__init__()
        ids, counts = name_pieces(words)
        self.register_buffer("ids_CAW", ids, persistent=False)
        self.register_buffer("aliases_C", counts, persistent=False)
        self.log_scale = nn.Parameter(torch.tensor(2.3))
        self.background = nn.Parameter(torch.randn(dim) * 0.02)

    def forward(self, image_BTD: Tensor, wte_VD: Tensor, kinds_BT: Tensor) -> Tensor:
        """Weighted cross entropy; class C is background."""
        kinds = self.ids_CAW.shape[0]
        pick = (torch.rand(kinds, device=wte_VD.device) * self.aliases_C).long()
        ids_CW = self.ids_CAW[torch.arange(kinds, device=pick.device), pick]
        used = (ids_CW >= 0).float()[..., None]
        names = (F.embedding(ids_CW.clamp(min=0), wte_VD) * used).sum(1) / used.sum(1)
        classes = F.normalize(torch.cat([names, self.background[None]]).float(), dim=-1)
        features = F.normalize(image_BTD.float(), dim=-1).flatten(0, 1)
        logits = (features @ classes.t()) * self.log_scale.exp().clamp(max=100)
        target = kinds_BT.long().flatten()
        loss = F.cross_entropy(logits.float(), target, reduction="none")
        weight = torch.where(target == kinds, BACKGROUND_WEIGHT, 1.0)
        return (loss * weight).sum() / weight.sum()


def name_pieces(words: Words) -> tuple[Tensor, Tensor]:
    """Token ids of each kind's names [C, A, W] padded with -1, and how many names each has [C]."""
    phrases_of = lexicon().phrases_of
    ids = torch.full((len(phrases_of), MAX_ALIASES, MAX_PIECES), -1, dtype=torch.long)
    counts = torch.zeros(len(phrases_of))
    for kind, phrases in enumerate(phrases_of):
        counts[kind] = min(len(phrases), MAX_ALIASES)
        for alias, phrase in enumerate(phrases[:MAX_ALIASES]):
            pieces = words.encode(" " + phrase.singular)[:MAX_PIECES]
            ids[kind, alias, : len(pieces)] = torch.tensor(pieces)
    return ids, counts
