"""Hugging Face transformers: PhiForCausalLM, a static cache, torch.compile with CUDA graphs.

No step waits for its token on the host, as `generate` would; so these are the best times that the
library could reach. Shape legend: B streams, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PhiConfig, PhiForCausalLM, StaticCache

from benchmarks import peers


def build(shape: peers.Shape, device: str) -> Any:
    """Build the decoder with random bf16 weights."""
    factor = shape.rotary_dim / shape.head_dim
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    config = PhiConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ff_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.max_context,
        rope_parameters=rope,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = PhiForCausalLM(config)
    model.eval()
    assert model.model.rotary_emb.inv_freq.numel() == shape.rotary_dim // 2, "a wrong RoPE"
    return model


class Decoding:
    """A prefilled static cache and the compiled forward over it."""

    def __init__(self, model: Any, streams: int, options: peers.Options) -> None:
        self._cache = StaticCache(
            config=model.config,
            max_cache_len=options.capacity,
            max_batch_size=streams,
            device=options.device,
            dtype=torch.bfloat16,
        )
        self._forward: Callable[..., torch.Tensor] = _compiled(model, options)
        shape = (streams, options.context)
        prompt_BT = torch.randint(0, model.config.vocab_size, shape, device=options.device)
        positions_T = torch.arange(options.context, device=options.device)
        logits_BV = _forward(model, prompt_BT, self._cache, positions_T)
        self._token_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        self._position_1 = positions_T[-1:] + 1

    def step(self) -> None:
        """Run a forward pass and sample one token a stream, greedily."""
        _begin_step()
        logits_BV = self._forward(self._token_B1, self._cache, self._position_1)
        self._token_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        self._position_1 += 1


def _compiled(model: Any, options: peers.Options) -> Callable[..., torch.Tensor]:
    def forward(
        tokens_BT: torch.Tensor, cache: StaticCache, positions_T: torch.Tensor
    ) -> torch.Tensor:
        return _forward(model, tokens_BT, cache, positions_T)

    if not options.compiled:
        return forward
    torch.compiler.reset()  # one graph for each number of streams, none for all
    if options.dry:
        return torch.compile(forward, backend="eager", fullgraph=True, dynamic=False)
    return torch.compile(forward, mode="reduce-overhead", fullgraph=True, dynamic=False)


def _forward(
    model: Any, tokens_BT: torch.Tensor, cache: StaticCache, positions_T: torch.Tensor
) -> torch.Tensor:
    """Return [B, V] of the last token; older versions need positions, newer ones count them."""
    told = {"cache_position": positions_T} if _WANTS_POSITIONS else {}
    output = model(
        input_ids=tokens_BT,
        position_ids=positions_T[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **told,
    )
    logits_BV: torch.Tensor = output.logits[:, -1]
    return logits_BV


_begin_step: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin
_WANTS_POSITIONS = "cache_position" in inspect.signature(PhiForCausalLM.forward).parameters


def main() -> None:
    """Emit a row per number of streams."""
    options = peers.parse()
    peers.emit({"versions": peers.versions("transformers")})
    assert transformers.__version__
    with torch.no_grad():  # torch.compile's graphs do not go well with inference tensors
        model = build(options.shape, options.device)
        for streams in options.streams:
            times = peers.step_times(Decoding(model, streams, options).step, options)
            peers.emit(
                {"streams": streams, "step_ms": statistics.median(times), "steps": len(times)}
            )


if __name__ == "__main__":
    main()
