"""The kernels of captured steps on the same model, whose bits those of the megakernel are."""

from __future__ import annotations

import torch
from legato_engine.kernels.megakernel.sizes import HEAD_DIM, PAGE, ROTARY_DIM
from legato_engine.kernels.parameters import Affine
from legato_engine.kernels.step import DecoderSizes, DecoderStep, StepCache, StepPositions

from benchmarks.megakernel.model import Cache, Model
from tests.resident.words import Rows, World


class CapturedSteps:
    """A model's steps by those kernels, on a copy of a cache."""

    def __init__(self, model: Model, cache: Cache) -> None:
        sizes = model.sizes
        decoder = DecoderSizes(
            dim=sizes.dim,
            ff_dim=sizes.ff_dim,
            num_heads=sizes.dim // HEAD_DIM,
            rotary_dim=ROTARY_DIM,
            vocab_size=sizes.vocab_size,
            page_size=PAGE,
            max_pages=cache.pages.shape[1],
        )
        layers = [layer.parameters for layer in model.layers]
        self._model, self.cache = model, cache.clone()
        kept = StepCache(self.cache.keys, self.cache.values, None, model.cosines, model.sines)
        head, norm = model.head.affine, Affine(*model.norm)
        self._step = DecoderStep(decoder, layers, head, norm, kept)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, V] of one token of each row."""
        return self.step(self._model.embedding[tokens.long()].clone(), positions)

    def step(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [B, V] of the embedding [B, D] of one token of each row.

        The embedding becomes the last residual stream.
        """
        count = len(x)
        rows = torch.arange(count, device=x.device)
        table = self.cache.pages.long()
        self._step.layers(x, StepPositions(rows, positions.long(), positions.long(), table, count))
        logits = torch.empty(count, self._model.sizes.vocab_size, device=x.device)
        self._step.head(x, logits)
        return logits


def bits_are_those_of_captured_steps(world: World, num_rows: int, steps: int = 4) -> None:
    """Logits of every step, and all keys and values."""
    rows = Rows(world, num_rows)
    captured = CapturedSteps(world.model, rows.cache)
    tokens, logits = rows.run(world.kernel(num_rows), steps)
    fed = rows.tokens
    for step in range(steps):
        expected = captured.logits(fed, rows.positions + step)
        assert torch.equal(logits[step], expected), f"step {step}"
        fed = tokens[step]
    assert torch.equal(captured.cache.keys, rows.cache.keys)
    assert torch.equal(captured.cache.values, rows.cache.values)
