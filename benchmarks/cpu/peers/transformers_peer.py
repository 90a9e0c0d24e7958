"""Hugging Face transformers: `python -m benchmarks.cpu.peers.transformers_peer FILE DTYPE`.

Its forward with its cache in a plain greedy loop, which takes less than `generate` around it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.cpu.peers import turn


class Transformers:
    """A model of a GGUF file, as transformers reads it."""

    def __init__(self, path: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        file = Path(path)
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
        )
        self._model = model.eval()
        self.versions = {
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        }

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> int:
        return int(self._start([prompt])[0])

    @torch.inference_mode()
    def decode(self, prompts: turn.Prompts, steps: int) -> turn.Spent:
        tokens_B1, cache = self._start(prompts)
        start = turn.clock()
        for _ in range(steps):
            output = self._model(tokens_B1, past_key_values=cache, use_cache=True)
            tokens_B1 = output.logits[:, -1].argmax(-1, keepdim=True)
        return turn.since(start)

    def _start(self, prompts: turn.Prompts) -> tuple[torch.Tensor, Any]:
        output = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values


if __name__ == "__main__":
    path, dtype, _, threads = sys.argv[1:5]
    turn.serve(Transformers(path, dtype, int(threads)))
